"""What the W4A16 kernels are compiled as: every program, over groups, zero points and types."""

from __future__ import annotations

from typing import Any

from compile_case import CompileCase

MODULE = "runtime.kernels.w4a16.kernel"
PORTABLE = {"USE_PTX": False, "PDL": False, "PREFETCH_KB": 0, "STAGES": 2}
OVERRIDES = {"gfx942": PORTABLE, "sm80": {"PDL": False, "PREFETCH_KB": 0}}


def linear(
    name: str, kernel: str, *, half: str = "bf16", asymmetric: bool = False, **given: Any
) -> CompileCase:
    launch = {key: given.pop(key) for key in ("num_warps", "num_stages", "targets") if key in given}
    expects = given.pop("expects", {})
    constants = {
        "BLOCK_K": 128,
        "GROUPS": 1,
        "SPLIT_K": 1,
        "EVEN_K": True,
        "EVEN_N": True,
        "STAGES": 4,
        "PREFETCH_KB": 32,
        "USE_PTX": True,
        "PDL": True,
        "bias_ptr": None,
        **({} if asymmetric else {"zero_ptr": None}),
        **given,
    }
    pointers = {"x_ptr": half, "codes_ptr": "i16", "scale_ptr": half, "out_ptr": half}
    pointers |= {"zero_ptr": "u8"} if asymmetric else {}
    pointers |= {"partials_ptr": "fp32", "counters_ptr": "i32"}
    numbers = [
        "M",
        "N",
        "K",
        "num_kb",
        *(["num_m_tiles", "num_whole"] if kernel == "tile_kernel" else []),
    ]
    return CompileCase(
        name=name,
        kernel=f"{MODULE}:{kernel}",
        signature={key: f"*{kind}" for key, kind in pointers.items()}
        | dict.fromkeys(numbers, "i32"),
        constexprs=constants,
        overrides=OVERRIDES,
        aligned=("N", "K"),
        expects=expects,
        **launch,
    )


def gemv(name: str, *, groups: int, half: str = "bf16", asymmetric: bool = False) -> CompileCase:
    pointers = {"x_ptr": half, "codes_ptr": "i32", "scale_ptr": half, "out_ptr": half}
    pointers |= {"zero_ptr": "u8"} if asymmetric else {}
    constants = {
        "BLOCK_N": 4,
        "BLOCK_K": 128,
        "KBS": 32,
        "GROUPS": groups,
        "EVEN_K": True,
        "USE_PTX": True,
        "PDL": True,
        "bias_ptr": None,
        **({} if asymmetric else {"zero_ptr": None}),
    }
    return CompileCase(
        name=name,
        kernel="runtime.kernels.w4a16.gemv:gemv_kernel",
        signature={key: f"*{kind}" for key, kind in pointers.items()}
        | dict.fromkeys(("N", "K", "num_kb"), "i32"),
        constexprs=constants,
        overrides={"sm80": {"PDL": False}, "gfx942": {"PDL": False, "USE_PTX": False}},
        aligned=("N", "K"),
    )


def few(name: str, *, half: str = "bf16", asymmetric: bool = False, **given: Any) -> CompileCase:
    """Inputs and weights in registers, unless staged."""
    num_stages = given.pop("num_stages", 1)
    constants = {
        "BLOCK_K": 128,
        "GROUPS": 1,
        "SPLIT_K": 1,
        "ACROSS": 1,
        "CENTERED": False,
        "EVEN_K": True,
        "WHOLE": True,
        "ONCE": True,
        "PREFETCH": 1,
        "AHEAD": False,
        "STAGES": 1,
        "USE_PTX": True,
        "PDL": True,
        "bias_ptr": None,
        **({} if asymmetric else {"zero_ptr": None}),
        **given,
    }
    pointers = {"x_ptr": half, "codes_ptr": "i16", "scale_ptr": half, "out_ptr": half}
    pointers |= {"zero_ptr": "u8"} if asymmetric else {}
    pointers |= {"partials_ptr": "fp32", "counters_ptr": "i32"}
    return CompileCase(
        name=name,
        kernel="runtime.kernels.w4a16.few:few_rows",
        signature={key: f"*{kind}" for key, kind in pointers.items()}
        | dict.fromkeys(("M", "N", "K", "num_kb"), "i32"),
        constexprs=constants,
        overrides={
            "sm80": {"PDL": False, "PREFETCH": 0},
            "gfx942": {"PDL": False, "PREFETCH": 0, "USE_PTX": False},
        },
        aligned=("N", "K"),
        num_warps=given["WARPS"],
        num_stages=num_stages,
        expects={"sm90": ("mma.sync.aligned.m16n8k16",)},
    )


WGMMA = {"sm90": ("wgmma.mma_async",)}
COMPILE_CASES = [
    gemv("gemv-g128", groups=1),
    gemv("gemv-g32-asym-fp16", groups=4, half="fp16", asymmetric=True),
    gemv("gemv-channel", groups=0),
    few("few-once", BLOCK_M=8, TILES=2, WARPS=8, STEP=4),
    few(
        "few-ahead",
        BLOCK_M=16,
        TILES=2,
        WARPS=4,
        STEP=1,
        ONCE=False,
        AHEAD=True,
    ),
    few("few-staged", BLOCK_M=8, TILES=2, WARPS=4, STEP=1, STAGES=3, ONCE=False, num_stages=3),
    few(
        "few-g32-asym-ragged",
        half="fp16",
        asymmetric=True,
        CENTERED=True,
        BLOCK_M=8,
        TILES=1,
        WARPS=4,
        STEP=2,
        BLOCK_K=64,
        GROUPS=2,
        SPLIT_K=2,
        EVEN_K=False,
        WHOLE=False,
        ONCE=False,
    ),
    linear("warp-m1", "warp_kernel", BLOCK_M=8, BLOCK_N=16, WARPS=4),
    linear("warp-n32", "warp_kernel", BLOCK_M=8, BLOCK_N=32, WARPS=4),
    linear(
        "warp-g32-asym-ragged",
        "warp_kernel",
        half="fp16",
        asymmetric=True,
        BLOCK_M=16,
        BLOCK_N=32,
        WARPS=4,
        BLOCK_K=64,
        GROUPS=2,
        EVEN_K=False,
        EVEN_N=False,
        SPLIT_K=2,
    ),
    linear(
        "tile-m16-split",
        "tile_kernel",
        BLOCK_M=16,
        BLOCK_N=64,
        SCALING="sums",
        JOIN=1,
        STAGED=False,
        SPLIT_K=4,
        expects=WGMMA,
    ),
    linear(
        "tile-m64-channel-asym",
        "tile_kernel",
        asymmetric=True,
        BLOCK_M=64,
        BLOCK_N=64,
        SCALING="centered",
        JOIN=4,
        STAGED=False,
        GROUPS=0,
        STAGES=3,
        num_warps=4,
        expects=WGMMA,
    ),
    linear(
        "tile-m128-g64-asym",
        "tile_kernel",
        half="fp16",
        asymmetric=True,
        BLOCK_M=128,
        BLOCK_N=128,
        SCALING="weights",
        JOIN=2,
        STAGED=False,
        GROUPS=2,
        STAGES=3,
        num_warps=8,
        expects=WGMMA,
    ),
    linear(
        "tile-m128-staged",
        "tile_kernel",
        BLOCK_M=128,
        BLOCK_N=256,
        SCALING="weights",
        JOIN=1,
        STAGED=True,
        STAGES=3,
        num_warps=8,
        expects=WGMMA,
        targets=("sm90", "sm100"),
    ),
]
