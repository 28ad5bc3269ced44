"""The scheduler under random load: budget kept, books balanced, everybody ends, salts apart.

The model is a stand-in: every computed span that reaches the end of its sequence gets a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import process_time

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.block_manager import BlockManager, hash_root
from runtime.engine.scheduler import MAX_PASSED, Limits, Schedule, Scheduler
from runtime.engine.sequence import Sequence, Status
from runtime.request import Request, SamplingParams

BLOCK = 8


@dataclass
class World:
    """A scheduler, its pool, and a record of who computed what."""

    num_blocks: int = 16
    max_num_seqs: int = 4
    budget: int = 16
    threshold: int = 0
    caching: bool = True
    lag: int = 0
    num_arrived: int = 0
    in_flight: deque[Schedule] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.blocks = BlockManager(self.num_blocks, BLOCK, enable_prefix_caching=self.caching)
        limits = Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            long_prefill_token_threshold=self.threshold,
        )
        self.scheduler = Scheduler(limits, self.blocks)

    def add(
        self,
        prompt: Seq[int],
        output: int,
        *,
        salt: str = "",
        priority: int = 0,
        lp: int | None = None,
    ) -> Sequence:
        name = f"r{self.num_arrived}"
        limit = min(len(prompt) + output, self.num_blocks * BLOCK + 1)
        sequence = Sequence(
            request=Request(
                id=name,
                prompt=tuple(prompt),
                sampling=SamplingParams(prompt_logprobs=lp),
                priority=priority,
                cache_salt=salt,
            ),
            arrival=self.num_arrived,
            max_len=limit,
            stop_ids=frozenset(),
            seed=0,
            hash_root=hash_root([salt]),
        )
        self.num_arrived += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Schedule:
        """Launch a schedule, collect those more than `lag` steps old (one if none was launched)."""
        plan = self.scheduler.schedule()
        self.check(plan)
        if plan.spans:
            self.scheduler.commit(plan)
            self.in_flight.append(plan)
        self.scheduler.audit(self.in_flight)
        if len(self.in_flight) > (self.lag if plan.spans else 0):
            self.collect()
        return plan

    def collect(self) -> None:
        plan = self.in_flight.popleft()
        self.scheduler.collected(plan)
        for sequence in plan.sampling:
            if sequence.status is not Status.FINISHED:
                sequence.resolve(1000 + sequence.num_known - sequence.num_prompt)
                if sequence.num_known >= sequence.max_len:
                    self.scheduler.finish(sequence.id)
        self.scheduler.audit(self.in_flight)

    def check(self, plan: Schedule) -> None:
        assert sum(plan.spans.values()) + plan.budget == self.budget
        assert plan.budget >= 0
        assert len(plan.spans) <= self.max_num_seqs
        for sequence, num_tokens in plan.spans.items():
            assert sequence.status is Status.RUNNING
            assert 1 <= num_tokens <= sequence.num_remaining
            assert not self.threshold or num_tokens <= self.threshold
            end = sequence.num_computed + num_tokens
            assert self.blocks.blocks_for(end) <= len(sequence.block_ids)
        self.check_sharing()
        if plan.preempted:
            assert all(s.num_computed or s.num_generated for s in plan.spans), "somebody started"

    def check_sharing(self) -> None:
        """A block in two tables holds the same tokens after the same prefix, of the same salt."""
        contents: dict[int, tuple[str, list[int]]] = {}
        for sequence in self.scheduler.running.values():
            for i, block in enumerate(sequence.block_ids):
                content = (sequence.request.cache_salt, sequence.tokens[: (i + 1) * BLOCK])
                assert contents.setdefault(block, content) == content

    def drain(self, limit: int = 5000) -> int:
        for steps in range(limit):
            if not self.scheduler.num_live:
                assert self.blocks.num_used == 0
                return steps
            was_behind = bool(self.in_flight)
            plan = self.step()
            assert plan.spans or plan.preempted or was_behind, "a step that did nothing"
        raise AssertionError("somebody starves")


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + i * 31) % 97 for i in range(length)]


def test_decodes_come_first_and_chunks_fill_the_rest() -> None:
    world = World(budget=16)
    short = world.add(prompt(1, 4), 20)
    world.step()
    long = world.add(prompt(2, 60), 4)
    plan = world.step()
    assert list(plan.spans.items()) == [(short, 1), (long, 15)]


def test_one_notion_of_span_a_last_chunk_of_one_is_a_decode() -> None:
    world = World(budget=16)
    sequence = world.add(prompt(1, 17), 3)
    assert world.step().spans == {sequence: 16}
    assert world.step().spans == {sequence: 1}
    assert sequence.num_generated == 1


def test_a_long_prompt_leaves_room_for_short_newcomers_and_takes_back_the_rest() -> None:
    world = World(budget=16, num_blocks=64)
    long = world.add(prompt(1, 400), 1)
    assert world.step().spans == {long: 16}, "alone it has the whole budget"
    short = world.add(prompt(2, 5), 1)
    assert world.step().spans == {long: 11, short: 5}


def test_two_long_prompts_come_one_after_the_other() -> None:
    world = World(budget=16, num_blocks=64)
    one, two = world.add(prompt(1, 100), 1), world.add(prompt(2, 100), 1)
    seen = [set(world.step().spans) for _ in range(6)]
    assert seen == [{one}] * 6
    assert two.status is Status.WAITING


def test_the_threshold_lets_long_prompts_run_side_by_side() -> None:
    world = World(budget=16, num_blocks=64, threshold=8)
    one, two = world.add(prompt(1, 100), 1), world.add(prompt(2, 100), 1)
    assert world.step().spans == {one: 8, two: 8}


def test_equal_prompts_of_one_moment_are_computed_once() -> None:
    world = World(budget=64, num_blocks=64, max_num_seqs=8)
    choices = [world.add(prompt(1, 40), 2) for _ in range(4)]
    assert set(world.step().spans) == {choices[0]}
    plan = world.step()
    assert [plan.spans[c] for c in choices[1:]] == [8, 8, 8]
    assert [c.num_cached for c in choices] == [0, 32, 32, 32]


def test_salts_do_not_share_and_do_not_wait_for_each_other() -> None:
    world = World(budget=128, num_blocks=64, max_num_seqs=8)
    mine, other = world.add(prompt(1, 40), 9, salt="a"), world.add(prompt(1, 40), 9, salt="b")
    assert world.step().spans == {mine: 40, other: 40}
    late = world.add(prompt(1, 40), 2, salt="b")
    world.step()
    assert (mine.num_cached, other.num_cached, late.num_cached) == (0, 0, 32)
    assert not set(mine.block_ids) & set(other.block_ids)
    assert set(late.block_ids) & set(other.block_ids)


def test_prompt_logprobs_do_without_the_cache() -> None:
    world = World(budget=128)
    world.add(prompt(1, 40), 1)
    world.drain()
    scored = world.add(prompt(1, 40), 1, lp=0)
    assert world.step().spans == {scored: 40}


def test_the_victim_is_of_lowest_priority_then_has_generated_least() -> None:
    world = World(num_blocks=8, budget=64, max_num_seqs=4, caching=False)
    old = world.add(prompt(1, 10), 40)
    world.step()
    young = world.add(prompt(2, 10), 40)
    world.step()
    important = world.add(prompt(3, 7), 40, priority=-1)
    while not world.scheduler.preemptions_total:
        world.step()
    assert young.status is Status.WAITING
    assert old.status is important.status is Status.RUNNING
    assert young.num_generated > 0, "its tokens stay"
    world.drain()


def test_a_faulty_step_publishes_nothing_of_its_sequence() -> None:
    world = World(budget=64, num_blocks=32)
    good, faulty = world.add(prompt(1, 20), 2), world.add(prompt(2, 20), 2)
    plan = world.scheduler.schedule()
    world.scheduler.commit(plan)
    found = [world.blocks.match(s.block_hashes) for s in (good, faulty)]
    assert found == [[], []], "launched is not collected"
    world.scheduler.collected(plan, {faulty})
    assert len(world.blocks.match(good.block_hashes)) == 2
    assert world.blocks.match(faulty.block_hashes) == []
    world.scheduler.finish(faulty.id, tainted=True)
    late = world.add(prompt(2, 20), 1)
    good.resolve(5)
    assert world.step().spans == {good: 1, late: 20}, "nobody waits for blocks that never come"


def test_who_only_waits_for_a_token_in_flight_is_preempted_first() -> None:
    """It loses nothing: its last step was launched, and needs no block afterwards."""
    world = World(num_blocks=9, budget=64, max_num_seqs=4, caching=False, lag=3)
    growing = world.add(prompt(1, 29), 40, priority=1)
    over = world.add(prompt(2, 31), 3, priority=-1)
    for _ in range(5):
        world.step()
    assert world.scheduler.preemptions_total == 1
    assert over.status is Status.WAITING
    assert growing.status is Status.RUNNING
    world.drain()
    assert over.num_generated == 3
    assert world.scheduler.preemptions_total == 1


def test_lower_priority_numbers_start_first() -> None:
    world = World(max_num_seqs=1)
    world.add(prompt(1, 4), 3)
    world.step()
    night = world.add(prompt(2, 4), 1, priority=5)
    chat = world.add(prompt(3, 4), 1, priority=0)
    order: list[Sequence] = []
    while world.scheduler.num_live:
        order += [s for s in world.step().spans if s not in order]
    assert order[-2:] == [chat, night]


def test_a_big_waiting_prompt_is_passed_only_so_often() -> None:
    world = World(num_blocks=16, max_num_seqs=8, budget=64, caching=False)
    world.add(prompt(1, 60), 60)
    world.step()
    big = world.add(prompt(2, 100), 1)
    for i in range(MAX_PASSED + 4):
        world.add(prompt(3 + i, 4), 1)
    passed: set[Sequence] = set()
    while big not in (plan := world.step()).spans:
        passed |= {sequence for sequence in plan.spans if sequence.arrival > big.arrival}
    assert len(passed) == MAX_PASSED


def test_a_prompt_as_large_as_the_pool_runs() -> None:
    world = World(num_blocks=8, budget=16)
    sequence = world.add(prompt(1, 64), 100)
    world.drain()
    assert sequence.num_generated == 1


def test_abort_frees_at_once_in_every_state_and_is_idempotent() -> None:
    world = World(num_blocks=16, budget=16, max_num_seqs=2)
    decoding = world.add(prompt(1, 4), 50)
    world.step()
    prefilling = world.add(prompt(2, 80), 5)
    waiting = world.add(prompt(3, 30), 5)
    world.step()
    assert prefilling.num_remaining > 1
    for sequence in (prefilling, waiting, decoding):
        assert world.scheduler.finish(sequence.id) is sequence
        assert world.scheduler.finish(sequence.id) is None
        assert sequence.block_ids == []
        world.scheduler.audit()
    assert world.blocks.num_used == 0
    assert world.scheduler.schedule().spans == {}


def test_aborted_waiting_requests_do_not_pile_up() -> None:
    world = World(max_num_seqs=1)
    world.add(prompt(1, 4), 100)
    world.step()
    for i in range(1000):
        world.scheduler.finish(world.add(prompt(i, 4), 1).id)
    assert len(world.scheduler._waiting) < 100


requests = st.tuples(
    st.integers(1, 5),  # which text
    st.integers(1, 60),  # prompt length
    st.integers(0, 30),  # output
    st.sampled_from(["", "a"]),
    st.integers(-1, 1),  # priority
    st.sampled_from([None, None, None, 0]),  # prompt log-probs
)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_random_traffic(data: st.DataObject) -> None:
    world = World(
        num_blocks=data.draw(st.integers(8, 24)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        budget=data.draw(st.integers(6, 40)),
        threshold=data.draw(st.sampled_from([0, 0, 5])),
        caching=data.draw(st.booleans()),
        lag=data.draw(st.integers(0, 3)),
    )
    sequences: list[Sequence] = []
    aborted: set[Sequence] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "abort"]))
        if action == "add":
            text, length, output, salt, priority, lp = data.draw(requests)
            sequences.append(
                world.add(prompt(text, length), output or 1, salt=salt, priority=priority, lp=lp)
            )
        elif action == "step":
            world.step()
        elif sequences:
            victim = data.draw(st.sampled_from(sequences))
            if world.scheduler.finish(victim.id):
                aborted.add(victim)
            world.scheduler.audit(world.in_flight)
    world.drain()
    for sequence in set(sequences) - aborted:
        assert len(sequence.tokens) == sequence.max_len
        assert sequence.tokens[: sequence.num_prompt] == list(sequence.request.prompt)
    world.scheduler.audit()
    assert world.blocks.num_used == 0


def test_a_decode_step_costs_little_python() -> None:
    """A bound far above what it takes, to catch a step that goes quadratic."""
    num_seqs = 256
    world = World(num_blocks=num_seqs * 16, max_num_seqs=num_seqs, budget=8192)
    for i in range(num_seqs):
        world.add(prompt(i, 24), 90)
    for _ in range(3):
        world.step()
    spent = 0.0
    for _ in range(20):
        started = process_time()
        plan = world.scheduler.schedule()
        world.scheduler.commit(plan)
        world.scheduler.collected(plan)
        spent += process_time() - started
        assert len(plan.spans) == num_seqs
        for sequence in plan.sampling:
            sequence.resolve(5)
    assert spent / 20 < 0.02
