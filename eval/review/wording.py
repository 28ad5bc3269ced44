"""A review in plain sentences, shared by the terminal, review.md and review.html."""

from __future__ import annotations

import math
from collections.abc import Iterator

from eval.review.draw import Draw
from eval.review.score import Agreement, Judged, Review, percent
from eval.review.unseal import RaterResult

_LABELS = {"preference": "Preference", "critical_faults": "Critical faults"}
_OUTCOMES = {"pass": "pass", "fail": "FAIL", "inconclusive": "undecided"}
_LONGEST_NOTE = 200


def packed(draw: Draw, asked: int) -> Iterator[str]:
    """What is in a new pack."""
    controls = len(draw.identical) + len(draw.planted)
    yield (
        f"{len(draw.drawn)} requests of the {draw.num_differing} (of {draw.num_requests}) that the "
        f"models answered differently ({sum(d.is_longest for d in draw.drawn)} of them the longest "
        f"inputs), and {controls} controls."
    )
    if len(draw.drawn) < asked:
        yield f"{asked} were asked for; more would need a larger evaluation."


def headline(review: Review) -> str:
    """What was found, short enough for a badge."""
    if review.preference is None or review.faults is None:
        missing = review.num_packed - review.num_rated
        return f"{missing} of {review.num_packed} requests have no rating that counts"
    net, faults = review.preference.net, review.faults
    return (
        f"{_many(review.num_rated, 'request')}, {raters(review)}: net "
        f"preference {percent(net.estimate)} [{percent(net.lower)}, {percent(net.upper)}], "
        f"{_many(faults.num_new, 'new critical fault')} (at most {faults.new.upper:.1%})"
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def reasons(review: Review) -> list[str]:
    """One sentence a question."""
    return [
        f"{_LABELS[a.name]} ({_OUTCOMES[a.outcome]}): {a.reason}."
        + (f" About {a.num_needed} requests would decide." if a.num_needed else "")
        for a in review.answers
    ]


def scope(review: Review) -> str:
    """What was looked at."""
    return (
        f"{review.num_rated} of {review.num_packed} packed requests rated, drawn from "
        f"{review.num_differing} that the models answered differently, of {review.num_requests} "
        f"in all; {raters(review)}."
    )


def raters(review: Review) -> str:
    """How many raters count, and how many do not."""
    failed = sum(rater.standing == "failed" for rater in review.raters)
    counted = _many(len(review.raters) - failed, "rater")
    return f"{counted} ({failed} more failed the controls)" if failed else counted


def counts(review: Review) -> list[str]:
    """The plain counts behind the shares."""
    if review.preference is None or review.faults is None:
        return []
    p, f = review.preference, review.faults
    return [
        f"Candidate better {p.candidate_better}, equally good {p.equal}, base better "
        f"{p.base_better} (exact sign test {_p_value(p.sign_p)}).",
        f"Critical faults: candidate {f.num_candidate}, base {f.num_base}, candidate alone "
        f"{f.num_new}.",
    ]


def _p_value(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def could_show(review: Review) -> str:
    """What a review of this size can find at all."""
    if review.preference is None or review.faults is None:
        return ""
    p, share = review.preference, review.preference.detectable
    decisive = p.candidate_better + p.base_better
    weakest = "no preference, however strong"
    if share is not None:
        weakest = f"a preference of {share:.0%} to {1 - share:.0%} or stronger"
    return (
        f"What this review could have shown: among {_many(decisive, 'decisive pair')} {weakest} "
        f"(power 80 %); without any new critical fault the bound would have "
        f"been {review.faults.upper_if_none:.1%}."
    )


def rater_line(rater: RaterResult) -> str:
    """One rater's controls and habits."""
    line = (
        f"{printable(rater.rater)}: {rater.num_requests} requests; controls: "
        f"{rater.identical_passed} of {rater.identical_rated} identical pairs, "
        f"{rater.planted_passed} of {rater.planted_rated} planted defects"
    )
    if rater.share_a is not None:
        line += f"; side A in {rater.share_a:.0%} of the decisive votes"
    if rater.median_seconds is not None:
        line += f"; median {rater.median_seconds:.0f} s"
    tail = {
        "failed": ". FAILED the controls: these ratings do not count.",
        "unproven": ". Too few controls rated to vouch for.",
        "passed": ".",
    }
    return line + tail[rater.standing]


def agreement_lines(found: Agreement) -> Iterator[str]:
    """Kappa by pair, alpha over all."""
    if not found.num_items:
        yield "No request was rated twice: nothing is known of the raters' agreement."
        return
    for pair in found.pairs:
        first, second = map(printable, pair.raters)
        yield (
            f"{first} and {second}, {pair.num_items} requests: Cohen's kappa "
            f"{number(pair.preference)} (preference), {number(pair.fault)} (critical fault)."
        )
    yield (
        f"Krippendorff's alpha on {found.num_items} requests: {number(found.alpha_preference)} "
        f"(preference), {number(found.alpha_fault)} (critical fault)."
    )


def number(value: float | None) -> str:
    """Two decimals, or why there are none."""
    return "undefined" if value is None or not math.isfinite(value) else f"{value:.2f}"


def faulty(review: Review) -> list[Judged]:
    """Requests with a critical fault of the candidate alone."""
    return [item for item in review.judged if item.is_new_fault]


def fault_line(item: Judged) -> str:
    """One such request, with what the raters noted."""
    notes = "; ".join(printable(vote.note) for vote in item.votes if vote.note)
    noted = f": {notes}" if notes else ""
    return f"{printable(item.entry.sample)} ({printable(item.entry.source)}){noted}"


def printable(text: str) -> str:
    """One short line without control characters: a note must not drive the reader's terminal."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _LONGEST_NOTE else line[: _LONGEST_NOTE - 3] + "..."


def scored(review: Review) -> Iterator[str]:
    """The terminal's text."""
    yield f"{review.result.upper()}: {headline(review)}"
    yield ""
    yield scope(review)
    yield from reasons(review)
    yield from counts(review)
    if review.answers:
        yield could_show(review)
    yield ""
    yield from map(rater_line, review.raters)
    yield from agreement_lines(review.agreement)
    if found := faulty(review):
        yield ""
        yield "Critical faults of the candidate alone:"
        yield from (f"  {fault_line(item)}" for item in found)
