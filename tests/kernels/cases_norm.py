"""What the norm kernel is compiled as."""

from __future__ import annotations

from compile_case import CompileCase

NO_PDL = {"PDL": False}


def norm(name: str, out: str, *, has_residual: bool, block: int, num_warps: int) -> CompileCase:
    is_quantized = out != "*bf16"
    is_fp8 = out == "*fp8e4nv"
    absent = {
        **({} if has_residual else {"residual_ptr": None, "residual_out_ptr": None}),
        **({} if is_quantized else {"scale_ptr": None}),
    }
    pointers = {
        "x_ptr": "*bf16",
        "residual_ptr": "*bf16",
        "weight_ptr": "*fp32",
        "out_ptr": out,
        "residual_out_ptr": "*bf16",
        "scale_ptr": "*fp32",
        "x_stride": "i32",
        "width": "i32",
        "eps": "fp32",
    }
    return CompileCase(
        name=name,
        kernel="runtime.kernels.norm.kernel:rms_norm_kernel",
        signature={key: kind for key, kind in pointers.items() if key not in absent},
        constexprs={
            "BLOCK": block,
            "HAS_RESIDUAL": has_residual,
            "IS_QUANTIZED": is_quantized,
            "IS_FLOAT": is_fp8,
            "USE_FMA": True,
            "PDL": True,
            **absent,
        },
        overrides={} if is_fp8 else {"sm80": NO_PDL, "gfx942": NO_PDL},
        targets=("sm90", "sm100") if is_fp8 else ("sm80", "sm90", "sm100", "gfx942"),
        num_warps=num_warps,
        aligned=("x_stride", "width"),
    )


COMPILE_CASES = [
    norm("plain", "*bf16", has_residual=False, block=4096, num_warps=16),
    norm("add-int8", "*i8", has_residual=True, block=8192, num_warps=32),
    norm("add-fp8", "*fp8e4nv", has_residual=True, block=4096, num_warps=16),
]
