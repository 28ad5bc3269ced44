"""Which sequences compute how many tokens in the next step. Pure policy over queues and blocks.

Stdlib only: knows no tensors, no sampling and no text. A schedule is a list of spans
(sequence, number of tokens); decodes and prompt chunks differ in length only.

Policy, in the order it is applied:
1. Every decoding sequence gets its one token. Where the pool is exhausted, the running sequence of
   lowest priority that has generated least is preempted: its blocks go, its tokens stay, and it is
   recomputed later (mostly out of the prefix cache).
2. Prompts under way get chunks of what is left. One that cannot end in this step leaves half of it
   to newcomers that can, and takes back what they do not use.
3. Waiting sequences start, by (priority, arrival), when the KV of all their tokens fits beside one
   more block for each running sequence. Nobody starts in a step that preempted.

Nobody starves: prompts own all their blocks from the start, so they always advance; the running
sequence that has generated most is never a victim, so it ends; and a waiting sequence can be passed
by later arrivals for lack of room at most MAX_PASSED times before the pool is left to drain for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.engine.block_manager import BlockManager
from runtime.engine.sequence import Sequence, Status

MAX_PASSED = 4
SCAN_LIMIT = 32  # waiting sequences looked at in one step: keeps a step's cost flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The knobs of the policy; see EngineConfig for their meaning."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0


@dataclass(slots=True)
class Schedule:
    """One step's spans in order of service, and the room that is left."""

    budget: int
    spans: dict[Sequence, int] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    partial: list[Sequence] = field(default_factory=list)

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        self.spans[sequence] = self.spans.get(sequence, 0) + num_tokens
        self.budget -= num_tokens

    def take_back(self, sequence: Sequence) -> None:
        self.budget += self.spans.pop(sequence, 0)


class Start(Enum):
    """What came of trying to start a waiting sequence."""

    STARTED = auto()
    LATER = auto()  # its prefix is being computed, or a long prompt holds the budget
    NO_ROOM = auto()  # its KV does not fit now


