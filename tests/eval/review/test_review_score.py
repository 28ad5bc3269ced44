"""Layer 3's verdict: known answers in, the right outcome out; who guesses does not count."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from review_rows import opened, packed, prefer, rate_all, sound

from eval.review.commands import score_pack
from eval.review.pack import Key, KeyEntry, Label
from eval.review.ratings import History, Rating
from eval.review.rules import Rules
from eval.review.score import Review, score
from eval.review.unseal import check_rater
from eval.review.weighted import effective_size, share_bounds
from eval.review.wording import headline
from eval.stats import clopper_pearson_lower, clopper_pearson_upper


def make_key(count: int, *, num_requests: int | None = None, controls: int = 6) -> Key:
    """`count` requests of equal weight and as many controls of each kind."""
    draw = random.Random(count)
    side: Callable[[], Label] = lambda: draw.choice(("a", "b"))  # noqa: E731
    entries = [_entry(n, "request", candidate=side(), weight=2.0) for n in range(count)]
    entries += [_entry(count + n, "identical") for n in range(controls)]
    entries += [_entry(count + controls + n, "planted", sound=side()) for n in range(controls)]
    return Key(
        secret="0" * 64, seed=0, items_sha256="0" * 64, samples_sha256="0" * 64,
        artifact_digest=None, num_requests=num_requests or 2 * count, num_differing=2 * count,
        entries=entries,
    )  # fmt: skip


def _entry(n: int, kind: str, **more: object) -> KeyEntry:
    about = {"id": f"{n:03d}", "kind": kind, "sample": f"s{n}", "doc": f"d{n}", "task": "t"}
    return KeyEntry.model_validate({**about, "source": "x", "lang": "en", **more})


def rater(key: Key, say: Callable[[int, KeyEntry], Rating] | None = None, name: str = "Ann"):  # type: ignore[no-untyped-def]
    """A history in which the n-th request is rated as `say` says, controls as they should be."""
    requests = [e for e in key.entries if e.kind == "request"]
    said = {e.id: say(n, e) if say else sound(e) for n, e in enumerate(requests)}
    return History(rater=name, current={e.id: said.get(e.id) or sound(e) for e in key.entries})


def outcomes(review: Review) -> dict[str, str]:
    return {answer.name: answer.outcome for answer in review.answers}


def test_nobody_prefers_anything_and_nothing_is_at_fault() -> None:
    key = make_key(150)
    found = score(key, Rules(), [rater(key)])
    assert (found.result, found.exit_code) == ("accepted", 0)
    assert found.preference is not None
    assert found.faults is not None
    assert (found.preference.candidate_better, found.preference.base_better) == (0, 0)
    assert found.faults.new.upper == pytest.approx(1 - 0.05 ** (1 / 150), abs=1e-9)


@pytest.mark.parametrize(("count", "percent"), [(100, 3.0), (150, 2.0), (200, 1.5)])
def test_bound_without_a_fault(count: int, percent: float) -> None:
    """n = 150 without a critical fault: at most 2.0 % (100: 3.0 %, 200: 1.5 %)."""
    key = make_key(count)
    found = score(key, Rules(), [rater(key)])
    assert found.faults is not None
    assert 100 * found.faults.new.upper == pytest.approx(percent, abs=0.05)
    assert found.faults.upper_if_none == found.faults.new.upper


def test_requests_answered_alike_dilute_both_shares() -> None:
    """75 of 150 differing requests prefer the base; 300 differ of 1,200: net -12.5 %."""
    key = make_key(150, num_requests=1200)
    found = score(key, Rules(), [rater(key, lambda n, e: prefer(e, "base" if n % 2 else "tie"))])
    assert found.preference is not None
    assert found.faults is not None
    assert found.preference.net.estimate == pytest.approx(-0.125)
    assert found.faults.new.upper == pytest.approx((1 - 0.05 ** (1 / 150)) / 4)
    assert outcomes(found) == {"preference": "pass", "critical_faults": "pass"}


def test_the_base_is_clearly_preferred() -> None:
    key = make_key(150)
    found = score(key, Rules(), [rater(key, lambda n, e: prefer(e, "tie" if n % 6 else "base"))])
    assert outcomes(found)["preference"] == "inconclusive"
    needed = found.answers[0].num_needed
    assert needed is not None
    assert needed > 150
    found = score(key, Rules(), [rater(key, lambda n, e: prefer(e, "tie" if n % 2 else "base"))])
    assert found.preference is not None
    assert found.preference.net.estimate == pytest.approx(-0.5)
    assert found.preference.net.upper < -0.15
    assert outcomes(found)["preference"] == "fail"
    assert (found.result, found.exit_code) == ("rejected", 1)


@pytest.mark.parametrize(("count", "outcome"), [(5, "inconclusive"), (6, "fail"), (11, "fail")])
def test_a_few_that_all_prefer_the_base_are_no_certainty(count: int, outcome: str) -> None:
    """None of n left that side; as many may as Clopper and Pearson allow: -(1 - u) + u at most."""
    key = make_key(count)
    found = score(key, Rules(), [rater(key, lambda n, e: prefer(e, "base"))])
    assert found.preference is not None
    net = found.preference.net
    assert (net.estimate, net.lower) == (-1, -1)
    assert net.upper == pytest.approx(2 * (1 - 0.05 ** (1 / count)) - 1, abs=1e-9)
    assert outcomes(found)["preference"] == outcome
    mirrored = score(key, Rules(), [rater(key, lambda n, e: prefer(e, "candidate"))])
    assert mirrored.preference is not None
    assert mirrored.preference.net.lower == pytest.approx(-net.upper)


def test_gains_of_the_candidate_count() -> None:
    key = make_key(120)
    kinds = ("candidate", "candidate", "base")
    found = score(key, Rules(), [rater(key, lambda n, e: prefer(e, kinds[n % 3]))])
    assert found.preference is not None
    assert found.preference.net.estimate == pytest.approx(1 / 3)
    assert (found.preference.candidate_better, found.preference.base_better) == (80, 40)
    assert found.result == "accepted"


def test_weights_by_hand() -> None:
    """Ten of weight 1 prefer the candidate, ten of weight 3 the base: (10 - 30) / 40, halved."""
    key = make_key(20, num_requests=80)
    weights = {e.id: 1.0 if n < 10 else 3.0 for n, e in enumerate(key.entries[:20])}
    entries = [e.model_copy(update={"weight": weights.get(e.id, 0.0)}) for e in key.entries]
    key = key.model_copy(update={"entries": entries})

    def say(n: int, entry: KeyEntry) -> Rating:
        light = n < 10
        return prefer(entry, "candidate" if light else "base", fault=None if light else "candidate")

    found = score(key, Rules(), [rater(key, say)])
    assert found.preference is not None
    assert found.faults is not None
    assert found.preference.net.estimate == pytest.approx(-0.25)
    assert found.faults.new.estimate == pytest.approx(0.375)
    assert found.num_effective == pytest.approx(40**2 / (10 + 90))


def test_the_interval_is_that_of_a_mean() -> None:
    key = make_key(200)
    found = score(key, Rules(), [rater(key, lambda n, e: prefer(e, ("candidate", "base")[n % 2]))])
    assert found.preference is not None
    assert found.preference.net.estimate == 0
    assert found.preference.net.upper == pytest.approx(1.645 / 200**0.5, rel=0.05)


def test_critical_faults() -> None:
    """One of 150 is undecided, ten are rejected; those that the base has too do not count."""

    def harm(every: int, who: str) -> Callable[[int, KeyEntry], Rating]:
        return lambda n, e: prefer(e, "tie", fault=who if n % every == 0 else None)

    key = make_key(150)
    one = score(key, Rules(), [rater(key, harm(150, "candidate"))])
    assert outcomes(one) == {"preference": "pass", "critical_faults": "inconclusive"}
    assert (one.result, one.exit_code) == ("inconclusive", 3)
    many = score(key, Rules(), [rater(key, harm(15, "candidate"))])
    assert many.result == "rejected"
    assert many.faults is not None
    assert many.faults.num_new == 10
    base = score(key, Rules(), [rater(key, harm(15, "base"))])
    assert base.result == "accepted"
    assert base.faults is not None
    assert (base.faults.num_base, base.faults.num_new) == (10, 0)
    both = score(key, Rules(), [rater(key, lambda n, e: Rating(choice="tie", critical=["a", "b"]))])
    assert both.result == "accepted"


def test_the_size_that_would_decide_does_decide() -> None:
    key = make_key(40)
    found = score(key, Rules(), [rater(key)])
    faults = next(a for a in found.answers if a.name == "critical_faults")
    assert faults.outcome == "inconclusive"
    assert faults.num_needed is not None
    enough = make_key(faults.num_needed)
    assert outcomes(score(enough, Rules(), [rater(enough)]))["critical_faults"] == "pass"
    short = make_key(faults.num_needed - 4)
    assert outcomes(score(short, Rules(), [rater(short)]))["critical_faults"] == "inconclusive"


def test_few_ties_more_do_not_pass_by_an_empty_bootstrap() -> None:
    """All ten ties: the bootstrap has no spread, yet up to 26 % may prefer the base."""
    key = make_key(10)
    assert outcomes(score(key, Rules(), [rater(key)]))["preference"] == "inconclusive"


def test_bounds_of_equal_weights_are_those_of_the_count() -> None:
    for hits, trials in ((0, 150), (1, 150), (7, 40), (40, 40)):
        docs = [f"d{n}" for n in range(trials)]
        found = share_bounds([3.7] * trials, docs, [n < hits for n in range(trials)], 0.95)
        assert found.estimate == pytest.approx(hits / trials)
        assert found.upper == clopper_pearson_upper(hits, trials)
        assert found.lower == clopper_pearson_lower(hits, trials)


def test_bounds_of_unequal_weights_are_rounded_outward() -> None:
    """1 of 7 in 49 / 19 = 2.6 effective trials: between 0 and 1 hits of 2."""
    found = share_bounds([1.0, 3.0, 3.0], ["a", "b", "c"], [True, False, False], 0.95)
    assert found.estimate == pytest.approx(1 / 7)
    assert (found.lower, found.upper) == (0, clopper_pearson_upper(1, 2))


def test_bounds_of_weighted_items_hold() -> None:
    """Weights 1 and 6, faults in 2 % and 8 %: the bounds cover the truth as often as they say."""
    chance = np.random.default_rng(5)
    weights, rates = np.repeat([1.0, 6.0], 60), np.repeat([0.02, 0.08], 60)
    truth = (weights * rates).sum() / weights.sum()
    docs = [f"d{n}" for n in range(120)]
    found = [
        share_bounds(list(weights), docs, list(chance.random(120) < rates), 0.95)
        for _ in range(400)
    ]
    assert np.mean([f.upper >= truth for f in found]) >= 0.94
    assert np.mean([f.lower <= truth for f in found]) >= 0.94
    assert effective_size(list(weights)) == pytest.approx(420**2 / (60 + 36 * 60))
    assert np.mean([f.upper for f in found]) < 0.2


def in_dialogs(key: Key, turns: int) -> Key:
    """The key with its requests as turns of dialogs."""
    entries = [
        e.model_copy(update={"doc": f"dialog {n // turns}"}) if e.kind == "request" else e
        for n, e in enumerate(key.entries)
    ]
    return key.model_copy(update={"entries": entries})


def test_the_turns_of_a_dialog_are_no_independent_requests() -> None:
    """100 turns without a fault: of 20 dialogs no more can be said than of 20 requests."""
    key = in_dialogs(make_key(100), 5)
    found = score(key, Rules(), [rater(key)])
    assert found.faults is not None
    assert found.faults.new.upper == pytest.approx(1 - 0.05 ** (1 / 20))
    assert outcomes(found)["critical_faults"] == "inconclusive"
    assert "0 of 100 requests (worth 20 independent ones)" in found.answers[1].reason
    needed = found.answers[1].num_needed
    assert needed is not None
    enough = in_dialogs(make_key(-(-needed // 5) * 5), 5)
    assert outcomes(score(enough, Rules(), [rater(enough)]))["critical_faults"] == "pass"
    few = in_dialogs(make_key(20), 2)
    net = score(few, Rules(), [rater(few)]).preference
    assert net is not None
    assert -net.net.lower == pytest.approx(1 - 0.05 ** (1 / 10))


@pytest.mark.parametrize("are_alike", [True, False])
def test_bounds_of_items_in_documents_hold(are_alike: bool) -> None:
    """40 documents of five items, 10 % faults, all of a document's items alike or none."""
    chance = np.random.default_rng(3)
    docs = [f"d{n // 5}" for n in range(200)]
    found = []
    for _ in range(400):
        drawn = np.repeat(chance.random(40), 5) if are_alike else chance.random(200)
        found.append(share_bounds([1.0] * 200, docs, list(drawn < 0.1), 0.95))
    assert np.mean([f.upper >= 0.1 for f in found]) >= 0.94
    assert np.mean([f.lower <= 0.1 for f in found]) >= 0.94
    assert np.mean([f.upper for f in found]) < (0.25 if are_alike else 0.16)


