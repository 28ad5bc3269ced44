"""What the attention kernels are compiled as without a GPU."""

from __future__ import annotations

from typing import Any

from compile_case import ALL_TARGETS, CompileCase

TYPES = {
    "q_ptr": "*bf16",
    "head_scales_ptr": "*fp32",
    "token_scales_ptr": "*fp32",
    "tables_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "out_ptr": "*bf16",
    "q_stride": "i32",
    "table_stride": "i32",
    "window": "i32",
    "scale": "fp32",
}
DECODE_TYPES = {
    **TYPES,
    "shares_ptr": "*i32",
    "partials_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "counters_ptr": "*i32",
    "num_seqs": "i32",
}
PREFILL_TYPES = {**TYPES, "starts_ptr": "*i32", "first_span": "i32", "num_spans": "i32"}
POOLS = {"plain": "*bf16", "fp8": "*u8", "int8": "*i8"}
DECODE_POOLS = {"plain": "*bf16", "fp8": "*i16", "int8": "*i16"}
OTHER_CARDS = {
    "sm80": {"PDL": False},
    "gfx942": {"PDL": False, "USE_PTX": False},
}
FEWER_BITS = {name: {**values, "KV": "fp8_bits"} for name, values in OTHER_CARDS.items()}


def shared(kv: str, windowed: bool, group: int, head_dim: int) -> dict[str, Any]:
    return {
        "DTYPE": dtype("bfloat16" if kv == "plain" else "float16"),
        "GROUP": group,
        "KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "KV": kv,
        "WINDOWED": windowed,
        "USE_PTX": True,
    }


def dtype(name: str) -> Any:
    """A Triton type, or its name on a machine that only collects these cases."""
    try:
        import triton.language as tl
    except ImportError:
        return name
    return getattr(tl, name)


def decode(
    name: str,
    *,
    kv: str = "plain",
    windowed: bool = False,
    group: int = 4,
    head_dim: int = 128,
    splits: int = 0,
    warps: int = 1,
    **options: Any,
) -> CompileCase:
    constants = {
        **shared(kv, windowed, group, head_dim),
        "ROWS": 8 if group <= 8 else 16,
        "GROUP_ROWS": 1 << (group - 1).bit_length(),
        "TILE": 32 * warps,
        "WARPS": warps,
        "SPLITS": splits,
        "MIN_TILES": 8,
        "MERGE": 8,
        "PDL": True,
    }
    return CompileCase(
        name=f"decode-{name}",
        kernel="runtime.kernels.attention.decode_kernel:decode_kernel",
        signature={**DECODE_TYPES, "pool_ptr": DECODE_POOLS[kv]},
        constexprs=constants,
        overrides=FEWER_BITS if kv == "fp8" else OTHER_CARDS,
        aligned=("q_stride",),
        num_warps=warps,
        num_stages=2 if head_dim > 128 else 3,
        **options,
    )


def prefill(name: str, *, kv: str = "plain", windowed: bool = False, **options: Any) -> CompileCase:
    small = {"ROWS": 64, "TILE": 32, "WHOLE_TILE": 32}
    other = FEWER_BITS if kv == "fp8" else OTHER_CARDS
    return CompileCase(
        name=f"prefill-{name}",
        kernel="runtime.kernels.attention.prefill_kernel:prefill_kernel",
        signature={**PREFILL_TYPES, "pool_ptr": POOLS[kv]},
        constexprs={
            **shared(kv, windowed, 4, 128),
            "ROWS": 128,
            "TILE": 64,
            "WHOLE_TILE": 128,
            "UNIFORM": windowed,
        },
        overrides={
            card: {key: value for key, value in {**values, **small}.items() if key != "PDL"}
            for card, values in other.items()
        },
        aligned=("q_stride",),
        num_warps=8,
        num_stages=3,
        expects={"sm90": ("wgmma.mma_async",)},
        **options,
    )


def hopper(name: str, type_name: str, group: int, head_dim: int, block_size: int) -> CompileCase:
    """The copying warp has 24 registers and may spill."""
    layout = (
        "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, "
        "fp4_padded=False, cga_layout=[])"
    )
    types = {
        **TYPES,
        "q_ptr": f"*{type_name}",
        "out_ptr": f"*{type_name}",
        "pool_desc": f"tensordesc<{type_name}[{block_size}, {head_dim}],{layout}>",
        "work_ptr": "*i32",
        "num_items": "i32",
    }
    for other in ("head_scales_ptr", "token_scales_ptr", "seq_lens_ptr", "window"):
        del types[other]
    return CompileCase(
        name=f"hopper-{name}",
        kernel="runtime.kernels.attention.hopper_kernel:hopper_prefill_kernel",
        signature=types,
        constexprs={
            "GROUP": group,
            "KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "TILE": 128,
            "STAGES": 2,
        },
        targets=("sm90",),
        aligned=("q_stride",),
        expects={"sm90": ("wgmma.mma_async", "cp.async.bulk.tensor.2d", "setmaxnreg")},
        max_spill_bytes=128,
    )


PLAN = CompileCase(
    name="plan",
    kernel="runtime.kernels.attention.plan_kernels:plan_decode_kernel",
    signature={
        "seq_lens_ptr": "*i32",
        "starts_ptr": "*i32",
        "shares_ptr": "*i32",
        "num_seqs": "i32",
        "num_programs": "i32",
        "window": "i32",
    },
    constexprs={
        "KV_HEADS": 8,
        "TILE": 64,
        "WINDOWED": True,
        "MIN_UNITS": 1,
        "SLACK": 4,
        "BLOCK_S": 256,
        "BLOCK_P": 512,
        "SEARCH_STEPS": 8,
        "PDL": True,
    },
    overrides={"sm80": {"PDL": False}, "gfx942": {"PDL": False}},
    targets=ALL_TARGETS,
)

PREFILL_PLAN = CompileCase(
    name="plan-prefill",
    kernel="runtime.kernels.attention.plan_kernels:plan_prefill_kernel",
    signature={
        "starts_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "work_ptr": "*i32",
        "first_span": "i32",
        "num_spans": "i32",
        "num_tiles": "i32",
        "search_steps": "i32",
    },
    constexprs={"BLOCK_Q": 32, "TILE": 128, "BLOCK": 64},
)

COMPILE_CASES = [
    PLAN,
    PREFILL_PLAN,
    decode("bf16"),
    decode("fp8", kv="fp8"),
    decode("int8", kv="int8"),
    decode("window-wide", windowed=True, group=2, head_dim=256, max_spill_bytes=16),
    decode("splits-of-three", splits=16, group=3, head_dim=64),
    decode("warps", warps=4),
    prefill("bf16"),
    prefill("fp8", kv="fp8"),
    prefill("window", windowed=True),
    hopper("bf16", "bf16", 4, 128, 16),
    hopper("fp16-group-of-three", "fp16", 3, 64, 8),
]