class Scheduler:
    """The queues. `schedule` decides, `commit` records that a schedule was computed."""

    def __init__(self, limits: Limits, blocks: BlockManager) -> None:
        assert limits.max_num_seqs <= limits.max_num_batched_tokens, "refused on resolving"
        self.limits = limits
        self.blocks = blocks
        self.running: dict[str, Sequence] = {}
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._live: dict[str, Sequence] = {}
        self._in_flight: dict[bytes, Sequence] = {}
        self.preemptions_total = 0
        self.prefix_queries_total = 0
        self.prefix_hits_total = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live.values())

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._live) - len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose KV can fit an empty pool (the engine refuses others)."""
        assert sequence.id not in self._live, f"{sequence.id} is queued already"
        assert self.blocks.blocks_for(sequence.num_prompt) <= self.blocks.num_blocks
        self._live[sequence.id] = sequence
        self._enqueue(sequence)

    def schedule(self) -> Schedule:
        plan = Schedule(self.limits.max_num_batched_tokens)
        self._continue_decodes(plan)
        self._continue_prompts(plan)
        if not plan.preempted:
            self._start_waiting(plan)
        self._top_up(plan)
        return plan

    def commit(self, plan: Schedule) -> None:
        """The spans were computed: move the borders, publish blocks that became full."""
        for sequence, num_tokens in plan.spans.items():
            sequence.num_computed += num_tokens
            if sequence.num_computed // self.blocks.block_size > sequence.num_registered:
                self._publish(sequence)

    def finish(self, request_id: str, *, tainted: bool = False) -> Sequence | None:
        """Remove a sequence, waiting or running, and free what it holds; None if unknown.

        tainted: its KV may hold non-finite values, so nobody may find its blocks again.
        """
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return None
        if tainted:
            self.blocks.forget(sequence.block_ids)
        self._drop_blocks(sequence)
        self.running.pop(request_id, None)
        sequence.status = Status.FINISHED
        self._compact_queue()
        return sequence

    def audit(self) -> None:
        """AssertionError unless the books balance: blocks, queues and prefixes in flight."""
        self.blocks.audit(sequence.block_ids for sequence in self._live.values())
        assert len(self.running) <= self.limits.max_num_seqs
        queued = {sequence.id for _, _, sequence in self._waiting if sequence.id in self._live}
        assert queued == self._live.keys() - self.running.keys(), "a sequence is in no queue"
        for sequence in self._live.values():
            assert (sequence.status is Status.RUNNING) == (sequence.id in self.running)
            held = len(sequence.block_ids)
            assert self.blocks.blocks_for(sequence.num_computed) <= held, "KV without a block"
        assert all(s.status is Status.RUNNING for s in self._in_flight.values())

    def _continue_decodes(self, plan: Schedule) -> None:
        for sequence in list(self.running.values()):
            if sequence.status is not Status.RUNNING or sequence.num_remaining != 1:
                continue
            if self._ensure_room(sequence, plan):
                plan.give(sequence, 1)

    def _continue_prompts(self, plan: Schedule) -> None:
        for sequence in self.running.values():
            if plan.budget and sequence not in plan.spans:
                self._give_chunk(sequence, plan)

    def _start_waiting(self, plan: Schedule) -> None:
        looked_at: list[Sequence] = []
        blocked: list[Sequence] = []
        while plan.budget and len(self.running) < self.limits.max_num_seqs:
            is_over = any(other.num_passed >= MAX_PASSED for other in blocked)
            sequence = None if is_over or len(looked_at) == SCAN_LIMIT else self._pop_waiting()
            if sequence is None:
                break
            outcome = self._start(sequence, plan)
            if outcome is Start.STARTED:
                for other in blocked:
                    other.num_passed += 1
            else:
                looked_at.append(sequence)
            if outcome is Start.NO_ROOM:
                blocked.append(sequence)
        for sequence in looked_at:
            self._enqueue(sequence)

    def _start(self, sequence: Sequence, plan: Schedule) -> Start:
        hashes = self._shareable(sequence)
        shared = self.blocks.match(hashes)
        if len(shared) < len(hashes) and hashes[len(shared)] in self._in_flight:
            return Start.LATER
        num_remaining = len(sequence.tokens) - len(shared) * self.blocks.block_size
        if plan.partial and num_remaining > plan.budget:
            return Start.LATER
        num_new = self.blocks.blocks_for(len(sequence.tokens)) - len(shared)
        blocks = self.blocks.acquire(shared, num_new, reserve=self._watermark())
        if blocks is None:
            return Start.NO_ROOM
        self._begin(sequence, blocks, len(shared))
        self._give_chunk(sequence, plan)
        return Start.STARTED

    def _begin(self, sequence: Sequence, blocks: list[int], num_shared: int) -> None:
        sequence.status = Status.RUNNING
        sequence.block_ids = blocks
        sequence.num_computed = num_shared * self.blocks.block_size
        sequence.num_registered = num_shared
        sequence.num_passed = 0
        self.running[sequence.id] = sequence
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.prefix_queries_total += sequence.num_prompt
            self.prefix_hits_total += sequence.num_computed
        for value in self._hashes_ahead(sequence):
            self._in_flight.setdefault(value, sequence)

    def _give_chunk(self, sequence: Sequence, plan: Schedule) -> None:
        """The next piece of a prompt; `partial` remembers who could use more of the budget."""
        threshold = self.limits.long_prefill_token_threshold
        num_tokens = min(sequence.num_remaining, threshold or sequence.num_remaining)
        room = plan.budget
        if num_tokens > room and len(self._live) > len(self.running):
            room = (room + 1) // 2
        if num_tokens > room:
            plan.partial.append(sequence)
        plan.give(sequence, min(num_tokens, room))

    def _top_up(self, plan: Schedule) -> None:
        threshold = self.limits.long_prefill_token_threshold
        for sequence in plan.partial:
            given = plan.spans.get(sequence, 0)
            if given and plan.budget:
                wanted = min(sequence.num_remaining, threshold or sequence.num_remaining)
                plan.give(sequence, min(wanted - given, plan.budget))

    def _ensure_room(self, sequence: Sequence, plan: Schedule) -> bool:
        """A block for the next token, by preemption if need be; False if it fell victim itself."""
        if self.blocks.blocks_for(sequence.num_computed + 1) <= len(sequence.block_ids):
            return True
        while (blocks := self.blocks.acquire((), 1)) is None:
            victim = max(self.running.values(), key=_victim_order)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.block_ids.extend(blocks)
        return True

    def _preempt(self, victim: Sequence, plan: Schedule) -> None:
        plan.take_back(victim)
        plan.preempted.append(victim)
        self._drop_blocks(victim)
        del self.running[victim.id]
        victim.status = Status.WAITING
        victim.num_preempted += 1
        self.preemptions_total += 1
        self._enqueue(victim)

    def _publish(self, sequence: Sequence) -> None:
        num_full = sequence.num_computed // self.blocks.block_size
        hashes = sequence.hashes(num_full, self.blocks.block_size)
        for index in range(sequence.num_registered, num_full):
            self.blocks.register(sequence.block_ids[index], hashes[index])
            if self._in_flight.get(hashes[index]) is sequence:
                del self._in_flight[hashes[index]]
        sequence.num_registered = num_full

    def _drop_blocks(self, sequence: Sequence) -> None:
        for value in self._hashes_ahead(sequence):
            if self._in_flight.get(value) is sequence:
                del self._in_flight[value]
        self.blocks.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0
        sequence.num_registered = 0

    def _shareable(self, sequence: Sequence) -> list[bytes]:
        """Hashes that may be looked up: full blocks that leave at least one token to compute."""
        if not self.blocks.enable_prefix_caching or not sequence.can_use_cache:
            return []
        num_full = (len(sequence.tokens) - 1) // self.blocks.block_size
        return sequence.hashes(num_full, self.blocks.block_size)

    def _hashes_ahead(self, sequence: Sequence) -> list[bytes]:
        """Hashes of full blocks this sequence holds but has not computed and published yet."""
        if not self.blocks.enable_prefix_caching:
            return []
        return sequence.block_hashes[sequence.num_registered :]

    def _watermark(self) -> int:
        """Blocks to leave free on starting: one per running sequence, else decodes soon preempt."""
        return len(self.running)

    def _enqueue(self, sequence: Sequence) -> None:
        entry = (sequence.request.priority, sequence.arrival, sequence)
        heapq.heappush(self._waiting, entry)

    def _pop_waiting(self) -> Sequence | None:
        while self._waiting:
            sequence = heapq.heappop(self._waiting)[2]
            if sequence.status is Status.WAITING:
                return sequence
        return None

    def _compact_queue(self) -> None:
        """Finished entries leave the heap when popped; drop them in bulk before they pile up."""
        if len(self._waiting) > 2 * self.num_waiting + 64:
            self._waiting = [e for e in self._waiting if e[2].status is Status.WAITING]
            heapq.heapify(self._waiting)


def _victim_order(sequence: Sequence) -> tuple[int, int, int]:
    return (sequence.request.priority, -sequence.num_generated, sequence.arrival)
