"""The one loop: for each decoder layer capture -> methods -> write -> feed the quantized output on.

Read this first. `run` takes a source, a plan and calibration windows and leaves a sealed artifact.
One layer is in memory at a time, and the hidden states of the calibration windows between two
layers; each finished layer is on disk before the next one begins. A run that was killed is resumed
by running it again: finished layers are read back instead of quantized, the hidden states pass
through them as before, and the result is the same to the last bit (on one machine, device and
number of threads).

Everything that follows a layer sees what was *stored*, read back through the layout, never the
tensors that were about to be stored.

It does not know how a layer computes (`quant.modelling`), how codes are chosen (`quant.layer_job`,
`quant.methods`) nor how files are made durable (`quant.artifact.writer`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quant.artifact.errors import SchemeError
from quant.artifact.probe import ProbeRecord, make_probe
from quant.artifact.scheme import DENSE, Scheme
from quant.artifact.writer import ArtifactWriter
from quant.calibration import Calibration
from quant.capture import Batch, Stream, make_batches, tapped
from quant.checkpoint import Source
from quant.errors import PipelineError, SourceError
from quant.expert_job import quantize_experts
from quant.folds import MAPPINGS
from quant.gradient_job import Gradient, LearnWork, learn_layer, learns, start_of
from quant.kv_layer import layer_scales, planned_kv, stored_tap
from quant.kv_scales import scale_names
from quant.layer_job import (
    MethodSettings,
    dense_state,
    quantize_input,
    quantize_stage,
    stored_parts,
)
from quant.layer_store import LayerStore
from quant.methods.gptq import GPTQSettings
from quant.modelling import HEAD, Skeleton, linear_of
from quant.original import Beside, can_aim, quantize_towards
from quant.outcome import Outcomes
from quant.parallel import Ranks, Single, share_of
from quant.plan import Plan
from quant.provenance import Describe, finish, job_identity, no_texts, stage_files
from quant.recipe import Recipe
from quant.report import ModuleResult, RunReport
from quant.smooth_layer import NO_FOLD, FoldNote, LayerTensors, SmoothSettings, smooth_layer
from quant.spill import UNLIMITED, MemoryLimits, Shelves

PROBE_TEXTS = (
    "This Agreement shall be governed by the laws of the State of",
    "def add(a, b):\n    return",
    '{"name": "Acme", "total":',
    "The customer asked when the parcel would arrive, and the agent replied",
)
# What several ranks can share: their statistics are sums over tokens.
SHARED_METHODS = frozenset({"none", "rtn", "gptq", "awq"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Progress(Protocol):
    """Told how far a run is."""

    def start(self, total_layers: int) -> None: ...

    def layer(self, index: int, text: str) -> None: ...

    def done(self) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def start(self, total_layers: int) -> None:
        return

    def layer(self, index: int, text: str) -> None:
        return

    def done(self) -> None:
        return


@dataclass(slots=True, kw_only=True)
class Job:
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


def run(
    source: Source,
    plan: Plan,
    recipe: Recipe,
    calibration: Calibration | None,
    out: Path,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
    overwrite: bool = False,
    resume: bool = True,
    describe: Describe = no_texts,
    ranks: Ranks | None = None,
    memory: MemoryLimits = UNLIMITED,
) -> RunReport:
    """Carry out `plan` on `source` and seal the artifact at `out`.

    ranks: the processes that do this together, each calling `run` (None: this one alone).
    memory: of a process; hidden states that do not fit go to the host, then to disk beside `out`.
    A partial run of the same job (model, recipe, calibration, versions, device, threads) is taken
    up again unless `resume` is False. `describe` makes the files beside the weights that tell of
    the run; they appear with the artifact. Raises PipelineError (calibration missing), SourceError
    (weights or activations that are not finite), SchemeError (a scale that does not fit, module
    named) and StorageError; none of them leaves anything at `out`.
    """
    clock, ranks = Clock(), ranks or Single()
    check_run(source, plan, calibration)
    check_ranks(plan, calibration, ranks)
    identity = job_identity(source, plan, recipe, calibration, device, ranks.size)
    ranks.agree("job", identity)
    with open_writer(
        source, plan, out, identity, overwrite=overwrite, resume=resume, ranks=ranks
    ) as writer:
        store = LayerStore(writer, ranks)
        resumed = len(store.committed)
        if writer is not None:
            stage_files(source, recipe, writer)
        shelves = Shelves(out, device, ranks, memory)
        job = start_job(source, plan, recipe, calibration, store, device, ranks, shelves)
        clock.lap("read and embed")
        quantize_layers(job, progress or Silent())
        clock.lap("layers")
        store_outer(job)

        def seal() -> RunReport:
            assert writer is not None
            probe = run_probe(job, writer.read_shard(0))
            clock.lap("head and probe")
            return finish(
                source, plan, recipe, calibration, writer, probe, job.results,
                seconds=clock.seconds, resumed=resumed, device=device, ranks=ranks.size,
                describe=describe,
            )  # fmt: skip

        return ranks.first(seal)


class Clock:
    """Seconds per stage of a run, in order."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Book the time since the last lap under `stage`."""
        now = time.perf_counter()
        self.seconds[stage], self._since = now - self._since, now


