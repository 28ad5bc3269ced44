"""What the operator said (EngineConfig) and what will run (ResolvedConfig); stdlib only.

Neither object is ever changed: `runtime.engine.resolve.resolve` reads the first, looks at the
artifact and the machine, and makes the second, with a reason for each value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]


class ConfigError(ValueError):
    """A setting that cannot be honoured; the message names the flag and a value that works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings as said on the command line; names and meaning are vLLM's.

    Attributes:
        device: "auto" takes CUDA when there is one, else the CPU.
        dtype: compute type; "auto" is float32 on the CPU and the artifact's own type elsewhere.
        kv_cache_dtype: "auto" is what the artifact declares, else the compute type; "int8" has a
            scale per token and head. Layers that the artifact keeps out of its quantized cache
            have the compute type under "fp8" and "int8" too.
        max_model_len: longest sequence in tokens; None takes the model's own limit.
        max_num_seqs: most sequences that run at once; None takes 256 on a GPU, 64 on a CPU.
        max_num_batched_tokens: most tokens computed in one step (chunks of prompts and decodes);
            None takes 8192 on a GPU, 2048 on a CPU.
        long_prefill_token_threshold: the most prompt tokens of one sequence in one step (0: the
            whole budget); keeps one long prompt from stalling everyone's decode.
        block_size: KV tokens per block.
        gpu_memory_utilization: share of the device's memory for weights, KV and workspace.
        kv_cache_memory_bytes: KV pool size; overrides the utilization (and the CPU's default).
        num_gpu_blocks_override: KV pool size in blocks, for tests and experiments.
        enable_prefix_caching: share full blocks between equal prefixes.
        deterministic: a row's bits do not depend on the rows beside it; refused where no kernel
            promises that. (A sequence preempted for want of KV is recomputed as a prompt, whose
            last bits may differ from those of decodes: give the pool room.)
        enforce_eager: capture no CUDA graphs (slower; for finding faults).
        verify: "full" hashes every byte of the artifact at load, "fast" sizes and headers only.
        probe: re-check the artifact's probe at load.
        seed: base of the random streams of requests that name none.
        num_threads: CPU threads for compute; None leaves torch's choice.
    """

    device: str = "auto"
    dtype: DType = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    block_size: int = 16
    gpu_memory_utilization: float = 0.90
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    deterministic: bool = False
    enforce_eager: bool = False
    verify: Literal["full", "fast"] = "full"
    probe: bool = True
    seed: int = 0
    num_threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where the memory of a device goes, in bytes; the parts add up to `total`.

    Attributes:
        total: of the device. weights: packed weights and tables. kv: the KV pools.
        workspace: what a step has in use at its worst: activations, logits, sampling, log-probs.
        graphs: set aside for captured decode steps. outside: the context and other processes.
        left: beyond the utilization: what the allocator loses between the pieces comes from here.
    """

    total: int
    weights: int
    kv: int
    workspace: int
    graphs: int
    outside: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What will run. `reasons` maps a field's name to a short sentence on why it is so.

    `account` says where a GPU's memory goes; None on a CPU, where the pool grows with its use.
    """

    device: str
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool
    deterministic: bool
    seed: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    artifact_digest: str
    enforce_eager: bool = False
    verify: Literal["full", "fast"] = "full"
    account: Account | None = None
    reasons: dict[str, str] = field(default_factory=dict)
