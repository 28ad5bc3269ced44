"""What the rotate-and-store kernel is compiled as without a GPU."""

from __future__ import annotations

from typing import Any

from compile_case import CompileCase

TYPES = {
    "heads_ptr": "*bf16",
    "head_scales_ptr": "*fp32",
    "token_scales_ptr": "*fp32",
    "slots_ptr": "*i32",
    "positions_ptr": "*i32",
    "table_ptr": "*fp32",
    "q_norm_ptr": "*fp32",
    "k_norm_ptr": "*fp32",
    "num_tokens": "i32",
    "eps": "fp32",
}
POOLS = {"plain": "*bf16", "fp8": "*u8", "int8": "*i8"}


def case(name: str, *, kv: str, width: int, normed: bool, block_t: int) -> CompileCase:
    constants: dict[str, Any] = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "HEAD_DIM": 128,
        "WIDTH": width,
        "ROTATES": True,
        "NORMS": normed,
        "BLOCK_SIZE": 16,
        "KV": kv,
        "BLOCK_T": block_t,
        "BLOCK_F": width // 2,
        "BLOCK_R": 128 - width,
        "PDL": True,
    }
    portable = {"PDL": False, "KV": "fp8_bits" if kv == "fp8" else kv}
    return CompileCase(
        name=name,
        kernel="runtime.kernels.rope_kv.kernel:rope_kv_kernel",
        signature={**TYPES, "pool_ptr": POOLS[kv]},
        constexprs=constants,
        overrides={"sm80": portable, "gfx942": portable},
        num_warps=4 if block_t > 1 else 1,
    )


COMPILE_CASES = [
    case("bf16", kv="plain", width=128, normed=False, block_t=1),
    case("fp8", kv="fp8", width=64, normed=True, block_t=16),
    case("int8", kv="int8", width=128, normed=True, block_t=1),
]
