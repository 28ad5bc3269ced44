"""From an artifact on disk to something an engine can run: verify, resolve, load, size, probe.

Nothing is served that was not checked: bytes by the artifact's digests, arithmetic by the probe.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quant.artifact.artifact import Artifact, open_artifact
from quant.artifact.errors import ArtifactError
from quant.artifact.probe import ProbeRecord, compare, expected_entries
from runtime.config import ConfigError, EngineConfig, ResolvedConfig
from runtime.engine.batch import Piece
from runtime.engine.cuda_runner import CudaRunner
from runtime.engine.end_of_text import end_of_text_ids
from runtime.engine.memory import available_host_bytes, cuda_pool
from runtime.engine.model_runner import ModelRunner
from runtime.engine.resolve import (
    QUANTIZED_KV,
    ModelFacts,
    Numerics,
    PoolFacts,
    cpu_pool,
    resolve,
    resolve_numerics,
    step_limits,
)
from runtime.engine.runner import Runner
from runtime.engine.startup import Startup, StartupClock
from runtime.engine.step_plan import RunnerLimits
from runtime.kernels import fast_launch
from runtime.kernels.backend import uses_triton
from runtime.kernels.compile_ahead import look_up_compiler
from runtime.kernels.linear import has_own_product
from runtime.kernels.workspace import KernelOptions, Workspace
from runtime.model.decoder import Decoder
from runtime.model.kv_cache import KVCache
from runtime.model.loader import LoadProgress, load_decoder
from runtime.model.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ProbeError(ArtifactError):
    """The loaded model computes something else than the artifact's probe expects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The parts of an engine. `startup` says where the time went."""

    decoder: Decoder
    kv: KVCache
    resolved: ResolvedConfig
    artifact: Artifact
    runner: Runner
    startup: Startup


def load(
    path: Path, config: EngineConfig, progress: Callable[[LoadProgress], None] | None = None
) -> Loaded:
    """`progress` is told after each layer.

    Raises ArtifactError (ProbeError included), UnsupportedModelError or ConfigError."""
    clock = StartupClock()
    clock.lap("imports")
    artifact = open_artifact(path, verify="fast")
    clock.lap("open")
    _set_threads(config.num_threads)
    numerics = resolve_numerics(
        config,
        artifact_dtype=artifact.manifest.dtype,
        artifact_kv=artifact.kv_cache_dtype,
        kept_layers=artifact.kv_kept_layers,
        has_cuda=torch.cuda.is_available(),
        has_triton=uses_triton(torch.device("cuda")),
    )
    numerics = _with_dense_products(numerics, artifact)
    compiler = look_up_compiler() if uses_triton(torch.device(numerics.device)) else None
    device = _opened(numerics.device)
    clock.lap("device")
    decoder = load_decoder(
        artifact,
        device=device,
        dtype=DTYPES[numerics.dtype],
        options=KernelOptions(workspace=Workspace(device), deterministic=config.deterministic),
        digests=artifact.tensor_digests() if config.verify == "full" else None,
        progress=progress,
    )
    clock.lap("weights")
    facts = _model_facts(artifact, decoder.spec, numerics, config)
    kv_dtypes = _kv_dtypes(artifact, numerics)
    sizing = _sizing_runner(decoder, kv_dtypes, numerics.device, facts, config)
    if compiler is not None:
        compiler.join()
    if sizing is not None:
        sizing.compile_ahead()
    clock.lap("compile")
    if config.probe and artifact.manifest.probe is not None:
        check_probe(decoder, artifact, artifact.manifest.probe, numerics, config.block_size)
    clock.lap("probe")
    resolved = resolve(config, numerics, facts, _pool_facts(sizing, facts, config))
    del sizing
    kv = _allocated(decoder, resolved, kv_dtypes)
    runner = make_runner(decoder, kv, resolved)
    clock.lap("pool")
    return Loaded(
        decoder=decoder, kv=kv, resolved=resolved, artifact=artifact, runner=runner,
        startup=clock.startup,
    )  # fmt: skip


