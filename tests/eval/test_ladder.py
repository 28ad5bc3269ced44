"""Layer 1 by llama-perplexity's names: against plain numpy, by document, position and length."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.metrics.divergence import WindowScores, measure
from eval.metrics.ladder import describe
from eval.stats import Sampling
from eval.windows import Window

FEW = Sampling(draws=500)

# What `llama-perplexity --kl-divergence` prints, with "delta-p" for its Greek letter.
NAMES = {
    "Mean PPL(Q)", "Mean PPL(base)", "Cor(ln(PPL(Q)), ln(PPL(base)))", "Mean ln(PPL(Q)/PPL(base))",
    "Mean PPL(Q)/PPL(base)", "Mean PPL(Q)-PPL(base)", "Mean KLD", "Maximum KLD", "99.9% KLD",
    "99.0% KLD", "95.0% KLD", "90.0% KLD", "Median KLD", "10.0% KLD", "5.0% KLD", "1.0% KLD",
    "0.1% KLD", "Minimum KLD", "Mean delta-p", "Maximum delta-p", "99.9% delta-p", "99.0% delta-p",
    "95.0% delta-p", "90.0% delta-p", "75.0% delta-p", "Median delta-p", "25.0% delta-p",
    "10.0% delta-p", "5.0% delta-p", "1.0% delta-p", "0.1% delta-p", "Minimum delta-p",
    "RMS delta-p", "Same top p",
}  # fmt: skip


def window(number: int, count: int, *, kl: np.ndarray | None = None, worse: float = 0.05,
           context: int = 1) -> WindowScores:  # fmt: skip
    rng = np.random.default_rng(number)
    base = rng.exponential(2.0, count)
    return WindowScores(
        window=Window(
            document=f"doc{number // 2}", source=("contracts", "code")[number % 2], lang="en",
            start=0, token_ids=tuple(range(count + context)), num_context=context,
        ),
        base_nll=base,
        candidate_nll=base + rng.normal(worse, 0.1, count),
        kl=rng.exponential(0.05, count) if kl is None else kl,
        agrees=rng.random(count) < 0.9,
    )  # fmt: skip


def test_every_statistic_has_its_name_and_its_value() -> None:
    scores = [window(n, 100) for n in range(24)]
    whole, *parts = describe(scores, FEW).domains
    assert {*whole.means, *whole.points} == NAMES
    assert [s.domain for s in parts] == ["lang:en", "source:code", "source:contracts"]
    assert (whole.num_tokens, whole.num_documents) == (2400, 12)
    base, candidate, kl = (
        np.concatenate([getattr(s, name) for s in scores])
        for name in ("base_nll", "candidate_nll", "kl")
    )
    change = np.exp(-candidate) - np.exp(-base)
    found = {name: interval.estimate for name, interval in whole.means.items()} | whole.points
    expected = {
        "Mean PPL(Q)": math.exp(candidate.mean()),
        "Mean PPL(base)": math.exp(base.mean()),
        "Cor(ln(PPL(Q)), ln(PPL(base)))": np.corrcoef(base, candidate)[0, 1],
        "Mean ln(PPL(Q)/PPL(base))": (candidate - base).mean(),
        "Mean PPL(Q)/PPL(base)": math.exp((candidate - base).mean()),
        "Mean PPL(Q)-PPL(base)": math.exp(candidate.mean()) - math.exp(base.mean()),
        "Mean KLD": kl.mean(),
        "99.0% KLD": np.quantile(kl, 0.99),
        "Minimum KLD": kl.min(),
        "Mean delta-p": change.mean(),
        "RMS delta-p": math.sqrt((change**2).mean()),
        "25.0% delta-p": np.quantile(change, 0.25),
        "Maximum delta-p": change.max(),
        "Same top p": np.concatenate([s.agrees for s in scores]).mean(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert all(i.lower <= i.estimate <= i.upper for i in whole.means.values())


def test_a_domain_is_described_by_its_own_tokens() -> None:
    zero, one = np.zeros(100), np.ones(100)
    scores = [window(n, 100, kl=one if n % 2 else zero) for n in range(24)]
    found = {s.domain: s.means["Mean KLD"].estimate for s in describe(scores, FEW).domains}
    assert found == {"": 0.5, "lang:en": 0.5, "source:code": 1.0, "source:contracts": 0.0}


def test_error_that_grows_along_the_window_shows_by_position_and_slope() -> None:
    growing = np.linspace(0.0, 0.2, 100)
    found = describe([window(n, 100, kl=growing + 0.01 * (n // 2)) for n in range(24)], FEW)
    means = [part.kld.estimate for part in found.positions]
    assert [part.label for part in found.positions][::9] == ["0-10 %", "90-100 %"]
    assert means == sorted(means)
    assert found.slope.estimate == pytest.approx(0.2, rel=0.02)
    assert found.slope.lower > 0.19
    flat = describe([window(n, 100) for n in range(24)], FEW)
    assert abs(flat.slope.estimate) < 0.02


def test_parts_hold_every_token_once() -> None:
    scores = [window(n, 7 + 150 * (n % 3), context=1 + n % 2) for n in range(24)]
    found = describe(scores, FEW)
    total = sum(len(s.kl) for s in scores)
    assert sum(part.num_tokens for part in found.positions) == total
    assert sum(part.num_tokens for part in found.lengths) == total
    assert [part.label for part in found.lengths] == [
        "0-64 tokens", "64-256 tokens", "256-1024 tokens",
    ]  # fmt: skip
    first = sum(min(len(s.kl), 64 - s.window.num_context) for s in scores)
    assert found.lengths[0].num_tokens == first


def test_tokens_of_a_document_are_not_independent_evidence() -> None:
    """Twelve documents with a level of their own: nearly three times the plain standard error."""
    levels = np.random.default_rng(1).exponential(0.05, 12)
    scores = [window(n, 100, kl=np.full(100, levels[n // 2])) for n in range(24)]
    interval = describe(scores, FEW).domains[0].means["Mean KLD"]
    kl = np.concatenate([s.kl for s in scores])
    plain = 2 * 1.645 * kl.std() / math.sqrt(len(kl))
    assert interval.upper - interval.lower > 2.5 * plain


def test_the_judged_percentile_and_its_bounds() -> None:
    """1 % of the tokens are far off; which documents hold them is chance."""
    rng = np.random.default_rng(0)
    kl = np.where(rng.random((300, 100)) < 0.02, rng.uniform(0.5, 3.0, (300, 100)), 0.001)
    scores = [window(n, 100, kl=kl[n]) for n in range(300)]
    found = next(m for m in measure(scores, FEW) if m.name == "kl_p99")
    assert found.estimate == pytest.approx(np.percentile(kl, 99))
    assert found.lower < found.estimate < found.upper
    assert found.upper - found.lower < 1.0
    assert {name for name, _ in found.domains} == {"lang:en", "source:code", "source:contracts"}


def test_a_model_against_itself_is_exactly_nothing() -> None:
    scores = [
        WindowScores(window=w.window, base_nll=w.base_nll, candidate_nll=w.base_nll,
                     kl=np.zeros(50), agrees=np.ones(50))
        for w in (window(n, 50) for n in range(12))
    ]  # fmt: skip
    whole = describe(scores, FEW).domains[0]
    assert whole.means["Mean PPL(Q)/PPL(base)"].upper == 1.0
    assert whole.means["Mean KLD"].upper == whole.points["Maximum KLD"] == 0.0
    assert whole.means["Same top p"].lower == 1.0
    assert whole.points["Maximum delta-p"] == whole.points["Minimum delta-p"] == 0.0
    assert whole.points["Cor(ln(PPL(Q)), ln(PPL(base)))"] == pytest.approx(1.0)


def test_numbers_that_are_none_stay_none() -> None:
    scores = [window(n, 50) for n in range(12)]
    scores[3].kl[7] = math.nan
    whole = describe(scores, FEW).domains[0]
    assert math.isnan(whole.means["Mean KLD"].estimate)
    assert math.isnan(whole.points["99.0% KLD"])