def test_pending_says_nothing_of_sides() -> None:
    key = make_key(30)
    whole = rater(key, lambda n, e: prefer(e, "base", fault="candidate"))
    part = {name: rating for name, rating in whole.current.items() if name != "004"}
    found = score(key, Rules(), [History(rater="Ann", current=part)])
    assert (found.result, found.exit_code) == ("pending", 3)
    assert (found.num_rated, found.num_packed) == (29, 30)
    assert (found.preference, found.faults, found.answers, found.judged) == (None, None, (), ())
    assert score(key, Rules(), []).result == "pending"


def test_two_raters_share_the_work() -> None:
    key = make_key(40)
    whole = rater(key)
    half = {n: r for n, r in whole.current.items() if n < "030"}
    rest = {n: r for n, r in whole.current.items() if n >= "020"}
    found = score(
        key, Rules(), [History(rater="A", current=half), History(rater="B", current=rest)]
    )
    assert found.num_rated == 40
    assert found.agreement.num_items == 10
    assert found.agreement.pairs[0].raters == ("A", "B")
    assert [r.standing for r in found.raters] == ["unproven", "passed"]


def test_kappa_of_unsealed_votes() -> None:
    """Two raters agree on the models although they see sides; a third contradicts the first."""
    key = make_key(30)
    kinds = ("candidate", "base", "tie")
    ann = rater(key, lambda n, e: prefer(e, kinds[n % 3]), "Ann")
    bob = rater(key, lambda n, e: prefer(e, kinds[n % 3]), "Bob")
    cid = rater(key, lambda n, e: prefer(e, kinds[(n + 1) % 3]), "Cid")
    pairs = score(key, Rules(), [ann, bob, cid]).agreement.pairs
    assert [(p.raters, p.preference) for p in pairs] == [
        (("Ann", "Bob"), pytest.approx(1.0)),
        (("Ann", "Cid"), pytest.approx(-0.5)),
        (("Bob", "Cid"), pytest.approx(-0.5)),
    ]


