"""Format compliance and field correctness of extraction answers, scored without any judge model.

`score_answer` looks at one answer of one model; `measure` pairs both models' scores per item.
Format is judged on the strict reading: the whole trimmed answer must parse. The lenient reading
(one code fence or leading prose removed) is reported beside it and gates nothing, because it hides
exactly the regressions that break a program downstream.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from eval.errors import SuiteError
from eval.measurement import Measurement
from eval.metrics.normalise import flatten, normalise
from eval.stats import (
    Interval,
    Sampling,
    clopper_pearson_upper,
    cluster_bootstrap,
    drop_interval,
    paired_counts,
    value,
)
from eval.suites import ExtractionItem

# Below this many changed items the bootstrap of a graded rate is too sure of itself.
FEW_CHANGED = 5

_FENCE = re.compile(r"```[a-zA-Z]*\s*\n?(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemScore:
    """What one answer achieved.

    truncated: it hit its token limit, so a parse error says little. failed: the model gave no
    answer at all (NaN, an engine error). problem: the first thing wrong, in words, or "".
    num_expected: gold fields that are not null; num_present: of these, non-empty in the answer;
    tp, fp, fn: (field, normalised value) pairs; wrong_fields: missing, wrong or invented ones.
    """

    json_valid: bool
    json_extractable: bool
    schema_valid: bool
    has_duplicate_keys: bool
    critical_right: bool
    truncated: bool
    failed: bool
    problem: str
    num_expected: int
    num_present: int
    tp: int
    fp: int
    fn: int
    wrong_fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedItem:
    """One item with both models' scores."""

    item: ExtractionItem
    base: ItemScore
    candidate: ItemScore


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parsed:
    value: Any
    problem: str
    has_duplicate_keys: bool = False


def score_answer(
    item: ExtractionItem, text: str, *, truncated: bool = False, failed: bool = False
) -> ItemScore:
    """Score one model's answer text."""
    parsed = parse_strict(text)
    problem = parsed.problem or _schema_problem(item.schema, parsed.value)
    fields = _fields(item, None if parsed.problem else parsed.value)
    return ItemScore(
        json_valid=not parsed.problem,
        json_extractable=not parsed.problem or _is_extractable(text),
        schema_valid=not problem,
        has_duplicate_keys=parsed.has_duplicate_keys,
        truncated=truncated,
        failed=failed,
        problem="no answer: the model failed" if failed else problem,
        **fields,
    )


def parse_strict(text: str) -> _Parsed:
    """The whole trimmed text as JSON; NaN and Infinity are refused, duplicate keys are flagged."""
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        duplicates.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        value = json.loads(text.strip(), object_pairs_hook=unique, parse_constant=_refuse_constant)
        flatten(value)
    except ValueError as error:
        return _Parsed(value=None, problem=f"not JSON: {error}")
    except RecursionError:
        return _Parsed(value=None, problem="not JSON: nested too deeply")
    return _Parsed(value=value, problem="", has_duplicate_keys=bool(duplicates))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _is_extractable(text: str) -> bool:
    """Whether an object parses once a code fence or surrounding prose is taken away."""
    fenced = _FENCE.search(text)
    body = fenced.group(1) if fenced else text
    start = body.find("{")
    if start < 0:
        return False
    try:
        json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(body, start)
    except (ValueError, RecursionError):
        return False
    return True


def _schema_problem(schema: dict[str, Any], value: Any) -> str:
    """The first broken keyword and its path, or "". The draft is the schema's own `$schema`."""
    validator = validator_for(schema, default=Draft202012Validator)
    # An empty registry: a schema must hold all it refers to, nothing is fetched.
    checker = validator(schema, format_checker=validator.FORMAT_CHECKER, registry=Registry())
    try:
        errors = sorted(checker.iter_errors(value), key=lambda error: error.json_path)
    except Unresolvable as error:
        raise SuiteError(
            f"a JSON Schema refers to {error.ref!r}, which it does not hold"
        ) from error
    return _printable(f"{errors[0].json_path}: {errors[0].validator}") if errors else ""


def _printable(text: str) -> str:
    r"""Half a surrogate pair, which JSON can spell but no file can hold, as `\udXXX`."""
    return text.encode("utf-8", "backslashreplace").decode()


def _fields(item: ExtractionItem, value: Any) -> dict[str, Any]:
    """Completeness, hits and misses. A value where gold is null is a false positive."""
    gold = {k: normalise(v) for k, v in flatten(item.gold).items()}
    answer = flatten(value) if isinstance(value, dict) else {}
    given = {k: normalise(v) for k, v in answer.items()}
    expected = {k: v for k, v in gold.items() if v is not None}
    claimed = {k: v for k, v in given.items() if not _is_empty(v)}
    hits = {k for k, v in expected.items() if k in claimed and _same(claimed[k], v)}
    wrong = tuple(
        _printable(k)
        for k in {**gold, **claimed}
        if k not in hits and (k in expected or k in claimed)
    )
    return {
        "num_expected": len(expected),
        "num_present": sum(k in claimed for k in expected),
        "tp": len(hits),
        "fp": len(claimed) - len(hits),
        "fn": len(expected) - len(hits),
        "wrong_fields": wrong,
        "critical_right": bool(answer) and not any(_belongs(w, item.critical) for w in wrong),
    }