def _with_dense_products(numerics: Numerics, artifact: Artifact) -> Numerics:
    """`numerics`, its reasons naming the schemes that have no kernel here."""
    schemes = artifact.schemes().values()
    labels = sorted({scheme.label for scheme in schemes if not has_own_product(scheme)})
    if not labels:
        return numerics
    note = (
        f"no kernel multiplies {', '.join(labels)}: dequantized at load, with the memory and the "
        "speed of a dense model"
    )
    said = "; ".join(filter(None, (numerics.reasons.get("dtype"), note)))
    return replace(numerics, reasons=numerics.reasons | {"dtype": said})


def make_runner(decoder: Decoder, kv: KVCache, resolved: ResolvedConfig) -> Runner:
    """The runner for the decoder's device: on a CPU waiting is free, elsewhere it is not."""
    if decoder.device.type == "cpu":
        return ModelRunner(decoder, kv, resolved.block_size)
    limits = RunnerLimits(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        block_size=resolved.block_size,
    )
    return CudaRunner(
        decoder,
        kv,
        limits,
        deterministic=resolved.deterministic,
        use_graphs=not resolved.enforce_eager,
    )


def _opened(name: str) -> torch.device:
    """The device, made current and given its context."""
    device = torch.device(name)
    if device.type == "cuda":
        _let_segments_expand()
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        if uses_triton(device):
            fast_launch.install(device)
    return device


def _set_threads(num_threads: int | None) -> None:
    """Far more threads than cores crash the process that starts them, so they are refused."""
    num_cores = os.cpu_count() or 1
    if num_threads is not None and not 1 <= num_threads <= num_cores:
        raise ConfigError(f"num_threads {num_threads}: this machine has {num_cores} cores")
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _kv_dtypes(artifact: Artifact, numerics: Numerics) -> tuple[str, ...]:
    """Each layer's KV type: the numerics', but for the layers that a quantized cache leaves out."""
    asked, kept = numerics.kv_cache_dtype, artifact.kv_kept_layers
    num_layers = ModelSpec.from_config(artifact.config).num_layers
    is_quantized = asked in QUANTIZED_KV
    return tuple(numerics.dtype if is_quantized and i in kept else asked for i in range(num_layers))


def _allocated(decoder: Decoder, resolved: ResolvedConfig, kv_dtypes: tuple[str, ...]) -> KVCache:
    num_blocks = resolved.num_blocks
    try:
        return make_cache(decoder, kv_dtypes, num_blocks, resolved.block_size)
    except RuntimeError as error:  # torch's way to say that there is no such memory
        size = num_blocks * KVCache.bytes_per_block(decoder.spec, resolved.block_size, kv_dtypes)
        raise ConfigError(
            f"a KV pool of {num_blocks} blocks takes {size / 2**30:.4g} GiB, more than the device "
            "gives; lower num_gpu_blocks_override, kv_cache_memory_bytes or max_model_len"
        ) from error


def make_cache(
    decoder: Decoder, dtype: str | Sequence[str], num_blocks: int, block_size: int
) -> KVCache:
    """An empty pool of one type, or of a type for each layer; fp8 with the artifact's scales, 1.0
    where it has none."""
    return KVCache(
        decoder.spec,
        num_blocks,
        block_size,
        dtype,
        decoder.device,
        decoder.kv_scales,
    )


