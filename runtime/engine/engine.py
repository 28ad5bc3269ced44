"""Engine: requests in, tokens out. `step` is three calls: schedule, execute, collect.

A synchronous object: no threads, no text, no sockets. The server drives it in a process of its own,
`eval` and the tests in theirs. One request's fault ends that request; an exception out of `step`
means the engine itself is broken.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

from quant.artifact.artifact import Artifact
from runtime.config import EngineConfig, ResolvedConfig
from runtime.engine.block_manager import BlockManager, hash_root
from runtime.engine.completions import NO_TOKEN, Collected, distribute
from runtime.engine.load import load
from runtime.engine.model_runner import DecoderLike, ModelRunner, StepResult
from runtime.engine.scheduler import Limits, Schedule, Scheduler
from runtime.engine.score import Score, ScoreItem, score_items
from runtime.engine.sequence import Sequence
from runtime.engine.validation import Bounds, check_can_go_on, check_request, max_length
from runtime.request import (
    Completion,
    EngineStats,
    FinishReason,
    Request,
    RequestError,
    StepOutput,
    TokenLogprobs,
)


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
    ) -> None:
        self.resolved = resolved
        self.artifact = artifact
        self.spec = decoder.spec
        self.runner = ModelRunner(decoder, kv, resolved.block_size)
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

    @classmethod
    def from_artifact(cls, path: Path, config: EngineConfig = EngineConfig()) -> Engine:  # noqa: B008
        """Open, verify, load and probe the artifact at `path`.

        Raises:
            ArtifactError: the artifact is damaged, unknown or of another format version.
            UnsupportedModelError: no decoder for this architecture.
            ConfigError: a setting cannot be honoured.
            ProbeError: the loaded model does not compute what the artifact's probe says.
        """
        loaded = load(path, config)
        return cls(loaded.decoder, loaded.kv, loaded.resolved, loaded.artifact)

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_live > 0

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
        self._scheduler.finish(request_id)

    def step(self) -> StepOutput:
        """Compute one schedule; an empty output if there is nothing to do."""
        started = perf_counter()
        schedule = self._scheduler.schedule()
        if not schedule.spans:
            return StepOutput()
        output = self._collect(schedule, self.runner.execute(schedule))
        self._steps_total += 1
        self._step_s_total += perf_counter() - started
        return output

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

    def audit(self) -> None:
        """AssertionError unless every block is owned as often as it is counted."""
        self._scheduler.audit()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (for measurements that start cold)."""
        self._blocks.reset_cache()

    def _collect(self, schedule: Schedule, result: StepResult) -> StepOutput:
        output = StepOutput()
        self._scheduler.commit(schedule)
        for sequence in schedule.spans:
            entries = result.prompt_logprobs.get(sequence)
            if entries is not None:
                sequence.prompt_logprobs += entries
            if sequence in result.errors:
                self._fail(sequence, result.errors[sequence], output)
            elif sequence in result.tokens:
                self._extend(sequence, result, output)
            elif not sequence.num_remaining:
                self._emit(sequence, NO_TOKEN, FinishReason.LENGTH, None, output)
        return output

    def _extend(self, sequence: Sequence, result: StepResult, output: StepOutput) -> None:
        token_id = result.tokens[sequence]
        sequence.append(token_id)
        self._generation_tokens_total += 1
        reason = None
        if token_id in sequence.stop_ids:
            reason = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.max_len:
            reason = FinishReason.LENGTH
        self._emit(sequence, token_id, reason, result.logprobs.get(sequence), output)

    def _fail(self, sequence: Sequence, message: str, output: StepOutput) -> None:
        output.errors[sequence.id] = message
        self._emit(sequence, NO_TOKEN, FinishReason.ERROR, None, output)

    def _emit(
        self,
        sequence: Sequence,
        token_id: int,
        reason: FinishReason | None,
        logprobs: TokenLogprobs | None,
        output: StepOutput,
    ) -> None:
        is_first = sequence.num_generated == (0 if token_id == NO_TOKEN else 1)
        if is_first:
            self._emit_prompt(sequence, output)
        output.request_ids.append(sequence.id)
        output.token_ids.append(token_id)
        output.finish_reasons.append(reason)
        output.logprobs.append(logprobs)
        if reason is not None:
            self._scheduler.finish(sequence.id, tainted=reason is FinishReason.ERROR)

    def _emit_prompt(self, sequence: Sequence, output: StepOutput) -> None:
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
        if self.has_work:
            raise RequestError(
                f"{verb}() needs an idle engine, but {self._scheduler.num_live} requests are live; "
                "step() them to their end or abort them first"
            )


def _limits(resolved: ResolvedConfig) -> Limits:
    return Limits(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        long_prefill_token_threshold=resolved.long_prefill_token_threshold,
    )
