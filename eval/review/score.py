"""Layer 3's verdict from unsealed votes: two questions, asked before the first rating.

1. Do people prefer the base? The net preference, candidate minus base, as a share of all requests;
   its lower bound must lie above -margin (non-inferiority, as everywhere in the gate).
2. Does the candidate alone do harm? The share of requests with a critical fault of the candidate
   that the base does not have; its Clopper-Pearson upper bound must not exceed max_critical.

Requests that both models answered alike have neither, so both shares are those among differing
requests times the share of differing ones. Knows no file and no page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from eval.gate_rules import Outcome
from eval.review.agreement import cohen_kappa, krippendorff_alpha
from eval.review.pack import Key, KeyEntry
from eval.review.power import detectable_preference, sign_test_p
from eval.review.ratings import History
from eval.review.rules import Rules
from eval.review.unseal import RaterResult, Vote, check_rater, votes_by_item
from eval.review.weighted import effective_size, independent_size, share_bounds
from eval.stats import (
    Interval,
    Sampling,
    clopper_pearson_lower,
    clopper_pearson_upper,
    cluster_bootstrap,
)

Result = Literal["accepted", "rejected", "inconclusive", "pending"]
EXIT_CODES: dict[Result, int] = {"accepted": 0, "rejected": 1, "inconclusive": 3, "pending": 3}
# With fewer items off the commonest side, the bootstrap knows too little of what was not drawn.
FEW_OTHERS = 5
MOST_ITEMS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One request with its counted votes. preference: their mean, -1 to 1.

    Of a fault one rater's word is enough; it is new when a rater sees it in the candidate alone.
    """

    entry: KeyEntry
    votes: tuple[Vote, ...]
    preference: float
    candidate_fault: bool
    base_fault: bool
    is_new_fault: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """net: candidate minus base over all requests, re-weighted; the counts are of rated items.

    sign_p: exact two-sided sign test. detectable: the weakest preference among decisive pairs that
    as many pairs show with 80 % power (None: none at all).
    """

    net: Interval
    candidate_better: int
    equal: int
    base_better: int
    sign_p: float
    detectable: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """new: the candidate's critical faults that the base lacks, over all requests, re-weighted.

    The counts are of rated items. num_independent: what they are worth where several come from one
    document or stand for different numbers of requests. upper_if_none: the bound that as many
    requests without any fault would have given.
    """

    new: Interval
    num_new: int
    num_candidate: int
    num_base: int
    num_independent: float
    upper_if_none: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAgreement:
    """Cohen's kappa of two raters on the requests both rated."""

    raters: tuple[str, str]
    num_items: int
    preference: float | None
    fault: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement on requests with two ratings or more, failed raters included. alpha: nominal."""

    num_items: int
    pairs: tuple[PairAgreement, ...]
    alpha_preference: float | None
    alpha_fault: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question's answer; `reason` is one plain sentence."""

    name: Literal["preference", "critical_faults"]
    outcome: Outcome
    reason: str
    num_needed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """A scored pack. While it is pending it says nothing of sides: who looks early may stop early.

    num_effective: requests of equal weight that carry as much information (Kish).
    """

    result: Result
    rules: Rules
    num_requests: int
    num_differing: int
    num_packed: int
    num_rated: int
    agreement: Agreement
    raters: tuple[RaterResult, ...]
    answers: tuple[Answer, ...] = ()
    num_effective: float | None = None
    preference: Preference | None = None
    faults: Faults | None = None
    judged: tuple[Judged, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 accepted, 1 rejected, 3 inconclusive or pending."""
        return EXIT_CODES[self.result]


def score(key: Key, rules: Rules, histories: Sequence[History]) -> Review:
    """Unseal and judge. A rater who fails the controls is reported and does not count."""
    raters = tuple(check_rater(key, history) for history in histories)
    failed = {rater.rater for rater in raters if rater.standing == "failed"}
    votes = votes_by_item(key, histories)
    entries = {entry.id: entry for entry in key.entries}
    judged = tuple(
        _judge_item(entries[name], counted)
        for name, said in votes.items()
        if (counted := [vote for vote in said if vote.rater not in failed])
    )
    pending = Review(
        result="pending",
        rules=rules,
        num_requests=key.num_requests,
        num_differing=key.num_differing,
        num_packed=len(votes),
        num_rated=len(judged),
        agreement=_agreement(votes),
        raters=raters,
    )
    return pending if len(judged) < len(votes) else _unsealed(pending, judged)


def _unsealed(pending: Review, judged: tuple[Judged, ...]) -> Review:
    share, rules = pending.num_differing / pending.num_requests, pending.rules
    preference, faults = _preference(judged, share, rules), _faults(judged, share, rules)
    answers = (
        _answer_preference(preference, len(judged), rules),
        _answer_faults(faults, len(judged), share, rules),
    )
    return replace(
        pending,
        result=_result(answers),
        answers=answers,
        num_effective=effective_size([item.entry.weight for item in judged]),
        preference=preference,
        faults=faults,
        judged=judged,
    )


def _result(answers: Sequence[Answer]) -> Result:
    outcomes = {answer.outcome for answer in answers}
    if "fail" in outcomes:
        return "rejected"
    return "inconclusive" if "inconclusive" in outcomes else "accepted"


def _judge_item(entry: KeyEntry, votes: Sequence[Vote]) -> Judged:
    return Judged(
        entry=entry,
        votes=tuple(votes),
        preference=sum(vote.preference for vote in votes) / len(votes),
        candidate_fault=any(vote.candidate_fault for vote in votes),
        base_fault=any(vote.base_fault for vote in votes),
        is_new_fault=any(vote.candidate_fault and not vote.base_fault for vote in votes),
    )


def _preference(judged: Sequence[Judged], share: float, rules: Rules) -> Preference:
    better = sum(item.preference > 0 for item in judged)
    worse = sum(item.preference < 0 for item in judged)
    return Preference(
        net=_net(judged, share, rules),
        candidate_better=better,
        equal=len(judged) - better - worse,
        base_better=worse,
        sign_p=sign_test_p(better, worse),
        detectable=detectable_preference(better + worse),
    )


def _net(judged: Sequence[Judged], share: float, rules: Rules) -> Interval:
    """The weighted mean of preferences, resampled by document.

    Where nearly all items go one way the bootstrap has too little to draw from: then the exact
    bounds of how often another way may be gone hold as well.
    """
    documents: dict[str, list[float]] = {}
    for item in judged:
        sums = documents.setdefault(item.entry.doc, [0.0, 0.0])
        sums[0] += item.entry.weight * item.preference
        sums[1] += item.entry.weight
    found = cluster_bootstrap(
        np.array([documents[doc] for doc in sorted(documents)]),
        lambda totals: share * totals[:, 0] / totals[:, 1],
        Sampling(confidence=rules.confidence),
    )
    sides = [float(np.sign(item.preference)) for item in judged]
    common = max((0.0, -1.0, 1.0), key=sides.count)
    if len(sides) - sides.count(common) >= FEW_OTHERS:
        return found
    low, high = _reach(judged, sides, common, rules.confidence)
    return replace(found, lower=min(found.lower, share * low), upper=max(found.upper, share * high))


def _reach(
    judged: Sequence[Judged], sides: Sequence[float], common: float, confidence: float
) -> tuple[float, float]:
    """How far the mean of differing requests may reach when as many as can be leave `common`."""

    def most(holds: Callable[[float], bool]) -> float:
        return _bounds(judged, [holds(side) for side in sides], confidence).upper

    if not common:
        return -most(lambda side: side < 0), most(lambda side: side > 0)
    others = most(lambda side: side != common)
    inside = [item for item, side in zip(judged, sides, strict=True) if side == common]
    mean = math.fsum(i.entry.weight * i.preference for i in inside)
    mean /= math.fsum(i.entry.weight for i in inside)
    reach = (1 - others) * mean - others * common
    return (reach, mean) if common > 0 else (mean, reach)


def _bounds(judged: Sequence[Judged], holds: Sequence[bool], confidence: float) -> Interval:
    """The share of differing requests for which `holds`."""
    return share_bounds(*_weighed(judged), holds, confidence)


def _weighed(judged: Sequence[Judged]) -> tuple[list[float], list[str]]:
    """The items' weights and documents."""
    return [item.entry.weight for item in judged], [item.entry.doc for item in judged]


def _exact(
    judged: Sequence[Judged], holds: Sequence[bool], share: float, confidence: float
) -> Interval:
    """The share of all requests for which `holds`, where only the share that differs can."""
    found = _bounds(judged, holds, confidence)
    return Interval(
        estimate=share * found.estimate, lower=share * found.lower, upper=share * found.upper
    )


def _faults(judged: Sequence[Judged], share: float, rules: Rules) -> Faults:
    new = [item.is_new_fault for item in judged]
    none = [False] * len(judged)
    return Faults(
        new=_exact(judged, new, share, rules.confidence),
        num_new=sum(new),
        num_candidate=sum(item.candidate_fault for item in judged),
        num_base=sum(item.base_fault for item in judged),
        num_independent=independent_size(*_weighed(judged), new),
        upper_if_none=_exact(judged, none, share, rules.confidence).upper,
    )


def _answer_preference(found: Preference, count: int, rules: Rules) -> Answer:
    net, limit = found.net, -rules.margin
    liked = "base" if net.estimate < 0 else "candidate"
    said = (
        f"on balance people prefer the {liked} in {abs(net.estimate):.1%} of the requests "
        f"[{percent(net.lower)}, {percent(net.upper)}]; a loss of {rules.margin:.1%} is allowed"
    )
    if math.isfinite(net.upper) and net.upper < limit:
        return Answer(name="preference", outcome="fail", reason=said)
    if math.isfinite(net.lower) and net.lower > limit:
        return Answer(name="preference", outcome="pass", reason=said)
    return Answer(
        name="preference",
        outcome="inconclusive",
        reason=f"{said}: too few ratings to tell",
        num_needed=_more(count, net, limit),
    )


def percent(share: float) -> str:
    """A signed share, or that there is no bound."""
    return f"{share + 0.0:+.1%}" if math.isfinite(share) else "no bound"


def _more(count: int, net: Interval, limit: float) -> int | None:
    """The requests at which the nearer bound reaches the limit, widths shrinking by 1/sqrt(n)."""
    bound = net.lower if net.estimate > limit else net.upper
    gap, reach = abs(net.estimate - limit), abs(bound - net.estimate)
    if gap == 0 or not math.isfinite(reach):
        return None
    needed = max(count + 1, math.ceil(count * (reach / gap) ** 2))
    return needed if needed <= MOST_ITEMS else None


def _answer_faults(found: Faults, count: int, share: float, rules: Rules) -> Answer:
    new, worth = found.new, math.floor(found.num_independent)
    said = (
        f"{found.num_new} of {count} requests "
        + (f"(worth {worth} independent ones) " if worth < count else "")
        + f"have a critical fault of the candidate that "
        f"the base lacks: {new.estimate:.1%} of all, at most {new.upper:.1%} "
        f"({rules.confidence:.0%} bound); {rules.max_critical:.1%} is allowed"
    )
    if new.lower > rules.max_critical:
        return Answer(name="critical_faults", outcome="fail", reason=said)
    if new.upper <= rules.max_critical:
        return Answer(name="critical_faults", outcome="pass", reason=said)
    return Answer(
        name="critical_faults",
        outcome="inconclusive",
        reason=f"{said}: too few ratings to tell",
        num_needed=_enough(found, share, rules, count),
    )


def _enough(found: Faults, share: float, rules: Rules, count: int) -> int | None:
    """The fewest requests that decide if the observed rate stays."""
    rate, worth = found.num_new / count, found.num_independent / count
    sizes = (round(count * 1.02**k) + k for k in range(1, 400))
    for size in sizes:
        if size > MOST_ITEMS:
            return None
        trials = math.floor(worth * size)
        hits = round(rate * trials)
        if share * clopper_pearson_upper(hits, trials, rules.confidence) <= rules.max_critical:
            return size
        if share * clopper_pearson_lower(hits, trials, rules.confidence) > rules.max_critical:
            return size
    return None


def _agreement(votes: Mapping[str, Sequence[Vote]]) -> Agreement:
    shared = [said for said in votes.values() if len(said) > 1]
    names = sorted({vote.rater for said in shared for vote in said})
    pairs = [_pair(first, second, shared) for first, second in combinations(names, 2)]
    return Agreement(
        num_items=len(shared),
        pairs=tuple(pair for pair in pairs if pair.num_items),
        alpha_preference=krippendorff_alpha([[v.preference for v in said] for said in shared]),
        alpha_fault=krippendorff_alpha([[v.candidate_fault for v in said] for said in shared]),
    )


def _pair(first: str, second: str, shared: Sequence[Sequence[Vote]]) -> PairAgreement:
    by_rater = [{vote.rater: vote for vote in said} for said in shared]
    both = [(said[first], said[second]) for said in by_rater if first in said and second in said]
    return PairAgreement(
        raters=(first, second),
        num_items=len(both),
        preference=cohen_kappa([a.preference for a, _ in both], [b.preference for _, b in both]),
        fault=cohen_kappa(
            [a.candidate_fault for a, _ in both], [b.candidate_fault for _, b in both]
        ),
    )
