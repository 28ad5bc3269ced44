"""W4A16 for many rows on Hopper, in Gluon: one warp copies, two warpgroups unpack and multiply.

What plain Triton cannot say: that the warps of a program do different things. Here a warp feeds
stages of shared memory through the copy engine (TMA), and two warpgroups, which share the inputs
but not a barrier, each own half of a tile's weight rows: while one unpacks, the other multiplies.
Programs are at most as many as multiprocessors. Each has as many whole tiles as the others; the
K-blocks of the tiles left over are shared out evenly, and a tile that several share is added up by
all of them, each a part, in the order of K.

Codes, scales and the arithmetic are `kernel.py`'s with SCALING "weights": a weight is
(code - zero point) * scale, rounded to the compute type, as `pack.unpack_w4a16` has it. Serves
whatever lies in K-blocks of 128 with scales of the compute type.

Imports triton; `runtime.kernels.w4a16.launch` imports this only where it launches.
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

from runtime.kernels.w4a16.wide_parts import barrier, load_words, tma_load, unpack_half

CONSUMERS = gl.constexpr(2)
CHUNK = gl.constexpr(16)
"""Rows of inputs of a shared tile that are added up at a time."""
PLAIN, ADDS, SILU, GELU, GELU_TANH = (gl.constexpr(kind) for kind in (1, 2, 4, 8, 16))


@gluon.jit
def _locate(i, program, programs, num_kb, num_whole, shared_begin):
    """(tile, K-block) of a program's i-th unit: first its whole tiles, one of each wave of
    programs, then its share of the K-blocks of the tiles that no full wave is left for."""
    whole = i < num_whole * num_kb
    unit = shared_begin + i - num_whole * num_kb
    tile = gl.where(whole, i // num_kb * programs + program, num_whole * programs + unit // num_kb)
    return tile, gl.where(whole, i, unit) % num_kb


@gluon.jit
def _share_begin(program, num_sharers, num_shared):
    """The first of the `num_shared` units that this program and those after it share."""
    return gl.minimum(program, num_sharers) * num_shared // num_sharers


@gluon.jit
def _sharer_of(unit, num_sharers, num_shared):
    """The program whose share a unit is in."""
    return ((unit + 1) * num_sharers - 1) // num_shared


@gluon.jit
def _load_weights(
    codes_desc, scale_desc, zero_desc, code_bufs, scale_bufs, zero_bufs, bar, stage, tile, kb,
    num_groups, num_m_tiles, up, STAGES: gl.constexpr,
):  # fmt: skip
    """Sixteens of rows: where there are several pieces, every other one is of the half from the
    sixteen `up` on."""
    PER_BLOCK: gl.constexpr = scale_bufs.shape[0] // STAGES
    SIZE: gl.constexpr = codes_desc.block_shape[0]
    PIECES: gl.constexpr = code_bufs.shape[1] // SIZE
    for piece in gl.static_range(PIECES):
        first = tile // num_m_tiles * SIZE
        if PIECES > 1:
            first = (tile // num_m_tiles * (PIECES // 2) + piece // 2) * SIZE + piece % 2 * up
        words = code_bufs.index(stage).slice(piece * SIZE, SIZE)
        tma_load(codes_desc, [first, kb * 16, 0], bar, words)
        for g in gl.static_range(PER_BLOCK):
            at = stage * PER_BLOCK + g
            scales = scale_bufs.index(at).slice(piece * SIZE, SIZE)
            tma_load(scale_desc, [first, kb * num_groups + g, 0], bar, scales)
            if zero_desc is not None:
                zeros = zero_bufs.index(at).slice(piece * SIZE, SIZE)
                tma_load(zero_desc, [first, kb * num_groups + g, 0], bar, zeros)


@gluon.jit
def _load_inputs(x_desc, x_bufs, bar, stage, tile, kb, num_m_tiles):
    m = tile % num_m_tiles * x_desc.block_shape[0]
    tma_load(x_desc, [m, kb * 128], bar, x_bufs.index(2 * stage))
    tma_load(x_desc, [m, kb * 128 + 64], bar, x_bufs.index(2 * stage + 1))


@gluon.jit
def _produce(
    x_desc, codes_desc, scale_desc, zero_desc, x_bufs, code_bufs, scale_bufs, zero_bufs, full,
    empty, num_kb, num_groups, num_m_tiles, up, program, programs, num_whole, shared_begin,
    num_units,
):  # fmt: skip
    """Fill stages with inputs, codes, scales and zero points, a unit each."""
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = 16 * code_bufs.shape[1]
    COLUMN: gl.constexpr = 2 if zero_desc is None else 3
    BYTES: gl.constexpr = BLOCK_M * 256 + BLOCK_N * (64 + scale_bufs.shape[0] // STAGES * COLUMN)
    ahead = gl.minimum(num_units, STAGES)
    for i in range(ahead):
        tile, kb = _locate(i, program, programs, num_kb, num_whole, shared_begin)
        bar = full.index(i)
        mbarrier.expect(bar, BYTES)
        _load_weights(
            codes_desc, scale_desc, zero_desc, code_bufs, scale_bufs, zero_bufs, bar, i, tile, kb,
            num_groups, num_m_tiles, up, STAGES,
        )  # fmt: skip
    # Returns at once where the launch was not a dependent one.
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    for i in range(ahead):
        tile, kb = _locate(i, program, programs, num_kb, num_whole, shared_begin)
        _load_inputs(x_desc, x_bufs, full.index(i), i, tile, kb, num_m_tiles)
    for i in range(ahead, num_units):
        tile, kb = _locate(i, program, programs, num_kb, num_whole, shared_begin)
        stage = i % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), i // STAGES & 1 ^ 1)
        mbarrier.expect(bar, BYTES)
        _load_inputs(x_desc, x_bufs, bar, stage, tile, kb, num_m_tiles)
        _load_weights(
            codes_desc, scale_desc, zero_desc, code_bufs, scale_bufs, zero_bufs, bar, stage, tile,
            kb, num_groups, num_m_tiles, up, STAGES,
        )  # fmt: skip


@gluon.jit
def _activate(x, ACT: gl.constexpr):
    """`gate.kernel.activate` of float32 values, with its bits."""
    if ACT == GELU:
        y = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    else:
        inner = x
        if ACT == GELU_TANH:
            inner = 2.0 * (0.7978845608028654 * (x + 0.044715 * x * x * x))
        y = x * gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp(-inner)],
            dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return y


@gluon.jit
def _gated(acc, dtype: gl.constexpr, ACT: gl.constexpr):
    """act(gate) * up of rows [gate | up], rounded as if they had been stored. In registers."""
    halves = gl.reshape(acc.to(dtype), (2, acc.shape[0] // 2, acc.shape[1]))
    gate, up = gl.split(gl.permute(halves, (1, 2, 0)))
    return (_activate(gate.to(gl.float32), ACT) * up.to(gl.float32)).to(dtype)


@gluon.jit
def _store_part(acc, out_ptr, bias_ptr, n, m, M, N, ACT: gl.constexpr, OUT: gl.constexpr):
    """acc [R, BLOCK_M] + bias to out [M, N], from weight row `n` and input row `m` on. ADDS: onto
    what is there, either rounded. With an activation half the rows are gate's, half up's."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        at = n + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + at, mask=at < N, other=0.0).to(gl.float32)[:, None]
    y = acc.to(dtype) if ACT <= ADDS else _gated(acc, dtype, ACT)
    y = gl.convert_layout(gl.permute(y, (1, 0)), OUT)
    rows = n + gl.arange(0, y.shape[1], gl.SliceLayout(0, OUT))
    cols = m + gl.arange(0, y.shape[0], gl.SliceLayout(1, OUT))
    at = cols.to(gl.int64)[:, None] * N + rows[None, :]
    ok = (cols < M)[:, None] & (rows < N)[None, :]
    if ACT == ADDS:
        there = gl.load(out_ptr + at, mask=ok, other=0.0, cache_modifier=".cg")
        y = (y.to(gl.float32) + there.to(gl.float32)).to(dtype)
    gl.store(out_ptr + at, y, mask=ok)


