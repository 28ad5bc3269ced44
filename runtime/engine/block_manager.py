"""Who owns which block of the KV pool, and which full blocks can be shared (the prefix cache).

Plain integers and bytes: knows no tensors, no sequences and no scheduling policy. A block is in
exactly one of three places:

    owned            refcount > 0, listed in as many block tables as its refcount says
    free, cached     refcount 0, still findable by its hash; evicted least recently used first
    free, blank      refcount 0, no hash

Only full, computed blocks get a hash. The hash of a block covers every token before it, because it
chains on its parent's: H(parent, tokens), rooted in H(extra) with extra = tenant salt, artifact
digest and KV dtype. Equal hash therefore means equal KV, and different salts never meet.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

BLOCK_SIZES = (8, 16, 32)


def hash_root(extra: Iterable[str]) -> bytes:
    """Parent of a sequence's first block. Fields are length-prefixed: no two lists collide."""
    digest = sha256()
    for part in extra:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block holding `tokens` that follows the block hashed `parent`."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


class BlockManager:
    """`num_blocks` blocks of `block_size` KV tokens; every operation is O(blocks named)."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        assert num_blocks > 0, "an empty pool is refused when the configuration is resolved"
        assert block_size in BLOCK_SIZES, f"block size {block_size} is refused on resolving"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._refcounts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free_blank = list(range(num_blocks - 1, -1, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free_blank) + len(self._free_cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix; `acquire` them at once: none is held."""
        found: list[int] = []
        for value in hashes:
            block = self._cached.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, shared: Sequence[int], num_new: int, *, reserve: int = 0) -> list[int] | None:
        """References on `shared` (from `match`) plus `num_new` blank blocks, as one block table.

        None, and nothing changed, when fewer than `reserve` blocks would stay free.
        """
        num_revived = sum(1 for block in shared if self._refcounts[block] == 0)
        if num_new + num_revived + reserve > self.num_free:
            return None
        for block in shared:
            if self._refcounts[block] == 0:
                del self._free_cached[block]
            self._refcounts[block] += 1
        return [*shared, *(self._take() for _ in range(num_new))]

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each. The tail goes first, so that prefixes are evicted last."""
        for block in reversed(blocks):
            self._refcounts[block] -= 1
            assert self._refcounts[block] >= 0, f"block {block} released more often than owned"
            if self._refcounts[block] == 0:
                self._set_free(block)

    def register(self, block: int, value: bytes) -> None:
        """Make a full, computed, owned block findable, unless an equal one already is."""
        assert self._refcounts[block] > 0, f"block {block} registered without an owner"
        if self.enable_prefix_caching and self._hashes[block] is None and value not in self._cached:
            self._cached[value] = block
            self._hashes[block] = value

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Make blocks unfindable, owned or not, e.g. because their content is not to be trusted."""
        for value in hashes:
            block = self._cached.get(value)
            if block is None:
                continue
            self._unhash(block)
            if self._refcounts[block] == 0:
                del self._free_cached[block]
                self._free_blank.append(block)

    def reset_cache(self) -> None:
        """Forget every cached prefix; owners keep their blocks."""
        for block in list(self._cached.values()):
            self._unhash(block)
        self._free_blank.extend(self._free_cached)
        self._free_cached.clear()

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """AssertionError unless `tables` (of all owners) account for every reference."""
        owned = Counter(block for table in tables for block in table)
        counted = {block: count for block, count in enumerate(self._refcounts) if count}
        assert dict(owned) == counted, f"owned {dict(owned)} but counted {counted}"
        free = [*self._free_blank, *self._free_cached]
        assert len(free) == len(set(free)), "a block is free twice"
        assert not set(free) & counted.keys(), "a block is free and owned"
        assert len(free) + len(counted) == self.num_blocks, "a block is lost"
        hashed = {block: value for block, value in enumerate(self._hashes) if value is not None}
        assert hashed == {block: value for value, block in self._cached.items()}
        assert all(block in hashed for block in self._free_cached), (
            "a free cached block has no hash"
        )
        assert not any(block in hashed for block in self._free_blank), "a blank block has a hash"

    def _take(self) -> int:
        if self._free_blank:
            block = self._free_blank.pop()
        else:
            block, _ = self._free_cached.popitem(last=False)
            self._unhash(block)
        self._refcounts[block] = 1
        return block

    def _set_free(self, block: int) -> None:
        if self._hashes[block] is None:
            self._free_blank.append(block)
        else:
            self._free_cached[block] = None

    def _unhash(self, block: int) -> None:
        value = self._hashes[block]
        if value is not None:
            del self._cached[value]
            self._hashes[block] = None
