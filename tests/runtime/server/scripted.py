"""A scripted engine (T-SAY) with the interface of the real one.

Its greedy output is a fixed token list, so stop strings, emoji and faults happen at will. Imports
nothing heavy: engine processes of tests start quickly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from runtime.config import ResolvedConfig
from runtime.engine.validation import Bounds, check_request
from runtime.request import (
    EngineStats,
    FinishReason,
    Request,
    StepOutput,
    TokenLogprobs,
)
from runtime.server.messages import Loading


@dataclass(frozen=True)
class Script:
    """What the engine does. `say` None: each request repeats its own prompt for ever."""

    say: tuple[int, ...] | None = None
    eos: int = 2
    vocab: int = 350
    max_model_len: int = 256
    max_num_seqs: int = 4
    tokens_per_step: int = 1
    step_s: float = 0.0
    crash_at: int | None = None  # the engine breaks once any request has this many tokens
    kill_at: int | None = None  # the process dies then, without a word
    fault_at: int | None = None  # a request ends with an error then
    refuse_to_load: str | None = None
    hold: str | None = None  # while this file is there, nobody gets a second token


def make_engine(
    script: Script, report: Callable[[Loading], None] = lambda _: None
) -> tuple[ScriptedEngine, dict[str, str]]:
    for layers in (1, 2):
        report(Loading(layers=layers, num_layers=2))
    if script.refuse_to_load is not None:
        raise ValueError(script.refuse_to_load)
    return ScriptedEngine(script), {"device_class": "cpu", "compute_dtype": "float32"}


def die_while_loading(report: Callable[[Loading], None]) -> NoReturn:
    os._exit(7)


class ScriptedEngine:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.resolved = ResolvedConfig(
            device="cpu", dtype="float32", kv_cache_dtype="float32",
            max_model_len=script.max_model_len, max_num_seqs=script.max_num_seqs,
            max_num_batched_tokens=64, long_prefill_token_threshold=0, block_size=16,
            num_blocks=64, enable_prefix_caching=True, deterministic=False, seed=0,
            eos_token_ids=(script.eos,), vocab_size=script.vocab, artifact_digest="d" * 64,
        )  # fmt: skip
        self._bounds = Bounds(
            vocab=script.vocab, max_model_len=script.max_model_len, num_pool_tokens=1024
        )
        self._live: dict[str, list[int]] = {}
        self._requests: dict[str, Request] = {}
        self._prompt_total = self._generated_total = self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, request: Request) -> None:
        check_request(request, self._bounds)
        self._live[request.id] = []
        self._requests[request.id] = request

    def make_ready(self) -> bool:
        return False

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._requests.pop(request_id, None)

    def step(self) -> StepOutput:
        time.sleep(self.script.step_s)
        self._steps += 1
        output = StepOutput()
        for request_id in self._moving():
            for _ in range(self.script.tokens_per_step):
                if request_id in self._live:
                    self._extend(request_id, output)
        return output

    def _moving(self) -> list[str]:
        running = list(self._live)[: self.script.max_num_seqs]
        held = self.script.hold is not None and os.path.exists(self.script.hold)
        return [one for one in running if not (held and self._live[one])]

    def stats(self) -> EngineStats:
        running = min(len(self._live), self.script.max_num_seqs)
        return EngineStats(
            num_running=running, num_waiting=len(self._live) - running, num_blocks=64,
            num_used_blocks=running, prefix_queries_total=0, prefix_hits_total=0,
            preemptions_total=0, prompt_tokens_total=self._prompt_total,
            generation_tokens_total=self._generated_total, steps_total=self._steps,
            step_s_total=0.0,
        )  # fmt: skip

    def _extend(self, request_id: str, output: StepOutput) -> None:
        request, tokens = self._requests[request_id], self._live[request_id]
        sampling = request.sampling
        if not tokens:
            output.cached_tokens[request_id] = len(request.prompt) - 1
            self._prompt_total += len(request.prompt)
            if sampling.prompt_logprobs is not None:
                known = [self._logprobs(t, sampling.prompt_logprobs) for t in request.prompt[1:]]
                output.prompt_logprobs[request_id] = [None, *known]
        if len(tokens) == self.script.crash_at:
            raise RuntimeError("the scripted engine breaks here")
        if len(tokens) == self.script.kill_at:
            os._exit(9)
        if len(tokens) == self.script.fault_at:
            output.errors[request_id] = "the model computed NaN logits"
            self._row(request_id, -1, FinishReason.ERROR, output)
            return
        if sampling.max_tokens == 0:
            self._row(request_id, -1, FinishReason.LENGTH, output)
            return
        token = self._next(request, tokens)
        tokens.append(token)
        self._generated_total += 1
        eos = () if sampling.ignore_eos else (self.script.eos,)
        limit = sampling.max_tokens or self.script.max_model_len - len(request.prompt)
        stops = token in (*eos, *sampling.stop_token_ids)
        full = len(tokens) >= limit
        reason = FinishReason.STOP if stops else FinishReason.LENGTH if full else None
        self._row(request_id, token, reason, output)

    def _next(self, request: Request, tokens: list[int]) -> int:
        say = self.script.say
        if say is None:
            return request.prompt[len(tokens) % len(request.prompt)]
        return say[len(tokens)] if len(tokens) < len(say) else self.script.eos

    def _row(
        self, request_id: str, token: int, reason: FinishReason | None, output: StepOutput
    ) -> None:
        num_top = self._requests[request_id].sampling.logprobs
        output.request_ids.append(request_id)
        output.token_ids.append(token)
        output.finish_reasons.append(reason)
        known = token >= 0 and num_top is not None
        output.logprobs.append(self._logprobs(token, num_top or 0) if known else None)
        if reason is not None:
            self.abort(request_id)

    def _logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        others = [i for i in range(100, 130) if i != token][: max(0, num_top - 1)]
        tops = [token, *others][:num_top]
        return TokenLogprobs(
            token_id=token, value=-0.1234567, rank=1, top_ids=tuple(tops),
            top_values=tuple(-0.1234567 - i for i in range(len(tops))),
        )  # fmt: skip
