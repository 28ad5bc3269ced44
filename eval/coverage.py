"""Coverage: whether a workload gives a gates file's rules anything to judge.

Checks and domains are known before any model is asked. Lengths are not, since a dialog's later
prompts hold answers; rules on lengths and their drift are left to `eval.gate.judge`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from eval.checks.base import Reply
from eval.checks.catalogue import TASK_METRICS
from eval.checks.registry import KINDS, score_reply
from eval.errors import EvaluationError
from eval.gate_spec import GateSpec
from eval.suites import TaskItem
from eval.windows import Window

_NO_REPLY = Reply(text="", raw="", finish="error")
_TEXT_METRICS = ("perplexity_ratio", "kl_mean", "kl_p99", "top1_agreement")


def metrics_of(item: TaskItem) -> tuple[str, ...]:
    """The metrics that any answer to this item has a value of."""
    scored = score_reply(_NO_REPLY, item.checks)
    return (*scored.values, *scored.signals)


def _own_metrics(item: TaskItem) -> tuple[str, ...]:
    """Those that the row itself asks for, without what every answer is looked at for."""
    found = (KINDS[check.kind].score(_NO_REPLY, check.options) for check in item.checks)
    return tuple(name for outcome in found for name in outcome.values)


def domains_of(row: TaskItem | Window) -> tuple[str, str]:
    """The strata that are known of an item or a window before it is asked."""
    return f"source:{row.source}", f"lang:{row.lang}"


def require_covered(spec: GateSpec, windows: Sequence[Window], items: Sequence[TaskItem]) -> None:
    """EvaluationError for a rule that no window and no item can give a value for, and for a golden
    item that no rule would miss."""
    _require_golden_judged(spec, items)
    held = _held(windows, items)
    for name, rule in spec.metrics.items():
        if name not in held:
            if name in TASK_METRICS and not rule.if_measured:
                raise EvaluationError(
                    f"the gates file judges {name}, but no item of the suite has a check for it; "
                    "leave the rule out or give it `if_measured: true`"
                )
            continue
        for pattern in missing(rule.strata, held[name]):
            raise EvaluationError(
                f"the gates file judges {name} in {pattern}, but none of that is asked; there "
                f"are: {', '.join(sorted(held[name]))}"
            )


def _require_golden_judged(spec: GateSpec, items: Sequence[TaskItem]) -> None:
    for item in items:
        own = _own_metrics(item)
        if item.golden and not any(name in spec.metrics for name in own):
            raise EvaluationError(
                f"item {item.id} is golden, so it must never be lost, but the gates file judges "
                f"nothing that its checks find ({', '.join(own)}); give one of these a limit"
            )


def missing(patterns: Mapping[str, object], held: set[str]) -> Iterator[str]:
    """Those of a rule's strata, other than lengths, that match none of `held`."""
    for pattern in patterns:
        kind, value = pattern.split(":", 1)
        is_there = any(s.startswith(f"{kind}:") for s in held) if value == "*" else pattern in held
        if kind != "length" and not is_there:
            yield pattern


def _held(windows: Sequence[Window], items: Sequence[TaskItem]) -> dict[str, set[str]]:
    """The domains in which each metric will have a value."""
    of_text = {domain for window in windows for domain in domains_of(window)}
    held = dict.fromkeys(_TEXT_METRICS, of_text)
    for item in items:
        for metric in metrics_of(item):
            held.setdefault(metric, set()).update(domains_of(item))
    return held
