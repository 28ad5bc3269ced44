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

A schedule is committed when it is launched, before the host knows its tokens; only when it was
collected may its blocks be found by others. Blocks are freed at once even while a step in flight
still writes to them: their next owner is computed by a later step, and steps run in order.

Nobody starves: prompts own all their blocks from the start, so they always advance; the running
sequence that has generated most is never a victim, so it ends; and a waiting sequence can be passed
by later arrivals for lack of room at most MAX_PASSED times before the pool is left to drain for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.engine.block_manager import BlockManager
from runtime.engine.sequence import PENDING, Sequence, Status

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
    """One step's spans in order of service (decodes first), and the room that is left.

    sampling: the sequences of `spans`, in the same order, that draw a token in this step.
    """

    budget: int
    spans: dict[Sequence, int] = field(default_factory=dict)
    sampling: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    partial: list[Sequence] = field(default_factory=list)

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        self.spans[sequence] = self.spans.get(sequence, 0) + num_tokens
        self.budget -= num_tokens


class Start(Enum):
    """What came of trying to start a waiting sequence."""

    STARTED = auto()
    LATER = auto()  # its prefix or its last step is being computed, or the budget is taken
    NO_ROOM = auto()  # its KV does not fit now


class Scheduler:
    """The queues. `schedule` decides; `commit` and `collected` follow a step."""

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
        """The next step. Nothing but `commit` makes it count: it may be dropped for another."""
        plan = Schedule(self.limits.max_num_batched_tokens)
        prompts = self._continue_decodes(plan)
        for sequence in prompts:
            if plan.budget and sequence.status is Status.RUNNING:
                self._give_chunk(sequence, plan)
        if self._waiting and not plan.preempted:
            self._start_waiting(plan)
        self._top_up(plan)
        plan.sampling = [
            sequence
            for sequence, num_tokens in plan.spans.items()
            if sequence.draws_at(sequence.num_computed + num_tokens)
        ]
        return plan

    def commit(self, plan: Schedule) -> None:
        """The step was launched: its KV counts as written, its tokens as drawn but unknown."""
        for sequence, num_tokens in plan.spans.items():
            sequence.num_computed += num_tokens
            sequence.num_in_flight += 1
        for sequence in plan.sampling:
            sequence.tokens.append(PENDING)

    def collected(self, plan: Schedule, faulty: Collection[Sequence] = ()) -> None:
        """The step is over: publish the blocks it filled, but those of `faulty` sequences.

        Steps are collected in order, so the ids of all tokens this one computed are known. A
        sequence preempted meanwhile has no blocks, and has not started anew while in flight.
        """
        block_size = self.blocks.block_size
        for sequence, num_tokens in plan.spans.items():
            sequence.num_in_flight -= 1
            if sequence.status is Status.RUNNING and sequence not in faulty:
                sequence.num_collected = border = sequence.num_collected + num_tokens
                if border >= (sequence.num_registered + 1) * block_size:
                    self._publish(sequence)

    def rewind(self, plans: Iterable[Schedule]) -> None:
        """These committed steps failed, and none after them is in flight: as if never launched."""
        for sequence in {sequence for plan in plans for sequence in plan.spans}:
            del sequence.tokens[sequence.num_known :]
            sequence.num_computed = sequence.num_collected
            sequence.num_in_flight = 0

    def finish(self, request_id: str, *, tainted: bool = False) -> Sequence | None:
        """Remove a sequence, waiting or running, and free what it holds; None if unknown.

        tainted: its KV may hold non-finite values, so nobody may find its blocks again.
        """
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return None
        if tainted:
            self.blocks.forget(sequence.block_hashes)
        self._drop_blocks(sequence)
        self.running.pop(request_id, None)
        sequence.status = Status.FINISHED
        self._compact_queue()
        return sequence

    def audit(self, in_flight: Collection[Schedule] = ()) -> None:
        """AssertionError unless the books balance: blocks, queues, prefixes, steps in flight."""
        self.blocks.audit(sequence.block_ids for sequence in self._live.values())
        assert len(self.running) <= self.limits.max_num_seqs
        queued = {sequence.id for _, _, sequence in self._waiting if sequence.id in self._live}
        assert queued == self._live.keys() - self.running.keys(), "a sequence is in no queue"
        for sequence in self._live.values():
            assert (sequence.status is Status.RUNNING) == (sequence.id in self.running)
            held = len(sequence.block_ids)
            assert self.blocks.blocks_for(sequence.num_computed) <= held, "KV without a block"
            self._audit_borders(sequence, in_flight)
        assert all(s.status is Status.RUNNING for s in self._in_flight.values())

    def _audit_borders(self, sequence: Sequence, in_flight: Collection[Schedule]) -> None:
        spans = [plan.spans[sequence] for plan in in_flight if sequence in plan.spans]
        assert sequence.num_in_flight == len(spans), "a step in flight is not counted"
        num_pending = sum(sequence in plan.sampling for plan in in_flight)
        known, pending = (
            sequence.tokens[: sequence.num_known],
            sequence.tokens[sequence.num_known :],
        )
        assert PENDING not in known, "an unknown id is taken for known"
        assert pending == [PENDING] * num_pending, "placeholders and steps in flight differ"
        assert len(sequence.tokens) <= max(sequence.max_len, sequence.num_prompt)
        assert sequence.num_registered * self.blocks.block_size <= sequence.num_collected
        assert len(sequence.block_hashes) * self.blocks.block_size <= sequence.num_known
        if sequence.status is Status.RUNNING:
            assert sequence.num_computed == sequence.num_collected + sum(spans)
        else:
            assert sequence.num_computed == sequence.num_collected == 0

    def _continue_decodes(self, plan: Schedule) -> list[Sequence]:
        """One token for each that has one to compute; returns those that have more.

        The whole cost of steady decode is this loop: it asks for nothing that needs a call.
        """
        prompts: list[Sequence] = []
        spans, block_size = plan.spans, self.blocks.block_size
        for sequence in list(self.running.values()):
            start = sequence.num_computed
            num_remaining = min(len(sequence.tokens), sequence.compute_limit) - start
            if num_remaining > 1:
                prompts.append(sequence)
            elif num_remaining == 1 and sequence.status is Status.RUNNING:
                has_room = start < len(sequence.block_ids) * block_size
                if has_room or self._make_room(sequence, plan):
                    spans[sequence] = 1
        plan.budget -= len(spans)
        return prompts

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
        if sequence.num_in_flight:
            return Start.LATER
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
        sequence.num_collected = sequence.num_computed
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

    def _make_room(self, sequence: Sequence, plan: Schedule) -> bool:
        """A block for the next token, by preemption if need be; False if it fell victim itself."""
        while (blocks := self.blocks.acquire((), 1)) is None:
            victim = max(self.running.values(), key=_victim_order)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.block_ids.extend(blocks)
        return True

    def _preempt(self, victim: Sequence, plan: Schedule) -> None:
        plan.spans.pop(victim, None)
        plan.preempted.append(victim)
        self._drop_blocks(victim)
        del self.running[victim.id]
        victim.status = Status.WAITING
        victim.num_preempted += 1
        self.preemptions_total += 1
        self._enqueue(victim)

    def _publish(self, sequence: Sequence) -> None:
        num_full = sequence.num_collected // self.blocks.block_size
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
        sequence.num_collected = 0
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


def _victim_order(sequence: Sequence) -> tuple[bool, int, int, int]:
    """Who only waits for tokens in flight loses nothing by it, and goes first."""
    is_over = sequence.num_remaining == 0 and sequence.num_generated > 0
    return (is_over, sequence.request.priority, -sequence.num_generated, sequence.arrival)
