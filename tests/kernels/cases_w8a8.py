"""What the one-row kernels are compiled as; the other W8A8 products are cases of `dense`."""

from __future__ import annotations

from compile_case import CompileCase

PORTABLE = {"PDL": False, "USE_PTX": False}

COMPILE_CASES = [
    CompileCase(
        name=f"gemv-{kind}-{block_k}",
        kernel="runtime.kernels.w8a8.kernel:gemv_words",
        signature={
            "x_ptr": "*i32",
            "w_ptr": "*i32",
            "out_ptr": "*bf16",
            "row_scale_ptr": "*fp32",
            "channel_scale_ptr": "*fp32",
            "N": "i32",
            "K": "i32",
        },
        constexprs={
            "BLOCK_N": 4,
            "BLOCK_K": block_k,
            "IS_FLOAT": kind == "fp8",
            "USE_PTX": True,
            "PDL": True,
            "bias_ptr": None,
        },
        overrides={} if kind == "fp8" else {"sm80": {"PDL": False}, "gfx942": PORTABLE},
        targets=("sm90", "sm100") if kind == "fp8" else ("sm80", "sm90", "sm100", "gfx942"),
        num_warps=4,
        aligned=("N", "K"),
        expects={"sm90": ("fma.rn.f16x2" if kind == "fp8" else "dp4a",)},
    )
    for kind, block_k in (("int8", 256), ("int8", 1024), ("fp8", 512))
]
