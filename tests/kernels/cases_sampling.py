"""What the sampling kernels are compiled as: Llama-3's vocabulary of 128256, with everything on."""

from __future__ import annotations

from compile_case import CompileCase

SCORES = {
    "logits_ptr": "*bf16",
    "row_stride": "i32",
    "adjusted_ptr": "*fp32",
    "is_adjusted_ptr": "*i32",
    "slots_ptr": "*i32",
}
PARAMETERS = {
    "doubles_ptr": "*fp64",
    "longs_ptr": "*i64",
    "floats_ptr": "*fp32",
    "ints_ptr": "*i32",
}
SEARCHED = {name: PARAMETERS[name] for name in ("doubles_ptr", "floats_ptr", "ints_ptr")}
SCRATCH = {"partials_ptr": "*fp32", "state_ptr": "*fp64", "counters_ptr": "*i32"}
BLOCKS = {"BLOCK": 2048, "NUM_BLOCKS": 63, "BLOCKS_POW2": 64, "PDL": True}
NO_PDL = {"sm80": {"PDL": False}, "gfx942": {"PDL": False}}
SAMPLING = "runtime.kernels.sampling"

FLAGS = {"RANDOM": True, "FILTERED": True, "ADJUSTED": True}
NOT_ADJUSTED = {"ADJUSTED": False, "adjusted_ptr": None, "is_adjusted_ptr": None}
GREEDY = {**NOT_ADJUSTED, "RANDOM": False, "FILTERED": False, "state_ptr": None}
DRAW = {
    **SCORES,
    **PARAMETERS,
    **SCRATCH,
    "ids_ptr": "*i32",
    "is_finite_ptr": "*u8",
    "vocab": "i32",
}


ADJUST = {
    **SCORES,
    **SEARCHED,
    "bias_ids_ptr": "*i32",
    "bias_values_ptr": "*fp32",
    "masked_ids_ptr": "*i32",
    "counts_ptr": "*i16",
    "prompt_mask_ptr": "*i32",
    "vocab": "i32",
    "num_words": "i32",
}
LISTS = {
    "BLOCK": 2048,
    "NUM_BIASED": 300,
    "NUM_MASKED": 8,
    "LIST": 64,
    "PENALIZED": True,
    "BIASED": True,
    "PDL": True,
}
NO_HISTORY = {"PENALIZED": False, "counts_ptr": None, "prompt_mask_ptr": None}
REPORTED = {
    "logits_ptr": "*bf16",
    "row_stride": "i32",
    "slots_ptr": "*i32",
    "ints_ptr": "*i32",
    "partials_ptr": "*fp32",
    "bounds_ptr": "*fp32",
    "counters_ptr": "*i32",
    "vocab": "i32",
    "num_top": "i32",
}


def without(signature: dict[str, str], names: object) -> dict[str, str]:
    return {name: kind for name, kind in signature.items() if name not in dict(names)}  # type: ignore[call-overload]


COMPILE_CASES = [
    CompileCase(
        name="draw-greedy",
        kernel=f"{SAMPLING}.kernel:draw_kernel",
        signature=without(DRAW, GREEDY),
        constexprs={**BLOCKS, **GREEDY},
        overrides=NO_PDL,
        aligned=("row_stride", "vocab"),
    ),
    CompileCase(
        name="draw",
        kernel=f"{SAMPLING}.kernel:draw_kernel",
        signature=DRAW,
        constexprs={**BLOCKS, **FLAGS},
        overrides=NO_PDL,
        aligned=("row_stride", "vocab"),
    ),
    CompileCase(
        name="adjust",
        kernel=f"{SAMPLING}.kernel_adjust:adjust_kernel",
        signature=ADJUST,
        constexprs=LISTS,
        overrides=NO_PDL,
        aligned=("row_stride", "vocab"),
    ),
    CompileCase(
        name="adjust-biased",
        kernel=f"{SAMPLING}.kernel_adjust:adjust_kernel",
        signature=without(ADJUST, NO_HISTORY),
        constexprs={**LISTS, **NO_HISTORY},
        overrides=NO_PDL,
        targets=("sm90",),
        aligned=("row_stride", "vocab"),
    ),
    CompileCase(
        name="count",
        kernel=f"{SAMPLING}.kernel_adjust:count_kernel",
        signature={
            "ids_ptr": "*i32",
            "is_finite_ptr": "*u8",
            "slots_ptr": "*i32",
            "counts_ptr": "*i16",
            "vocab": "i32",
        },
        constexprs={"PDL": True},
        overrides=NO_PDL,
        num_warps=1,
    ),
    CompileCase(
        name="narrow",
        kernel=f"{SAMPLING}.kernel_narrow:narrow_kernel",
        signature={**SCORES, **SEARCHED, **SCRATCH, "histograms_ptr": "*i32", "vocab": "i32"},
        constexprs={**BLOCKS, "CAPACITY": 2048, "ADJUSTED": True},
        overrides=NO_PDL,
        aligned=("row_stride", "vocab"),
    ),
    CompileCase(
        name="collect",
        kernel=f"{SAMPLING}.kernel_edge:collect_kernel",
        signature={
            **SCORES,
            **SEARCHED,
            **SCRATCH,
            "members_ptr": "*fp32",
            "vocab": "i32",
            "num_rows": "i32",
        },
        constexprs={**BLOCKS, "CAPACITY": 2048, "FEW": 256, "ADJUSTED": True},
        overrides=NO_PDL,
        aligned=("row_stride", "vocab"),
    ),
    CompileCase(
        name="collect-plain",
        kernel=f"{SAMPLING}.kernel_edge:collect_kernel",
        signature={
            **without(SCORES, NOT_ADJUSTED),
            **SEARCHED,
            **SCRATCH,
            "members_ptr": "*fp32",
            "vocab": "i32",
            "num_rows": "i32",
        },
        constexprs={**BLOCKS, **NOT_ADJUSTED, "CAPACITY": 2048, "FEW": 256},
        overrides=NO_PDL,
        aligned=("row_stride", "vocab"),
    ),
    CompileCase(
        name="draw-kept",
        kernel=f"{SAMPLING}.kernel_kept:draw_kept_kernel",
        signature={**SCORES, **PARAMETERS, **SCRATCH, "ids_ptr": "*i32", "vocab": "i32"},
        constexprs={**BLOCKS, "ADJUSTED": True},
        overrides=NO_PDL,
        aligned=("row_stride", "vocab"),
    ),
    CompileCase(
        name="logprobs",
        kernel=f"{SAMPLING}.kernel_logprobs:logprobs_kernel",
        signature={
            **REPORTED,
            "ids_ptr": "*i32",
            "chosen_ptr": "*fp32",
            "ranks_ptr": "*i32",
        },
        constexprs={**BLOCKS, "BY_SLOT": True},
        overrides=NO_PDL,
        aligned=("row_stride", "vocab"),
    ),
    CompileCase(
        name="top",
        kernel=f"{SAMPLING}.kernel_logprobs:top_kernel",
        signature={
            **REPORTED,
            "best_ptr": "*i64",
            "top_ids_ptr": "*i32",
            "top_values_ptr": "*fp32",
        },
        constexprs={**BLOCKS, "TOP_POW2": 32, "BY_SLOT": True},
        overrides=NO_PDL,
        aligned=("row_stride", "vocab"),
    ),
]
