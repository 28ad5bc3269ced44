"""What the quantization kernel is compiled as."""

from __future__ import annotations

from compile_case import CompileCase

COMPILE_CASES = [
    CompileCase(
        name=f"{kind}-{block}",
        kernel="runtime.kernels.quantize.kernel:quantize_kernel",
        signature={
            "x_ptr": "*bf16",
            "codes_ptr": "*fp8e4nv" if kind == "fp8" else "*i8",
            "scale_ptr": "*fp32",
            "width": "i32",
        },
        constexprs={"BLOCK": block, "IS_FLOAT": kind == "fp8", "USE_FMA": True, "PDL": True},
        overrides={"sm80": {"PDL": False}, "gfx942": {"PDL": False}} if kind == "int8" else {},
        targets=("sm80", "sm90", "sm100", "gfx942") if kind == "int8" else ("sm90", "sm100"),
        num_warps=warps,
        aligned=("width",),
    )
    for kind, block, warps in (("int8", 4096, 8), ("fp8", 16384, 16))
]