def quantize_layers(job: Job, progress: Progress) -> None:
    """The loop over the decoder layers."""
    progress.start(job.plan.num_layers)
    for index in range(job.plan.num_layers):
        progress.layer(index, f"layer {index + 1} of {job.plan.num_layers}")
        tensors = stored_layer(job, index)
        advance(job, index, tensors)
        advance_original(job, index)
    progress.done()


@contextmanager
def open_writer(
    source: Source,
    plan: Plan,
    out: Path,
    identity: dict[str, Any],
    *,
    overwrite: bool,
    resume: bool,
    ranks: Ranks,
) -> Iterator[ArtifactWriter | None]:
    """The writer of this job; None on other ranks than the first. Faults of the input, on any rank,
    discard what was staged: a retry would meet them again. After anything else (a full disk, a
    kill) the finished layers stay for the next run."""
    if ranks.rank != 0:
        yield None
        return

    def make() -> ArtifactWriter:
        return ArtifactWriter(
            out, num_shards=plan.num_layers + 1, job=identity, overwrite=overwrite,
            source_path=source.path,
        )  # fmt: skip

    writer = make()
    if not resume:
        writer.discard()
        writer = make()
    with writer:
        try:
            yield writer
        except (SourceError, SchemeError):
            writer.discard()
            raise


def check_run(source: Source, plan: Plan, calibration: Calibration | None) -> None:
    """PipelineError for what would only fail later."""
    planned = {row.module for row in plan.rows}
    assert planned == set(source.module_shapes), "the plan was made for another model"
    blind = next((row for row in plan.rows if row.statistics != "none"), None)
    if calibration is None and blind is not None:
        how = (
            f"rtn with scale_search {blind.scale_search}" if blind.method == "rtn" else blind.method
        )
        raise PipelineError(f"{how} needs calibration text; give --calib FILE, or use method rtn")
    check_smoothing(plan)
    if calibration is None and plan.smoothing != "none":
        raise PipelineError(
            "smoothing needs calibration text; give --calib FILE, or set `smoothing: none`"
        )


def check_ranks(plan: Plan, calibration: Calibration | None, ranks: Ranks) -> None:
    """PipelineError for what several ranks cannot do together."""
    if ranks.size == 1:
        return
    alone = sorted({row.method for row in plan.rows} - SHARED_METHODS)
    if alone:
        raise PipelineError(
            f"method {alone[0]} runs on one rank only (several can share "
            f"{', '.join(sorted(SHARED_METHODS))}); leave --ranks away"
        )
    windows = 0 if calibration is None else len(calibration.samples)
    if plan.needs_calibration and windows < ranks.size:
        raise PipelineError(
            f"{windows} calibration windows are too few for {ranks.size} ranks: each needs one at "
            "least; use fewer ranks, or more --samples"
        )


def check_smoothing(plan: Plan) -> None:
    """PipelineError when the plan smooths a model whose folds are not known."""
    if plan.is_smoothed and plan.architecture not in MAPPINGS:
        what, instead = "smoothing", "set `smoothing: none` (--smoothing none)"
        if plan.smoothing == "none":
            what, instead = "awq", "use `method: gptq` (--method gptq)"
        raise PipelineError(
            f"{what} does not know where scales fold in {plan.architecture} (it knows "
            f"{', '.join(MAPPINGS)}); {instead}"
        )


