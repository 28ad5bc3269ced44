"""ReferenceTarget: the base model in transformers, float32 where it fits: the independent witness.

Its tokenizer comes from the checkpoint itself, so that base and artifact can be compared. What it
says is kept in the cache: answers as token ids, and per window the final hidden states, from which
the output head makes the full-vocabulary log-probabilities again, to the last bit on one machine.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import DynamicCache

from eval.cache import Cache
from eval.errors import TargetError
from eval.fitting import Fit
from eval.targets.base import Advance, Answer, Finish, Prompt
from eval.targets.batching import batches, limits_of
from eval.targets.checkpoint import Checkpoint
from quant.gguf_reading import QuickReader, parsed_for_transformers
from runtime.engine.sampler import SamplingRow, sample
from runtime.request import SamplingParams


class ReferenceTarget:
    """A base model. With everything in the cache only its head computes.

    `fit` is what it computes in; None is float32.

    Attributes:
        description: how it computes and what the weights were stored as.
        digest: of the checkpoint's bytes.
        limits: how many prompts are answered together.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, device: str, cache: Cache, fit: Fit | None = None
    ) -> None:
        fit = fit or Fit(dtype=torch.float32, why="")
        self.digest = checkpoint.digest
        self._name = checkpoint.name
        self.description = _described(fit, device) + _stored_as(checkpoint, cache)
        self._device = device
        self._dtype = fit.dtype
        self._cache = cache
        self._model = _load_model(checkpoint, device, fit.dtype)
        self._can_replay: bool | None = None
        self.limits = limits_of(self._model.config.get_text_config(), device, fit.dtype)

    @property
    def model(self) -> Any:
        """The torch module itself, for what swaps weights in it (`eval.blame_model`)."""
        return self._model

    def require_vocabulary(self, size: int) -> None:
        """TargetError unless the output head has `size` rows, as the artifact's has."""
        found = len(self._model.get_output_embeddings().weight)
        if found != size:
            raise TargetError(
                f"the base {self._name} has a vocabulary of {found} tokens, the artifact of "
                f"{size}: it was not made from this model; pass the right one with --base"
            )

    def logprobs(self, windows: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        """Per window [n - 1, V] float32 log-probabilities of the next token, one at a time.

        TargetError where the base gives NaN: nothing can be held to it.
        """
        for window in windows:
            rows = self._logits(tuple(window))[:-1].float().log_softmax(-1)
            if bool(rows.isnan().any()):
                raise TargetError(
                    "the base gives NaN or Inf on held-out text: nothing can be held to it; "
                    f"look at the weights of {self._name}"
                )
            yield rows

    @torch.inference_mode()
    def _logits(self, window: tuple[int, ...]) -> torch.Tensor:
        """[n, V] logits, through the cached hidden states where the head can be replayed."""
        ids = torch.tensor([window], device=self._device)
        if self._can_replay is None:
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
            self._can_replay = torch.equal(self._head(self._hidden(window, ids)), logits)
            return logits
        if not self._can_replay:
            whole: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
            return whole
        return self._head(self._hidden(window, ids))

    def _hidden(self, window: tuple[int, ...], ids: torch.Tensor) -> torch.Tensor:
        key = self._key("hidden", window)
        cached = self._cache.tensor(key)
        if cached is not None:
            return cached.to(self._device)
        hidden: torch.Tensor = self._model.base_model(
            input_ids=ids, use_cache=False
        ).last_hidden_state[0]
        self._cache.put_tensor(key, hidden)
        return hidden

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        cap = getattr(self._model.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.inference_mode()
    def logprobs_together(self, windows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """As `logprobs`, computed in one batch, padded on the right: the same up to rounding."""
        width = max(map(len, windows))
        rows = [[*window, *[0] * (width - len(window))] for window in windows]
        mask = [[1] * len(window) + [0] * (width - len(window)) for window in windows]
        logits = self._model(
            input_ids=torch.tensor(rows, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            use_cache=False,
        ).logits
        return [
            row[: len(window) - 1].float().log_softmax(-1)
            for row, window in zip(logits, windows, strict=True)
        ]

    def generate(
        self,
        prompts: Sequence[Prompt],
        stop_ids: Sequence[int],
        advance: Advance,
        *,
        together: bool = True,
    ) -> list[Answer]:
        """Answers, greedy or drawn, in left-padded batches or one at a time."""
        limits = self.limits if together else replace(self.limits, rows=1)
        what = f"answers, {limits.rows} at once"
        keys = [self._key(what, _asked(p, stop_ids)) for p in prompts]
        answers = {i: _from_json(v) for i, key in enumerate(keys) if (v := self._cache.json(key))}
        advance(len(answers))
        missing = [i for i in range(len(prompts)) if i not in answers]
        for places in batches([prompts[i] for i in missing], limits):
            batch = [missing[place] for place in places]
            made = self._generate_batch([prompts[i] for i in batch], stop_ids)
            for i, answer in zip(batch, made, strict=True):
                answers[i] = answer
                self._cache.put_json(keys[i], [list(answer.token_ids), answer.finish])
            advance(len(batch))
        return [answers[i] for i in range(len(prompts))]

    def choose(self, prompts: Sequence[Prompt], advance: Advance) -> list[Answer]:
        """Log-likelihoods of the choices: the prompt once, then each choice behind its keys."""
        answers = []
        for prompt in prompts:
            key = self._key("choices", [prompt.token_ids, prompt.choices])
            found = self._cache.json(key)
            if found is None:
                found = self._loglikelihoods(prompt)
                self._cache.put_json(key, found)
            answers.append(Answer(token_ids=(), finish="stop", choice_logprobs=tuple(found)))
            advance(1)
        return answers

    @torch.inference_mode()
    def _loglikelihoods(self, prompt: Prompt) -> list[float]:
        """Per choice the sum of log P(token) over its tokens behind the prompt, nats."""
        # Sliding layers too keep the whole prompt, so that a choice can be taken back.
        cache = DynamicCache()
        first = self._forward(cache, prompt.token_ids, logits_to_keep=1)
        return [self._behind(cache, first, choice) for choice in prompt.choices]

    def _behind(self, cache: DynamicCache, first: torch.Tensor, choice: tuple[int, ...]) -> float:
        """first: the prompt's last logits [1, V]. The cache is given back as it came."""
        rows, behind = first, choice[:-1]
        if behind:
            rows = torch.cat((first, self._forward(cache, behind)))
            cache.crop(-len(behind))
        picked = torch.tensor(choice, device=self._device)[:, None]
        return float(rows.float().log_softmax(-1).gather(1, picked).double().sum())

    def _forward(
        self, cache: DynamicCache, token_ids: Sequence[int], **options: int
    ) -> torch.Tensor:
        """Logits [n, V] of tokens behind what the cache holds; they join it."""
        ids = torch.tensor([token_ids], device=self._device)
        # Newer releases of transformers call it `cache` and warn of the other name.
        taken = inspect.signature(self._model.forward).parameters
        name = "cache" if "cache" in taken else "past_key_values"
        logits: torch.Tensor = self._model(
            input_ids=ids, use_cache=True, **{name: cache}, **options
        ).logits[0]
        return logits

    @torch.inference_mode()
    def _generate_batch(self, prompts: list[Prompt], stop_ids: Sequence[int]) -> list[Answer]:
        width = max(len(p.token_ids) for p in prompts)
        pad = stop_ids[0] if stop_ids else 0
        rows = [[pad] * (width - len(p.token_ids)) + list(p.token_ids) for p in prompts]
        mask = [[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts]
        # generate() derives positions from the mask, so padding moves nothing.
        output = self._model.generate(
            input_ids=torch.tensor(rows, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            generation_config=_greedy(max(p.max_tokens for p in prompts), pad, stop_ids),
            logits_processor=[_Drawing(prompts, width)],
        )
        tails = output[:, width:].tolist()
        return [_trim(tail, p.max_tokens, stop_ids) for tail, p in zip(tails, prompts, strict=True)]

    def _key(self, what: str, content: Any) -> list[Any]:
        narrow = [] if self._dtype == torch.float32 else [str(self._dtype)]
        return [what, self.digest, self._device, versions(), content, *narrow]


def _asked(prompt: Prompt, stop_ids: Sequence[int]) -> list[Any]:
    """What decides an answer; a greedy one's key is as long as it ever was."""
    drawn = [] if prompt.draw is None else [list(astuple(prompt.draw))]
    return [prompt.token_ids, prompt.max_tokens, list(stop_ids), *drawn]


class _Drawing(transformers.LogitsProcessor):  # type: ignore[misc]
    """Draws the rows that are to be drawn by the engine's own definition; greedy then takes that.

    A row's random number depends on its seed and its number of tokens alone: neither on the batch
    nor on the model, and both models meet the same ones (docs/decisions/0020).
    """

    def __init__(self, prompts: Sequence[Prompt], width: int) -> None:
        self._draws = [(i, p.draw) for i, p in enumerate(prompts) if p.draw is not None]
        self._width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores: [B, V] logits. Rows that are drawn come back as 0 at the drawn id, else -inf."""
        if not self._draws:
            return scores
        number = input_ids.shape[1] - self._width
        rows = [
            SamplingRow(
                params=SamplingParams(temperature=d.temperature, top_p=d.top_p),
                seed=d.seed, num_generated=number,
            )
            for _, d in self._draws
        ]  # fmt: skip
        places = torch.tensor([i for i, _ in self._draws], device=scores.device)
        drawn = sample(scores[places].float(), rows)
        scores = scores.clone()
        scores[places] = -torch.inf
        scores[places, drawn] = 0.0
        return scores


def versions() -> list[str]:
    """What besides the checkpoint decides the reference's outputs."""
    return [torch.__version__, transformers.__version__]


def quiet_transformers() -> None:
    """No progress bars and no chatter from transformers; errors still come as exceptions."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's own tokenizer; TargetError when there is none."""
    options = {"gguf_file": checkpoint.gguf_file} if checkpoint.gguf_file else {}
    try:
        with _parsed(checkpoint):
            return transformers.AutoTokenizer.from_pretrained(
                str(checkpoint.directory), local_files_only=True, **options
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TargetError(
            f"the base {checkpoint.name} has no usable tokenizer: {_first_line(error)}"
        ) from error


def load_weights(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json's content and all tensors in float32, under checkpoint names; as ReferenceTarget
    computes with them, whatever the file held. Raises TargetError as it does."""
    model = _load_model(checkpoint, "cpu", torch.float32)
    config = json.loads(model.config.to_json_string(use_diff=False))
    return {**config, "architectures": [type(model).__name__]}, model.state_dict()


def _parsed(checkpoint: Checkpoint) -> contextlib.AbstractContextManager[None]:
    if checkpoint.gguf_file is None:
        return contextlib.nullcontext()
    return parsed_for_transformers(checkpoint.directory / checkpoint.gguf_file)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _load_model(checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {"use_safetensors": True}
    if checkpoint.gguf_file:
        dequantize = transformers.GgufConfig(dequantize=True)
        options = {"gguf_file": checkpoint.gguf_file, "quantization_config": dequantize}
    try:
        # The GGUF reader's own progress bar goes nowhere.
        with contextlib.redirect_stderr(io.StringIO()), _parsed(checkpoint):
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                str(checkpoint.directory),
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise TargetError(
            f"the base {checkpoint.name} cannot be loaded: {_first_line(error)}"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        # transformers would fill them with random numbers and only warn.
        raise TargetError(
            f"the base {checkpoint.name} lacks {len(missing)} weights ({missing[0]}, ...); "
            "fetch it again"
        )
    model = _held_in_memory(model.to(device))
    checkpoint.require_unchanged()
    # Sampling defaults and penalties that ship with a model must not touch a greedy answer.
    model.generation_config = transformers.GenerationConfig()
    return model.eval()


def _held_in_memory(model: Any) -> Any:
    """The model with weights of its own. Those that are stored in the type they are computed in lie
    in the mapped file: whoever wrote into it would change the base in the middle of a run, and what
    is cached under its digest."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
    return model


def _greedy(max_tokens: int, pad: int, stop_ids: Sequence[int]) -> Any:
    return transformers.GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=pad,
        eos_token_id=list(stop_ids) or None,
    )


def _trim(token_ids: list[int], max_tokens: int, stop_ids: Sequence[int]) -> Answer:
    """Cut at the first stop token or at the row's own limit, whichever comes first."""
    kept = token_ids[:max_tokens]
    stop_at = next((i for i, token in enumerate(kept) if token in stop_ids), None)
    finish: Finish = "length" if stop_at is None else "stop"
    return Answer(token_ids=tuple(kept[:stop_at]), finish=finish)


def _from_json(value: Any) -> Answer:
    return Answer(token_ids=tuple(value[0]), finish=value[1])


def _described(fit: Fit, device: str) -> str:
    name = str(fit.dtype).removeprefix("torch.")
    return f"transformers, {name} on {device}" + (f" ({fit.why})" if fit.why else "")


def _stored_as(checkpoint: Checkpoint, cache: Cache) -> str:
    """What the weights were on disk: a de-quantized base is no unquantized reference."""
    if checkpoint.gguf_file is None:
        return ""
    key = ["gguf types", checkpoint.digest]
    types = cache.json(key)
    if types is None:
        types = _gguf_types(checkpoint)
        cache.put_json(key, types)
    return f"; weights de-quantized from GGUF {', '.join(f'{t} ({n})' for t, n in types)}"


def _gguf_types(checkpoint: Checkpoint) -> list[list[Any]]:
    assert checkpoint.gguf_file is not None
    tensors = QuickReader(checkpoint.directory / checkpoint.gguf_file).tensors
    counts = Counter(t.tensor_type.name for t in tensors if len(t.shape) > 1)
    return [[name, count] for name, count in counts.most_common()]
