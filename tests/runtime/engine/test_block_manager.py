"""Blocks: nothing lost, nothing owned twice, prefixes found exactly when they are the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.block_manager import BlockManager, block_hash, hash_root


def chain(root: bytes, tokens: list[int], block_size: int) -> list[bytes]:
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(block_hash(parent, tokens[start : start + block_size]))
    return hashes


def filled(manager: BlockManager, hashes: list[bytes]) -> list[int]:
    """A table of computed, registered blocks."""
    table = manager.acquire((), len(hashes))
    assert table is not None
    for block, value in zip(table, hashes, strict=True):
        manager.register(block, value)
    return table


def test_a_released_prefix_is_found_again_and_owned_once_per_user() -> None:
    manager = BlockManager(8, 8)
    hashes = chain(hash_root(["a"]), list(range(24)), 8)
    table = filled(manager, hashes)
    manager.release(table)
    assert manager.num_used == 0
    assert manager.match(hashes) == table
    first, second = manager.acquire(table, 1), manager.acquire(table, 1)
    assert first is not None
    assert second is not None
    assert manager.num_used == 5
    manager.audit([first, second])
    manager.release(first)
    manager.release(second)
    manager.audit([])


def test_acquire_is_all_or_nothing() -> None:
    manager = BlockManager(4, 8)
    hashes = chain(hash_root([]), list(range(16)), 8)
    table = filled(manager, hashes)
    manager.release(table)
    assert manager.acquire(table, 3) is None, "reviving two cached blocks leaves only two"
    assert manager.acquire((), 2, reserve=3) is None
    manager.audit([])
    assert manager.match(hashes) == table


def test_eviction_takes_the_least_recently_used_and_tails_before_heads() -> None:
    manager = BlockManager(4, 8)
    old = chain(hash_root(["old"]), list(range(16)), 8)
    new = chain(hash_root(["new"]), list(range(16)), 8)
    manager.release(filled(manager, old))
    manager.release(filled(manager, new))
    held = manager.acquire((), 1)
    assert held is not None
    assert len(manager.match(old)) == 1, "the tail of the older prefix goes first"
    assert len(manager.match(new)) == 2
    more = manager.acquire((), 1)
    assert more is not None
    assert manager.match(old) == []
    manager.audit([held, more])


@pytest.mark.parametrize("is_owned", [True, False])
def test_forgotten_blocks_are_not_found(is_owned: bool) -> None:
    manager = BlockManager(4, 8)
    hashes = chain(hash_root([]), list(range(16)), 8)
    table = filled(manager, hashes)
    if not is_owned:
        manager.release(table)
    manager.forget(hashes)
    assert manager.match(hashes) == []
    if is_owned:
        manager.audit([table])
        manager.release(table)
    manager.audit([])
    assert manager.num_free == 4


def test_resetting_the_cache_leaves_owners_alone() -> None:
    manager = BlockManager(4, 8)
    hashes = chain(hash_root([]), list(range(24)), 8)
    table = filled(manager, hashes)
    manager.release(table[2:])
    manager.reset_cache()
    assert manager.match(hashes) == []
    manager.audit([table[:2]])


def test_audit_notices_a_lost_and_a_doubly_owned_block() -> None:
    manager = BlockManager(4, 8)
    table = manager.acquire((), 2)
    assert table is not None
    with pytest.raises(AssertionError, match="counted"):
        manager.audit([table[:1]])
    with pytest.raises(AssertionError, match="counted"):
        manager.audit([table, table])


tokens = st.lists(st.integers(0, 2), min_size=8, max_size=32)
salts = st.lists(st.sampled_from(["", "a", "b", "ab", "\ud800"]), max_size=3)


@settings(deadline=None)
@given(tokens, tokens, salts, salts)
def test_hashes_agree_exactly_on_equal_prefixes_of_equal_salts(
    one: list[int], two: list[int], salt_one: list[str], salt_two: list[str]
) -> None:
    first = chain(hash_root(salt_one), one, 8)
    second = chain(hash_root(salt_two), two, 8)
    for i in range(min(len(first), len(second))):
        same = salt_one == salt_two and one[: 8 * (i + 1)] == two[: 8 * (i + 1)]
        assert (first[i] == second[i]) == same


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_use_keeps_the_books(data: st.DataObject) -> None:
    manager = BlockManager(12, 8)
    tables: list[list[int]] = []
    contents: dict[int, bytes] = {}  # what a block holds, by an account of our own
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["acquire", "acquire", "release", "forget", "reset"]))
        if action == "acquire":
            root = hash_root([data.draw(st.sampled_from("ab"))])
            hashes = chain(root, data.draw(tokens), 8)
            shared = manager.match(hashes)
            assert all(contents[block] == hashes[i] for i, block in enumerate(shared))
            free = manager.num_free
            table = manager.acquire(shared, len(hashes) - len(shared))
            if table is None:
                assert manager.num_free == free
                continue
            for block, value in list(zip(table, hashes, strict=True))[len(shared) :]:
                manager.register(block, value)
                contents[block] = value
            tables.append(table)
        elif action == "reset":
            manager.reset_cache()
        elif tables:
            table = data.draw(st.sampled_from(tables))
            if action == "forget":
                manager.forget(contents[block] for block in table)
            tables.remove(table)
            manager.release(table)
        manager.audit(tables)
    for table in tables:
        manager.release(table)
    manager.audit([])
    assert manager.num_free == 12