def check_probe(
    decoder: Decoder, artifact: Artifact, probe: ProbeRecord, numerics: Numerics, block_size: int
) -> None:
    """Raise ProbeError unless the decoder reproduces the probe.

    Runs on a scratch cache of the artifact's own KV type: what an operator's other choice of KV
    type changes is intended, and not what the tolerance was made for.
    """
    pieces: list[Piece] = []
    num_blocks = 0
    for prompt in probe.prompts:
        num_tokens = len(prompt.token_ids)
        needed = -(-num_tokens // block_size)
        blocks = range(num_blocks, num_blocks + needed)
        num_blocks += needed
        pieces.append(
            Piece(tokens=prompt.token_ids, start=0, block_ids=blocks, wanted=[num_tokens - 1])
        )
    kv_dtype = artifact.kv_cache_dtype or numerics.dtype
    own = replace(numerics, kv_cache_dtype=kv_dtype)
    runner = _scratch_runner(decoder, _kv_dtypes(artifact, own), num_blocks, block_size)
    logits_PV = runner.logits(runner.forward(pieces))
    result = compare(
        probe, expected_entries(probe, logits_PV), is_float32=numerics.dtype == "float32"
    )
    if not result.passed:
        raise ProbeError(
            f"{artifact.path.name} does not compute what it was sealed with (device "
            f"{numerics.device}, {numerics.dtype}, KV in {kv_dtype}): {result}; run "
            "`quantize verify` on it; if float32 passes, a kernel for the other type is at fault"
        )


def _model_facts(
    artifact: Artifact, spec: ModelSpec, numerics: Numerics, config: EngineConfig
) -> ModelFacts:
    return ModelFacts(
        max_positions=spec.max_positions,
        vocab=spec.vocab,
        end_of_text=end_of_text_ids(artifact.path, artifact.config, spec.vocab),
        block_bytes=KVCache.bytes_per_block(
            spec, config.block_size, _kv_dtypes(artifact, numerics)
        ),
        digest=artifact.digest,
    )


def _scratch_runner(
    decoder: Decoder, kv_dtypes: tuple[str, ...], num_blocks: int, block_size: int
) -> ModelRunner | CudaRunner:
    """A runner for pieces of one's own, on a small cache that goes with it."""
    kv = make_cache(decoder, kv_dtypes, num_blocks, block_size)
    if decoder.device.type == "cpu":
        return ModelRunner(decoder, kv, block_size)
    limits = RunnerLimits(
        max_num_seqs=1,
        max_num_batched_tokens=num_blocks * block_size,
        max_model_len=num_blocks * block_size,
        block_size=block_size,
    )
    return CudaRunner(decoder, kv, limits, use_graphs=False)


def _let_segments_expand() -> None:
    """Have torch's allocator grow its segments instead of adding others that nothing fits into.

    Steps of all sizes share one pool; without this, half of it is lost between the pieces. Whoever
    configures the allocator by environment is left alone.
    """
    if not any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _sizing_runner(
    decoder: Decoder,
    kv_dtypes: tuple[str, ...],
    device: str,
    model: ModelFacts,
    config: EngineConfig,
) -> CudaRunner | None:
    """A runner as large as the one that will serve, with a single block of KV; None on a CPU."""
    if decoder.device.type == "cpu":
        return None
    steps = step_limits(config, device)
    limits = RunnerLimits(
        max_num_seqs=steps.max_num_seqs,
        max_num_batched_tokens=steps.max_num_batched_tokens,
        max_model_len=min(config.max_model_len or model.max_positions, model.max_positions),
        block_size=config.block_size,
    )
    kv = make_cache(decoder, kv_dtypes, 1, config.block_size)
    return CudaRunner(decoder, kv, limits, deterministic=config.deterministic, use_graphs=False)


def _pool_facts(sizing: CudaRunner | None, model: ModelFacts, config: EngineConfig) -> PoolFacts:
    """A GPU's pool is what the worst step leaves; that step also makes its kernels ready."""
    if sizing is None:
        return cpu_pool(available_host_bytes())
    facts = cuda_pool(
        sizing.run_worst_step,
        (lambda: 0) if config.enforce_eager else sizing.graph_bytes,
        sizing.decoder.device,
        config.gpu_memory_utilization,
    )
    # The pools hold one block more than they hand out.
    return replace(facts, pool_bytes=max(0, facts.pool_bytes - model.block_bytes))
