"""What lies between two products of a weight that is dequantized slice by slice."""

from __future__ import annotations

from typing import Any

from compile_case import CompileCase

PLAIN: dict[str, dict[str, Any]] = {
    "gfx942": {"USE_PTX": False, "PDL": False},
    "sm80": {"PDL": False},
}
SIZES = {
    "num_tokens": "i32", "width": "i32", "gated_stride": "i32", "gate_programs": "i32",
    "first": "i32", "num_rows": "i32", "turn": "i32", "jump": "i32", "K": "i32", "num_kb": "i32",
}  # fmt: skip
PAIRS = {"pairs_ptr": "*bf16", "gated_ptr": "*bf16"}
WEIGHT = {"codes_ptr": "*i16", "scale_ptr": "*bf16", "zero_ptr": "*u8", "matrix_ptr": "*bf16"}


def case(name: str, *, pairs: bool, weight: bool, symmetric: bool = True) -> CompileCase:
    signature = {**(PAIRS if pairs else {}), **(WEIGHT if weight else {}), **SIZES}
    if symmetric:
        signature.pop("zero_ptr", None)
    absent = {name: None for name in {**PAIRS, **WEIGHT} if name not in signature}
    return CompileCase(
        name=name,
        kernel="runtime.kernels.w4a16.slice_kernel:slice_kernel",
        signature=signature,
        constexprs={
            **absent, "ACT": "silu" if pairs else None, "BLOCK_T": 4, "BLOCK_W": 512,
            "BLOCK_N": 64, "BLOCK_K": 128, "GROUPS": 1,
            "USE_PTX": True, "PDL": True,
        },
        overrides=PLAIN,
        aligned=("width", "gated_stride", "K"),
    )  # fmt: skip


COMPILE_CASES = [
    case("first", pairs=False, weight=True),
    case("first-asymmetric", pairs=False, weight=True, symmetric=False),
    case("between", pairs=True, weight=True),
    case("last", pairs=True, weight=False),
]
