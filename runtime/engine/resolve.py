"""From what was said (EngineConfig) to what will run (ResolvedConfig), with a reason each.

Pure functions over facts about the model and the machine: nothing is measured or loaded here.
Two rounds, because the pool's size is known only once the weights are in memory:
`resolve_numerics` before loading, `resolve` after it. A setting that cannot be
honoured is a ConfigError.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace

from runtime.config import Account, ConfigError, EngineConfig, ResolvedConfig
from runtime.engine.block_manager import BLOCK_SIZES

CPU_POOL_BYTES = 4 * 2**30
CPU_POOL_SHARE = 0.25
QUANTIZED_KV = ("fp8", "int8")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", *QUANTIZED_KV)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How to compute. `reasons` as in ResolvedConfig."""

    device: str
    dtype: str
    kv_cache_dtype: str
    reasons: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """max_positions: the model's context in tokens. end_of_text: id -> files that name it.
    block_bytes: KV of one block, all layers. digest: the artifact's."""

    max_positions: int
    vocab: int
    end_of_text: dict[int, tuple[str, ...]]
    block_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """Memory the KV pool may take by default, in bytes, and in words where that comes from.

    account: of a GPU, with `kv` 0: what the pool does not take stays in `left`.
    """

    pool_bytes: int
    reason: str
    account: Account | None = None


