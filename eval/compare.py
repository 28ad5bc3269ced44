"""Comparing two runs of lm-eval tasks: paired statistics, a verdict for each metric and one of all.

The rules are the gate's (`eval.gate_rules`): a metric passes when its loss is shown to be within
the margin, fails when it is shown to be larger, and is inconclusive otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from eval.compare_files import Pair, RunFolder, pair_runs
from eval.errors import EvaluationError, UsageError
from eval.gate import ALARM_P, EXIT_CODES, Result
from eval.gate_rules import Answer, answer
from eval.gate_spec import FLOOR_MARGINS, StratumRule
from eval.measurement import Measurement
from eval.metrics.answers import unsure
from eval.stats import Sampling, cluster_bootstrap, holm, mcnemar_p, paired_by_cluster

# Metrics whose value per document is a log-likelihood, or one with the words or bytes it is of.
_LIKELIHOODS = frozenset(("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"))
# lm-eval's own metrics, whatever a results file leaves out: whether more of them is better.
_MORE_IS_BETTER = {
    **dict.fromkeys(("acc", "acc_norm", "acc_mutual_info", "acc_bytes", "acc_all"), True),
    **dict.fromkeys(("exact_match", "likelihood", "mcc", "f1", "bleu", "chrf", "chrf++"), True),
    **dict.fromkeys(("brier_score", "ter"), False),
}
Kind = Literal["pass or fail", "score", "likelihood"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What loss is allowed.

    margin: of a rate or a score in [0, 1], a share; of any other score, that share of the base's
    mean. ratio: perplexity of B over that of A.
    """

    margin: float = 0.02
    ratio: float = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricComparison:
    """One metric of one task under one filter, B against A.

    lost, gained: the pairs that went from right to wrong and back, by B's change; for scores, the
    pairs that fell and rose. scale: a drop of 1 in `measurement` is this much in the metric's unit.
    """

    task: str
    metric: str
    filter: str
    kind: Kind
    measurement: Measurement
    answer: Answer
    scale: float
    changed: float
    lost: tuple[Pair, ...]
    gained: tuple[Pair, ...]
    p_value: float | None = None
    holm_p: float | None = None

    @property
    def name(self) -> str:
        """task/metric, and the filter where it is not the only one."""
        return f"{self.task}/{self.metric}" + (f",{self.filter}" if self.filter != "none" else "")

    @property
    def alarm(self) -> bool:
        """Significantly worse after Holm's correction, whatever the margin says."""
        return self.holm_p is not None and self.holm_p < ALARM_P and self.answer.outcome != "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole comparison. left_out: metrics that cannot be compared, and why."""

    base: RunFolder
    candidate: RunFolder
    limits: Limits
    sampling: Sampling
    metrics: tuple[MetricComparison, ...]
    left_out: tuple[str, ...]
    result: Result

    @property
    def exit_code(self) -> int:
        """0 accepted, 1 rejected, 3 inconclusive."""
        return EXIT_CODES[self.result]


def compare(
    base: RunFolder,
    candidate: RunFolder,
    *,
    limits: Limits,
    sampling: Sampling,
    wanted: Callable[[str], bool] = lambda _: True,
    cluster: str | None = None,
) -> Comparison:
    """Pair the runs and judge every metric that both have.

    Args:
        wanted: which metrics. cluster: a field of the documents that says which belong together.

    Raises:
        MismatchError: the runs cannot be paired. EvaluationError: nothing to compare, a metric of A
        that B lacks, or one of which nobody says whether more is better. UsageError: a document
        without the cluster field.
    """
    found: list[MetricComparison] = []
    left_out: list[str] = []
    for task, pairs in pair_runs(base, candidate).items():
        for name, of_filter in _by_filter(pairs).items():
            clusters = _clusters(of_filter, cluster)
            for metric in _metrics(task, of_filter, wanted):
                direction = _direction(task, metric, (base, candidate))
                judge = _Judge(task, metric, name, limits, sampling, direction)
                one = judge.compare(of_filter, clusters)
                if isinstance(one, str):
                    left_out.append(one)
                else:
                    found.append(one)
    if left_out and not found:
        raise EvaluationError("no metric can be compared: " + "; ".join(left_out))
    if not found:
        known = {name for samples in base.tasks.values() for s in samples for name in s.values}
        raise UsageError(
            f"no metric of that name was measured; there are {', '.join(sorted(known)) or 'none'}"
        )
    metrics = _with_alarms(found)
    return Comparison(
        base=base,
        candidate=candidate,
        limits=limits,
        sampling=sampling,
        metrics=metrics,
        left_out=tuple(left_out),
        result=_result(metrics),
    )


def _result(metrics: Sequence[MetricComparison]) -> Result:
    outcomes = {m.answer.outcome for m in metrics}
    if "fail" in outcomes:
        return "rejected"
    return "inconclusive" if "inconclusive" in outcomes else "accepted"


