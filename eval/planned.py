"""A plan for one gates file and one suite: `eval.plan`'s probabilities for their rules.

Reads the gates file, counts the suite's strata, and takes discordance and base scores from an
earlier report where one is given.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist

from eval.checks.catalogue import TASK_METRICS
from eval.coverage import domains_of, metrics_of, missing
from eval.errors import UsageError
from eval.gate_spec import FLOOR_MARGINS, METRICS, GateSpec, StratumRule, load_gates
from eval.metrics.lengths import ENOUGH, length_bucket
from eval.plan import POWER, Ability, ability, equal, items_to_pass
from eval.suites import Suite, TaskItem, load_suite
from quant.artifact.shipped import resolve_input, shipped_dir

DISCORDANCES = (0.01, 0.02, 0.04, 0.08)
TYPICAL = 0.02
_ENOUGH = 0.8
# Stands for every metric.
ANY = "*"
# Items by metric and stratum; all of a metric under "".
Counts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of the models: by metric, the share of items that changed, and of base right.

    A metric that was not seen is taken to be TYPICAL and `default_base`.
    """

    discordance: Mapping[str, float] = field(default_factory=dict)
    base: Mapping[str, float] = field(default_factory=dict)
    default_base: float = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPlan:
    """One rule for pass-or-fail items; needed: items for `power`, None when no number is enough.

    least: what the base must reach for any number to be enough, where it does not; else None.
    """

    label: str
    required: bool
    ability: Ability
    needed: int | None
    least: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Items to accept an equal candidate by margin and discordance, and what `num_items` can do.

    accepts_all: chance that every required metric of an equal candidate passes, if independent.
    """

    num_items: int
    power: float
    discordances: tuple[float, ...]
    needed: dict[float, tuple[int | None, ...]]
    metrics: tuple[MetricPlan, ...]
    accepts_all: float
    remarks: tuple[str, ...]


def make_plan(
    *,
    gates: str | None = None,
    suite: Path | None = None,
    num_items: int,
    margins: tuple[float, ...] = (),
    discordances: tuple[float, ...] = (),
    seen: Seen | None = None,
    power: float = POWER,
    tokenizer: Path | None = None,
) -> Plan:
    """Plan for a gates file, looked up as `evaluate` does; UsageError when something is missing.

    tokenizer: a model's or an artifact's directory, to sort the items by their length.
    """
    seen = seen or Seen()
    try:
        path = resolve_input(gates or "gates/default.yaml", "recipes", within="gates")
        folder = suite or shipped_dir("calib_data") / "gate"
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    spec = load_gates(path).spec
    lengths = None if tokenizer is None else _Lengths(tokenizer, spec.length_edges)
    held = load_suite(folder)
    have = held.largest_file
    counts = _count(held, num_items, lengths)
    sizes = {s: n for s, n in counts.get(ANY, {}).items() if s}
    rows = tuple(_metric_plans(spec, counts, seen, power))
    wanted = sorted({rule.limit for _, _, rule in _rules(spec)} | set(margins))
    shares = discordances or DISCORDANCES

    def needed(margin: float) -> tuple[int | None, ...]:
        trials = [
            equal(d, margin, confidence=spec.confidence, base=seen.default_base) for d in shares
        ]
        return tuple(items_to_pass(trial, power) for trial in trials)

    return Plan(
        num_items=num_items,
        power=power,
        discordances=shares,
        needed={margin: needed(margin) for margin in wanted},
        metrics=rows,
        accepts_all=math.prod(row.ability.accepts_equal for row in rows if row.required),
        remarks=(
            *_unmeasured(spec, counts),
            *_remarks(rows, num_items, have),
            *_on_lengths(spec, sizes, seen, power, is_known=tokenizer is not None),
        ),
    )


def read_seen(report: Path) -> Seen:
    """Discordance and base scores from a report.json of `evaluate`; UsageError when it is none."""
    try:
        content = json.loads(report.read_bytes())
        rows = {k: m for k, m in content["measurements"].items() if "lost" in m}
        return Seen(
            discordance={k: (m["lost"] + m["gained"]) / m["num_items"] for k, m in rows.items()},
            base={k: float(m["base"]) for k, m in rows.items()},
        )
    except OSError as error:
        raise UsageError(f"cannot read the report {report}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(f"{report} is no report.json of evaluate: {error!r}") from error


class _Lengths:
    """Sorts items by the tokens of their prompts. A dialog's later turns count their own words."""

    def __init__(self, folder: Path, edges: tuple[int, ...]) -> None:
        from eval.workload import make_prompt
        from runtime.text import TextError, TextProcessor

        try:
            self._text = TextProcessor.load(folder)
        except TextError as error:
            raise UsageError(f"--tokenizer {folder}: {error}") from error
        self._edges, self._prompt = edges, make_prompt

    def stratum(self, item: TaskItem) -> str:
        """`length:0-1k` and so on."""
        tokens = self._prompt(self._text, item, item.messages).token_ids
        return f"length:{length_bucket(len(tokens), self._edges)}"


