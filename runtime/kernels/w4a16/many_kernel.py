"""W4A16 for prompts on Hopper, in Gluon: whole tiles, and act(gate) * up where it is asked for.

One warp feeds stages of shared memory through the copy engine (TMA); two warpgroups, which share
the inputs but no barrier, each own 64 rows of either half of a tile's weights and unpack them into
operand A's registers: while one unpacks or stores, the other multiplies. So weights cross memory
as codes and never exist dequantized, which a card at its power limit feels more than the unpacking.
A gate's row and its up's meet in one thread.

Codes, scales and the arithmetic are `kernel.py`'s with SCALING "weights": a weight is
(code - 8) * scale, rounded to the compute type, as `pack.unpack_w4a16` has it. Serves symmetric
weights with one group per K-block of 128 and 16-bit scales, an even number of K-blocks.

Imports triton; `runtime.kernels.w4a16.many` imports this only where it launches.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from runtime.kernels.w4a16.wide_parts import (
    barrier,
    beside,
    load_column,
    load_words,
    tma_load,
    unpack_plane,
)

CONSUMERS = gl.constexpr(2)
HALF_ROWS = gl.constexpr(128)


@gluon.jit
def _unpack_half(words, scale, HALF: gl.constexpr, A: gl.constexpr):
    """Planes 2 HALF and 2 HALF + 1 side by side: weights [64, 64]."""
    low = unpack_plane(words, scale, None, 2 * HALF)
    high = unpack_plane(words, scale, None, 2 * HALF + 1)
    return beside(low, high, A)


@gluon.jit
def _place(tile, num_m_tiles, num_n_tiles, group_m):
    """(n, m) of a tile: group_m tiles of inputs pass all weights, then the next group_m."""
    group = tile // (group_m * num_n_tiles)
    rest = tile % (group_m * num_n_tiles)
    size = gl.minimum(num_m_tiles - group * group_m, group_m)
    return rest // size, group * group_m + rest % size


@gluon.jit
def _produce(
    x_desc, codes_desc, scale_desc, x_bufs, code_bufs, scale_bufs, full, empty,
    num_kb, num_m_tiles, num_n_tiles, group_m, n_step, n_second, program, programs, end,
):  # fmt: skip
    """Fill stages: inputs, and codes and scales of both halves, of a K-block each."""
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BYTES: gl.constexpr = BLOCK_M * 256 + 2 * HALF_ROWS * 64 + 2 * HALF_ROWS * 2
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    for unit in range(0, end):
        stage = unit % STAGES
        turn = unit // STAGES
        n_tile, m_tile = _place(
            program + unit // num_kb * programs, num_m_tiles, num_n_tiles, group_m
        )
        kb = unit % num_kb
        m = m_tile * BLOCK_M
        first = n_tile * n_step
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        tma_load(codes_desc, [first, kb * 16, 0], bar, code_bufs.index(2 * stage))
        tma_load(codes_desc, [first + n_second, kb * 16, 0], bar, code_bufs.index(2 * stage + 1))
        tma_load(scale_desc, [first, kb, 0], bar, scale_bufs.index(2 * stage))
        tma_load(scale_desc, [first + n_second, kb, 0], bar, scale_bufs.index(2 * stage + 1))
        tma_load(x_desc, [m, kb * 128], bar, x_bufs.index(2 * stage))
        tma_load(x_desc, [m, kb * 128 + 64], bar, x_bufs.index(2 * stage + 1))


@gluon.jit
def _store(y, out_ptr, n, m, M, width, OUT: gl.constexpr, ONTO: gl.constexpr):
    """y [64, BLOCK_M] to out [M, width], from column `n` and row `m` on; added to it if ONTO."""
    BLOCK_M: gl.constexpr = y.shape[1]
    flipped = gl.convert_layout(gl.permute(y, (1, 0)), OUT)
    rows = n + gl.arange(0, 64, gl.SliceLayout(0, OUT))
    cols = m + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    at = out_ptr + (cols.to(gl.int64)[:, None] * width + rows[None, :])
    ok = (cols < M)[:, None] & (rows < width)[None, :]
    if ONTO:
        before = gl.load(at, mask=ok, other=0.0).to(gl.float32)
        flipped = (before + flipped.to(gl.float32)).to(flipped.dtype)
    gl.store(at, flipped, mask=ok)


@gluon.jit
def _with_bias(acc, bias_ptr, n, N):
    if bias_ptr is not None:
        at = n + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + at, mask=at < N, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def _silu(x):
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; "
        "add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _consume(
    x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr,
    M, width, num_kb, num_m_tiles, num_n_tiles, group_m, program, programs, end,
    WHO: gl.constexpr, GATED: gl.constexpr, ONTO: gl.constexpr,
):  # fmt: skip
    """All tiles of a program: 64 rows of either half of each."""
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = x_bufs.shape[1]
    FIRST: gl.constexpr = WHO * 64
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if WHO == 1:  # so that one has products to run while the other stores a tile
        mbarrier.wait(go.index(0), 0)
    mbarrier.wait(full.index(0), 0)
    words = load_words(code_bufs, 0, FIRST, 64, A)
    scale = load_column(scale_bufs, 0, FIRST, 64, A)
    scale_2 = load_column(scale_bufs, 1, FIRST, 64, A)
    w = _unpack_half(words, scale, 0, A)
    unit = 0
    while unit < end:
        acc = gl.zeros([64, BLOCK_M], gl.float32, C)
        more = acc
        for u in range(unit, unit + num_kb, 2):
            # Products run while the weights of the ones after them are unpacked; what is waited for
            # lies two products back. A barrier, and words read behind it, keep ptxas from
            # unpacking between the instructions of one product. None may run on into the next
            # iteration: ptxas would then wait for every single instruction.
            stage = u % STAGES
            x_low = x_bufs.index(2 * stage).permute((1, 0))
            x_high = x_bufs.index(2 * stage + 1).permute((1, 0))
            sums = warpgroup_mma(w, x_low, acc, is_async=True)
            barrier()
            w_2 = _unpack_half(load_words(code_bufs, 2 * stage + 1, FIRST, 64, A), scale_2, 0, A)
            sums_2 = warpgroup_mma(w_2, x_low, more, is_async=True)
            barrier()
            w_3 = _unpack_half(load_words(code_bufs, 2 * stage, FIRST, 64, A), scale, 1, A)
            sums = warpgroup_mma(w_3, x_high, sums, is_async=True)
            barrier()
            w_4 = _unpack_half(load_words(code_bufs, 2 * stage + 1, FIRST, 64, A), scale_2, 1, A)
            sums_2 = warpgroup_mma(w_4, x_high, sums_2, is_async=True)
            second = (u + 1) % STAGES
            mbarrier.wait(full.index(second), (u + 1) // STAGES & 1)
            scale = load_column(scale_bufs, 2 * second, FIRST, 64, A)
            scale_2 = load_column(scale_bufs, 2 * second + 1, FIRST, 64, A)
            y_low = x_bufs.index(2 * second).permute((1, 0))
            y_high = x_bufs.index(2 * second + 1).permute((1, 0))
            sums, sums_2 = warpgroup_mma_wait(2, deps=(sums, sums_2))
            w_5 = _unpack_half(load_words(code_bufs, 2 * second, FIRST, 64, A), scale, 0, A)
            sums = warpgroup_mma(w_5, y_low, sums, is_async=True)
            barrier()
            w_6 = _unpack_half(load_words(code_bufs, 2 * second + 1, FIRST, 64, A), scale_2, 0, A)
            sums_2 = warpgroup_mma(w_6, y_low, sums_2, is_async=True)
            sums, sums_2 = warpgroup_mma_wait(2, deps=(sums, sums_2))
            mbarrier.arrive(empty.index(stage), count=1)
            if WHO == 0:
                mbarrier.arrive(go.index(0), count=1, pred=u == 0)
            w_7 = _unpack_half(load_words(code_bufs, 2 * second, FIRST, 64, A), scale, 1, A)
            sums = warpgroup_mma(w_7, y_high, sums, is_async=True)
            barrier()
            w_8 = _unpack_half(load_words(code_bufs, 2 * second + 1, FIRST, 64, A), scale_2, 1, A)
            sums_2 = warpgroup_mma(w_8, y_high, sums_2, is_async=True)
            ahead = u + 2
            after = ahead % STAGES
            mbarrier.wait(full.index(after), ahead // STAGES & 1, pred=ahead < end)
            scale = load_column(scale_bufs, 2 * after, FIRST, 64, A)
            scale_2 = load_column(scale_bufs, 2 * after + 1, FIRST, 64, A)
            w = _unpack_half(load_words(code_bufs, 2 * after, FIRST, 64, A), scale, 0, A)
            acc, more = warpgroup_mma_wait(0, deps=(sums, sums_2))
            mbarrier.arrive(empty.index(second), count=1)
        n_tile, m_tile = _place(
            program + unit // num_kb * programs, num_m_tiles, num_n_tiles, group_m
        )
        m = m_tile * BLOCK_M
        if not GATED:
            n = n_tile * (2 * HALF_ROWS) + FIRST
            _store(
                _with_bias(acc, bias_ptr, n, width).to(dtype), out_ptr, n, m, M, width, OUT, ONTO
            )
            n += HALF_ROWS
            _store(
                _with_bias(more, bias_ptr, n, width).to(dtype), out_ptr, n, m, M, width, OUT, ONTO
            )
        else:
            y = (_silu(acc) * more).to(dtype)
            _store(y, out_ptr, n_tile * HALF_ROWS + FIRST, m, M, width, OUT, ONTO)
        unit += num_kb


@gluon.jit
def _first_plain(
    x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr,
    M, width, num_kb, num_m_tiles, num_n_tiles, group_m, program, programs, end,
):  # fmt: skip
    _consume(
        x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr, M, width, num_kb,
        num_m_tiles, num_n_tiles, group_m, program, programs, end, 0, False, False,
    )  # fmt: skip


@gluon.jit
def _second_plain(
    x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr,
    M, width, num_kb, num_m_tiles, num_n_tiles, group_m, program, programs, end,
):  # fmt: skip
    _consume(
        x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr, M, width, num_kb,
        num_m_tiles, num_n_tiles, group_m, program, programs, end, 1, False, False,
    )  # fmt: skip


@gluon.jit
def _first_gated(
    x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr,
    M, width, num_kb, num_m_tiles, num_n_tiles, group_m, program, programs, end,
):  # fmt: skip
    _consume(
        x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr, M, width, num_kb,
        num_m_tiles, num_n_tiles, group_m, program, programs, end, 0, True, False,
    )  # fmt: skip


@gluon.jit
def _second_gated(
    x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr,
    M, width, num_kb, num_m_tiles, num_n_tiles, group_m, program, programs, end,
):  # fmt: skip
    _consume(
        x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr, M, width, num_kb,
        num_m_tiles, num_n_tiles, group_m, program, programs, end, 1, True, False,
    )  # fmt: skip


@gluon.jit
def _first_onto(
    x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr,
    M, width, num_kb, num_m_tiles, num_n_tiles, group_m, program, programs, end,
):  # fmt: skip
    _consume(
        x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr, M, width, num_kb,
        num_m_tiles, num_n_tiles, group_m, program, programs, end, 0, False, True,
    )  # fmt: skip


@gluon.jit
def _second_onto(
    x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr,
    M, width, num_kb, num_m_tiles, num_n_tiles, group_m, program, programs, end,
):  # fmt: skip
    _consume(
        x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr, M, width, num_kb,
        num_m_tiles, num_n_tiles, group_m, program, programs, end, 1, False, True,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "num_kb", "num_m_tiles", "num_n_tiles", "group_m", "n_second"])
def many_kernel(
    x_desc,
    codes_desc,
    scale_desc,
    bias_ptr,
    out_ptr,
    M,
    width,
    num_kb,
    num_m_tiles,
    num_n_tiles,
    group_m,
    n_second,
    STAGES: gl.constexpr,
    ACT: gl.constexpr,
    ONTO: gl.constexpr,
    PDL: gl.constexpr,
):
    """out [M, width] = x w.T + bias, or with ACT act(gate) * up, in tiles of 2 x 128 weight rows
    by BLOCK_M input rows.

    The second 128 rows of a tile lie `n_second` sixteens after the first: 8, or half of gate | up.
    """
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    n_step: gl.constexpr = 16 if ACT is None else 8
    tiles = num_m_tiles * num_n_tiles
    end = (tiles - program + programs - 1) // programs * num_kb
    x_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [2 * STAGES] + x_desc.block_shape, x_desc.layout
    )
    code_bufs = gl.allocate_shared_memory(
        gl.int16, [2 * STAGES] + codes_desc.block_shape, codes_desc.layout
    )
    scale_bufs = gl.allocate_shared_memory(
        scale_desc.dtype, [2 * STAGES] + scale_desc.block_shape, scale_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(go.index(0), count=1)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    barrier()
    shared = (
        x_bufs, code_bufs, scale_bufs, full, empty, go, out_ptr, bias_ptr,
        M, width, num_kb, num_m_tiles, num_n_tiles, group_m, program, programs, end,
    )  # fmt: skip
    fed = (
        x_desc, codes_desc, scale_desc, x_bufs, code_bufs, scale_bufs, full, empty,
        num_kb, num_m_tiles, num_n_tiles, group_m, n_step, n_second, program, programs, end,
    )  # fmt: skip
    if ONTO:
        gl.warp_specialize(
            [(_first_onto, shared), (_second_onto, shared), (_produce, fed)], [4, 1], [240, 24]
        )
    elif ACT is None:
        gl.warp_specialize(
            [(_first_plain, shared), (_second_plain, shared), (_produce, fed)], [4, 1], [240, 24]
        )
    else:
        gl.warp_specialize(
            [(_first_gated, shared), (_second_gated, shared), (_produce, fed)], [4, 1], [240, 24]
        )