def test_votes_of_one_item_are_averaged_and_one_word_of_harm_is_enough() -> None:
    key = make_key(20)
    ann = rater(key, lambda n, e: prefer(e, "candidate"), "Ann")
    bob = rater(key, lambda n, e: prefer(e, "base", fault="candidate" if n == 0 else None), "Bob")
    found = score(key, Rules(), [ann, bob])
    assert found.preference is not None
    assert found.faults is not None
    assert found.preference.net.estimate == 0
    assert found.preference.equal == 20
    assert found.faults.num_new == 1


def guesses(key: Key, seed: int) -> History:
    draw = random.Random(seed)
    return History(
        rater=f"guess-{seed}",
        current={e.id: Rating(choice=draw.choice(("a", "tie", "b"))) for e in key.entries},
    )


def test_who_guesses_fails_the_controls_and_does_not_count() -> None:
    key = make_key(100)
    assert {check_rater(key, guesses(key, seed)).standing for seed in range(40)} == {"failed"}
    found = score(key, Rules(), [guesses(key, 1)])
    assert found.result == "pending"
    assert found.num_rated == 0
    with_ann = score(key, Rules(), [guesses(key, 1), rater(key)])
    assert with_ann.result == "accepted"
    assert with_ann.preference is not None
    assert with_ann.preference.net.estimate == 0
    assert with_ann.agreement.num_items == 100
    assert "100 requests, 1 rater (1 more failed the controls): net" in headline(with_ann)


