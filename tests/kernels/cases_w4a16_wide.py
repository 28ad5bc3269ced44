"""What the Hopper kernel of W4A16 is compiled as: groups, zero points, types, both tiles."""

from __future__ import annotations

from typing import Any

from compile_case import CompileCase


def descriptor(kind: str, block: list[int], swizzle: int) -> str:
    """As Triton spells the type of a Gluon tensor descriptor."""
    bits = 8 if kind == "u8" else 16
    return (
        f"tensordesc<{kind}{block},NVMMASharedLayout(swizzle_byte_width={swizzle}, "
        f"element_bitwidth={bits}, rank={len(block)}, transposed=False, fp4_padded=False, "
        "cga_layout=[])>"
    )


def wide(
    name: str, *, block_m: int = 128, block_n: int = 256, stages: int = 4, half: str = "bf16",
    groups: int = 1, parts: int = 4, act: int = 1, asymmetric: bool = False, has_bias: bool = False,
    max_spill_bytes: int = 0,
) -> CompileCase:  # fmt: skip
    sixteens = (block_n if act <= 2 else 64) // 16
    constants: dict[str, Any] = {
        "BLOCK_N": block_n, "PER_BLOCK": groups, "MAX_PARTS": parts, "ACT": act,
        "STAGES": stages, "PDL": True,
    }  # fmt: skip
    constants |= {} if has_bias else {"bias_ptr": None}
    constants |= {} if asymmetric else {"zero_desc": None}
    types = {
        "x_desc": descriptor(half, [block_m, 64], 128),
        "codes_desc": descriptor("i16", [sixteens, 16, 32], 64),
        "scale_desc": descriptor(half, [sixteens, 1, 16], 0),
        "zero_desc": descriptor("u8", [sixteens, 1, 16], 0),
        "bias_ptr": f"*{half}",
        "out_ptr": f"*{half}",
        "partials_ptr": "*fp32",
        "counters_ptr": "*i32",
        **dict.fromkeys(
            ("M", "N", "num_kb", "num_groups", "num_m_tiles", "num_tiles", "num_sharers", "up"),
            "i32",
        ),
    }
    return CompileCase(
        name=name,
        kernel="runtime.kernels.w4a16.wide_kernel:wide_kernel",
        signature={name: kind for name, kind in types.items() if name not in constants},
        constexprs=constants,
        targets=("sm90",),
        aligned=("N",),
        expects={"sm90": ("wgmma.mma_async", "setmaxnreg", "cp.async.bulk.tensor")},
        max_spill_bytes=max_spill_bytes,
    )


COMPILE_CASES = [
    # What spills lies outside of the loop over K.
    wide("m128-n256-g128", max_spill_bytes=128),
    wide("m256-n128-g128-whole", block_m=256, block_n=128, stages=3, parts=1, max_spill_bytes=128),
    wide("m32-n256-g128", block_m=32, stages=6, parts=8, max_spill_bytes=128),
    wide("m128-n128-g128-adds", block_n=128, act=2, stages=5, max_spill_bytes=128),
    wide("m128-n256-g128-silu", act=4, max_spill_bytes=128),
    wide("m64-n256-g64-gelu-tanh", act=16, block_m=64, groups=2, parts=1, max_spill_bytes=128),
    # The warp that copies has 24 registers and eight addresses of scales and zero points.
    wide(
        "m128-n256-g32-asym",
        half="fp16",
        groups=4,
        asymmetric=True,
        has_bias=True,
        max_spill_bytes=128,
    ),  # fmt: skip
    wide(
        "m128-n128-g64-asym", block_n=128, stages=5, groups=2, asymmetric=True, max_spill_bytes=32
    ),
]
