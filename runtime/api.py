"""The runtime in one process, for scripts and the terminal: `LLM(artifact).generate(...)`.

Text in, text out, no HTTP. The engine runs in the calling thread.

    from runtime.api import LLM
    llm = LLM("smollm2-w4a16")
    print(llm.chat([{"role": "user", "content": "Hello"}], max_tokens=32).text)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.precheck import check_artifact
from runtime.request import FinishReason, Request, SamplingParams, TokenLogprobs
from runtime.text import TextProcessor, TextStream


class GenerationError(RuntimeError):
    """The engine gave one sequence up (non-finite logits); the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextResult:
    """One answer. finish_reason is "stop" or "length"; token_ids include what ended it.

    logprobs: one entry per token id, None unless asked for; prompt_logprobs: one per prompt token,
    None for the first, which nothing stands before.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class LLM:
    """An artifact, loaded and ready. Keyword arguments are EngineConfig's fields.

    Raises ArtifactError, ConfigError or TextError when the artifact cannot be run.
    """

    def __init__(self, artifact: str | Path, **config: Any) -> None:
        path = Path(artifact)
        check_artifact(path)
        self.text = TextProcessor.load(path)
        self.engine = Engine.from_artifact(path, EngineConfig(**config))
        self._num_requests = 0
        self._runs: dict[str, _Run] = {}

    def generate(
        self, prompts: str | Sequence[str], *, stop: str | Sequence[str] = (), **sampling: Any
    ) -> list[TextResult]:
        """Continue each prompt; all run together. `sampling` are SamplingParams' fields.

        RequestError: a prompt or a setting the engine refuses; nothing runs then.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        return self._run([self.text.encode(text) for text in texts], stop, sampling)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stop: str | Sequence[str] = (),
        **sampling: Any,
    ) -> TextResult:
        """Answer one conversation. ChatTemplateError: the model's template refuses it."""
        return self._run([self.text.encode_chat(messages)], stop, sampling)[0]

    def stream(
        self, token_ids: Sequence[int], *, stop: str | Sequence[str] = (), **sampling: Any
    ) -> Iterator[str]:
        """The answer to one prompt of token ids, piece by piece.

        Other calls may run between two pieces, further streams too; they share the engine's steps.
        """
        with self._running([token_ids], stop, sampling) as runs:
            run = runs[0]
            while not run.done:
                self._step()
                yield run.read()
            if rest := run.read():  # it ended in a step of another call
                yield rest

    def _run(
        self, prompts: Sequence[Sequence[int]], stop: str | Sequence[str], sampling: dict[str, Any]
    ) -> list[TextResult]:
        with self._running(prompts, stop, sampling) as runs:
            while not all(run.done for run in runs):
                self._step()
                for run in runs:
                    run.raise_error()
            return [run.result() for run in runs]

    @contextmanager
    def _running(
        self, prompts: Sequence[Sequence[int]], stop: str | Sequence[str], sampling: dict[str, Any]
    ) -> Iterator[list[_Run]]:
        """Runs of these prompts, known to the engine until the block is left."""
        stops = (stop,) if isinstance(stop, str) else stop
        min_tokens = sampling.get("min_tokens", 0)
        runs = [
            _Run(self._request(ids, sampling), self.text.stream(stops, min_tokens=min_tokens))
            for ids in prompts
        ]
        try:
            for run in runs:
                self.engine.add(run.request)
                self._runs[run.request.id] = run
            yield runs
        finally:
            for run in runs:
                self.engine.abort(run.request.id)
                self._runs.pop(run.request.id, None)

    def _step(self) -> None:
        """One step of the engine; each run gets its rows, whoever asked for the step."""
        output = self.engine.step()
        rows = zip(
            output.request_ids, output.token_ids, output.finish_reasons, output.logprobs,
            strict=True,
        )  # fmt: skip
        for request_id, token_id, reason, logprobs in rows:
            run = self._runs.get(request_id)
            if run is None or run.done:
                continue
            run.num_cached = output.cached_tokens.get(request_id, run.num_cached)
            run.prompt_logprobs = output.prompt_logprobs.get(request_id, run.prompt_logprobs)
            if logprobs is not None:
                run.logprobs.append(logprobs)
            run.take(token_id, reason, output.errors.get(request_id))
            if run.done:
                self.engine.abort(request_id)

    def _request(self, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> Request:
        self._num_requests += 1
        params = SamplingParams(**sampling)
        return Request(id=f"llm-{self._num_requests}", prompt=tuple(token_ids), sampling=params)


class _Run:
    """Text of one sequence while it is made."""

    def __init__(self, request: Request, stream: TextStream) -> None:
        self.request = request
        self.reason: str | None = None
        self.num_cached = 0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._error: str | None = None
        self._stream = stream
        self._text: list[str] = []
        self._num_read = 0
        self._token_ids: list[int] = []

    @property
    def done(self) -> bool:
        return self.reason is not None

    def take(self, token_id: int, reason: FinishReason | None, error: str | None) -> None:
        """One row of this sequence."""
        if reason is FinishReason.ERROR:
            self.reason, self._error = str(reason), error or "the engine gave this request up"
            return
        if token_id >= 0:
            self._token_ids.append(token_id)
            if reason is not FinishReason.STOP:
                self._text.append(self._stream.push([token_id]))
        if self._stream.stopped is not None:
            self.reason = str(FinishReason.STOP)
        elif reason is not None:
            self._text.append(self._stream.finish())
            self.reason = str(reason)

    def read(self) -> str:
        """The text since the last call."""
        self.raise_error()
        start, self._num_read = self._num_read, len(self._text)
        return "".join(self._text[start:])

    def raise_error(self) -> None:
        if self._error is not None:
            raise GenerationError(self._error)

    def result(self) -> TextResult:
        assert self.reason is not None
        is_asked = self.request.sampling.logprobs is not None
        known = self.prompt_logprobs
        return TextResult(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self.reason,
            num_prompt_tokens=len(self.request.prompt),
            num_cached_tokens=self.num_cached,
            logprobs=tuple(self.logprobs) if is_asked else None,
            prompt_logprobs=None if known is None else tuple(known),
        )