@gluon.jit
def _keep_part(acc, slot_ptr, FIRST: gl.constexpr, BLOCK_N: gl.constexpr):
    """acc [R, BLOCK_M] to a slot [BLOCK_M, BLOCK_N] of scratch memory."""
    C: gl.constexpr = acc.type.layout
    rows = FIRST + gl.arange(0, acc.shape[0], gl.SliceLayout(1, C))
    cols = gl.arange(0, acc.shape[1], gl.SliceLayout(0, C))
    at = cols[None, :] * BLOCK_N + rows[:, None]
    gl.store(slot_ptr + at, acc, cache_modifier=".cg")


@gluon.jit
def _count_up(counter, last):
    """Says that this warpgroup has come here, and what it stored before its last barrier is there;
    zero again after `last`."""
    before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if before == last:
        gl.store(counter, 0)


@gluon.jit
def _await(counter, count):
    arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while arrived < count:
        arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")


@gluon.jit
def _sharers_of_tile(shared_tile, num_kb, num_sharers, num_shared):
    """(the first program that has a part of it, how many have)."""
    first = _sharer_of(shared_tile * num_kb, num_sharers, num_shared)
    last = _sharer_of(shared_tile * num_kb + num_kb - 1, num_sharers, num_shared)
    return first, last - first + 1


