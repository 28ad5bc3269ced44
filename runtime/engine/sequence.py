"""Sequence: one request on its way through the engine. Stdlib only; scheduler and engine share it.

    tokens   [ prompt ................ | output ........... ? ? ]   `?` is PENDING: drawn by a step
             [ known                                      )         in flight, not yet collected
             [ computed (KV in blocks)                    )  remaining
             [ collected                          )                 half-open: borders, not indices

`num_computed` moves when a step is launched, `num_collected` and `num_known` when it is collected.
A sequence with one remaining token is decoding, with more it is prefilling: the same thing with a
longer span. Only a decode can have a PENDING token to compute. Preemption only moves the borders of
the KV back to 0; tokens are never taken away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.engine.block_manager import block_hash
from runtime.request import Request, TokenLogprobs

PENDING = -1  # stands in `tokens` for an id that only the device knows so far


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """Mutable state of one request.

    arrival: number in the order of arrival; settles every tie.
    max_len: total tokens at which it ends with `length` (limit asked, context, or pool).
    stop_ids: ids that end it, end-of-text ids included unless ignored.
    seed: of its random stream. hash_root: parent of its first block's hash.
    num_known: tokens whose ids the host knows; those after them are PENDING.
    num_computed: tokens whose KV is written by the steps launched so far.
    num_collected: tokens whose KV is written by the steps collected so far.
    num_in_flight: steps launched with a span of it and not collected yet.
    compute_limit: no KV is ever needed from this position on; the last token is not computed.
    block_hashes: of the first full blocks of `tokens`; num_registered of them are in the cache.
    num_cached: prompt tokens found in the prefix cache at first admission; None before that.
    num_passed: how often a later arrival was started past it for lack of room.
    prompt_logprobs: entries of the first prompt tokens, as far as collected; [] if not asked for.
    """

    request: Request
    arrival: int
    max_len: int
    stop_ids: frozenset[int]
    seed: int
    hash_root: bytes
    id: str = ""
    tokens: list[int] = field(default_factory=list)
    num_prompt: int = 0
    num_known: int = 0
    num_computed: int = 0
    num_collected: int = 0
    num_in_flight: int = 0
    compute_limit: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_cached: int | None = None
    num_passed: int = 0
    num_preempted: int = 0
    status: Status = Status.WAITING
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    _output_counts: dict[int, int] = field(default_factory=dict)
    _num_counted: int = 0

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.tokens = list(self.request.prompt)
        self.num_prompt = self.num_known = self._num_counted = len(self.tokens)
        self.compute_limit = max(self.num_prompt, self.max_len - 1)
        if self.request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def num_generated(self) -> int:
        """Tokens drawn, those in flight included."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        return min(len(self.tokens), self.compute_limit) - self.num_computed

    @property
    def can_use_cache(self) -> bool:
        """Cached positions have no logits, so prompt log-probs that are still owed forbid them."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return not wanted or len(self.prompt_logprobs) == self.num_prompt

    @property
    def output_counts(self) -> dict[int, int]:
        """How often each id was generated, as far as known. Counted when asked: few ask."""
        for token_id in self.tokens[self._num_counted : self.num_known]:
            self._output_counts[token_id] = self._output_counts.get(token_id, 0) + 1
        self._num_counted = self.num_known
        return self._output_counts

    def draws_at(self, end: int) -> bool:
        """Whether a span that ends at position `end` (exclusive) draws the next token."""
        return end == len(self.tokens) and end < self.max_len

    def resolve(self, token_id: int) -> None:
        """The first PENDING token is this one."""
        self.tokens[self.num_known] = token_id
        self.num_known += 1

    def hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks, all of them full; computed once each."""
        assert num_blocks * block_size <= self.num_known, "the hash of an unknown token"
        for index in range(len(self.block_hashes), num_blocks):
            parent = self.block_hashes[-1] if self.block_hashes else self.hash_root
            start = index * block_size
            self.block_hashes.append(block_hash(parent, self.tokens[start : start + block_size]))
        return self.block_hashes[:num_blocks]
