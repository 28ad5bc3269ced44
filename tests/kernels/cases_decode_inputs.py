"""What `decode_inputs` is compiled as."""

from __future__ import annotations

from compile_case import CompileCase

COMPILE_CASES = [
    CompileCase(
        name="blocks-of-16",
        kernel="runtime.kernels.decode_inputs.kernel:decode_inputs_kernel",
        signature={
            "rows_ptr": "*i32",
            "tables_ptr": "*i32",
            "last_tokens_ptr": "*i32",
            "num_generated_ptr": "*i32",
            "token_ids_ptr": "*i64",
            "positions_ptr": "*i64",
            "kv_slots_ptr": "*i64",
            "slots_ptr": "*i32",
            "seq_lens_ptr": "*i32",
            "out_tables_ptr": "*i32",
            "num_columns": "i32",
            "count_stride": "i32",
        },
        constexprs={"BLOCK_SIZE": 16, "COLUMNS": 1024, "ROW_WIDTH": 5},
        unaligned=("num_generated_ptr", "positions_ptr", "kv_slots_ptr", "seq_lens_ptr"),
    )
]
