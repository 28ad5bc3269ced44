"""What `decode_inputs` is compiled as."""

from __future__ import annotations

from compile_case import CompileCase

COMPILE_CASES = [
    CompileCase(
        name=f"blocks-of-{block_size}",
        kernel="runtime.kernels.decode_inputs.kernel:decode_inputs_kernel",
        signature={
            "rows_ptr": "*i32",
            "tables_ptr": "*i32",
            "last_tokens_ptr": "*i32",
            "token_ids_ptr": "*i64",
            "positions_ptr": "*i64",
            "slots_ptr": "*i64",
            "seq_lens_ptr": "*i32",
            "out_tables_ptr": "*i32",
            "num_columns": "i32",
        },
        constexprs={"BLOCK_SIZE": block_size, "COLUMNS": 1024, "ROW_WIDTH": 5},
    )
    for block_size in (16,)
]
