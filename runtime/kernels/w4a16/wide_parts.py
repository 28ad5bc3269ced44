"""W4A16 in Gluon: words in shared memory become operands in registers.

Imports triton, so only kernels import this.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Names that changed between Triton 3.6 and 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@triton.constexpr_function
def _unpack_asm(plane, is_bf16, is_symmetric):
    """Two codes at bit 4 * plane of $1's halves -> (code - zero point) * $2, two of them. $3 is
    the zero point + the excess of `kernel_parts.excess`."""
    magic, eight = ("0x43004300", "0x43084308") if is_bf16 else ("0x64006400", "0x64086408")
    kind = "bf16x2" if is_bf16 else "f16x2"
    shift = f"shr.u32 t, $1, {4 * plane};" if plane else "mov.b32 t, $1;"
    offset = eight if is_symmetric else "$3"
    return (
        f"{{ .reg .b32 t, e; mov.b32 e, {offset}; {shift} "
        f"lop3.b32 t, t, 0x000f000f, {magic}, 0xea; "
        f"sub.rn.{kind} t, t, e; mul.rn.{kind} $0, t, $2; }}"
    )


@gluon.jit
def unpack_plane(words, scale, zero, PLANE: gl.constexpr):
    """Weights [R, 32] of a plane in the type of `scale` [R, 1]; zero: None for 8 everywhere."""
    asm: gl.constexpr = _unpack_asm(PLANE, scale.dtype == gl.bfloat16, zero is None)
    if zero is None:
        w = gl.inline_asm_elementwise(
            asm, "=r,r,r", [words, scale], dtype=scale.dtype, is_pure=True, pack=2
        )
    else:
        EXCESS: gl.constexpr = 128 if scale.dtype == gl.bfloat16 else 1024
        offset = (zero.to(gl.float32) + EXCESS).to(scale.dtype)
        w = gl.inline_asm_elementwise(
            asm, "=r,r,r,r", [words, scale, offset], dtype=scale.dtype, is_pure=True, pack=2
        )
    return w


@gluon.jit
def load_words(code_bufs, stage, FIRST: gl.constexpr, COUNT: gl.constexpr, A: gl.constexpr):
    """The words [COUNT, 32] of a tile's rows from FIRST on, as an operand."""
    ROWS: gl.constexpr = 16 * code_bufs.shape[1]
    return code_bufs.index(stage).reshape((ROWS, 32)).slice(FIRST, COUNT).load(A)


@gluon.jit
def load_column(bufs, at, FIRST: gl.constexpr, COUNT: gl.constexpr, A: gl.constexpr):
    """The scales or zero points [COUNT, 1] of a tile's rows from FIRST on."""
    ROWS: gl.constexpr = 16 * bufs.shape[1]
    rows = bufs.index(at).reshape((ROWS,)).slice(FIRST, COUNT)
    return gl.expand_dims(rows.load(gl.SliceLayout(1, A)), 1)


@gluon.jit
def unpack_half(
    words, scale_bufs, zero_bufs, stage, FIRST: gl.constexpr, HALF: gl.constexpr,
    PER_BLOCK: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Planes 2 HALF and 2 HALF + 1 side by side: weights [R, 64] of the rows from FIRST on."""
    COUNT: gl.constexpr = words.shape[0]
    group = stage * PER_BLOCK + HALF * PER_BLOCK // 2
    scale = load_column(scale_bufs, group, FIRST, COUNT, A)
    zero = zero_bufs
    if zero_bufs is not None:
        zero = load_column(zero_bufs, group, FIRST, COUNT, A)
    low = unpack_plane(words, scale, zero, 2 * HALF)
    if PER_BLOCK == 4:
        scale = load_column(scale_bufs, group + 1, FIRST, COUNT, A)
        if zero_bufs is not None:
            zero = load_column(zero_bufs, group + 1, FIRST, COUNT, A)
    high = unpack_plane(words, scale, zero, 2 * HALF + 1)
    return beside(low, high, A)


@gluon.jit
def beside(low, high, A: gl.constexpr):
    """Two planes [R, 32] as an operand [R, 64]. Registers are renamed, nothing moves."""
    both = gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), (low.shape[0], 64))
    return gl.convert_layout(both, A, assert_trivial=True)