def test_controls_one_by_one() -> None:
    key = make_key(10, controls=4)
    identical = [e for e in key.entries if e.kind == "identical"]
    planted = [e for e in key.entries if e.kind == "planted"]

    def standing(**changes: Rating) -> tuple[int, int, str]:
        current = {**rater(key).current, **changes}
        found = check_rater(key, History(rater="x", current=current))
        return found.identical_passed, found.planted_passed, found.standing

    assert standing() == (4, 4, "passed")
    first, defect = identical[0].id, planted[0]
    damaged: Label = "b" if defect.sound == "a" else "a"
    assert standing(**{first: Rating(choice="a")})[0] == 3
    assert standing(**{first: Rating(choice="tie", critical=["a"])})[0] == 3
    assert standing(**{first: Rating(choice="tie", critical=["a", "b"])})[0] == 4
    assert standing(**{defect.id: Rating(choice=damaged)})[1] == 3
    assert standing(**{defect.id: Rating(choice="tie")})[1] == 3
    assert standing(**{defect.id: Rating(choice="tie", critical=["a", "b"])})[1] == 4
    assert standing(**{defect.id: Rating(choice=damaged, critical=[damaged])})[1] == 3
    wrong = {e.id: Rating(choice="b") for e in identical[:3]}
    assert standing(**wrong)[2] == "failed"


