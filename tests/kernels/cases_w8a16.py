"""What the W8A16 kernels are compiled as: channel and groups, both 16-bit types."""

from __future__ import annotations

from typing import Any

from compile_case import ALL_TARGETS, CompileCase

MODULE = "runtime.kernels.w8a16.kernel"
PORTABLE = {"PDL": False, "USE_PTX": False, "PREFETCH": 0}
AMPERE = {"PDL": False, "PREFETCH": 0}


def gemm(
    name: str,
    half: str,
    group: int,
    *,
    has_zeros: bool = False,
    targets: tuple[str, ...] = ALL_TARGETS,
    **given: Any,
) -> CompileCase:
    launch = {key: given.pop(key) for key in ("num_warps", "num_stages") if key in given}
    constants: dict[str, Any] = {
        "BLOCK": 64 if group == 32 else 128,
        "SPLITS": 1,
        "GROUP": group,
        "PREFETCH": 1024,
        "USE_PTX": True,
        "PDL": True,
        "bias_ptr": None,
        **given,
    }
    if constants["SPLITS"] == 1:
        constants |= {"partials_ptr": None, "counters_ptr": None}
    if not has_zeros:
        constants["zero_ptr"] = None
    types = {
        "x_ptr": f"*{half}",
        "w_ptr": "*i16",
        "out_ptr": f"*{half}",
        "partials_ptr": "*fp32",
        "counters_ptr": "*i32",
        "scale_ptr": "*bf16",
        "zero_ptr": "*i8",
        **dict.fromkeys(("M", "N", "K", "split_k"), "i32"),
    }
    return CompileCase(
        name=name,
        kernel=f"{MODULE}:gemm_w8a16",
        signature={key: kind for key, kind in types.items() if key not in constants},
        constexprs=constants,
        targets=targets,
        overrides={"sm80": AMPERE} | ({"gfx942": PORTABLE} if "gfx942" in targets else {}),
        aligned=("N", "K", "split_k"),
        expects={"sm90": ("wgmma.mma_async", "lop3.b32")},
        **launch,
    )


def gemv(name: str, group: int) -> CompileCase:
    return CompileCase(
        name=name,
        kernel=f"{MODULE}:gemv_w8a16",
        signature={
            "x_ptr": "*bf16",
            "w_ptr": "*i16",
            "out_ptr": "*bf16",
            "scale_ptr": "*bf16",
            "N": "i32",
            "K": "i32",
        },
        constexprs={
            "BLOCK_N": 4,
            "BLOCK_K": 4096,
            "BLOCK": 128,
            "GROUP": group,
            "USE_PTX": True,
            "PDL": True,
            "bias_ptr": None,
            "zero_ptr": None,
        },
        overrides={"sm80": {"PDL": False}, "gfx942": {"PDL": False, "USE_PTX": False}},
        num_warps=8,
        aligned=("N", "K"),
    )


NVIDIA = ("sm80", "sm90")
COMPILE_CASES = [
    gemm("channel-split", "bf16", 0, BLOCK_N=64, BLOCK_M=16, SPLITS=4),
    gemm("channel-m128", "bf16", 0, targets=NVIDIA, BLOCK_N=128, BLOCK_M=128, num_warps=8),
    gemm("g128-asym", "bf16", 128, has_zeros=True, targets=NVIDIA, BLOCK_N=64, BLOCK_M=64),
    gemm("g32-fp16", "fp16", 32, targets=NVIDIA, BLOCK_N=64, BLOCK_M=32, num_stages=4),
    gemv("gemv-channel", 0),
    gemv("gemv-g128", 128),
    CompileCase(
        name="dequantize",
        kernel=f"{MODULE}:dequantize_w8a16",
        signature={
            "w_ptr": "*i16",
            "scale_ptr": "*bf16",
            "zero_ptr": "*i8",
            "out_ptr": "*bf16",
            "K": "i32",
        },
        constexprs={"WORDS": 512, "BLOCK": 128, "GROUP": 64},
        aligned=("K",),
    ),
]
