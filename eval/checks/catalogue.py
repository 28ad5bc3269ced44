"""The table of task metrics: what each is called and how one answer's values become a rate.

The order is the order of reports, and of what counts as the worse loss of an item.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

# [D, K] sums of an item's K counts to [D] rates.
Rate = Callable[[np.ndarray], np.ndarray]
Shape = Literal["pass", "rate", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetric:
    """One metric over many answers.

    shape: "pass", each answer passes (1) or not (0); "rate", counts summed over answers make the
        rate; "kept", the candidate's signal is compared with the base's, which keeps it by
        definition, so the drop is the share of answers that changed.
    rate: for "rate". kept: for "kept", whether (base's signal, candidate's signal) agree.
    """

    label: str
    shape: Shape = "pass"
    rate: Rate | None = None
    kept: Callable[[Any, Any], bool] | None = None


def share(sums: np.ndarray) -> np.ndarray:
    """Of (part, whole)."""
    found: np.ndarray = sums[:, 0] / sums[:, 1]
    return found


def _f1(sums: np.ndarray) -> np.ndarray:
    """Of (true positives, false positives, false negatives), micro-averaged."""
    f1: np.ndarray = 2 * sums[:, 0] / (2 * sums[:, 0] + sums[:, 1] + sums[:, 2])
    return f1


# An answer whose length leaves this band around the base's has drifted. Tokens of slack: short
# answers double easily.
LENGTH_BAND, LENGTH_SLACK = 2.0, 8


def _same_length(base: int, candidate: int) -> bool:
    longer, shorter = max(base, candidate), min(base, candidate)
    return longer - shorter <= LENGTH_SLACK or longer <= LENGTH_BAND * shorter


def _same(base: Any, candidate: Any) -> bool:
    return bool(base == candidate)


TASK_METRICS: dict[str, TaskMetric] = {
    "schema_valid": TaskMetric(label="Schema valid"),
    "critical_fields": TaskMetric(label="Critical fields"),
    "json_valid": TaskMetric(label="JSON valid"),
    "tool_call": TaskMetric(label="Tool call right"),
    "tool_decision": TaskMetric(label="Call or no call"),
    "tool_called": TaskMetric(label="Called when needed"),
    "tool_withheld": TaskMetric(label="No call when not"),
    "tool_schema": TaskMetric(label="Tool call valid"),
    "choice_accuracy": TaskMetric(label="Choice accuracy"),
    "exact_match": TaskMetric(label="Exact match"),
    "normalised_match": TaskMetric(label="Normalised match"),
    "code_parses": TaskMetric(label="Code parses"),
    "code_fenced": TaskMetric(label="Code fence closed"),
    "code_defines": TaskMetric(label="Code defines"),
    "constraints": TaskMetric(label="Constraints"),
    "constraints_loose": TaskMetric(label="Constraints, loose"),
    "instructions": TaskMetric(label="Instructions, strict", shape="rate", rate=share),
    "instructions_loose": TaskMetric(label="Instructions, loose", shape="rate", rate=share),
    "dialog_state": TaskMetric(label="Dialog state"),
    "field_completeness": TaskMetric(label="Fields complete", shape="rate", rate=share),
    "field_accuracy": TaskMetric(label="Fields right", shape="rate", rate=share),
    "field_f1": TaskMetric(label="Field F1", shape="rate", rate=_f1),
    "type_fidelity": TaskMetric(label="Types kept", shape="rate", rate=share),
    "enum_adherence": TaskMetric(label="Enum exact", shape="rate", rate=share),
    "enum_lenient": TaskMetric(label="Enum, near misses", shape="rate", rate=share),
    "json_extractable": TaskMetric(label="JSON extractable"),
    "json_unique_keys": TaskMetric(label="No duplicate keys"),
    "language_right": TaskMetric(label="Language asked for"),
    "no_loop": TaskMetric(label="No loops"),
    "no_leaked_tokens": TaskMetric(label="No leaked tokens"),
    "no_stray_characters": TaskMetric(label="No stray characters"),
    "stopped": TaskMetric(label="Ends by itself"),
    "language_kept": TaskMetric(label="Language kept", shape="kept", kept=_same),
    "refusal_kept": TaskMetric(label="Refusals kept", shape="kept", kept=_same),
    "length_kept": TaskMetric(label="Length kept", shape="kept", kept=_same_length),
}


def length_drift(name: str) -> str:
    """The metric "how much more of `name` is lost in long inputs than in short ones"."""
    return f"{name}_drift"


def sampled(name: str) -> str:
    """The metric over drawn answers, averaged within the item."""
    return f"{name}_sampled"


def pass_k(name: str) -> str:
    """The metric "all drawn answers of an item pass"."""
    return f"{name}_pass_k"
