"""Figures as a person reads them: values, differences with intervals, limits, outcomes, ladders.

The one wording of numbers for terminal, report.md, report.html, junit.xml and summary.md. Knows
numbers and report.json's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from eval.measurement import Unit, format_interval

OUTCOMES = {"pass": "pass", "fail": "FAIL", "inconclusive": "undecided"}
LimitKind = Literal["max", "min", "max_drop"]
_KINDS: tuple[LimitKind, ...] = ("max", "min", "max_drop")


def value(number: float | None, unit: Unit) -> str:
    """A model's own value; shares for paired metrics, perplexity for the ratio."""
    if number is None:
        return ""
    return f"{number:.1%}" if unit == "drop" else f"{number:.3f}"


def difference(estimate: float | None, lower: float | None, upper: float | None, unit: Unit) -> str:
    """What is judged, with its interval. A loss has a minus sign, as a reader expects."""
    if estimate is None:
        return ""
    low, high = (float("nan") if end is None else end for end in (lower, upper))
    if unit == "drop":
        return format_interval(-estimate, -high, -low, unit)
    return format_interval(estimate, low, high, unit).replace(" nats", "")


def of_measurement(m: Mapping[str, Any]) -> str:
    """The difference of one of report.json's measurements."""
    return difference(m["estimate"], m["lower"], m["upper"], m["unit"])


def limit(kind: LimitKind, number: float) -> str:
    """The limit as a person writes it: <= 1.03, >= 92 %, > -5 pp."""
    if kind == "max_drop":
        return f"> -{number * 100:g} pp"
    return f">= {number:.0%}" if kind == "min" else f"<= {number:g}"


def limit_of(finding: Mapping[str, Any]) -> str:
    """The limit of one of report.json's findings."""
    kind = next(kind for kind in _KINDS if kind in finding["limit"])
    return limit(kind, finding["limit"][kind])


def outcome(word: str, *, required: bool) -> str:
    """pass, FAIL or undecided; in parentheses for a guard, which need not be decided."""
    said = OUTCOMES[word]
    return said if required else f"({said})"


def kld_steps(kld: Mapping[str, Any]) -> list[tuple[str, float]]:
    """report.json's `kld` by `llama-perplexity`'s names, the rarest first, the mean last."""
    percents = sorted(
        (float(key[1:]) for key in kld if key[0] == "p" and key[1:2].isdigit()), reverse=True
    )
    named = [("Maximum KLD", kld["max"])]
    for percent in percents:
        label = "Median KLD" if percent == 50 else f"{percent:.1f}% KLD"
        named.append((label, kld[f"p{percent:g}"]))
    named.append(("Mean KLD", kld["mean"]))
    return [(label, nats) for label, nats in named if nats is not None]


def bounds(found: Mapping[str, float | None], digits: int = 5) -> str:
    """`0.01234 [0.01000, 0.01500]`; the estimate alone where there is no interval."""
    estimate, low, high = (found[name] for name in ("estimate", "lower", "upper"))
    if estimate is None:
        return "not a number"
    if low is None or high is None:
        return f"{estimate:.{digits}f}"
    return f"{estimate:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def num_bytes(count: int) -> str:
    """98 MB, 1.35 GB."""
    return f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.0f} MB"