def _is_empty(value: Any) -> bool:
    return value is None or value == ""


def _same(left: Any, right: Any) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _belongs(path: str, names: Sequence[str]) -> bool:
    return re.split(r"[.\[]", path, maxsplit=1)[0] in names


def measure(pairs: Sequence[PairedItem], sampling: Sampling) -> tuple[Measurement, ...]:
    """The judged measurements of a suite, each with its domains (item = cluster)."""
    return tuple(_with_domains(one, pairs, sampling) for one in _MEASURES)


_Measure = Callable[[Sequence[PairedItem], Sampling], Measurement]


def _with_domains(one: _Measure, pairs: Sequence[PairedItem], sampling: Sampling) -> Measurement:
    names = sorted({name for pair in pairs for name in _domain_names(pair)})
    parts = tuple((n, one([p for p in pairs if n in _domain_names(p)], sampling)) for n in names)
    return replace(one(pairs, sampling), domains=tuple(p for p in parts if p[1].num_scored))


def _domain_names(pair: PairedItem) -> tuple[str, str]:
    return f"source:{pair.item.source}", f"lang:{pair.item.lang}"


def _pass_or_fail(name: str, is_ok: Callable[[ItemScore], bool]) -> _Measure:
    """A metric that each item passes or fails: score bounds of the paired drop."""

    def one(pairs: Sequence[PairedItem], sampling: Sampling) -> Measurement:
        base = [is_ok(p.base) for p in pairs]
        candidate = [is_ok(p.candidate) for p in pairs]
        counts = paired_counts(base, candidate)
        interval = drop_interval(counts, sampling.confidence)
        return Measurement(
            name=name,
            unit="drop",
            base=sum(base) / len(pairs),
            candidate=sum(candidate) / len(pairs),
            estimate=interval.estimate,
            lower=interval.lower,
            upper=interval.upper,
            counted="items",
            num_scored=len(pairs),
            num_clusters=len(pairs),
            paired=counts,
            num_nonfinite=_num_failed(pairs),
        )

    return one


Counts = Callable[[ItemScore], tuple[int, ...]]
Rate = Callable[[np.ndarray], np.ndarray]


def _graded(name: str, counts: Counts, rate: Rate) -> _Measure:
    """A rate made of per-item counts: `rate` maps [D, K] sums of counts to [D] rates."""

    def one(pairs: Sequence[PairedItem], sampling: Sampling) -> Measurement:
        rows = np.array([counts(p.base) + counts(p.candidate) for p in pairs], dtype=np.float64)
        width = rows.shape[1] // 2
        total = rows.sum(axis=0, keepdims=True)
        interval = cluster_bootstrap(
            rows, lambda sums: rate(sums[:, :width]) - rate(sums[:, width:]), sampling
        )
        num_changed = int((rows[:, :width] != rows[:, width:]).any(axis=1).sum())
        interval = _unsure(interval, num_changed, len(rows), sampling.confidence)
        return Measurement(
            name=name,
            unit="drop",
            base=value(rate, total[:, :width]),
            candidate=value(rate, total[:, width:]),
            estimate=interval.estimate,
            lower=interval.lower,
            upper=interval.upper,
            counted="items",
            # Without one gold field in all items the rate is 0 / 0 and nothing was scored.
            num_scored=0 if math.isnan(interval.estimate) else len(pairs),
            num_clusters=len(pairs),
            num_nonfinite=_num_failed(pairs),
        )

    return one


def _unsure(interval: Interval, num_changed: int, num_items: int, confidence: float) -> Interval:
    """Bounds no narrower than what so few changed items can show.

    Resampling items of which none changed gives a width of zero, as if five flawless items proved
    that nothing is ever lost. The exact bound counts each changed item as lost whole.
    """
    if num_changed >= FEW_CHANGED:
        return interval
    most = clopper_pearson_upper(num_changed, num_items, confidence)
    return replace(interval, lower=min(interval.lower, -most), upper=max(interval.upper, most))


def _num_failed(pairs: Sequence[PairedItem]) -> int:
    return sum(p.candidate.failed for p in pairs)


_MEASURES: tuple[_Measure, ...] = (
    _pass_or_fail("json_valid", lambda score: score.json_valid),
    _pass_or_fail("schema_valid", lambda score: score.schema_valid),
    _graded(
        "field_completeness",
        lambda score: (score.num_present, score.num_expected),
        lambda sums: sums[:, 0] / sums[:, 1],
    ),
    _graded(
        "field_f1",
        lambda score: (score.tp, score.fp, score.fn),
        lambda sums: 2 * sums[:, 0] / (2 * sums[:, 0] + sums[:, 1] + sums[:, 2]),
    ),
    _pass_or_fail("critical_fields", lambda score: score.critical_right),
)