def _with_alarms(found: list[MetricComparison]) -> tuple[MetricComparison, ...]:
    p_values = {m.name: m.p_value for m in found if m.p_value is not None}
    adjusted = holm(p_values)
    return tuple(replace(m, holm_p=adjusted.get(m.name)) for m in found)


def _by_filter(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.base.key[0], []).append(pair)
    return groups


def _metrics(task: str, pairs: Sequence[Pair], wanted: Callable[[str], bool]) -> list[str]:
    """The metrics of a task. EvaluationError when a sample lacks one: its loss would not show."""
    known = dict.fromkeys(name for pair in pairs for name in pair.base.values)
    names = [name for name in known if wanted(name)]
    for pair in pairs:
        for side, sample in (("A", pair.base), ("B", pair.candidate)):
            if missing := [name for name in names if sample.values.get(name) is None]:
                raise EvaluationError(
                    f"task {task}: {', '.join(missing)} is missing in {side} for doc_id "
                    f"{sample.doc_id}; missing values are never a pass"
                )
    return names


def _direction(task: str, metric: str, runs: Sequence[RunFolder]) -> bool | None:
    """Whether more of a metric is better; None when the runs do not say, or not the same.

    lm-eval writes null for a metric whose task does not say it.
    """
    said = {run.higher_is_better.get(task, {}).get(metric) for run in runs} - {None}
    return said.pop() if len(said) == 1 else None if said else _MORE_IS_BETTER.get(metric)


def _clusters(pairs: Sequence[Pair], name: str | None) -> list[str]:
    if name is None:
        return [pair.base.doc_hash for pair in pairs]
    found = []
    for pair in pairs:
        if not isinstance(pair.base.doc, dict) or name not in pair.base.doc:
            raise UsageError(f"--cluster {name}: doc_id {pair.base.doc_id} has no such field")
        found.append(str(pair.base.doc[name]))
    return found