@gluon.jit
def _sum_parts(slots, at, count, SIZE: gl.constexpr, MAX_PARTS: gl.constexpr):
    """All parts are asked for at once, and added in the order of K. The first program of a tile
    ends with it (slot 1), the others begin with it (slot 0)."""
    total = gl.load(slots + SIZE + at, cache_modifier=".cg")
    for part in gl.static_range(1, MAX_PARTS):
        total += gl.load(
            slots + 2 * part * SIZE + at, mask=part < count, other=0.0, cache_modifier=".cg"
        )
    return total


@gluon.jit
def _add_up(
    shared_tile, partials_ptr, counters_ptr, out_ptr, bias_ptr, program, first_shared,
    num_sharers, num_shared, num_kb, num_m_tiles, M, N,
    WHO: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MAX_PARTS: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """This program's chunks of a shared tile: wait until all parts are there, add, store."""
    SIZE: gl.constexpr = BLOCK_M * BLOCK_N
    ROWS: gl.constexpr = BLOCK_N // CONSUMERS
    WIDTH: gl.constexpr = ROWS if ACT <= ADDS else ROWS // 2
    LANES: gl.constexpr = WIDTH // 4
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    first, count = _sharers_of_tile(shared_tile, num_kb, num_sharers, num_shared)
    counter = counters_ptr + shared_tile * CONSUMERS + WHO
    _await(counter, count)
    inner_n = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    inner_m = gl.arange(0, CHUNK, gl.SliceLayout(1, L))
    tile = first_shared + shared_tile
    n = tile // num_m_tiles * (CONSUMERS * WIDTH) + WHO * WIDTH + inner_n
    slots = partials_ptr + (2 * first).to(gl.int64) * SIZE + WHO * ROWS
    for chunk in range(program - first, BLOCK_M // CHUNK, count):
        at = (chunk * CHUNK + inner_m)[:, None] * BLOCK_N + inner_n[None, :]
        m = tile % num_m_tiles * BLOCK_M + chunk * CHUNK + inner_m
        out = out_ptr + m.to(gl.int64)[:, None] * N + n[None, :]
        ok = (m < M)[:, None] & (n < N)[None, :]
        there = 0.0
        if ACT == ADDS:
            there = gl.load(out, mask=ok, other=0.0, cache_modifier=".cg").to(gl.float32)
        total = _sum_parts(slots, at, count, SIZE, MAX_PARTS)
        if bias_ptr is not None:
            total += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
        y = total.to(dtype)
        if ACT > ADDS:
            up = _sum_parts(slots, at + WIDTH, count, SIZE, MAX_PARTS).to(dtype)
            y = (_activate(y.to(gl.float32), ACT) * up.to(gl.float32)).to(dtype)
        if ACT == ADDS:
            y = (y.to(gl.float32) + there).to(dtype)
        gl.store(out, y, mask=ok)
    barrier()
    _count_up(counter, 2 * count - 1)


@gluon.jit
def _consume(
    x_bufs, code_bufs, scale_bufs, zero_bufs, full, empty, out_ptr, bias_ptr, partials_ptr,
    counters_ptr, M, N, num_kb, num_m_tiles, program, programs, num_whole, shared_begin,
    num_sharers, num_shared, num_units, most, WHO: gl.constexpr,
):  # fmt: skip
    """A program's units, for half the rows of each tile."""
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = x_bufs.shape[1]
    BLOCK_N: gl.constexpr = 16 * code_bufs.shape[1]
    ROWS: gl.constexpr = BLOCK_N // CONSUMERS
    FIRST: gl.constexpr = WHO * ROWS
    PER_BLOCK: gl.constexpr = scale_bufs.shape[0] // STAGES
    MAX_PARTS: gl.constexpr = most.shape[0]
    ACT: gl.constexpr = most.shape[1]
    SIZE: gl.constexpr = BLOCK_M * BLOCK_N
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 4], [1, 0])
    mbarrier.wait(full.index(0), 0)
    words = load_words(code_bufs, 0, FIRST, ROWS, A)
    w = unpack_half(words, scale_bufs, zero_bufs, 0, FIRST, 0, PER_BLOCK, A)
    begin = 0
    while begin < num_units:
        tile, kb = _locate(begin, program, programs, num_kb, num_whole, shared_begin)
        end = gl.minimum(num_units, begin + num_kb - kb)
        acc = gl.zeros([ROWS, BLOCK_M], gl.float32, C)
        for i in range(begin, end):
            # A product runs while the weights of the one after it are unpacked. None may run on
            # into the next iteration: ptxas would then wait for every single instruction.
            stage = i % STAGES
            x_low = x_bufs.index(2 * stage).permute((1, 0))
            x_high = x_bufs.index(2 * stage + 1).permute((1, 0))
            acc = warpgroup_mma(w, x_low, acc, is_async=True)
            words = load_words(code_bufs, stage, FIRST, ROWS, A)
            w = unpack_half(words, scale_bufs, zero_bufs, stage, FIRST, 1, PER_BLOCK, A)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            acc = warpgroup_mma(w, x_high, acc, is_async=True)
            after = (i + 1) % STAGES
            mbarrier.wait(full.index(after), (i + 1) // STAGES & 1, pred=i + 1 < num_units)
            words = load_words(code_bufs, after, FIRST, ROWS, A)
            w = unpack_half(words, scale_bufs, zero_bufs, after, FIRST, 0, PER_BLOCK, A)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(stage), count=1)
        if MAX_PARTS == 1 or end - begin == num_kb:
            n = tile // num_m_tiles * BLOCK_N + FIRST
            if ACT > ADDS:
                n = n // 2
            _store_part(acc, out_ptr, bias_ptr, n, tile % num_m_tiles * BLOCK_M, M, N, ACT, OUT)
        else:
            slot = 2 * program + (kb == 0).to(gl.int32)
            _keep_part(acc, partials_ptr + slot.to(gl.int64) * SIZE, FIRST, BLOCK_N)
            barrier()
            shared_tile = tile - num_whole * programs
            _, count = _sharers_of_tile(shared_tile, num_kb, num_sharers, num_shared)
            _count_up(counters_ptr + shared_tile * CONSUMERS + WHO, 2 * count - 1)
        begin = end
    if MAX_PARTS == 1:
        return
    # All of a program's parts are kept before it waits for others'.
    first_shared = num_whole * programs
    shared_end = shared_begin + num_units - num_whole * num_kb
    first = shared_begin // num_kb
    last = (shared_end - 1) // num_kb
    if shared_end > shared_begin:
        if (shared_begin > first * num_kb) | (shared_end < first * num_kb + num_kb):
            _add_up(
                first, partials_ptr, counters_ptr, out_ptr, bias_ptr, program, first_shared,
                num_sharers, num_shared, num_kb, num_m_tiles, M, N, WHO, BLOCK_M, BLOCK_N,
                MAX_PARTS, ACT,
            )  # fmt: skip
        if (last > first) & (shared_end < last * num_kb + num_kb):
            _add_up(
                last, partials_ptr, counters_ptr, out_ptr, bias_ptr, program, first_shared,
                num_sharers, num_shared, num_kb, num_m_tiles, M, N, WHO, BLOCK_M, BLOCK_N,
                MAX_PARTS, ACT,
            )  # fmt: skip


