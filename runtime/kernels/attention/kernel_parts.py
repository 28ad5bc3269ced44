"""Pieces that the attention kernels share: reading the paged pool and the online softmax.

Shape legend: M rows (queries x heads of one key/value head), N keys of a tile, D head_dim,
W warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def outer_scales(head_scales_ptr, head, scale, KV_HEADS: tl.constexpr, KV: tl.constexpr):
    """What scores are multiplied by to become powers of two, and what undoes the values' scale."""
    qk_scale = scale * LOG2_E
    v_scale = 1.0
    if KV == "fp8" or KV == "fp8_bits":
        qk_scale *= tl.load(head_scales_ptr + head)
        v_scale = tl.load(head_scales_ptr + KV_HEADS + head)
    if KV == "fp8_bits":
        # What `widen` and `split_pairs` leave out.
        qk_scale *= 256.0
        v_scale *= 256.0
    return qk_scale, v_scale


@triton.jit
def widen(codes, DTYPE: tl.constexpr, KV: tl.constexpr, USE_PTX: tl.constexpr):
    """Stored values in the type of the dot products; exact for every 8-bit code.

    `fp8_bits` takes e4m3 as the upper bits of a float16, which is 2^8 too small: the caller's
    scales make up for it. int8 by PTX: code + 128 becomes the low byte of 1024.0 (0x6400).
    """
    if KV == "fp8_bits":
        bits = codes.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(DTYPE)
    elif KV == "int8" and USE_PTX:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 biased, low, high, offset;
                xor.b32 biased, $2, 0x80808080;
                prmt.b32 low, biased, 0x64646464, 0x4140;
                prmt.b32 high, biased, 0x64646464, 0x4342;
                mov.b32 offset, 0x64806480;
                sub.f16x2 $0, low, offset;
                sub.f16x2 $1, high, offset;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    elif KV == "fp8":
        return codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        return codes.to(DTYPE)


