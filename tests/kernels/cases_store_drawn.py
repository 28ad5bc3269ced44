"""What `store_drawn` is compiled as."""

from __future__ import annotations

from compile_case import CompileCase

COMPILE_CASES = [
    CompileCase(
        name="rows",
        kernel="runtime.kernels.store_drawn.kernel:store_drawn_kernel",
        signature={
            "ids_ptr": "*i32",
            "is_finite_ptr": "*u8",
            "slots_ptr": "*i32",
            "last_tokens_ptr": "*i32",
            "out_ptr": "*i32",
            "num_rows": "i32",
        },
        constexprs={"FAULTY": -1, "BLOCK": 256},
    )
]
