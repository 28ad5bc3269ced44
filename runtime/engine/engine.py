"""Engine: requests in, tokens out. `step` is three calls: schedule, launch, collect.

The host runs behind: a step is collected when `runner.lag` later ones were launched, so that the
device never waits for Python. At launch a schedule is committed with placeholders for the tokens it
draws; at collect they become ids. A sequence found to have ended costs at most `lag` rows computed
for nothing: they are dropped.

A synchronous object: no threads, no text, no sockets. The server drives it in a process of its own,
`eval` and the tests in theirs. One request's fault ends that request; an exception out of `step`
means the engine itself is broken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

from quant.artifact.artifact import Artifact
from runtime.config import EngineConfig, ResolvedConfig
from runtime.engine.block_manager import BlockManager, hash_root
from runtime.engine.completions import NO_TOKEN, Collected, distribute
from runtime.engine.load import load
from runtime.engine.model_runner import DecoderLike, ModelRunner
from runtime.engine.runner import Runner, StepResult
from runtime.engine.scheduler import Limits, Schedule, Scheduler
from runtime.engine.score import Score, ScoreItem, score_items
from runtime.engine.sequence import Sequence, Status
from runtime.engine.step_cost import StepCost
from runtime.engine.validation import Bounds, check_can_go_on, check_request, max_length
from runtime.model.loader import LoadProgress
from runtime.request import (
    Completion,
    EngineStats,
    FinishReason,
    Request,
    RequestError,
    StepOutput,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """A step launched and not collected yet. started_s: when its making began (perf_counter)."""

    schedule: Schedule
    ticket: Any
    started_s: float


class Engine:
    """Continuous batching over one decoder.

    Attributes:
        resolved: what runs, with reasons. artifact: what was loaded (None for a scripted decoder).
        spec: the decoder's ModelSpec.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        kv: Any,
        resolved: ResolvedConfig,
        artifact: Artifact | None = None,
        runner: Runner | None = None,
    ) -> None:
        """runner: of this decoder and this kv; None takes the one that waits for every step."""
        self.resolved = resolved
        self.artifact = artifact
        self.spec = decoder.spec
        self.runner: Runner = runner or ModelRunner(decoder, kv, resolved.block_size)
        self._blocks = BlockManager(
            resolved.num_blocks,
            resolved.block_size,
            enable_prefix_caching=resolved.enable_prefix_caching,
        )
        self._scheduler = Scheduler(_limits(resolved), self._blocks)
        self._bounds = Bounds(
            vocab=resolved.vocab_size,
            max_model_len=resolved.max_model_len,
            num_pool_tokens=resolved.num_blocks * resolved.block_size,
        )
        self._num_arrived = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._steps_total = 0
        self._step_s_total = 0.0
        self._in_flight: deque[_InFlight] = deque()
        self._collected_s = 0.0

    @classmethod
    def from_artifact(
        cls,
        path: Path,
        config: EngineConfig = EngineConfig(),  # noqa: B008
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> Engine:
        """Open, verify, load and probe the artifact at `path`; `progress` is told of each layer.

        Raises:
            ArtifactError: the artifact is damaged, unknown or of another format version.
            UnsupportedModelError: no decoder for this architecture.
            ConfigError: a setting cannot be honoured.
            ProbeError: the loaded model does not compute what the artifact's probe says.
        """
        loaded = load(path, config, progress)
        return cls(loaded.decoder, loaded.kv, loaded.resolved, loaded.artifact, loaded.runner)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: requests to serve, or steps to collect."""
        return self._scheduler.num_live > 0 or bool(self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. RequestError if it can never run; the engine is unchanged then."""
        if request.id in self._scheduler:
            raise RequestError(f"a request with id {request.id!r} is running already", "id")
        check_request(request, self._bounds)
        sequence = self._sequence(request)
        check_can_go_on(sequence.stop_ids, request.sampling, self._bounds.vocab)
        self._scheduler.add(sequence)
        self._num_arrived += 1

    def abort(self, request_id: str) -> None:
        """End a request and free all it holds at once. No row is emitted; unknown ids are fine."""
        self._finish(request_id)

    def step(self) -> StepOutput:
        """Launch one schedule and collect the one `lag` steps before it: one at most.

        Where nothing can be launched, or not before the steps in flight are known, the oldest of
        them is collected. The output is empty if there is none, and while the first ones are under
        way. An exception out of the runner leaves the requests as after the last step collected.
        """
        started_s = perf_counter()
        schedule = self._schedule()
        if schedule.spans and (not self._in_flight or self.runner.can_run_behind(schedule)):
            self._launch(schedule, started_s)
            if len(self._in_flight) <= self.runner.lag:
                return StepOutput()
        return self._collect() if self._in_flight else StepOutput()

    def generate(self, requests: Seq[Request]) -> list[Completion]:
        """Run these requests to the end, all at once; completions in the order of `requests`.

        The engine must be idle, and is again however this ends. RequestError if a request is
        refused; none is run then.
        """
        self._require_idle("generate")
        rows: dict[str, Collected] = {request.id: Collected() for request in requests}
        try:
            for request in requests:
                self.add(request)
            while self.has_work:
                distribute(self.step(), rows)
        finally:
            for request_id in rows:
                self.abort(request_id)
            self._drain()
        return [rows[request.id].completion(request) for request in requests]

    def score(self, items: Seq[ScoreItem]) -> list[Score]:
        """Log-likelihoods, and divergence from a reference, of given token lists.

        The engine must be idle. Uses scratch blocks: nothing enters or comes from the prefix cache.
        """
        self._require_idle("score")
        return score_items(items, self.runner, self._blocks, self._bounds, self.resolved)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_blocks=self._blocks.num_blocks,
            num_used_blocks=self._blocks.num_used,
            prefix_queries_total=scheduler.prefix_queries_total,
            prefix_hits_total=scheduler.prefix_hits_total,
            preemptions_total=scheduler.preemptions_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            steps_total=self._steps_total,
            step_s_total=self._step_s_total,
        )

    def make_ready(self) -> bool:
        """Do one piece of what makes later steps quick; False once there is nothing left to do.

        For idle moments: a piece may take some tenths of a second.
        """
        return self.runner.make_ready()

    @property
    def step_cost(self) -> StepCost | None:
        """What steps cost on this machine, once `make_ready` has measured it."""
        return self.runner.step_cost

    def audit(self) -> None:
        """AssertionError unless every block is owned as often as it is counted, and every token
        that is not known yet is one that a step in flight draws."""
        self._scheduler.audit([step.schedule for step in self._in_flight])

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (for measurements that start cold)."""
        self._blocks.reset_cache()

    def _schedule(self) -> Schedule:
        schedule = self._scheduler.schedule()
        for sequence in schedule.preempted:
            self.runner.release(sequence)
        return schedule

    def _launch(self, schedule: Schedule, started_s: float) -> None:
        try:
            ticket = self.runner.launch(schedule)
        except BaseException:
            self._abandon()
            raise
        self._scheduler.commit(schedule)
        self._in_flight.append(_InFlight(schedule=schedule, ticket=ticket, started_s=started_s))

    def _collect(self) -> StepOutput:
        """Wait for the oldest step in flight; its rows."""
        step = self._in_flight[0]
        try:
            result = self.runner.collect(step.ticket)
        except BaseException:
            self._abandon()
            raise
        self._in_flight.popleft()
        self._scheduler.collected(step.schedule, result.errors)
        output = self._rows(step.schedule, result)
        now_s = perf_counter()
        self._steps_total += 1
        self._step_s_total += now_s - max(step.started_s, self._collected_s)
        self._collected_s = now_s
        return output

    def _drain(self) -> None:
        """Collect steps whose requests have all ended: their rows are nobody's."""
        assert not self._scheduler.num_live
        while self._in_flight:
            self._collect()

    def _abandon(self) -> None:
        """A step could not be launched or collected: none after it is worth anything either."""
        self._scheduler.rewind([step.schedule for step in self._in_flight])
        self._in_flight.clear()
        self.runner.abandon()

    def _rows(self, schedule: Schedule, result: StepResult) -> StepOutput:
        """Sequences that were aborted, or ended after the launch, get nothing any more."""
        output = StepOutput()
        for sequence, entries in result.prompt_logprobs.items():
            sequence.prompt_logprobs += entries
        for sequence, message in result.errors.items():
            if sequence.status is not Status.FINISHED:
                output.errors[sequence.id] = message
                self._end(sequence, FinishReason.ERROR, output)
        self._add_tokens(schedule, result, output)
        if len(schedule.sampling) < len(schedule.spans):
            for sequence in schedule.spans:
                if sequence.status is Status.RUNNING and sequence.num_collected == sequence.max_len:
                    self._end(sequence, FinishReason.LENGTH, output)
        return output

    def _add_tokens(self, schedule: Schedule, result: StepResult, output: StepOutput) -> None:
        """The placeholders of this step become ids. Runs for every token of every sequence."""
        logprobs = result.logprobs
        for sequence, token_id in zip(schedule.sampling, result.token_ids, strict=True):
            if sequence.status is Status.FINISHED:
                continue
            sequence.resolve(token_id)
            if sequence.num_known == sequence.num_prompt + 1:
                self._add_prompt(sequence, output)
            reason = None
            if token_id in sequence.stop_ids:
                reason = FinishReason.STOP
            elif sequence.num_known >= sequence.max_len:
                reason = FinishReason.LENGTH
            output.request_ids.append(sequence.id)
            output.token_ids.append(token_id)
            output.finish_reasons.append(reason)
            output.logprobs.append(logprobs.get(sequence) if logprobs else None)
            self._generation_tokens_total += 1
            if reason is not None:
                self._finish(sequence.id)

    def _end(self, sequence: Sequence, reason: FinishReason, output: StepOutput) -> None:
        """A last row without a token."""
        if sequence.num_known == sequence.num_prompt:
            self._add_prompt(sequence, output)
        output.request_ids.append(sequence.id)
        output.token_ids.append(NO_TOKEN)
        output.finish_reasons.append(reason)
        output.logprobs.append(None)
        self._finish(sequence.id, tainted=reason is FinishReason.ERROR)

    def _finish(self, request_id: str, *, tainted: bool = False) -> None:
        sequence = self._scheduler.finish(request_id, tainted=tainted)
        if sequence is not None:
            self.runner.release(sequence)

    def _add_prompt(self, sequence: Sequence, output: StepOutput) -> None:
        self._prompt_tokens_total += sequence.num_prompt
        output.cached_tokens[sequence.id] = sequence.num_cached or 0
        if len(sequence.prompt_logprobs) == sequence.num_prompt:
            output.prompt_logprobs[sequence.id] = list(sequence.prompt_logprobs)

    def _sequence(self, request: Request) -> Sequence:
        sampling = request.sampling
        own = () if sampling.ignore_eos else self.resolved.eos_token_ids
        extra = (request.cache_salt, self.resolved.artifact_digest, self.resolved.kv_cache_dtype)
        return Sequence(
            request=request,
            arrival=self._num_arrived,
            max_len=max_length(request, self._bounds),
            stop_ids=frozenset((*own, *sampling.stop_token_ids)),
            seed=self._drawn_seed() if sampling.seed is None else sampling.seed,
            hash_root=hash_root(extra),
        )

    def _drawn_seed(self) -> int:
        """A stream for a request that names none: its own, but the same in the same run."""
        text = f"{self.resolved.seed}/{self._num_arrived}"
        return int.from_bytes(sha256(text.encode()).digest()[:8], "little", signed=True)

    def _require_idle(self, verb: str) -> None:
        if self._scheduler.num_live:
            raise RequestError(
                f"{verb}() needs an idle engine, but {self._scheduler.num_live} requests are live; "
                "step() them to their end or abort them first"
            )
        self._drain()


def _limits(resolved: ResolvedConfig) -> Limits:
    return Limits(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        long_prefill_token_threshold=resolved.long_prefill_token_threshold,
    )
