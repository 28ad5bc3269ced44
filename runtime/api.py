"""The runtime in one process, for scripts and the terminal: `LLM(artifact).generate(...)`.

Text in, text out, no HTTP. The engine runs in the calling thread.

    from runtime.api import LLM
    llm = LLM("smollm2-w4a16")
    print(llm.chat([{"role": "user", "content": "Hello"}], max_tokens=32).text)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.precheck import check_artifact
from runtime.request import FinishReason, Request, SamplingParams, StepOutput
from runtime.text import TextProcessor, TextStream


class GenerationError(RuntimeError):
    """The engine gave one sequence up (non-finite logits); the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextResult:
    """One answer. finish_reason is "stop" or "length"; token_ids include what ended it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int


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

    def generate(
        self, prompts: str | Sequence[str], *, stop: Sequence[str] = (), **sampling: Any
    ) -> list[TextResult]:
        """Continue each prompt; all run together. `sampling` are SamplingParams' fields.

        RequestError: a prompt or a setting the engine refuses; nothing runs then.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        return self._run([self.text.encode(text) for text in texts], stop, sampling)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stop: Sequence[str] = (), **sampling: Any
    ) -> TextResult:
        """Answer one conversation. ChatTemplateError: the model's template refuses it."""
        return self._run([self.text.encode_chat(messages)], stop, sampling)[0]

    def stream(
        self, token_ids: Sequence[int], *, stop: Sequence[str] = (), **sampling: Any
    ) -> Iterator[str]:
        """The answer to one prompt of token ids, piece by piece."""
        run = _Run(self.text.stream(stop, min_tokens=sampling.get("min_tokens", 0)))
        request = self._request(token_ids, sampling)
        self.engine.add(request)
        try:
            while not run.done:
                yield run.take(request.id, self.engine.step())
        finally:
            self.engine.abort(request.id)

    def _run(
        self, prompts: Sequence[Sequence[int]], stop: Sequence[str], sampling: Mapping[str, Any]
    ) -> list[TextResult]:
        min_tokens = sampling.get("min_tokens", 0)
        requests = [self._request(ids, sampling) for ids in prompts]
        runs = {r.id: _Run(self.text.stream(stop, min_tokens=min_tokens)) for r in requests}
        try:
            for request in requests:
                self.engine.add(request)
            while not all(run.done for run in runs.values()):
                output = self.engine.step()
                for request_id, run in runs.items():
                    run.take(request_id, output)
                    if run.done:
                        self.engine.abort(request_id)
        finally:
            for request_id in runs:
                self.engine.abort(request_id)
        return [runs[r.id].result(len(r.prompt)) for r in requests]

    def _request(self, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> Request:
        self._num_requests += 1
        params = SamplingParams(**sampling)
        return Request(id=f"llm-{self._num_requests}", prompt=tuple(token_ids), sampling=params)


class _Run:
    """Text of one sequence while it is made."""

    def __init__(self, stream: TextStream) -> None:
        self.reason: str | None = None
        self._stream = stream
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._cached = 0

    @property
    def done(self) -> bool:
        return self.reason is not None

    def take(self, request_id: str, output: StepOutput) -> str:
        """The rows of this sequence in one step; returns the text that is new."""
        self._cached = output.cached_tokens.get(request_id, self._cached)
        before = len(self._text)
        columns = zip(output.request_ids, output.token_ids, output.finish_reasons, strict=True)
        for row_id, token_id, reason in columns:
            if row_id == request_id and not self.done:
                self._row(token_id, reason, output.errors.get(request_id))
        return "".join(self._text[before:])

    def result(self, num_prompt: int) -> TextResult:
        assert self.reason is not None
        return TextResult(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self.reason,
            num_prompt_tokens=num_prompt,
            num_cached_tokens=self._cached,
        )

    def _row(self, token_id: int, reason: FinishReason | None, error: str | None) -> None:
        if reason is FinishReason.ERROR:
            raise GenerationError(error or "the engine gave this request up")
        if token_id >= 0:
            self._token_ids.append(token_id)
            if reason is not FinishReason.STOP:
                self._text.append(self._stream.push([token_id]))
        if self._stream.stopped is not None:
            self.reason = str(FinishReason.STOP)
        elif reason is not None:
            self._text.append(self._stream.finish())
            self.reason = str(reason)