def start_job(
    source: Source,
    plan: Plan,
    recipe: Recipe,
    calibration: Calibration | None,
    store: LayerStore,
    device: str,
    ranks: Ranks,
    shelves: Shelves,
) -> Job:
    """Embed the windows and the probe prompts; everything is then at the door of layer 0."""
    skeleton = source.skeleton if device == "cpu" else Skeleton(source.config, device)
    settings = MethodSettings(
        dtype=DTYPES[plan.dtype], gptq=GPTQSettings(**recipe.gptq.model_dump(exclude={"target"}))
    )
    prompts = probe_ids(source) if ranks.rank == 0 else []
    probe = [Batch.single(i, ids) for i, ids in enumerate(prompts)]
    streams = [Stream(batches=probe, ranks=ranks)]
    if calibration is not None and needs_windows(plan):
        windows = calibration.samples
        mine = share_of([len(ids) for ids in windows], ranks)
        batches = make_batches(windows, tokens_at_once(recipe, plan, device), mine)
        streams.append(Stream(batches=batches, ranks=ranks))
    long_texts = None
    if calibration is not None and calibration.long_samples and recipe.calibrates_kv:
        windows = list(calibration.long_samples)
        windows *= -(-ranks.size // len(windows))  # each rank has one; twice the same is harmless
        mine = share_of([len(ids) for ids in windows], ranks)
        long_texts = Stream(batches=make_batches(windows, 1, mine), ranks=ranks)
        streams.append(long_texts)
    embedding = stored_tensors(source, settings.dtype, ["model.embed_tokens.weight"])
    check_ids(source, streams)
    place = partial(shelves.place, width=plan.hidden_size, dtype=skeleton.compute_dtype)
    for i, stream in enumerate(streams):
        ids = [batch.token_ids for batch in stream.batches]
        stream.home, stream.shelf = place(f"stream{i}", ids)
        stream.fill(skeleton.embed(embedding, ids))
    entering = streams[1] if len(streams) > 1 else None
    original = None
    if entering is not None and (plan.gptq_target == "original" or learns(plan.rows)):
        home, shelf = place("original", [batch.token_ids for batch in entering.batches])
        original = replace(entering, home=home, shelf=shelf)
        original.fill(entering.hidden)
    return Job(
        source=source, plan=plan, skeleton=skeleton, store=store, settings=settings,
        smooth=SmoothSettings(**recipe.smooth.model_dump()) if plan.is_smoothed else None,
        calibration=entering, probe=streams[0],
        gradient=Gradient.of(recipe) if learns(plan.rows) else None,
        long_texts=long_texts, original=original,
    )  # fmt: skip


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
    rows = source.shape("model.embed_tokens.weight")[0]
    batches = [batch for stream in streams for batch in stream.batches]
    largest = max((int(batch.token_ids.max()) for batch in batches), default=0)
    if largest >= rows:
        raise SourceError(
            f"{source.path}: the tokenizer makes the id {largest}, but the model has {rows} "
            "embeddings; the tokenizer files are of another model"
        )


def needs_windows(plan: Plan) -> bool:
    """Whether calibration windows must flow through the layers at all."""
    return plan.needs_calibration


def probe_ids(source: Source) -> list[list[int]]:
    """Token ids of the probe prompts."""
    tokenizer = source.tokenizer()
    ids = [list(tokenizer(text)["input_ids"]) for text in PROBE_TEXTS]
    if not all(ids):
        raise SourceError(f"{source.path}: the tokenizer makes no tokens of plain English")
    return ids


def stored_layer(job: Job, index: int) -> dict[str, Tensor]:
    """The tensors of layer `index` as they are on disk: quantized now, or by an earlier run."""
    if index + 1 not in job.store.committed:
        job.store.commit(index + 1, *quantize_layer(job, index))
    job.results.update(job.store.results(index + 1))
    return job.store.read(index + 1)


def quantize_layer(job: Job, index: int) -> tuple[dict[str, Tensor], dict[str, ModuleResult]]:
    """Capture, choose codes, stage by stage. Returns what to store, and the report's rows."""
    planned = job.plan.layer_rows(index)
    rows = {row.module: start_of(row, job.gradient) for row in planned}
    prefix, names = job.skeleton.layer_prefix(index), job.skeleton.layer_names(index)
    quantized = {f"{name}.weight" for name, row in rows.items() if not row.scheme.is_dense}
    dense = stored_tensors(job.source, job.settings.dtype, [n for n in names if n not in quantized])
    weights = on_device(job.source.tensors(sorted(quantized)), job.skeleton.device)
    layer = job.skeleton.build_layer(index, {**dense, **weights})
    linears = {
        name: linear_of(layer, name.removeprefix(prefix))
        for name, row in rows.items()
        if not row.scheme.is_dense
    }
    experts = job.skeleton.experts_of(layer)

    def run_layer(hidden: Tensor, mask: Tensor) -> Tensor:
        return job.skeleton.run_layer(index, layer, hidden, mask)

    windows = job.calibration or job.probe
    notes = {} if job.smooth is None else smooth(job, index, layer, dense, weights, run_layer)
    by_module = {name.removesuffix(".weight"): tensor for name, tensor in weights.items()}
    stored, results = dict(dense), dense_results(job, index, dense)
    stages = job.skeleton.stages(index)
    beside = None if job.original is None else beside_original(job, index, layer)
    every: Outcomes = {}
    for stage in stages:
        work = (
            [rows[prefix + leaf] for leaf in stage], linears, by_module, windows, run_layer,
            job.settings,
        )  # fmt: skip
        if experts is not None and ".experts." in stage[0]:
            outcomes = quantize_experts(experts, *work)
        elif beside is not None and job.plan.gptq_target == "original" and can_aim(work[0]):
            outcomes = quantize_towards(beside, work[0], linears, by_module, job.settings)
        else:
            outcomes = quantize_stage(*work)
        every |= outcomes
        if stage is stages[0]:
            stored.update(kv_scales(job, index, layer, run_layer))
    if beside is not None and learns(planned):
        outcomes, norms = learn(job, index, beside, by_module, every, stored)
        stored.update(norms)
        every |= outcomes
    for name, outcome in every.items():
        note = notes.get(name, NO_FOLD)
        results[name] = replace(outcome.result, smoothing=note.text, smooth_dead=note.dead)
        stored.update(stored_parts(name, outcome.weight))
    return stored, results


def beside_original(job: Job, index: int, layer: nn.Module) -> Beside:
    """`layer`, about to be quantized, and a copy that stays as it is (smoothed, it computes the
    same), on the streams of both models."""
    assert job.original is not None
    assert job.calibration is not None

    def run(layer: nn.Module, hidden: Tensor, mask: Tensor) -> Tensor:
        return job.skeleton.run_layer(index, layer, hidden, mask)

    return Beside(
        layer=layer, original=copy.deepcopy(layer), stream=job.calibration,
        reference=job.original, run=run, prefix=job.skeleton.layer_prefix(index),
    )  # fmt: skip


def learn(
    job: Job,
    index: int,
    beside: Beside,
    originals: Mapping[str, Tensor],
    outcomes: Outcomes,
    stored: Mapping[str, Tensor],
) -> tuple[Outcomes, dict[str, Tensor]]:
    """Gradient rounding of a layer that has codes: outcomes and norms that take their place."""
    assert job.gradient is not None
    scales = [stored[name] for name in scale_names(beside.prefix) if name in stored]
    work = LearnWork(
        beside=beside, architecture=job.plan.architecture, originals=originals, outcomes=outcomes,
        dtype=job.settings.dtype, kv_tap=stored_tap(planned_kv(job.plan, index), scales),
        run=partial(job.skeleton.run_layer, index, beside.layer),
    )  # fmt: skip
    return learn_layer(job.plan.layer_rows(index), work, job.gradient.tune)


def kv_scales(
    job: Job, index: int, layer: nn.Module, run: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """The scales of the layer's KV cache to store; what they cost is kept for the report."""
    streams = [job.calibration or job.probe, *([job.long_texts] if job.long_texts else [])]
    prefix, dtype = job.skeleton.layer_prefix(index), job.settings.dtype
    scales, result = layer_scales(job.plan, index, prefix, layer, streams, run, dtype)
    if result is not None:
        job.store.keep_kv(result)
    return scales


def smooth(
    job: Job,
    index: int,
    layer: nn.Module,
    dense: dict[str, Tensor],
    weights: dict[str, Tensor],
    run_layer: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, FoldNote]:
    """Fold scales into a layer's tensors (changed, here and in the module); what was done, by
    module."""
    assert job.smooth is not None
    prefix = job.skeleton.layer_prefix(index)
    leaves = {name.removeprefix(prefix): tensor for name, tensor in {**dense, **weights}.items()}
    # Where awq alone folds, what another method takes stays as it is: dense, as smoothing sees it.
    schemes = {
        row.module.removeprefix(prefix): row.scheme
        if job.plan.smoothing != "none" or row.method == "awq"
        else DENSE
        for row in job.plan.layer_rows(index)
    }
    work = LayerTensors(layer=layer, tensors=leaves, schemes=schemes, dtype=job.settings.dtype)
    notes = smooth_layer(
        work, MAPPINGS.get(job.plan.architecture, ()), job.calibration or job.probe, run_layer,
        job.skeleton.head_dim, job.smooth,
    )  # fmt: skip
    for group in (dense, weights):
        group.update({name: work.tensors[name.removeprefix(prefix)] for name in group})
    return {prefix + name: note for name, note in notes.items()}


def dense_results(
    job: Job, layer: int | None, dense: Mapping[str, Tensor]
) -> dict[str, ModuleResult]:
    """Report rows of the linears that stay as they are."""
    return {
        row.module: ModuleResult(
            module=row.module, shape=row.shape, scheme=row.scheme.label, method="none",
            bytes=dense[f"{row.module}.weight"].nbytes if f"{row.module}.weight" in dense else 0,
            note=row.note,
        )
        for row in job.plan.layer_rows(layer)
        if row.scheme.is_dense
    }  # fmt: skip


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


def advance(job: Job, index: int, tensors: Mapping[str, Tensor]) -> None:
    """Pass every stream through layer `index` as stored: codes, rounded inputs, rounded KV."""
    prefix, schemes = job.skeleton.layer_prefix(index), job.schemes(index)
    state = dense_state(on_device(tensors, job.skeleton.device), schemes)
    scales = [state.pop(name) for name in scale_names(prefix) if name in state]
    layer = job.skeleton.build_layer(index, state)
    for name, scheme in schemes.items():
        if scheme.activations is not None:
            quantize_input(linear_of(layer, name.removeprefix(prefix)), scheme.activations)
    tap = stored_tap(planned_kv(job.plan, index), scales)
    rounded = tapped(layer.get_submodule("self_attn"), tap) if tap else nullcontext()
    with rounded:
        for stream in job.streams:
            stream.advance(
                lambda hidden, mask: job.skeleton.run_layer(index, layer, hidden, mask),
                f"layer {index}",
            )


def advance_original(job: Job, index: int) -> None:
    """Pass the original model's stream through layer `index` as the source has it."""
    if job.original is None or index + 1 == job.plan.num_layers:
        return
    tensors = job.source.tensors(list(job.skeleton.layer_names(index)))
    layer = job.skeleton.build_layer(index, on_device(tensors, job.skeleton.device))
    job.original.advance(
        lambda hidden, mask: job.skeleton.run_layer(index, layer, hidden, mask),
        f"the original layer {index}",
    )


def store_outer(job: Job) -> None:
    """Store embedding, norm, head and what the model class does not use."""
    if 0 not in job.store.committed:
        job.store.commit(0, *quantize_outer(job, list(job.skeleton.outer_names())))
    job.results.update(job.store.results(0))


def run_probe(job: Job, stored: Mapping[str, Tensor]) -> ProbeRecord:
    """What the artifact says to the probe's prompts; `stored` is its shard 0."""
    schemes = job.schemes(None)
    state = dense_state(stored, schemes)
    last = torch.cat([hidden[:, -1:] for hidden in job.probe.hidden])
    with torch.no_grad(), job.skeleton.head(state) as head:
        act = schemes[HEAD].activations
        handle = quantize_input(linear_of(head, HEAD), act) if act else None
        logits = head(inputs_embeds=last.to(job.skeleton.device, torch.float32)).logits[:, 0].cpu()
        if handle is not None:
            handle.remove()
    prompts = [batch.token_ids[0].tolist() for batch in job.probe.batches]
    schemes_used = job.plan.schemes().values()
    return make_probe(prompts, logits, schemes_used, has_fp8_kv=job.plan.kv_cache != "none")


def quantize_outer(job: Job, outer: list[str]) -> tuple[dict[str, Tensor], dict[str, ModuleResult]]:
    """lm_head if the plan wants it, and everything else outside the layers as it is."""
    rows = [
        start_of(row, job.gradient) for row in job.plan.layer_rows(None) if not row.scheme.is_dense
    ]
    quantized = {f"{row.module}.weight" for row in rows}
    dense = stored_tensors(job.source, job.settings.dtype, [n for n in outer if n not in quantized])
    weights = job.source.tensors(sorted(quantized))
    stored, results = dict(dense), dense_results(job, None, dense)
    with job.skeleton.head({**dense, **weights}) as head:

        def run_head(hidden: Tensor, mask: Tensor) -> object:
            with torch.no_grad():
                return head(inputs_embeds=hidden.to(job.skeleton.device, torch.float32))

        outcomes = quantize_stage(
            rows, {HEAD: linear_of(head, HEAD)},
            {name.removesuffix(".weight"): tensor for name, tensor in weights.items()},
            job.calibration or job.probe, run_head, job.settings,
        ) if rows else {}  # fmt: skip
    for name, outcome in outcomes.items():
        results[name] = outcome.result
        stored.update(stored_parts(name, outcome.weight))
    stored.update({name: job.source.raw_tensor(name) for name in job.source.extra_names()})
    return stored, results
