"""The start of a run: calibration windows and probe prompts, embedded, at the door of layer 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from quant.artifact.scheme import Scheme
from quant.capture import Batch, Stream, make_batches
from quant.checkpoint import Source
from quant.errors import SourceError
from quant.gradient_job import Gradient, learns
from quant.layer_job import MethodSettings
from quant.layer_store import LayerStore
from quant.methods.gptq import GPTQSettings
from quant.modelling import EMBEDDING_WEIGHT, Skeleton
from quant.parallel import Ranks, share_of
from quant.plan import Plan
from quant.provenance import RunInputs
from quant.recipe import Recipe
from quant.report import ModuleResult
from quant.smooth_layer import SmoothSettings
from quant.spill import Shelves

PROBE_TEXTS = (
    "This Agreement shall be governed by the laws of the State of",
    "def add(a, b):\n    return",
    '{"name": "Acme", "total":',
    "The customer asked when the parcel would arrive, and the agent replied",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True, kw_only=True)
class RunState:
    """What one run works with. `calibration` is None when no method needs statistics; `long_texts`
    are for KV scales alone; `original` is the calibration windows as the original model sees them,
    where a method aims at its outputs. Of all streams each rank has its share (of the probe, rank 0
    has all)."""

    source: Source
    plan: Plan
    skeleton: Skeleton
    store: LayerStore
    settings: MethodSettings
    smooth: SmoothSettings | None
    calibration: Stream | None
    probe: Stream
    gradient: Gradient | None = None
    long_texts: Stream | None = None
    original: Stream | None = None
    results: dict[str, ModuleResult] = field(default_factory=dict)

    @property
    def streams(self) -> tuple[Stream, ...]:
        every = (self.calibration, self.long_texts, self.probe)
        return tuple(stream for stream in every if stream is not None)

    def schemes(self, layer: int | None) -> dict[str, Scheme]:
        """Schemes of a layer's linears (None: of lm_head)."""
        return {row.module: row.scheme for row in self.plan.layer_rows(layer)}


def start_run(inputs: RunInputs, store: LayerStore, ranks: Ranks, shelves: Shelves) -> RunState:
    """Embed the windows and the probe prompts; everything is then at the door of layer 0."""
    source, plan, recipe, device = inputs.source, inputs.plan, inputs.recipe, inputs.device
    skeleton = source.skeleton if device == "cpu" else Skeleton(source.config, device)
    dtype = DTYPES[plan.dtype]
    gptq = GPTQSettings(**recipe.gptq.model_dump(exclude={"target"}))
    probe = _probe_stream(source, ranks)
    windows = _window_stream(inputs, ranks)
    long_texts = _long_stream(inputs, ranks)
    streams = [stream for stream in (probe, windows, long_texts) if stream is not None]
    embedding = stored_tensors(source, dtype, [EMBEDDING_WEIGHT])
    check_ids(source, streams)
    place = partial(shelves.place, width=plan.hidden_size, dtype=skeleton.compute_dtype)
    for i, stream in enumerate(streams):
        ids = [batch.token_ids for batch in stream.batches]
        stream.home, stream.shelf = place(f"stream{i}", ids)
        stream.fill(skeleton.embed(embedding, ids))
    return RunState(
        source=source, plan=plan, skeleton=skeleton, store=store,
        settings=MethodSettings(dtype=dtype, gptq=gptq),
        smooth=SmoothSettings(**recipe.smooth.model_dump()) if plan.is_smoothed else None,
        calibration=windows, probe=probe,
        gradient=Gradient.of(recipe) if learns(plan.rows) else None, long_texts=long_texts,
        original=_original_stream(plan, windows, place),
    )  # fmt: skip


def _probe_stream(source: Source, ranks: Ranks) -> Stream:
    prompts = probe_ids(source) if ranks.rank == 0 else []
    batches = [Batch.single(i, ids) for i, ids in enumerate(prompts)]
    return Stream(batches=batches, ranks=ranks)


def _window_stream(inputs: RunInputs, ranks: Ranks) -> Stream | None:
    """This rank's calibration windows; None where none flow through the layers."""
    if inputs.calibration is None or not inputs.plan.needs_calibration:
        return None
    windows = inputs.calibration.samples
    mine = share_of([len(ids) for ids in windows], ranks)
    batch_tokens = tokens_at_once(inputs.recipe, inputs.plan, inputs.device)
    return Stream(batches=make_batches(windows, batch_tokens, mine), ranks=ranks)


def _long_stream(inputs: RunInputs, ranks: Ranks) -> Stream | None:
    """This rank's texts longer than a window; None where KV scales are not measured on such."""
    calibration = inputs.calibration
    if calibration is None or not calibration.long_samples or not inputs.recipe.calibrates_kv:
        return None
    windows = list(calibration.long_samples)
    windows *= -(-ranks.size // len(windows))  # each rank has one; twice the same is harmless
    mine = share_of([len(ids) for ids in windows], ranks)
    return Stream(batches=make_batches(windows, 1, mine), ranks=ranks)


def _original_stream(
    plan: Plan,
    windows: Stream | None,
    place: Callable[..., tuple[torch.device, list[Tensor] | None]],
) -> Stream | None:
    """The calibration windows once more, for the original model; None where nothing aims at it."""
    if windows is None or not (plan.gptq_target == "original" or learns(plan.rows)):
        return None
    home, shelf = place("original", [batch.token_ids for batch in windows.batches])
    original = replace(windows, home=home, shelf=shelf)
    original.fill(windows.hidden)
    return original


def tokens_at_once(recipe: Recipe, plan: Plan, device: str) -> int:
    """Tokens of a batch. Where the recipe does not say, a GPU takes as many as keep it busy, and
    no tensor of a layer is larger than 2^28 values for it."""
    asked = recipe.calibration
    if torch.device(device).type != "cuda" or "batch_tokens" in asked.model_fields_set:
        return asked.batch_tokens
    widest = max(max(row.shape) for row in plan.rows if row.layer is not None)
    return max(asked.batch_tokens, min(1 << 15, (1 << 28) // widest))


def check_ids(source: Source, streams: Sequence[Stream]) -> None:
    """SourceError when the tokenizer makes an id that the model has no embedding for."""
    rows = source.shape(EMBEDDING_WEIGHT)[0]
    batches = [batch for stream in streams for batch in stream.batches]
    largest = max((int(batch.token_ids.max()) for batch in batches), default=0)
    if largest >= rows:
        raise SourceError(
            f"{source.path}: the tokenizer makes the id {largest}, but the model has {rows} "
            "embeddings; the tokenizer files are of another model"
        )


def probe_ids(source: Source) -> list[list[int]]:
    """Token ids of the probe prompts."""
    tokenizer = source.tokenizer()
    ids = [list(tokenizer(text)["input_ids"]) for text in PROBE_TEXTS]
    if not all(ids):
        raise SourceError(f"{source.path}: the tokenizer makes no tokens of plain English")
    return ids


def stored_tensors(source: Source, dtype: torch.dtype, names: list[str]) -> dict[str, Tensor]:
    """Dense tensors in the artifact's dtype; SourceError names one that does not fit it."""
    found = {}
    for name in names:
        original = source.tensor(name)
        found[name] = original.to(dtype)
        if not bool(torch.isfinite(found[name]).all()):
            raise SourceError(
                f"tensor {name} holds {float(original.abs().max()):.4g}, which does not fit "
                f"{dtype}; set `dtype: bfloat16` or `dtype: float32` in the recipe"
            )
    return found


def on_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors where they are computed with. They travel in the dtype they are stored in."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}
