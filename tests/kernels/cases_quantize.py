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
COMPILE_CASES += [
    CompileCase(
        name=f"pieces-{kind}{'' if has_maxima else '-row'}",
        kernel="runtime.kernels.quantize.kernel:quantize_pieces_kernel",
        signature={
            "x_ptr": "*bf16",
            **({"maxima_ptr": "*i32"} if has_maxima else {}),
            "codes_ptr": "*fp8e4nv" if kind == "fp8" else "*i8",
            "scale_ptr": "*fp32",
            "width": "i32",
            "num_maxima": "i32",
        },
        constexprs={
            "BLOCK": 2048,
            "MAXIMA": 256 if has_maxima else 16384,
            **({} if has_maxima else {"maxima_ptr": None}),
            "IS_FLOAT": kind == "fp8",
            "USE_FMA": True,
            "PDL": True,
        },
        overrides={"sm80": {"PDL": False}, "gfx942": {"PDL": False}} if kind == "int8" else {},
        targets=("sm80", "sm90", "sm100", "gfx942") if kind == "int8" else ("sm90", "sm100"),
        num_warps=4 if has_maxima else 32,
        aligned=("width",),
    )
    for kind, has_maxima in (("int8", True), ("fp8", True), ("int8", False))
]
