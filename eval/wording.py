"""Wording: one evaluation in plain sentences, shared by the terminal, the report and the stamp."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from eval.amounts import Amounts
from eval.checks.catalogue import TASK_METRICS
from eval.evaluation import Evaluation, Exchange
from eval.gate import Finding
from eval.gate_rules import RETENTION_MARGINS
from eval.metrics.answers import values_of
from eval.plan import Ability, ability, equal
from eval.review.verdict import PENDING
from eval.stats import PairedCounts, drop_upper, fewest_clusters

WORST = 3

# What to prepare next when a scheme is rejected: the first entry that begins a label of the
# artifact's wins.
_NEXT = (
    ("w4", "--recipe w8a8.yaml --calib FILE", "8 bits keep far more of the original"),
    ("w8a8", "--recipe w8a16.yaml", "8-bit weights, exact activations"),
    ("fp8", "--recipe w8a16.yaml", "8-bit weights, exact activations"),
)


_OWN_DATA = (
    "If these data are not like yours, calibrate with samples of your own requests (--calib) and "
    "judge on your own suite (--suite)."
)

PEOPLE_FOUND = "Read what people found worse: review.html beside review.json."


def summary(evaluation: Evaluation) -> str:
    """The verdict in at most four sentences."""
    return " ".join([summary_of_measured(evaluation), *_of_people(evaluation)])


def _of_people(evaluation: Evaluation) -> list[str]:
    """That people rejected these answers before, or were not asked yet. An artifact that is
    rejected need not be shown to them."""
    verdict, before = evaluation.verdict, evaluation.rejected_before
    if before is not None:
        return [f"Layer 3 FAILED: {before.summary}."]
    return [PENDING] if verdict.awaits_review and verdict.result != "rejected" else []


def summary_of_measured(evaluation: Evaluation) -> str:
    """What layers 1 and 2 alone say, in at most three sentences."""
    verdict = evaluation.verdict
    if verdict.measured == "accepted":
        return f"Every required metric keeps its limit on {scope(evaluation)}."
    return " ".join(sentence(f.reason) for f in verdict.deciding[:2]) + _and_more(evaluation)


def why(evaluation: Evaluation) -> list[str]:
    """One sentence for each finding that decided, and for what people said or must say."""
    if evaluation.verdict.measured == "accepted":
        return [summary(evaluation)]
    said = (sentence(f.reason) for f in evaluation.verdict.deciding)
    return [*said, *_of_people(evaluation)]


def _and_more(evaluation: Evaluation) -> str:
    rest = len(evaluation.verdict.deciding) - 2
    return f" And {rest} more." if rest > 0 else ""


def sentence(text: str) -> str:
    """With a full stop at its end."""
    return text if text.endswith(".") else text + "."


def scope(evaluation: Evaluation) -> str:
    """How much was looked at."""
    return (
        f"{_scored(evaluation):,} tokens of {_many(evaluation.num_documents, 'document')} and "
        f"{_many(len(evaluation.exchanges), 'answer')}"
    )


def _scored(evaluation: Evaluation) -> int:
    """Tokens of held-out text that were scored."""
    return next(m.num_scored for m in evaluation.measurements if m.counted == "tokens")


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def remarks(evaluation: Evaluation) -> list[str]:
    """One line for each rule that needs one: what would decide it, or that a loss is suspected."""
    lines = []
    findings = evaluation.verdict.findings
    failed = {(f.name, f.stratum) for f in findings if f.outcome == "fail"}
    for finding in findings:
        label = finding.label
        is_open = finding.outcome == "inconclusive" and finding.rule.required
        if is_open and not _is_hopeless(finding):
            confidence = evaluation.sampling.confidence
            lines.append(f"{label} is undecided: {_what_decides(finding, confidence)}.")
    lines += [
        f"{alarm.label}: regression suspected, more items got worse than chance allows "
        f"(p {alarm.p_value:.2g}, {alarm.holm_p:.2g} corrected for all metrics)."
        for alarm in evaluation.verdict.alarms
        if (alarm.name, alarm.stratum) not in failed
    ]
    return lines


def _is_hopeless(finding: Finding) -> bool:
    """Whether no number of samples would decide: the base, or its noise, stands in the way."""
    return any(words in finding.reason for words in ("too weak", "noise floor"))


def _what_decides(finding: Finding, confidence: float) -> str:
    m = finding.measurement
    if not m.has_interval:
        return (
            f"an interval needs at least {fewest_clusters(confidence)} {m.clusters}, not "
            f"{m.num_clusters}"
        )
    if finding.num_needed is not None:
        return f"about {finding.num_needed:,} {m.counted} would decide, {m.num_scored:,} were used"
    if m.paired is not None and _loses_too_much(m.paired, finding.rule.limit):
        return (
            f"{m.paired.lost} of the {m.paired.num_base_ok} items the base gets right are lost; "
            "at that rate no number of items makes it pass"
        )
    return "the loss lies too close to the limit for any number of samples"


def _loses_too_much(counts: PairedCounts, margin: float) -> bool:
    """Whether the rates as observed break the rule, however many items showed them."""
    return counts.drop >= margin or counts.lost >= RETENTION_MARGINS * margin * counts.num_base_ok


def regressions(evaluation: Evaluation) -> list[Exchange]:
    """The items that got worst, at most WORST, worst first."""
    worse = [e for e in evaluation.exchanges if _losses(e)]
    return sorted(worse, key=lambda e: (_badness(e), e.pair.item.id))[:WORST]


def _losses(exchange: Exchange) -> dict[str, float]:
    """Metric to how much of it this item lost, in the catalogue's order. Changes are no losses."""
    losses: dict[str, float] = {}
    for name, metric in TASK_METRICS.items():
        found = values_of(name, exchange.pair) if metric.shape != "kept" else None
        if found is not None:
            base, candidate = (v[0] if isinstance(v, tuple) else v for v in found)
            losses[name] = max(base - candidate, 0.0)
    return {name: lost for name, lost in losses.items() if lost > 0}


