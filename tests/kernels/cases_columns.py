"""What GPTQ's column kernel is compiled as."""

from __future__ import annotations

from compile_case import CompileCase

POINTERS = {
    "block_ptr": "*fp32",
    "local_ptr": "*fp32",
    "groups_ptr": "*i32",
    "scale_ptr": "*bf16",
    "is_zero_ptr": "*i1",
    "codes_ptr": "*fp32",
    "pushed_ptr": "*fp32",
}
RANGES = {"int4": (-8.0, 7.0), "fp8": (-448.0, 448.0)}

COMPILE_CASES = [
    CompileCase(
        name=f"{kind}{'-asym' if has_zero else ''}-{'descend' if descends else 'propagate'}",
        kernel="quant.methods.columns_kernel:sweep_kernel",
        signature={
            **POINTERS,
            **({"zero_ptr": "*i8"} if has_zero else {}),
            **({"present_ptr": "*fp32"} if descends else {}),
            **dict.fromkeys(("num_rows", "num_columns", "local_stride"), "i32"),
        },
        constexprs={
            **({} if has_zero else {"zero_ptr": None}),
            **({} if descends else {"present_ptr": None}),
            "LOW": RANGES[kind][0],
            "HIGH": RANGES[kind][1],
            "IS_FLOAT": kind == "fp8",
            "COLUMNS": 128,
            "ROWS": 16,
        },
        num_warps=1,
        aligned=("num_rows",),
    )
    for kind, has_zero, descends in (
        ("int4", False, False),
        ("int4", True, True),
        ("fp8", False, True),
    )
]
