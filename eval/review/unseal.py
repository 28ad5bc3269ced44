"""From sides to models: what each rater said of the candidate and the base, and of the controls.

Pure; everything after this file speaks of candidate and base, nothing of A and B.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from eval.review.pack import Key, KeyEntry
from eval.review.ratings import History, Rating

Standing = Literal["passed", "failed", "unproven"]

# A rater who guesses passes 3 of 4 controls once in nine times, 9 of 12 once in 250.
PASS_SHARE = 0.75
FEWEST_RATED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One rater's judgement of one request. preference: 1 candidate, 0 tie, -1 base."""

    rater: str
    preference: int
    candidate_fault: bool
    base_fault: bool
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RaterResult:
    """How one rater did. standing "failed": the ratings do not count.

    share_a: of the decisive votes on requests, those for the left side; sides are balanced, so a
    habit shows. None without decisive votes.
    """

    rater: str
    standing: Standing
    num_requests: int
    identical_passed: int
    identical_rated: int
    planted_passed: int
    planted_rated: int
    share_a: float | None
    median_seconds: float | None


def votes_by_item(key: Key, histories: Sequence[History]) -> dict[str, list[Vote]]:
    """The votes on every request, in the key's order; an empty list where there is none."""
    requests = {entry.id: entry for entry in key.entries if entry.kind == "request"}
    return {
        name: [
            _vote(entry, history.rater, history.current[name])
            for history in histories
            if name in history.current
        ]
        for name, entry in requests.items()
    }


def _vote(entry: KeyEntry, rater: str, rating: Rating) -> Vote:
    other = "b" if entry.candidate == "a" else "a"
    preference = 0 if rating.choice == "tie" else 1 if rating.choice == entry.candidate else -1
    return Vote(
        rater=rater,
        preference=preference,
        candidate_fault=entry.candidate in rating.critical,
        base_fault=other in rating.critical,
        note=rating.note,
    )


def check_rater(key: Key, history: History) -> RaterResult:
    """Hold a rater's ratings of controls against the key."""
    entries = {entry.id: entry for entry in key.entries}
    rated = [(entries[name], rating) for name, rating in history.current.items()]
    identical = [_passes(e, r) for e, r in rated if e.kind == "identical"]
    planted = [_passes(e, r) for e, r in rated if e.kind == "planted"]
    decisive = [r.choice for e, r in rated if e.kind == "request" and r.choice != "tie"]
    return RaterResult(
        rater=history.rater,
        standing=_standing([*identical, *planted], _num_controls(entries)),
        num_requests=sum(entry.kind == "request" for entry, _ in rated),
        identical_passed=sum(identical),
        identical_rated=len(identical),
        planted_passed=sum(planted),
        planted_rated=len(planted),
        share_a=decisive.count("a") / len(decisive) if decisive else None,
        median_seconds=statistics.median([r.seconds for _, r in rated]) if rated else None,
    )


def _num_controls(entries: Mapping[str, KeyEntry]) -> int:
    return sum(entry.kind != "request" for entry in entries.values())


def _passes(entry: KeyEntry, rating: Rating) -> bool:
    """Identical answers are equally good, and equally at fault; a planted defect must be seen.

    Where the sound answer is not good either, both may be called bad, but never the damaged one
    better.
    """
    if entry.kind == "identical":
        return rating.choice == "tie" and len(rating.critical) != 1
    damaged = "b" if entry.sound == "a" else "a"
    seen = rating.choice == entry.sound or damaged in rating.critical
    return seen and rating.choice != damaged


def _standing(passed: Sequence[bool], num_controls: int) -> Standing:
    """Failed as soon as the rest of the controls cannot make up for it."""
    if passed.count(False) > (1 - PASS_SHARE) * num_controls:
        return "failed"
    if len(passed) < FEWEST_RATED:
        return "unproven"
    return "passed" if sum(passed) >= PASS_SHARE * len(passed) else "failed"
