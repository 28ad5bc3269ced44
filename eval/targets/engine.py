"""EngineTarget: our engine in this process, so that what is judged are the kernels that serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from eval.errors import EvaluationError, TargetError
from eval.targets.base import Advance, Answer, Finish, Keep, Prompt, TokenScores, forget
from runtime.config import ConfigError, EngineConfig
from runtime.engine import numerics
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem
from runtime.request import FinishReason, Request, RequestError, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

# More would fill a step no better, and an interrupted run would lose more.
_CHOSEN_AT_ONCE = 16

_FINISHES: dict[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "error",
    FinishReason.ERROR: "error",
}


class EngineTarget:
    """An artifact in the engine.

    TargetError: the engine cannot run this model. ArtifactError, ConfigError: as the engine raises.
    """

    def __init__(self, artifact: Path, config: EngineConfig) -> None:
        try:
            self.engine = Engine.from_artifact(artifact, config)
        except ConfigError:
            raise
        except ValueError as error:  # a family or rope kind that the decoder does not compute
            raise TargetError(f"{artifact} cannot run in the engine: {error}") from error
        resolved = self.engine.resolved
        self.description = (
            f"Weighbridge engine, {resolved.dtype} on {resolved.device}, "
            f"KV cache {resolved.kv_cache_dtype}"
        )
        self.max_tokens: int = resolved.max_model_len

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The model's end-of-text ids."""
        return self.engine.resolved.eos_token_ids

    def numerics(self) -> dict[str, str]:
        """device_class, compute_dtype, kv_cache_dtype and lm_head_scheme, for the stamp."""
        return numerics(self.engine)

    def score(
        self, windows: Sequence[Sequence[int]], references: Sequence[Tensor]
    ) -> list[TokenScores]:
        """Score windows against the reference's [n - 1, V] log-probabilities."""
        items = [
            ScoreItem(token_ids=tuple(window), reference=reference)
            for window, reference in zip(windows, references, strict=True)
        ]
        try:
            scores = self.engine.score(items)
        except RequestError as error:
            raise EvaluationError(
                f"the engine refused a window: {error}; does this base belong to the artifact?"
            ) from error
        return [
            TokenScores(nll=list(s.nll), kl=list(s.kl or ()), agrees=list(s.top1_agree or ()))
            for s in scores
        ]

    def generate(
        self, prompts: Sequence[Prompt], advance: Advance, keep: Keep = forget
    ) -> list[Answer]:
        """Greedy answers, all prompts in flight together; a fault of one ends that one only."""
        for index, prompt in enumerate(prompts):
            self._add(index, prompt)
        token_ids: list[list[int]] = [[] for _ in prompts]
        answers: dict[int, Answer] = {}
        while self.engine.has_work:
            step = self.engine.step()
            ended = len(answers)
            for request_id, token, reason in zip(
                step.request_ids, step.token_ids, step.finish_reasons, strict=True
            ):
                index = int(request_id)
                if token >= 0:
                    token_ids[index].append(token)
                if reason is not None:
                    answers[index] = self._answer(token_ids[index], _FINISHES[reason])
                    keep(index, answers[index])
            advance(len(answers) - ended)
        return [answers[index] for index in range(len(prompts))]

    def choose(
        self, prompts: Sequence[Prompt], advance: Advance, keep: Keep = forget
    ) -> list[Answer]:
        """Log-likelihoods of the choices, the choices of a few prompts together."""
        answers: list[Answer] = []
        for start in range(0, len(prompts), _CHOSEN_AT_ONCE):
            for found in self._chosen(prompts, start):
                scores = tuple(-sum(nll) for nll in found)
                answers.append(Answer(token_ids=(), finish="stop", choice_logprobs=scores))
                keep(len(answers) - 1, answers[-1])
                advance(1)
        return answers

    def _chosen(self, prompts: Sequence[Prompt], start: int) -> list[list[list[float]]]:
        """Of the next few prompts, per choice, the NLL of its tokens."""
        part = list(prompts[start : start + _CHOSEN_AT_ONCE])
        items = [
            ScoreItem(token_ids=(*p.token_ids, *c), num_given=len(p.token_ids))
            for p in part
            for c in p.choices
        ]
        try:
            scores = iter(self.engine.score(items))
        except RequestError as error:
            raise EvaluationError(
                f"the engine refused one of prompts {start} to {start + len(part) - 1}: {error}"
            ) from error
        return [[next(scores).nll for _ in prompt.choices] for prompt in part]

    def _add(self, index: int, prompt: Prompt) -> None:
        how = {"temperature": 0.0} if prompt.draw is None else asdict(prompt.draw)
        sampling = SamplingParams(max_tokens=prompt.max_tokens, **how)
        try:
            self.engine.add(Request(id=str(index), prompt=prompt.token_ids, sampling=sampling))
        except RequestError as error:
            raise EvaluationError(f"the engine refused prompt {index}: {error}") from error

    def _answer(self, token_ids: list[int], finish: Finish) -> Answer:
        stopped = finish == "stop" and token_ids and token_ids[-1] in self.stop_ids
        return Answer(token_ids=tuple(token_ids[:-1] if stopped else token_ids), finish=finish)