def test_a_habit_for_one_side_shows() -> None:
    key = make_key(100)
    left = rater(key, lambda n, e: Rating(choice="a", seconds=4))
    found = check_rater(key, left)
    assert found.share_a == 1
    assert found.median_seconds == pytest.approx(4, abs=4)


def test_the_files(tmp_path: Path) -> None:
    made = packed(tmp_path)
    pack, key = opened(made)
    hostile = "<script>alert(1)</script> `code` \x1b[31m"

    def say(entry: KeyEntry) -> Rating:
        if entry.kind != "request":
            return sound(entry)
        rating = prefer(entry, "base", fault="candidate")
        return rating.model_copy(update={"note": hostile})

    rate_all(pack, key, "<b>Ann</b>", say)
    review, folder = score_pack(made.path, key=None, out=None)
    assert review.result == "rejected"
    assert folder == tmp_path / "blind-review"
    facts = json.loads((folder / "review.json").read_text())
    assert (facts["verdict"], facts["exit_code"], facts["layer"]) == ("rejected", 1, 3)
    assert facts["pack"]["key_sha256"] == pack.info.key_sha256
    assert facts["rules"] == {"margin": 0.15, "max_critical": 0.03, "confidence": 0.95}
    assert len(facts["items"]) == 40
    assert facts["faults"]["num_new"] == 40
    page = (folder / "review.html").read_text()
    assert '<section id="review">' in page
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "http://" not in page
    assert "https://" not in page
    text = (folder / "review.md").read_text()
    assert "\x1b" not in text
    assert "<script" not in text.replace("\\<", "")
    assert "\\<b\\>Ann" in text


def test_pending_files_unseal_nothing(tmp_path: Path) -> None:
    made = packed(tmp_path)
    pack, key = opened(made)
    rate_all(pack, key, "Ann", lambda e: sound(e) if e.id < "020" else None)
    review, folder = score_pack(made.path, key=None, out=None)
    assert review.result == "pending"
    text = "".join(path.read_text() for path in folder.iterdir())
    assert "row-0" not in text
    assert "Acme" not in text
    facts = json.loads((folder / "review.json").read_text())
    assert facts["preference"] is None
    assert facts["items"] == []


def test_the_review_never_goes_into_the_pack(tmp_path: Path) -> None:
    made = packed(tmp_path)
    with pytest.raises(Exception, match="lies in the pack"):
        score_pack(made.path, key=None, out=made.path / "review")
