"""What the gate kernel is compiled as."""

from __future__ import annotations

from compile_case import CompileCase

NO_PDL = {"PDL": False}
PORTABLE = {"PDL": False, "USE_PTX": False}


def gated(name: str, out: str, act: str, block: int, num_warps: int) -> CompileCase:
    is_quantized = out != "*bf16"
    is_fp8 = out == "*fp8e4nv"
    scale = {"scale_ptr": "*fp32"} if is_quantized else {}
    return CompileCase(
        name=name,
        kernel="runtime.kernels.gate.kernel:gate_kernel",
        signature={"gate_up_ptr": "*bf16", "out_ptr": out, "width": "i32", **scale},
        constexprs={
            "ACT": act,
            "BLOCK": block,
            "IS_QUANTIZED": is_quantized,
            "IS_FLOAT": is_fp8,
            "USE_PTX": True,
            "PDL": True,
            **({} if is_quantized else {"scale_ptr": None}),
        },
        overrides={} if is_fp8 else {"sm80": NO_PDL, "gfx942": PORTABLE},
        targets=("sm90", "sm100") if is_fp8 else ("sm80", "sm90", "sm100", "gfx942"),
        num_warps=num_warps,
        aligned=("width",),
    )


COMPILE_CASES = [
    gated("silu", "*bf16", "silu", 1024, 4),
    gated("gelu", "*bf16", "gelu", 1024, 4),
    gated("gelu-tanh-int8", "*i8", "gelu_tanh", 16384, 32),
    gated("silu-fp8", "*fp8e4nv", "silu", 32768, 32),
]
