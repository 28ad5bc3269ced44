"""What a kernel is compiled as, without a GPU: one entry of a `COMPILE_CASES` list.

    COMPILE_CASES = [
        CompileCase(
            name="gemv-m1",
            kernel="runtime.kernels.w4a16.kernel:gemv",
            signature={"x_ptr": "*bf16", "codes_ptr": "*i32", "out_ptr": "*bf16", "N": "i32"},
            constexprs={"BLOCK_N": 64, "USE_PTX": True, "PDL": True},
            overrides={"gfx942": {"USE_PTX": False, "PDL": False}},
            aligned=("N",),
        ),
    ]

Imports nothing, so that a machine without triton can collect the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_TARGETS = ("sm80", "sm90", "sm100", "gfx942")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """One kernel with one choice of constants, compiled for each of its targets.

    Attributes:
        name: unique in its op.
        kernel: `package.module:function` of the `triton.jit` function.
        signature: type of every argument that is no constant, as Triton writes them (`*bf16`,
            `*fp8e4nv`, `*i32`, `i32`, `fp32`). The constants need not be named here.
        constexprs: value of every `tl.constexpr` argument (and of arguments specialised to None).
        overrides: by target, constants that differ there (no PTX and no PDL on gfx942; no PDL on
            sm80).
        targets: what to compile for.
        num_warps, num_stages: launch options; `options` holds any other one, such as `num_ctas`
            or `maxnreg`. `launch_pdl` follows a true constant named PDL by itself.
        target_options: by target, launch options that differ there (fewer stages on gfx942, whose
            programs have 64 KiB of shared memory).
        aligned: integer arguments that are multiples of 16, as the launcher would see from their
            values. Pointers are aligned unless named in `unaligned`.
        expects: by target, text that must stand in the PTX (gfx942: in the AMDGCN), such as
            `{"sm90": ("wgmma.mma_async",)}`.
        max_spill_bytes: local memory per thread allowed on sm90. Zero unless there is a reason.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    targets: tuple[str, ...] = ALL_TARGETS
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    target_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    expects: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    max_spill_bytes: int = 0

    def constants_for(self, target: str) -> dict[str, Any]:
        return {**self.constexprs, **self.overrides.get(target, {})}

    def options_for(self, target: str) -> dict[str, Any]:
        """Launch options; a kernel with PDL set is compiled as it would be launched."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}
        options |= self.target_options.get(target, {})
        if self.constants_for(target).get("PDL") and target.startswith("sm"):
            options["launch_pdl"] = True
        return options