_VERIFIED = {
    "full": "every byte of the artifact was hashed",
    "fast": "as asked: sizes and headers only; bytes altered on disk go unnoticed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step: sequences and tokens. `reasons` as in ResolvedConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int
    reasons: dict[str, str]


def resolve_numerics(
    config: EngineConfig,
    *,
    artifact_dtype: str,
    artifact_kv: str | None,
    has_cuda: bool,
    has_triton: bool = False,
    kept_layers: Collection[int] = (),
) -> Numerics:
    """Device, compute type and KV type. `has_triton`: our own kernels run on the CUDA device.
    `artifact_kv`: the quantized KV type that the artifact declares (fp8 with scales, or int8), and
    `kept_layers` the layers it leaves out of it.

    Raises:
        ConfigError: an unknown device or type, CUDA asked for where there is none, or
            `deterministic` where no kernel promises it.
    """
    reasons: dict[str, str] = {}
    device = device_of(config, has_cuda, reasons)
    if config.deterministic and (device == "cpu" or not has_triton):
        raise ConfigError(
            f"deterministic: no kernel on {device} promises results that are independent of the "
            "batch to the last bit (a CUDA device with Triton does); leave it off (in float32, "
            "greedy tokens agree but for near-ties)"
        )
    dtype = _compute_dtype(config, device, artifact_dtype, reasons)
    kv_dtype = _kv_dtype(config, dtype, artifact_kv, reasons)
    if kv_dtype in QUANTIZED_KV and kept_layers:
        layers = ", ".join(map(str, sorted(kept_layers)))
        reasons["kv_cache_dtype"] += f"; layers {layers} stay {dtype}, as the artifact has it"
    return Numerics(device=device, dtype=dtype, kv_cache_dtype=kv_dtype, reasons=reasons)


def resolve(
    config: EngineConfig, numerics: Numerics, model: ModelFacts, pool: PoolFacts
) -> ResolvedConfig:
    """All values that will run.

    Raises:
        ConfigError: a size out of range, a context longer than the model's or than the pool.
    """
    _check_ranges(config)
    limits = step_limits(config, numerics.device)
    reasons = numerics.reasons | limits.reasons
    length = _asked_length(config, model, reasons)
    most_tokens = length * limits.max_num_seqs
    num_blocks = _num_blocks(config, model, pool, most_tokens, reasons)
    length = _fitting_length(config, length, num_blocks * config.block_size, reasons)
    ends = {i: " and ".join(files) for i, files in model.end_of_text.items()}
    reasons["eos_token_ids"] = "; ".join(f"{i} from {files}" for i, files in ends.items()) or (
        "no file of the artifact names an end-of-text id: only limits and stop ids end a sequence"
    )
    reasons |= {
        "vocab_size": "rows of the output head",
        "artifact_digest": "sha256 of artifact.json",
        "account": "measured before the KV pool was made",
    }
    for name in ("long_prefill_token_threshold", "block_size", "enable_prefix_caching",
                 "deterministic", "enforce_eager", "seed"):  # fmt: skip
        reasons[name] = _said(config, name)
    reasons["verify"] = _VERIFIED[config.verify]
    return ResolvedConfig(
        device=numerics.device,
        dtype=numerics.dtype,
        kv_cache_dtype=numerics.kv_cache_dtype,
        max_model_len=length,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        block_size=config.block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        deterministic=config.deterministic,
        seed=config.seed,
        eos_token_ids=tuple(model.end_of_text),
        vocab_size=model.vocab,
        artifact_digest=model.digest,
        enforce_eager=config.enforce_eager,
        verify=config.verify,
        account=_with_pool(pool.account, num_blocks * model.block_bytes),
        reasons=reasons,
    )


def describe(resolved: ResolvedConfig) -> list[tuple[str, str, str]]:
    """(name, value, reason) rows of the table that start-up prints, a GPU's memory last."""
    rows = [
        (f.name, _shown(getattr(resolved, f.name)), resolved.reasons.get(f.name, ""))
        for f in fields(resolved)
        if f.name not in ("reasons", "account")
    ]
    return rows + ([] if resolved.account is None else _account_rows(resolved.account))


def step_limits(config: EngineConfig, device: str) -> StepLimits:
    """How many sequences and tokens one step may have.

    Every running sequence must get its token in every step, so the token budget is a bound.
    """
    is_cpu = device == "cpu"
    default_seqs, default_tokens = (64, 2048) if is_cpu else (256, 8192)
    why = f"default on a {'CPU' if is_cpu else 'GPU'}"
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    reasons = {
        "max_num_seqs": why if num_seqs is None else "as asked",
        "max_num_batched_tokens": why if num_tokens is None else "as asked",
    }
    num_seqs = default_seqs if num_seqs is None else num_seqs
    num_tokens = default_tokens if num_tokens is None else num_tokens
    if num_seqs > num_tokens:
        reasons["max_num_seqs"] = (
            f"lowered from {num_seqs} to max_num_batched_tokens: "
            "each running sequence needs one token of a step"
        )
        num_seqs = num_tokens
    return StepLimits(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, reasons=reasons)


def cpu_pool(available_bytes: int) -> PoolFacts:
    """The default pool on a CPU: a modest share of the memory that is free now."""
    share = int(available_bytes * CPU_POOL_SHARE)
    if share >= CPU_POOL_BYTES:
        return PoolFacts(pool_bytes=CPU_POOL_BYTES, reason="the CPU's default of 4 GiB")
    return PoolFacts(pool_bytes=share, reason=f"{CPU_POOL_SHARE:.0%} of the memory that is free")


def device_of(config: EngineConfig, has_cuda: bool, reasons: dict[str, str]) -> str:
    """The device that `config` means here, and why; ConfigError when there is no such one."""
    kind = config.device.split(":")[0]
    if config.device == "auto":
        reasons["device"] = "a CUDA device was found" if has_cuda else "no CUDA device was found"
        return "cuda" if has_cuda else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device {config.device!r} is unknown; use auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not has_cuda:
        raise ConfigError("device cuda was asked for, but torch finds none; use cpu or auto")
    reasons["device"] = "as asked"
    return config.device


def _compute_dtype(
    config: EngineConfig, device: str, artifact_dtype: str, reasons: dict[str, str]
) -> str:
    if config.dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError(
            f"dtype {config.dtype!r} is unknown; use auto, float32, bfloat16 or float16"
        )
    if config.dtype != "auto":
        reasons["dtype"] = "as asked"
        return config.dtype
    if device == "cpu":
        reasons["dtype"] = "the CPU's default: exact, and faster than bfloat16 without AMX"
        return "float32"
    if artifact_dtype == "float32":
        reasons["dtype"] = "the artifact is float32; bfloat16 is what the device computes fast"
        return "bfloat16"
    reasons["dtype"] = "the artifact's own"
    return artifact_dtype


def _kv_dtype(
    config: EngineConfig, dtype: str, artifact_kv: str | None, reasons: dict[str, str]
) -> str:
    asked = config.kv_cache_dtype
    if asked not in KV_CACHE_DTYPES:
        known = ", ".join(KV_CACHE_DTYPES)
        raise ConfigError(f"kv_cache_dtype {asked!r} is unknown; use one of {known}")
    if asked == "auto":
        reasons["kv_cache_dtype"] = "the artifact's own" if artifact_kv else "the compute type"
        return artifact_kv or dtype
    reasons["kv_cache_dtype"] = "as asked"
    if asked == "fp8" and artifact_kv != "fp8":
        reasons["kv_cache_dtype"] = "as asked; the artifact has no KV scales, so they are 1.0"
    return asked


def _check_ranges(config: EngineConfig) -> None:
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len",
                 "num_gpu_blocks_override", "kv_cache_memory_bytes"):  # fmt: skip
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if config.long_prefill_token_threshold < 0:
        raise ConfigError("long_prefill_token_threshold must be 0 (no limit) or more")
    if config.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise ConfigError(f"block_size {config.block_size} is not supported; use one of {sizes}")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is a share in (0, 1], not {config.gpu_memory_utilization}"
        )