def _badness(exchange: Exchange) -> tuple[float, ...]:
    """Sorts worst first: the most important metric decides, then the next."""
    losses = _losses(exchange)
    return tuple(-losses.get(name, 0.0) for name in TASK_METRICS)


def went_wrong(exchange: Exchange) -> str:
    """What the candidate's answer lost, in words."""
    base, candidate = exchange.pair.base, exchange.pair.candidate
    losses = _losses(exchange)
    cut = ", cut off at its token limit" if candidate.truncated else ""
    if "schema_valid" in losses:
        return f"no longer fits the schema ({candidate.problem}{cut})"
    known = base.details.get("wrong_fields", ())
    lost = [field for field in candidate.details.get("wrong_fields", ()) if field not in known]
    if lost:
        return f"now wrong: {', '.join(lost)}"
    label = TASK_METRICS[next(iter(losses))].label
    return f"{label}: lost" + (f" ({candidate.problem}{cut})" if candidate.problem else "")


def gold(exchange: Exchange) -> str:
    """The right answer on one line, as far as the suite gives one."""
    return exchange.pair.item.gold_text or "(the suite names no right answer)"


def detectable(evaluation: Evaluation) -> str:
    """What this run could have shown: of each required pass-or-fail metric, by how it came out."""
    found = powers(evaluation)
    if not found:
        return _flawless(evaluation)
    return " ".join(_power_sentence(finding, can) for finding, can in found)


def powers(evaluation: Evaluation) -> list[tuple[Finding, Ability]]:
    """The abilities of the required pass-or-fail metrics, given how often the two models differed.

    One more changed item than was seen is assumed: none of a few does not mean that none ever is.
    """
    verdict = evaluation.verdict
    num_tests = sum(m.paired is not None for m in evaluation.measurements)
    found = []
    for finding in verdict.findings:
        counts = finding.measurement.evidence
        if counts is None or not finding.rule.required:
            continue
        n = counts.num_items
        trial = equal(
            min((counts.lost + counts.gained + 1) / (n + 1), 1.0),
            finding.rule.limit,
            confidence=evaluation.sampling.confidence,
            base=min(max(counts.num_base_ok, 1) / n, 1.0),
        )
        can = ability(replace(trial, num_items=n), num_metrics=max(num_tests, 1))
        found.append((finding, can))
    return found


def _power_sentence(finding: Finding, can: Ability) -> str:
    label = finding.label
    noticed, rejected = (
        "no drop" if drop is None else f"a drop of {drop * 100:.1f} pp"
        for drop in (can.noticed, can.rejected)
    )
    return (
        f"{label}: with {can.num_items:,} independent items and {can.discordance:.1%} that change "
        f"either way, this run could notice {noticed} and reject {rejected} with "
        f"{can.power:.0%} power, and accepts a candidate without any with "
        f"{can.accepts_equal:.0%}; had nothing changed at all, it would have shown the loss to be "
        f"below {can.flawless * 100:.1f} pp."
    )


def _flawless(evaluation: Evaluation) -> str:
    n = len(evaluation.exchanges)
    flawless = PairedCounts(num_items=n, num_base_ok=n, lost=0, gained=0)
    bound = drop_upper(flawless, evaluation.sampling.confidence)
    return (
        f"With {n} items, a candidate that loses nothing is still only known to lose less than "
        f"{bound * 100:.1f} pp of pass-or-fail metrics."
    )