@triton.jit
def block_ids(table_ptr, keys_N, seq_len, BLOCK_SIZE: tl.constexpr):
    """Physical blocks of the keys; block 0 stands in beyond the sequence."""
    return tl.load(table_ptr + keys_N // BLOCK_SIZE, mask=keys_N < seq_len, other=0)


@triton.jit
def pool_rows(blocks_N, keys_N, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Rows of `pool.view(-1, D)` that hold the keys; the values lie KV_HEADS * BLOCK_SIZE on.

    int32: rows are D times fewer than elements, which need 64 bits.
    """
    return blocks_N * (2 * KV_HEADS * BLOCK_SIZE) + head * BLOCK_SIZE + keys_N % BLOCK_SIZE


@triton.jit
def split_pairs(pairs, KV: tl.constexpr, USE_PTX: tl.constexpr):
    """16-bit words of two 8-bit codes each -> two float16 tensors, of the low and the high bytes.

    Exact, and elementwise: a tile of words can be transposed on its way to the tensor cores as a
    tile of bytes cannot. `fp8_bits` comes 2^8 too small (see `widen`).
    """
    if KV == "int8":
        if USE_PTX:
            return tl.inline_asm_elementwise(
                """
                {
                    .reg .b32 biased, low, high, offset;
                    xor.b32 biased, $2, 0x80808080;
                    mov.b32 offset, 0x64806480;
                    lop3.b32 low, biased, 0x00ff00ff, 0x64006400, 0xea;
                    prmt.b32 high, biased, 0x64646464, 0x4341;
                    sub.f16x2 $0, low, offset;
                    sub.f16x2 $1, high, offset;
                }
                """,
                "=r,=r,r",
                [pairs],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            words = pairs.to(tl.int32)
            low, high = (words << 24) >> 24, (words << 16) >> 24
            return low.to(tl.float16), high.to(tl.float16)
    elif KV == "fp8":
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b16 first, second;
                .reg .b32 one, two;
                mov.b32 {first, second}, $2;
                cvt.rn.f16x2.e4m3x2 one, first;
                cvt.rn.f16x2.e4m3x2 two, second;
                prmt.b32 $0, one, two, 0x5410;
                prmt.b32 $1, one, two, 0x7632;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        if USE_PTX:
            return tl.inline_asm_elementwise(
                """
                {
                    .reg .b32 sign, size;
                    shl.b32 sign, $2, 8;
                    shl.b32 size, $2, 7;
                    and.b32 size, size, 0x3f803f80;
                    lop3.b32 $0, sign, 0x80008000, size, 0xea;
                    shr.u32 size, $2, 1;
                    and.b32 size, size, 0x3f803f80;
                    lop3.b32 $1, $2, 0x80008000, size, 0xea;
                }
                """,
                "=&r,=r,r",
                [pairs],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            words = pairs.to(tl.int32)
            low = ((words << 8) & 0x8000) | ((words << 7) & 0x3F80)
            high = (words & 0x8000) | ((words >> 1) & 0x3F80)
            return (
                low.to(tl.uint16).to(tl.float16, bitcast=True),
                high.to(tl.uint16).to(tl.float16, bitcast=True),
            )


@triton.jit
def soften(scores, scale, m, l, AXIS: tl.constexpr, MAY_SEE_NOTHING: tl.constexpr):  # noqa: E741
    """Online softmax of scores * scale along AXIS, scale > 0, in powers of two.

    New maximum and sum, weights, and the factor of older sums. A tile in which a row sees nothing
    leaves that row as it was, bit for bit (m is -inf until the first visible key).
    """
    m_new = tl.maximum(m, tl.max(scores, AXIS) * scale)
    shift = m_new
    if MAY_SEE_NOTHING:
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores * scale - tl.expand_dims(shift, AXIS))
    alpha = tl.exp2(m - shift)
    return m_new, l * alpha + tl.sum(p, AXIS), p, alpha


@triton.jit
def value_scales(scales_ptr, rows_N, is_stored_N):
    """int8 values' scales over the largest one, which keeps weights in float16's range."""
    scales_N = tl.load(scales_ptr + rows_N, mask=is_stored_N, other=0.0)
    largest = tl.maximum(tl.max(scales_N, 0), 1e-30)
    return scales_N / largest, largest


@triton.jit
def attend_tile(
    q_MD,
    m_M,
    l_M,
    acc_MD,
    pool_ptr,
    token_scales_ptr,
    blocks_N,
    keys_N,
    visible_MN,
    is_stored_N,
    head,
    qk_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV: tl.constexpr,
    MASKED: tl.constexpr,
    MAY_SEE_NOTHING: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """One tile of keys folded into (running maximum, sum, weighted values).

    Keys are read unmasked, since their scores are replaced where not visible; values where not
    stored become zeros, because 0 * NaN of a stale slot would be NaN.
    """
    rows_N = pool_rows(blocks_N, keys_N, head, KV_HEADS, BLOCK_SIZE)
    at_ND = (rows_N.to(tl.int64) * HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    k_ND = widen(tl.load(pool_ptr + at_ND), q_MD.dtype, KV, USE_PTX)
    v_ptr = pool_ptr + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if MASKED:
        v_codes_ND = tl.load(v_ptr + at_ND, mask=is_stored_N[:, None], other=0)
    else:
        v_codes_ND = tl.load(v_ptr + at_ND)
    scores_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee")
    if KV == "int8":
        scores_MN *= tl.load(token_scales_ptr + rows_N)[None, :]
    if MASKED:
        scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
    m_M, l_M, p_MN, alpha_M = soften(scores_MN, qk_scale, m_M, l_M, 1, MAY_SEE_NOTHING)
    acc_MD = acc_MD * alpha_M[:, None]
    v_ND = widen(v_codes_ND, q_MD.dtype, KV, USE_PTX)
    if KV == "int8":
        scales_N, largest = value_scales(
            token_scales_ptr + KV_HEADS * BLOCK_SIZE, rows_N, is_stored_N
        )
        p_MN = (p_MN * scales_N[None, :]).to(q_MD.dtype)
        acc_MD += tl.dot(p_MN, v_ND, input_precision="ieee") * largest
    else:
        acc_MD = tl.dot(p_MN.to(q_MD.dtype), v_ND, acc_MD, input_precision="ieee")
    return m_M, l_M, acc_MD


@triton.jit
def attend_tile_by_warp(
    q_WDM,
    m_WM,
    l_WM,
    acc_WDM,
    pool_ptr,
    blocks_WN,
    keys_WN,
    is_visible_WN,
    is_stored_WN,
    head,
    qk_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAY_SEE_NOTHING: tl.constexpr,
):
    """`attend_tile` for few rows of a plain pool: every warp has N keys and a softmax of its own.

    Warps exchange nothing until the end of the segment: a barrier for each reduction took longer
    than the tile itself. Keys (then dimensions) are the rows of the products, heads their columns,
    which come in eights where rows come in sixteens.
    """
    rows_WN = pool_rows(blocks_WN, keys_WN, head, KV_HEADS, BLOCK_SIZE)
    at_WND = (rows_WN.to(tl.int64) * HEAD_DIM)[:, :, None] + tl.arange(0, HEAD_DIM)[None, None, :]
    k_WND = tl.load(pool_ptr + at_WND).to(q_WDM.dtype)
    v_ptr = pool_ptr + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    at_WDN = (rows_WN.to(tl.int64) * HEAD_DIM)[:, None, :] + tl.arange(0, HEAD_DIM)[None, :, None]
    v_WDN = tl.load(v_ptr + at_WDN, mask=is_stored_WN[:, None, :], other=0).to(q_WDM.dtype)
    scores_WNM = tl.dot(k_WND, q_WDM, input_precision="ieee")
    scores_WNM = tl.where(is_visible_WN[:, :, None], scores_WNM, float("-inf"))
    m_WM, l_WM, p_WNM, alpha_WM = soften(scores_WNM, qk_scale, m_WM, l_WM, 1, MAY_SEE_NOTHING)
    acc_WDM = acc_WDM * alpha_WM[:, None, :]
    acc_WDM = tl.dot(v_WDN, p_WNM.to(q_WDM.dtype), acc_WDM, input_precision="ieee")
    return m_WM, l_WM, acc_WDM


@triton.jit
def attend_pairs_by_warp(
    q_even_WDM,
    q_odd_WDM,
    m_WM,
    l_WM,
    even_WDM,
    odd_WDM,
    pairs_ptr,
    token_scales_ptr,
    blocks_WN,
    keys_WN,
    is_visible_WN,
    is_stored_WN,
    head,
    qk_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV: tl.constexpr,
    MAY_SEE_NOTHING: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """`attend_tile_by_warp` over an 8-bit pool read as words of two dimensions."""
    HALF: tl.constexpr = HEAD_DIM // 2
    rows_WN = pool_rows(blocks_WN, keys_WN, head, KV_HEADS, BLOCK_SIZE)
    at_WND = (rows_WN.to(tl.int64) * HALF)[:, :, None] + tl.arange(0, HALF)[None, None, :]
    k_pairs_WND = tl.load(pairs_ptr + at_WND)
    v_ptr = pairs_ptr + KV_HEADS * BLOCK_SIZE * HALF
    at_WDN = (rows_WN.to(tl.int64) * HALF)[:, None, :] + tl.arange(0, HALF)[None, :, None]
    v_pairs_WDN = tl.load(v_ptr + at_WDN, mask=is_stored_WN[:, None, :], other=0)
    k_even_WND, k_odd_WND = split_pairs(k_pairs_WND, KV, USE_PTX)
    scores_WNM = tl.dot(k_even_WND, q_even_WDM)
    scores_WNM = tl.dot(k_odd_WND, q_odd_WDM, scores_WNM)
    if KV == "int8":
        scores_WNM *= tl.load(token_scales_ptr + rows_WN)[:, :, None]
    scores_WNM = tl.where(is_visible_WN[:, :, None], scores_WNM, float("-inf"))
    m_WM, l_WM, p_WNM, alpha_WM = soften(scores_WNM, qk_scale, m_WM, l_WM, 1, MAY_SEE_NOTHING)
    even_WDM = even_WDM * alpha_WM[:, None, :]
    odd_WDM = odd_WDM * alpha_WM[:, None, :]
    v_even_WDN, v_odd_WDN = split_pairs(v_pairs_WDN, KV, USE_PTX)
    if KV == "int8":
        v_scales_ptr = token_scales_ptr + KV_HEADS * BLOCK_SIZE
        scales_WN = tl.load(v_scales_ptr + rows_WN, mask=is_stored_WN, other=0.0)
        largest_W = tl.maximum(tl.max(scales_WN, 1), 1e-30)
        p_WNM = (p_WNM * (scales_WN / largest_W[:, None])[:, :, None]).to(tl.float16)
        even_WDM += tl.dot(v_even_WDN, p_WNM) * largest_W[:, None, None]
        odd_WDM += tl.dot(v_odd_WDN, p_WNM) * largest_W[:, None, None]
    else:
        p_WNM = p_WNM.to(tl.float16)
        even_WDM = tl.dot(v_even_WDN, p_WNM, even_WDM)
        odd_WDM = tl.dot(v_odd_WDN, p_WNM, odd_WDM)
    return m_WM, l_WM, even_WDM, odd_WDM


@triton.jit
def join_warps(m_WM, l_WM, acc_WDM, WARPS: tl.constexpr):
    """One (maximum, sum, values [D, M]) out of the warps' own; who saw nothing adds nothing."""
    if WARPS == 1:
        m_M, l_M, acc_DM = tl.sum(m_WM, 0), tl.sum(l_WM, 0), tl.sum(acc_WDM, 0)
    else:
        m_M = tl.max(m_WM, 0)
        weight_WM = tl.exp2(m_WM - m_M[None, :])
        l_M = tl.sum(l_WM * weight_WM, 0)
        acc_DM = tl.sum(acc_WDM * weight_WM[:, None, :], 0)
    return m_M, l_M, acc_DM
