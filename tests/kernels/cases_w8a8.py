"""What the int8 row kernel is compiled as; the other W8A8 products are cases of `dense`."""

from __future__ import annotations

from compile_case import CompileCase

PORTABLE = {"PDL": False, "USE_PTX": False}

COMPILE_CASES = [
    CompileCase(
        name=f"gemv-int8-{block_k}",
        kernel="runtime.kernels.w8a8.kernel:gemv_int8",
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
            "USE_PTX": True,
            "PDL": True,
            "bias_ptr": None,
        },
        overrides={"sm80": {"PDL": False}, "gfx942": PORTABLE},
        num_warps=4,
        aligned=("N", "K"),
        expects={"sm90": ("dp4a",)},
    )
    for block_k in (256, 1024)
]
