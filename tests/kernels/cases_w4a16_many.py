"""What the prompts' kernel of W4A16 is compiled as on Hopper: plain, gated, added to a sum."""

from __future__ import annotations

from cases_w4a16_wide import descriptor
from compile_case import CompileCase


def many(name: str, *, act: str | None = None, adds: bool = False, half: str = "bf16",
         has_bias: bool = False) -> CompileCase:  # fmt: skip
    types = {
        "x_desc": descriptor(half, [128, 64], 128),
        "codes_desc": descriptor("i16", [8, 16, 32], 64),
        "scale_desc": descriptor(half, [8, 1, 16], 0),
        "bias_ptr": f"*{half}",
        "out_ptr": f"*{half}",
        **dict.fromkeys(("M", "width", "num_kb", "num_m_tiles", "num_n_tiles"), "i32"),
        **dict.fromkeys(("group_m", "n_second"), "i32"),
    }
    constants = {"STAGES": 4, "ACT": act, "ONTO": adds, "PDL": True}
    constants |= {} if has_bias else {"bias_ptr": None}
    return CompileCase(
        name=name,
        kernel="runtime.kernels.w4a16.many_kernel:many_kernel",
        signature={name: kind for name, kind in types.items() if name not in constants},
        constexprs=constants,
        targets=("sm90",),
        aligned=("width",),
        expects={"sm90": ("wgmma.mma_async", "setmaxnreg", "cp.async.bulk.tensor")},
    )


COMPILE_CASES = [
    many("plain-bias-fp16", half="fp16", has_bias=True),
    many("gated", act="silu"),
    many("added", adds=True),
]
