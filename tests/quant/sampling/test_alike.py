"""Near duplicates: estimates against brute force, what is kept, scripts without spaces."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.artifact.text_runs import ngrams, normalised, tokens
from quant.sampling.alike import (
    jaccard,
    near_duplicates,
    shingles,
    signature,
)


def text(rng: random.Random, words: int = 60) -> str:
    return " ".join("".join(rng.choices("abcdefghij", k=4)) for _ in range(words))


def changed(rng: random.Random, original: str, words: int) -> str:
    parts = original.split()
    for place in rng.sample(range(len(parts)), words):
        parts[place] = "".join(rng.choices("klmnop", k=5))
    return " ".join(parts)


def test_shingles_are_the_set_of_three_token_runs() -> None:
    """Oracle: Jaccard over Python sets of tuples."""
    rng = random.Random(1)
    for changes in (0, 1, 4, 15, 40):
        one = text(rng)
        other = changed(rng, one, changes)
        sets = [
            {tuple(t[i : i + 3]) for i in range(len(t) - 2)} for t in (tokens(one), tokens(other))
        ]
        expected = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
        assert jaccard(shingles(one), shingles(other)) == expected


def test_chinese_is_cut_into_characters() -> None:
    assert tokens("iPhone15的退款 请求") == ["iPhone15", "的", "退", "款", "请", "求"]
    assert len(ngrams("一二三四五", 3)) == 3


def test_signatures_estimate_the_jaccard_similarity() -> None:
    rng = random.Random(2)
    errors = []
    for changes in (1, 3, 6, 12, 25) * 8:
        one = text(rng, 300)
        other = changed(rng, one, changes)
        found = (signature(shingles(one)) == signature(shingles(other))).mean()
        errors.append(found - jaccard(shingles(one), shingles(other)))
    assert abs(np.mean(errors)) < 0.03
    assert np.max(np.abs(errors)) < 0.2, "4 to 5 standard deviations of 128 draws"


def test_the_first_of_each_family_stays() -> None:
    rng = random.Random(3)
    families = [text(rng, 120) for _ in range(30)]
    rows = [(i, changed(rng, f, n)) for n in (0, 1, 2) for i, f in enumerate(families)]
    signatures = np.array([signature(shingles(t)) for _, t in rows])
    gone = near_duplicates(signatures, 0.8)
    assert gone[:30].sum() == 0
    assert gone[30:].all()


def test_crowded_buckets_of_unlike_rows_end() -> None:
    signatures = np.random.Generator(np.random.PCG64(1)).integers(0, 2, (3000, 128))
    gone = near_duplicates(signatures.astype(np.uint16), 0.9)
    assert not gone.any()


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_text_has_a_signature_that_spelling_of_space_and_case_does_not_change(s: str) -> None:
    other = "  " + s.replace(" ", "\n\t") + " "
    if normalised(s) == normalised(other):
        one, two = (signature(shingles(normalised(t))) for t in (s, other))
        assert (one == two).all()
