"""What the one-row kernels are compiled as; the other W8A8 products are cases of `dense`."""

from __future__ import annotations

from compile_case import CompileCase

PORTABLE = {"PDL": False, "USE_PTX": False}
NO_PDL = {"PDL": False, "PREFETCH": 0}
TYPES = {"int8": "i8", "fp8": "fp8e4nv"}

COMPILE_CASES = [
    CompileCase(
        name=f"gemv-{kind}-{block_k}{'-' + act if act else ''}",
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
            "ACT": act,
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
    for kind, block_k, act in (
        ("int8", 256, None),
        ("int8", 1024, "silu"),
        ("fp8", 512, None),
        ("fp8", 512, "gelu_tanh"),
    )
] + [
    CompileCase(
        name=f"gate-up-{kind}-m{block_m}",
        kernel="runtime.kernels.w8a8.kernel:gemm_gate_up",
        signature={
            "x_ptr": f"*{TYPES[kind]}",
            "w_ptr": f"*{TYPES[kind]}",
            "out_ptr": "*bf16",
            "maxima_ptr": "*i32",
            "row_scale_ptr": "*fp32",
            "channel_scale_ptr": "*fp32",
            **dict.fromkeys(("M", "N", "K"), "i32"),
        },
        constexprs={
            "BLOCK_N": block_n,
            "BLOCK_M": block_m,
            "BLOCK_K": 128,
            "EXACT_EVERY": 128 if kind == "fp8" else None,
            "PREFETCH": 1024,
            "EVEN_K": True,
            "ACT": "silu",
            "USE_PTX": True,
            "PDL": True,
        },
        overrides={} if kind == "fp8" else {"sm80": NO_PDL, "gfx942": {**NO_PDL, "USE_PTX": False}},
        targets=("sm90", "sm100") if kind == "fp8" else ("sm80", "sm90", "sm100", "gfx942"),
        num_stages=3,
        target_options={} if kind == "fp8" else {"gfx942": {"num_stages": 2}},
        aligned=("N", "K"),
        expects={"sm90": ("wgmma.mma_async",)},
    )
    for kind, block_n, block_m in (("int8", 128, 64), ("int8", 64, 16), ("fp8", 128, 64))
]
