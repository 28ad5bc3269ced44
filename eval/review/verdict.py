"""Layer 3 in the verdict: what a gates file's demand and people's review make of what was measured.

Pure; knows the values of report.json and review.json and no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from eval.gate import EXIT_CODES, Result

State = Literal["none", "pending", "pass", "fail", "inconclusive"]

_STATES: dict[str, State] = {
    "accepted": "pass",
    "rejected": "fail",
    "inconclusive": "inconclusive",
    "pending": "pending",
}
PENDING = "Layer 3 is pending: the gates demand that people compare the answers blind."


def is_demanded(data: Mapping[str, Any]) -> bool:
    """Whether report.json's gates accept this artifact only with a passed review.

    Where all answers are the base's there is nothing to ask people.
    """
    demand = data["gates"].get("review")
    return bool(demand and demand["required"] and data["answers"]["num_differing"])


def state(data: Mapping[str, Any]) -> State:
    """Where layer 3 stands: "none" when people were not asked and need not be."""
    if (review := data.get("review")) is not None:
        return _STATES[review["verdict"]]
    if data.get("rejected_before") is not None:
        return "fail"
    return "pending" if is_demanded(data) else "none"


def review_of(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The review whose summary counts: that of this evaluation, or the one that rejected these very
    answers when they were judged before. None when people were not asked."""
    return data.get("review") or data.get("rejected_before")


def joint(measured: Result, found: State, *, demanded: bool) -> Result:
    """The verdict of all layers. A failed review rejects, demanded or not; an open one only keeps
    an artifact from being accepted where the gates demand it.
    """
    if "rejected" in (measured, _result_of(found)):
        return "rejected"
    if demanded and found != "pass":
        return "inconclusive"
    return measured


def _result_of(found: State) -> str:
    return next((verdict for verdict, each in _STATES.items() if each == found), "")


def with_review(data: Mapping[str, Any], review: Mapping[str, Any] | None) -> dict[str, Any]:
    """report.json's values with the review in them, and the verdict that it makes."""
    joined = {**data, "review": review}
    found, measured = state(joined), data["measured"]
    verdict = joint(measured["verdict"], found, demanded=is_demanded(joined))
    return joined | {
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "summary": " ".join(filter(None, (measured["summary"], sentence(joined)))),
    }


def sentence(data: Mapping[str, Any]) -> str:
    """What people found, or that they were not asked although they must be; "" otherwise."""
    review = review_of(data)
    if review is None:
        return PENDING if is_demanded(data) else ""
    word = {"pass": "passed", "fail": "FAILED", "pending": "is pending"}.get(state(data), "")
    return f"Layer 3 {word or 'is undecided'}: {review['summary']}."