@dataclass(frozen=True, slots=True)
class _Judge:
    """One metric's question."""

    task: str
    metric: str
    filter: str
    limits: Limits
    sampling: Sampling
    is_higher_better: bool | None

    def compare(self, pairs: Sequence[Pair], clusters: list[str]) -> MetricComparison | str:
        """The comparison, or why there is none."""
        base, candidate = ([p.values[self.metric] for p in side] for side in _sides(pairs))
        if self.metric in _LIKELIHOODS:
            return self._likelihood(pairs, base, candidate, clusters)
        if all(_is_label_pair(value) for value in (*base, *candidate)):
            base, candidate = ([float(a == b) for a, b in side] for side in (base, candidate))
        if not all(isinstance(v, bool | int | float) for v in (*base, *candidate)):
            return f"{self.task}/{self.metric}: its values per document are no numbers"
        if self.is_higher_better is None:
            raise EvaluationError(
                f"{self.task}/{self.metric}: the runs do not say whether more of it is better, so "
                "a loss would look like a gain; give it `higher_is_better` in the task's "
                "metric_list and run again, or name the other metrics with --metrics"
            )
        sign = 1.0 if self.is_higher_better else -1.0
        left, right = np.array(base, dtype=float), np.array(candidate, dtype=float)
        if not np.isfinite(left).all():
            raise EvaluationError(f"{self.task}/{self.metric}: A itself gives NaN or Inf")
        if set(np.unique(left)) | set(np.unique(right)) <= {0.0, 1.0}:
            return self._pass_or_fail(pairs, left == float(sign > 0), right == float(sign > 0),
                                      clusters)  # fmt: skip
        return self._score(pairs, left, right, sign, clusters)

    def _pass_or_fail(
        self, pairs: Sequence[Pair], left: np.ndarray, right: np.ndarray, clusters: list[str]
    ) -> MetricComparison:
        found = paired_by_cluster(left.tolist(), right.tolist(), clusters, self.sampling)
        measurement = Measurement(
            name=self.metric, unit="drop", base=float(left.mean()), candidate=float(right.mean()),
            estimate=found.interval.estimate, lower=found.interval.lower,
            upper=found.interval.upper, counted="items", num_scored=len(pairs),
            num_clusters=len(set(clusters)), paired=found.counts,
            design_effect=found.design_effect, p_value=found.p_value,
        )  # fmt: skip
        p_value = mcnemar_p(found.counts) if found.design_effect == 1 else found.p_value
        return self._made(pairs, "pass or fail", measurement, left * 1.0 - right, 1.0, p_value)

    def _score(
        self, pairs: Sequence[Pair], left: np.ndarray, right: np.ndarray, sign: float,
        clusters: list[str],
    ) -> MetricComparison:  # fmt: skip
        """Mean difference of scores. Scores beyond [0, 1] are measured in the base's mean."""
        is_share = float(min(left.min(), right.min())) >= 0 and max(left.max(), right.max()) <= 1
        scale = 1.0 if is_share else abs(float(left.mean())) or 1.0
        drops = sign * (left - right) / scale
        bad = int((~np.isfinite(drops)).sum())
        sums = _sums(np.nan_to_num(drops), np.ones_like(drops), clusters)
        interval = cluster_bootstrap(sums, _mean, self.sampling)
        if is_share:  # of other scores nobody knows how much an item can lose
            num_changed = len({c for c, drop in zip(clusters, drops, strict=True) if drop})
            interval = unsure(interval, num_changed, len(sums), self.sampling.confidence)
        measurement = Measurement(
            name=self.metric, unit="drop", base=_if_share(left, is_share, sign),
            candidate=_if_share(right, is_share, sign), estimate=interval.estimate,
            lower=interval.lower, upper=interval.upper, counted="items", num_scored=len(pairs),
            num_clusters=len(set(clusters)), num_nonfinite=bad,
        )  # fmt: skip
        return self._made(pairs, "score", measurement, drops, scale, None)

    def _likelihood(
        self, pairs: Sequence[Pair], base: list[Any], candidate: list[Any], clusters: list[str]
    ) -> MetricComparison | str:
        """Perplexity of B over that of A, per word, byte or document."""
        values = [[_likelihood_of(v) for v in side] for side in (base, candidate)]
        if any(one is None for side in values for one in side):
            return f"{self.task}/{self.metric}: its values are no log-likelihoods"
        left, right = (np.array(side, dtype=float) for side in values)
        if (left[:, 1] != right[:, 1]).any():
            return f"{self.task}/{self.metric}: A and B count the same texts differently"
        drops = left[:, 0] - right[:, 0]
        bad = int((~np.isfinite(drops)).sum())
        sums = _sums(np.nan_to_num(drops), left[:, 1], clusters)
        interval = cluster_bootstrap(sums, _ratio, self.sampling)
        measurement = Measurement(
            name=self.metric, unit="ratio", base=_perplexity(left), candidate=_perplexity(right),
            estimate=interval.estimate, lower=interval.lower, upper=interval.upper,
            counted="items", num_scored=len(pairs), num_clusters=len(set(clusters)),
            num_nonfinite=bad,
        )  # fmt: skip
        return self._made(pairs, "likelihood", measurement, drops, 1.0, None)

    def _made(
        self, pairs: Sequence[Pair], kind: Kind, m: Measurement, drops: np.ndarray, scale: float,
        p_value: float | None,
    ) -> MetricComparison:  # fmt: skip
        """Judge it, and order what was lost and gained by how much."""
        worst = [int(n) for n in np.argsort(-drops, kind="stable")]
        return MetricComparison(
            task=self.task,
            metric=self.metric,
            filter=self.filter,
            kind=kind,
            measurement=m,
            answer=answer(self._rule(kind, pairs), m, self.sampling.confidence, None),
            scale=scale,
            changed=float(np.mean([p.base.answer != p.candidate.answer for p in pairs])),
            lost=tuple(pairs[n] for n in worst if drops[n] > 0),
            gained=tuple(pairs[n] for n in reversed(worst) if drops[n] < 0),
            p_value=p_value,
        )

    def _rule(self, kind: Kind, pairs: Sequence[Pair]) -> StratumRule:
        if kind == "likelihood":
            return StratumRule(max=self.limits.ratio)
        chance = 0.0
        if kind == "pass or fail":
            chance = float(np.mean([1 / n if (n := p.base.num_choices) > 1 else 0 for p in pairs]))
        room = max(0.0, 1 - FLOOR_MARGINS * self.limits.margin)
        return StratumRule(max_drop=self.limits.margin, floor=min(chance, room))


def _sides(pairs: Sequence[Pair]) -> tuple[list[Any], list[Any]]:
    return [p.base for p in pairs], [p.candidate for p in pairs]


def _is_label_pair(value: Any) -> bool:
    """[gold, said], as metrics over the whole set (F1, MCC) log it."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) for v in value)


def _likelihood_of(value: Any) -> tuple[float, float] | None:
    """(log-likelihood, what it is of); a single number is of one document."""
    if isinstance(value, int | float):
        return float(value), 1.0
    if isinstance(value, list) and len(value) == 2:
        return float(value[0]), float(value[1])
    return None


def _sums(values: np.ndarray, weights: np.ndarray, clusters: list[str]) -> np.ndarray:
    """[C, 2] per cluster: sum of values, sum of weights."""
    _, index = np.unique(clusters, return_inverse=True)
    return np.stack([np.bincount(index, values), np.bincount(index, weights)], axis=1)


def _mean(totals: np.ndarray) -> np.ndarray:
    mean: np.ndarray = totals[:, 0] / totals[:, 1]
    return mean


def _ratio(totals: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = np.exp(totals[:, 0] / totals[:, 1])
    return ratio


def _perplexity(values: np.ndarray) -> float:
    return math.exp(min(700.0, -float(values[:, 0].sum() / values[:, 1].sum())))


def _if_share(values: np.ndarray, is_share: bool, sign: float) -> float | None:
    """The mean where it is a share that can sit on a floor; else there is no floor to speak of."""
    return float(values.mean()) if is_share and sign > 0 else None
