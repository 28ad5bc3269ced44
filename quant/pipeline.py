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

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from quant.artifact.errors import SchemeError
from quant.artifact.writer import ArtifactWriter
from quant.calibration import Calibration
from quant.checkpoint import Source
from quant.errors import SourceError
from quant.layer_store import LayerStore
from quant.parallel import Ranks, Single
from quant.plan import Plan
from quant.provenance import (
    Describe,
    RunFindings,
    RunInputs,
    finish,
    job_identity,
    no_texts,
    stage_files,
)
from quant.recipe import Recipe
from quant.report import RunReport
from quant.run_checks import check_ranks, check_run
from quant.run_layer import quantize_layer, quantize_outer
from quant.run_onward import advance, advance_original, run_probe
from quant.run_progress import Clock, Progress, Silent
from quant.run_start import RunState, start_run
from quant.spill import UNLIMITED, MemoryLimits, Shelves


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
    inputs = RunInputs(
        source=source, plan=plan, recipe=recipe, calibration=calibration, device=device,
        num_ranks=ranks.size,
    )  # fmt: skip
    with open_writer(inputs, out, ranks, overwrite=overwrite, resume=resume) as writer:
        store = LayerStore(writer, ranks)
        resumed = len(store.committed)
        if writer is not None:
            stage_files(source, recipe, writer)
        state = start_run(inputs, store, ranks, Shelves(out, device, ranks, memory))
        clock.lap("read and embed")
        quantize_layers(state, progress or Silent())
        clock.lap("layers")
        store_outer(state)

        def seal() -> RunReport:
            assert writer is not None
            probe = run_probe(state, writer.read_shard(0))
            clock.lap("head and probe")
            findings = RunFindings(
                results=state.results, seconds=clock.seconds, resumed_layers=resumed
            )
            return finish(inputs, writer, probe, findings, describe)

        return ranks.first(seal)


def quantize_layers(state: RunState, progress: Progress) -> None:
    """The loop over the decoder layers."""
    progress.start(state.plan.num_layers)
    for index in range(state.plan.num_layers):
        progress.layer(index, f"layer {index + 1} of {state.plan.num_layers}")
        tensors = stored_layer(state, index)
        advance(state, index, tensors)
        advance_original(state, index)
    progress.done()


def stored_layer(state: RunState, index: int) -> dict[str, Tensor]:
    """The tensors of layer `index` as they are on disk: quantized now, or by an earlier run."""
    if index + 1 not in state.store.committed:
        state.store.commit(index + 1, *quantize_layer(state, index))
    state.results.update(state.store.results(index + 1))
    return state.store.read(index + 1)


def store_outer(state: RunState) -> None:
    """Store embedding, norm, head and what the model class does not use."""
    if 0 not in state.store.committed:
        state.store.commit(0, *quantize_outer(state, list(state.skeleton.outer_names())))
    state.results.update(state.store.results(0))


@contextmanager
def open_writer(
    inputs: RunInputs, out: Path, ranks: Ranks, *, overwrite: bool, resume: bool
) -> Iterator[ArtifactWriter | None]:
    """The writer of this job; None on other ranks than the first. Faults of the input, on any rank,
    discard what was staged: a retry would meet them again. After anything else (a full disk, a
    kill) the finished layers stay for the next run."""
    identity = job_identity(inputs)
    ranks.agree("job", identity)
    if ranks.rank != 0:
        yield None
        return

    def make() -> ArtifactWriter:
        return ArtifactWriter(
            out, num_shards=inputs.plan.num_layers + 1, job=identity, overwrite=overwrite,
            source_path=inputs.source.path,
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