def next_steps(evaluation: Evaluation, reports: Path) -> list[str]:
    """What to do now, as commands where there is one. reports: the folder of the reports."""
    is_stamped = "against" not in evaluation.said
    if evaluation.verdict.result == "accepted":
        return [serve(evaluation.artifact.path)] if is_stamped else []
    if evaluation.rejected_before is not None and evaluation.verdict.measured != "rejected":
        return [PEOPLE_FOUND]
    if evaluation.verdict.measured == "accepted":
        return _ask_people(reports, is_stamped=is_stamped)
    if evaluation.verdict.result == "rejected":
        return [*_next_recipe(evaluation), _OWN_DATA]
    return _more_evidence(evaluation)


def serve(artifact: Path) -> str:
    """What an accepted artifact is for."""
    return f"Serve it: {shlex.join(['runtime', 'serve', str(artifact)])}"


def _ask_people(reports: Path, *, is_stamped: bool) -> list[str]:
    """Layer 3 as commands. is_stamped: by this evaluation; else a stamp there is another's."""
    score = ["evaluate", "review", "score", "blind", "--evaluation", str(reports)]
    return [
        f"Draw what people compare: {shlex.join(['evaluate', 'review', 'pack', str(reports)])} "
        "--out blind",
        "Let them compare: evaluate review serve blind",
        f"Complete the verdict: {shlex.join([*score, *([] if is_stamped else ['--no-stamp'])])}",
    ]


def _next_recipe(evaluation: Evaluation) -> list[str]:
    """The base is what gets quantized: where an adapter was merged, the merged model."""
    model = shlex.quote(evaluation.base.name)
    for prefix, recipe, why in _NEXT:
        if any(label.startswith(prefix) for label in evaluation.artifact.schemes):
            return [f"Next recipe up ({why}): quantize {recipe} --model {model}"]
    return []


def _more_evidence(evaluation: Evaluation) -> list[str]:
    """One command for all that is wanting: a second would leave the first one's want."""
    deciding = evaluation.verdict.deciding
    wanted: dict[str, int] = {}
    supply = ""
    for counted, option in (("items", "items"), ("tokens", "windows")):
        needed = _largest(
            (f for f in deciding if f.measurement.counted == counted), evaluation.amounts.num_items
        )
        if needed and counted == "tokens":
            needed = -(-needed // max(_scored(evaluation) // evaluation.num_windows, 1))
        if needed:
            wanted[option] = needed
            supply += _supply(evaluation, counted, needed)
    if any(not f.measurement.has_interval and f.measurement.counted == "tokens" for f in deciding):
        fewest = fewest_clusters(evaluation.sampling.confidence)
        wanted["windows"] = max(wanted.get("windows", 0), Amounts.num_windows)
        if len(evaluation.suite.documents) < fewest:
            supply += f" on a suite with at least {fewest} documents"
    steps = []
    if wanted:
        steps.append(f"Decide with more evidence: {_again(evaluation, **wanted)}{supply}")
    if any("too weak" in f.reason for f in deciding):
        labels = ", ".join(f.label for f in deciding if "too weak" in f.reason)
        steps.append(
            f"{labels}: the base itself hardly solves this suite, so no number of items helps; "
            "judge with a suite it can solve (--suite) or a stronger base."
        )
    return steps


def _again(evaluation: Evaluation, **changed: int) -> str:
    """The command that judges the same artifact again as it was asked, with options `changed`."""
    options = {**evaluation.said, **{name: str(number) for name, number in changed.items()}}
    flags = [word for name, text in options.items() for word in (f"--{name}", text)]
    return shlex.join(["evaluate", str(evaluation.artifact.path), *flags])


def _largest(findings: Iterable[Finding], num_items: int) -> int | None:
    """The most tokens, or items of a file, that any finding needs.

    A metric that only some of a file's items have needs so many more of them.
    """
    numbers = []
    for f in findings:
        if f.num_needed is not None:
            n, m = f.num_needed, f.measurement
            sparse = m.counted == "items" and m.num_scored < num_items
            numbers.append(-(-n * num_items // m.num_scored) if sparse else n)
    return max(numbers, default=None)


def _supply(evaluation: Evaluation, counted: str, needed: int) -> str:
    have = evaluation.suite.largest_file
    if counted != "items" or needed <= have:
        return ""
    return (
        f" (the suite holds {have}: make a larger one with calib_data/generate.py --n and --suite)"
    )
