"""Sequence: one request on its way through the engine. Stdlib only; scheduler and engine share it.

    tokens   [ prompt ................ | output ...... ]
             [ computed (KV in blocks) )[ remaining    )     half-open: num_computed is the border

A sequence with one remaining token is decoding, with more it is prefilling: the same thing with a
longer span. Preemption only moves the border back to 0; tokens are never taken away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.engine.block_manager import block_hash
from runtime.request import Request, TokenLogprobs


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
    block_hashes: of the first full blocks of `tokens`; num_registered of them are in the cache.
    num_cached: prompt tokens found in the prefix cache at first admission; None before that.
    num_passed: how often a later arrival was started past it for lack of room.
    output_counts: how often each id was generated.
    prompt_logprobs: entries of the first prompt tokens, as far as computed.
    """

    request: Request
    arrival: int
    max_len: int
    stop_ids: frozenset[int]
    seed: int
    hash_root: bytes
    tokens: list[int] = field(default_factory=list)
    num_prompt: int = 0
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_cached: int | None = None
    num_passed: int = 0
    num_preempted: int = 0
    status: Status = Status.WAITING
    output_counts: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.num_prompt = len(self.tokens)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def can_use_cache(self) -> bool:
        """Cached positions have no logits, so prompt log-probs that are still owed forbid them."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return not wanted or len(self.prompt_logprobs) == self.num_prompt

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    def hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks, all of them full; computed once each."""
        for index in range(len(self.block_hashes), num_blocks):
            parent = self.block_hashes[-1] if self.block_hashes else self.hash_root
            start = index * block_size
            self.block_hashes.append(block_hash(parent, self.tokens[start : start + block_size]))
        return self.block_hashes[:num_blocks]