def _count(suite: Suite, num_items: int, lengths: _Lengths | None) -> Counts:
    """Items by metric and stratum among those that `--items num_items` asks; ANY counts them all.

    More rows than the suite's largest file holds are taken to be more of the same.
    """
    counts: dict[str, Counter[str]] = {}
    for item in suite.pick(num_items, seed=0):
        strata = ["", *domains_of(item)]
        if lengths is not None:
            strata.append(lengths.stratum(item))
        for metric in (ANY, *metrics_of(item)):
            counts.setdefault(metric, Counter()).update(strata)
    have = min(suite.largest_file, num_items)
    return {
        metric: {stratum: n * num_items // have for stratum, n in found.items()}
        for metric, found in counts.items()
    }


def _rules(spec: GateSpec) -> Iterator[tuple[str, str, StratumRule]]:
    """Rules for pass-or-fail items: (metric, stratum, rule)."""
    for name, rule in spec.metrics.items():
        # Nobody draws answers unless asked to.
        is_drawn = METRICS[name].variant and rule.if_measured
        if METRICS[name].by_item and not is_drawn:
            yield name, "", rule
            for stratum, within in rule.strata.items():
                yield name, stratum, within


def _metric_plans(spec: GateSpec, counts: Counts, seen: Seen, power: float) -> Iterator[MetricPlan]:
    rules = [
        (name, found, rule, n)
        for name, stratum, rule in _rules(spec)
        for found, n in _sizes(stratum, counts.get(_root(name), {}))
    ]
    for name, stratum, rule, n in rules:
        if n == 0:
            continue
        trial = equal(
            seen.discordance.get(name, TYPICAL),
            rule.limit,
            confidence=spec.confidence,
            base=seen.base.get(name, seen.default_base),
        )
        can = ability(replace(trial, num_items=n), power=power, num_metrics=len(rules))
        label = METRICS[name].label + (f" in {stratum}" if stratum else "")
        plan = MetricPlan(
            label=label, required=rule.required, ability=can, needed=items_to_pass(trial, power)
        )
        least = max(rule.floor + FLOOR_MARGINS * rule.limit, rule.at_least or 0.0)
        if trial.base < least:
            can = replace(can, accepts_equal=0.0)
            plan = replace(plan, ability=can, needed=None, least=least)
        yield plan


def _root(name: str) -> str:
    """The metric that a variant looks at in another way."""
    return name.removesuffix("_sampled").removesuffix("_pass_k").removesuffix("_drift")


def _sizes(stratum: str, counts: Mapping[str, int]) -> list[tuple[str, int]]:
    if stratum.startswith("length:") and not any(s.startswith("length:") for s in counts):
        return []  # no tokenizer was named; a remark says so
    if stratum.endswith(":*"):
        found = [(s, n) for s, n in sorted(counts.items()) if s.startswith(stratum[:-1])]
        # One that holds every item says what the whole says.
        return [(s, n) for s, n in found if n != counts[""]]
    return [(stratum, counts.get(stratum, 0))]


def _unmeasured(spec: GateSpec, counts: Counts) -> Iterator[str]:
    """Rules that this suite gives nothing to judge, which `evaluate` takes for an error."""
    names = [
        METRICS[name].label
        for name, rule in spec.metrics.items()
        if name in TASK_METRICS and not rule.if_measured and name not in counts
    ]
    if names:
        yield (
            f"No item of the suite has a check for {', '.join(names)}: evaluate will not judge "
            "under this gates file. Leave the rule out or give it `if_measured: true`."
        )
    for name, rule in spec.metrics.items():
        for stratum in missing(rule.strata, set(counts[name])) if name in counts else ():
            yield (
                f"No item with {METRICS[name].label} is in {stratum}: evaluate will not judge "
                "under this gates file."
            )


def _on_lengths(
    spec: GateSpec, sizes: Mapping[str, int], seen: Seen, power: float, *, is_known: bool
) -> Iterator[str]:
    """What rules by input length need, which the tables cannot show."""
    by_length = any(s.startswith("length:") for rule in spec.metrics.values() for s in rule.strata)
    drifts = {
        name: rule
        for name, rule in spec.metrics.items()
        if METRICS[name].difference and (is_known or not rule.if_measured)
    }
    if (by_length or drifts) and not is_known:
        yield "Rules by input length: --tokenizer ART counts the items of each length."
    if not drifts:
        return
    z = NormalDist().inv_cdf(spec.confidence) + NormalDist().inv_cdf(power)
    for name, rule in drifts.items():
        share = seen.discordance.get(name.removesuffix("_drift"), TYPICAL)
        needed = max(math.ceil(2 * share * (z / rule.limit) ** 2), ENOUGH)
        yield (
            f"{METRICS[name].label}: about {needed} items at either end of the lengths accept an "
            f"equal candidate {power:.0%} of the time ({share:.1%} differ, "
            f"{rule.limit * 100:g} pp allowed)."
        )
    held = {s.removeprefix("length:"): n for s, n in sizes.items() if s.startswith("length:")}
    if held:
        said = ", ".join(f"{n} of {length} tokens" for length, n in sorted(held.items()))
        yield f"Your items by input length: {said}."


def _remarks(rows: tuple[MetricPlan, ...], asked: int, have: int) -> Iterator[str]:
    if asked > have:
        yield (
            f"The suite holds {have} of the {asked} items: make more with "
            f"calib_data/generate.py --split gate --gate-n {asked}."
        )
    for row in rows:
        if row.least is not None:
            yield (
                f"{row.label}: the base must reach {row.least:.1%} and does not, so no number of "
                "items accepts anything; use a stronger base or an easier suite."
            )
    required = [row.ability.accepts_equal for row in rows if row.required]
    if len(required) > 1:
        yield (
            f"All {len(required)} required rows together accept an equal candidate with "
            f"{math.prod(required):.0%} (if independent): each one more lowers it."
        )
    open_ = [row for row in rows if row.required and row.least is None]
    weak = [row.label for row in open_ if row.ability.accepts_equal < _ENOUGH]
    if weak:
        yield f"Too few items for {', '.join(weak)}: expect inconclusive even of a sound artifact."
    yield (
        "In parentheses: guards, which need not be decided. "
        "Assumes one item a document; of several, the design effect in the report says how many "
        "more it takes. Notices: exact McNemar, corrected for all rows. Rejects: the gate is sure."
    )