def _asked_length(config: EngineConfig, model: ModelFacts, reasons: dict[str, str]) -> int:
    if config.max_model_len is None:
        reasons["max_model_len"] = "the model's own limit"
        return model.max_positions
    if config.max_model_len > model.max_positions:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is longer than the model's context of "
            f"{model.max_positions} tokens; lower it"
        )
    reasons["max_model_len"] = "as asked"
    return config.max_model_len


def _num_blocks(
    config: EngineConfig,
    model: ModelFacts,
    pool: PoolFacts,
    most_tokens: int,
    reasons: dict[str, str],
) -> int:
    if config.num_gpu_blocks_override is not None:
        reasons["num_blocks"] = "as asked (num_gpu_blocks_override)"
        return config.num_gpu_blocks_override
    budget, why = pool.pool_bytes, pool.reason
    if config.kv_cache_memory_bytes is not None:
        budget, why = config.kv_cache_memory_bytes, "kv_cache_memory_bytes as asked"
    most_blocks = -(-most_tokens // config.block_size)
    num_blocks = budget // model.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"the KV pool of {_size(budget)} ({why}) does not hold one block of "
            f"{config.block_size} tokens ({_size(model.block_bytes)}); free memory or set "
            "kv_cache_memory_bytes"
        )
    if num_blocks >= most_blocks and config.kv_cache_memory_bytes is None:
        size = _size(most_blocks * model.block_bytes)
        reasons["num_blocks"] = f"{size}: max_num_seqs sequences of max_model_len tokens"
        return most_blocks
    reasons["num_blocks"] = f"{_size(num_blocks * model.block_bytes)}: {why}"
    return num_blocks


def _fitting_length(
    config: EngineConfig, length: int, num_pool_tokens: int, reasons: dict[str, str]
) -> int:
    """A context that the whole pool can hold, unless the pool's size was forced."""
    if length <= num_pool_tokens or config.num_gpu_blocks_override is not None:
        return length
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len {length} does not fit the KV pool of {num_pool_tokens} tokens; lower "
            "it, or raise gpu_memory_utilization or kv_cache_memory_bytes"
        )
    reasons["max_model_len"] = f"lowered from the model's {length} to what the KV pool holds"
    return num_pool_tokens


def _with_pool(account: Account | None, pool_bytes: int) -> Account | None:
    if account is None:
        return None
    return replace(account, kv=pool_bytes, left=account.left - pool_bytes)


def _account_rows(account: Account) -> list[tuple[str, str, str]]:
    what = {
        "total": "the device's memory",
        "weights": "packed, with tables",
        "kv": "the KV pool",
        "workspace": "what a full step takes at its worst",
        "graphs": "set aside for captured decode steps",
        "outside": "CUDA context, kernels, other processes",
        "left": "beyond the utilization",
    }
    return [(f"memory: {name}", _size(getattr(account, name)), why) for name, why in what.items()]


def _said(config: EngineConfig, name: str) -> str:
    default = EngineConfig.__dataclass_fields__[name].default
    return "default" if getattr(config, name) == default else "as asked"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _size(num_bytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024  # type: ignore[assignment]
    return f"{num_bytes:.4g} GiB"