@gluon.jit
def _consume_first(
    x_bufs, code_bufs, scale_bufs, zero_bufs, full, empty, out_ptr, bias_ptr, partials_ptr,
    counters_ptr, M, N, num_kb, num_m_tiles, program, programs, num_whole, shared_begin,
    num_sharers, num_shared, num_units, most,
):  # fmt: skip
    _consume(
        x_bufs, code_bufs, scale_bufs, zero_bufs, full, empty, out_ptr, bias_ptr, partials_ptr,
        counters_ptr, M, N, num_kb, num_m_tiles, program, programs, num_whole, shared_begin,
        num_sharers, num_shared, num_units, most, 0,
    )  # fmt: skip


@gluon.jit
def _consume_second(
    x_bufs, code_bufs, scale_bufs, zero_bufs, full, empty, out_ptr, bias_ptr, partials_ptr,
    counters_ptr, M, N, num_kb, num_m_tiles, program, programs, num_whole, shared_begin,
    num_sharers, num_shared, num_units, most,
):  # fmt: skip
    _consume(
        x_bufs, code_bufs, scale_bufs, zero_bufs, full, empty, out_ptr, bias_ptr, partials_ptr,
        counters_ptr, M, N, num_kb, num_m_tiles, program, programs, num_whole, shared_begin,
        num_sharers, num_shared, num_units, most, 1,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["M", "num_kb", "num_groups", "num_m_tiles", "num_tiles", "num_sharers", "up"]
)
def wide_kernel(
    x_desc,
    codes_desc,
    scale_desc,
    zero_desc,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    num_kb,
    num_groups,
    num_m_tiles,
    num_tiles,
    num_sharers,
    up,
    BLOCK_N: gl.constexpr,
    PER_BLOCK: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    ACT: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """out [M, N] = x w.T + bias, in tiles of BLOCK_N weight rows by BLOCK_M input rows.

    Grid: at most one program a multiprocessor and one a unit, where a unit is a K-block of a tile
    and K is fastest, M next, so that programs beside each other share weights and inputs in L2.
    x_desc: [M, K] in blocks [BLOCK_M, 64]. codes_desc: [R, num_kb * 16, 32] in blocks
    [BLOCK_N / 16, 16, 32]. scale_desc: [R, num_kb, 16] in blocks [BLOCK_N / 16, 1, 16].
    partials: two slots of a tile each a program. counters: two a tile, zero before and after.
    """
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    num_whole = num_tiles // programs
    num_shared = (num_tiles - num_whole * programs) * num_kb
    shared_begin = _share_begin(program, num_sharers, num_shared)
    shared_end = _share_begin(program + 1, num_sharers, num_shared)
    num_units = num_whole * num_kb + shared_end - shared_begin
    x_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [2 * STAGES] + x_desc.block_shape, x_desc.layout
    )
    code_bufs = gl.allocate_shared_memory(
        codes_desc.dtype, [STAGES, BLOCK_N // 16, 16, 32], codes_desc.layout
    )
    scale_bufs = gl.allocate_shared_memory(
        scale_desc.dtype, [STAGES * PER_BLOCK, BLOCK_N // 16, 1, 16], scale_desc.layout
    )
    if zero_desc is None:
        zero_bufs: gl.constexpr = None
    else:
        zero_bufs = gl.allocate_shared_memory(
            zero_desc.dtype, [STAGES * PER_BLOCK, BLOCK_N // 16, 1, 16], zero_desc.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    barrier()
    # Nothing lies there: a shape is how a number that is known when compiling comes to workers.
    most = gl.allocate_shared_memory(
        gl.int32, [MAX_PARTS, ACT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    shared = (
        x_bufs, code_bufs, scale_bufs, zero_bufs, full, empty, out_ptr, bias_ptr, partials_ptr,
        counters_ptr, M, N, num_kb, num_m_tiles, program, programs, num_whole, shared_begin,
        num_sharers, num_shared, num_units, most,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume_first, shared),
            (_consume_second, shared),
            (
                _produce,
                (
                    x_desc, codes_desc, scale_desc, zero_desc, x_bufs, code_bufs, scale_bufs,
                    zero_bufs, full, empty, num_kb, num_groups, num_m_tiles, up, program, programs,
                    num_whole, shared_begin, num_units,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
