"""What the matrix kernels are compiled as, over plain and scaled operands."""

from __future__ import annotations

from typing import Any

from compile_case import ALL_TARGETS, CompileCase

MODULE = "runtime.kernels.dense.kernel"
PORTABLE = {"PDL": False, "PREFETCH": 0}


def gemm(
    name: str, kind: str, targets: tuple[str, ...], *, has_scales: bool, **given: Any
) -> CompileCase:
    is_fp8 = kind == "fp8e4nv"
    constants: dict[str, Any] = {
        "BLOCK_K": 128,
        "SPLITS": 1,
        "EXACT_EVERY": 128 if is_fp8 else None,
        "PREFETCH": 1024,
        "EVEN_K": True,
        "PDL": True,
        "bias_ptr": None,
        **given,
    }
    if constants["SPLITS"] == 1:
        constants |= {"partials_ptr": None, "counters_ptr": None}
    if not has_scales:
        constants |= {"row_scale_ptr": None, "channel_scale_ptr": None}
    pointers = {
        "x_ptr": f"*{kind}",
        "w_ptr": f"*{kind}",
        "out_ptr": "*bf16",
        "partials_ptr": "*i32" if kind == "i8" else "*fp32",
        "counters_ptr": "*i32",
        "row_scale_ptr": "*fp32",
        "channel_scale_ptr": "*fp32",
        **dict.fromkeys(("M", "N", "K", "split_k"), "i32"),
    }
    return CompileCase(
        name=name,
        kernel=f"{MODULE}:gemm",
        signature={key: kind for key, kind in pointers.items() if key not in constants},
        constexprs=constants,
        overrides={name: PORTABLE for name in ("sm80", "gfx942") if name in targets},
        targets=targets,
        aligned=("N", "K", "split_k"),
        num_stages=3 if "gfx942" not in targets else 2,
        expects={"sm90": ("wgmma.mma_async",)},
    )


def gemv(name: str, kind: str, **given: Any) -> CompileCase:
    is_fp8 = kind == "fp8e4nv"
    absent = {} if is_fp8 else {"row_scale_ptr": None, "channel_scale_ptr": None}
    scales = {"row_scale_ptr": "*fp32", "channel_scale_ptr": "*fp32"} if is_fp8 else {}
    return CompileCase(
        name=name,
        kernel=f"{MODULE}:gemv",
        signature={
            "x_ptr": f"*{kind}",
            "w_ptr": f"*{kind}",
            "out_ptr": "*bf16",
            "N": "i32",
            "K": "i32",
            **scales,
        },
        constexprs={"PDL": True, "bias_ptr": None, **absent, **given},
        overrides={} if is_fp8 else {"sm80": {"PDL": False}, "gfx942": {"PDL": False}},
        targets=("sm90", "sm100") if is_fp8 else ("sm80", "sm90", "sm100", "gfx942"),
        aligned=("N", "K"),
    )


def tma(name: str, kind: str, block_m: int, block_n: int, splits: int = 1) -> CompileCase:
    absent = {"partials_ptr": None, "counters_ptr": None} if splits == 1 else {}
    scratch = {"partials_ptr": "*i32", "counters_ptr": "*i32"} if splits > 1 else {}
    return CompileCase(
        name=name,
        kernel=f"{MODULE}:gemm_tma",
        signature={
            "x_desc": f"tensordesc<{kind}[{block_m}, 128]>",
            "w_desc": f"tensordesc<{kind}[{block_n}, 128]>",
            "w_ptr": f"*{kind}",
            "out_ptr": "*bf16",
            "row_scale_ptr": "*fp32",
            "channel_scale_ptr": "*fp32",
            **scratch,
            **dict.fromkeys(("M", "N", "K", "split_k"), "i32"),
        },
        constexprs={
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": 128,
            "GROUP_M": 8,
            "SPLITS": splits,
            "EXACT_EVERY": None if kind == "i8" else 128,
            "PREFETCH": 1024 if block_m < 64 else 0,
            "IS_INT": kind == "i8",
            "IS_SWAPPED": block_m < 64,
            "PDL": True,
            "bias_ptr": None,
            **absent,
        },
        targets=("sm90",),
        num_warps=4,
        num_stages=3,
        aligned=("N", "K", "split_k"),
        expects={"sm90": ("wgmma.mma_async", "cp.async.bulk.tensor")},
    )


HOPPER = ("sm90", "sm100")
COMPILE_CASES = [
    gemm("bf16-fixed", "bf16", ALL_TARGETS, has_scales=False, BLOCK_N=64, BLOCK_M=64, BLOCK_K=64),
    gemm("int8-split", "i8", ALL_TARGETS, has_scales=True, BLOCK_N=64, BLOCK_M=16, SPLITS=4),
    gemm("int8-m128", "i8", ("sm80", "sm90"), has_scales=True, BLOCK_N=64, BLOCK_M=128),
    gemm("fp8-split", "fp8e4nv", HOPPER, has_scales=True, BLOCK_N=128, BLOCK_M=16, SPLITS=2),
    gemm("fp8-ragged", "fp8e4nv", ("sm90",), has_scales=True, BLOCK_N=64, BLOCK_M=64, EVEN_K=False),
    gemv("gemv-bf16", "bf16", BLOCK_N=4, BLOCK_K=2048),
    gemv("gemv-fp8", "fp8e4nv", BLOCK_N=4, BLOCK_K=2048),
    tma("tma-int8", "i8", 128, 128),
    tma("tma-int8-m16-split", "i8", 16, 64, splits=4),
    tma("tma-fp8", "fp8e4nv", 64, 128),
]
