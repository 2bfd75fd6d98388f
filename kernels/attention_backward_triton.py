"""Backward kernels of kernels/attention_triton.py."""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from covey.kernels.attention_forward_triton import LOG2E, capped, key_blocks, load_rows, store_rows, visible


@triton.jit
def _pull(
    dq, q, do, lse, delta, k_ptr, v_ptr, low, high, split, own_first, query, own, end, prefix, prefix_end, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    DIM: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds ds k of key blocks [low, high), which are counted as in `_attend`."""
    column = tl.arange(0, BLOCK_N)
    factor: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E
    for i in range(low, high):
        in_prefix = i < split
        first = tl.where(in_prefix, prefix + i * BLOCK_N, own_first + (i - split) * BLOCK_N)
        inside = column
        if MASKED:
            inside, seen = visible(first, in_prefix, query, own, end, prefix_end, window, WINDOWED, BLOCK_N)
        k = load_rows(k_ptr + first.to(tl.int64) * K_ROW, column * K_ROW, inside, DIM, BLOCK_D, MASKED)
        v = load_rows(v_ptr + first.to(tl.int64) * V_ROW, column * V_ROW, inside, DIM, BLOCK_D, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee", out_dtype=ACC)  # runs while p is made
        s = capped(s, SCALE, SOFTCAP)
        p = tl.exp2(s * factor - lse[:, None])
        if MASKED:
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta[:, None])
        if SOFTCAP > 0:
            ds *= 1.0 - s * s
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee", out_dtype=ACC)
    return dq


@triton.jit(do_not_specialize=["tokens", "window"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, rows_ptr, dq_ptr, tiles_ptr, tokens, window,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, O_ROW: tl.constexpr, O_HEAD: tl.constexpr,
    DO_ROW: tl.constexpr, DO_HEAD: tl.constexpr, DQ_ROW: tl.constexpr, DQ_HEAD: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    tile_ptr = tiles_ptr + tl.program_id(0) // HEADS * 5
    start, end, own = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    prefix, prefix_end = tl.load(tile_ptr + 3), tl.load(tile_ptr + 4)
    row = tl.arange(0, BLOCK_M)
    token, sub = row // GROUP, row % GROUP
    inside = token < end - start
    base = start.to(tl.int64)
    wide_head = head.to(tl.int64)
    q_ptr += base * Q_ROW + wide_head * (GROUP * Q_HEAD)
    o_ptr += base * O_ROW + wide_head * (GROUP * O_HEAD)
    do_ptr += base * DO_ROW + wide_head * (GROUP * DO_HEAD)
    dq_ptr += base * DQ_ROW + wide_head * (GROUP * DQ_HEAD)
    lse_ptr += wide_head * GROUP * tokens + start
    rows_ptr += (wide_head * tokens + start) * GROUP
    k_ptr += wide_head * K_HEAD
    v_ptr += wide_head * V_HEAD
    do = load_rows(do_ptr, token * DO_ROW + sub * DO_HEAD, inside, DIM, BLOCK_D, True)
    o = load_rows(o_ptr, token * O_ROW + sub * O_HEAD, inside, DIM, BLOCK_D, True)
    delta = tl.sum(o.to(ACC) * do.to(ACC), axis=1)
    lse = tl.load(lse_ptr + sub.to(tl.int64) * tokens + token, mask=inside, other=0.0) * LOG2E
    tl.store(rows_ptr + row, lse, mask=inside)
    tl.store(rows_ptr + tokens.to(tl.int64) * (HEADS * GROUP) + row, delta, mask=inside)
    q = load_rows(q_ptr, token * Q_ROW + sub * Q_HEAD, inside, DIM, BLOCK_D, True)
    query = start + token
    prefix_blocks, own_blocks, seen, full, tail, diagonal = key_blocks(
        start, end, own, prefix, prefix_end, window, WINDOWED, BLOCK_N
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=ACC)
    if WINDOWED:
        dq = _pull(
            dq, q, do, lse, delta, k_ptr, v_ptr, seen, full, prefix_blocks, own,
            query, own, end, prefix, prefix_end, window,
            SCALE, SOFTCAP, WINDOWED, K_ROW, V_ROW, DIM, ACC, True, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    dq = _pull(
        dq, q, do, lse, delta, k_ptr, v_ptr, full, prefix_blocks + own_blocks, prefix_blocks, own,
        query, own, end, prefix, prefix_end, window,
        SCALE, SOFTCAP, WINDOWED, K_ROW, V_ROW, DIM, ACC, False, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    dq = _pull(
        dq, q, do, lse, delta, k_ptr, v_ptr, tail, prefix_blocks + 1 + diagonal, prefix_blocks + 1,
        own + own_blocks * BLOCK_N, query, own, end, prefix, prefix_end, window,
        SCALE, SOFTCAP, WINDOWED, K_ROW, V_ROW, DIM, ACC, True, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    store_rows(dq_ptr, token * DQ_ROW + sub * DQ_HEAD, inside, dq * SCALE, DIM, BLOCK_D)


@triton.jit
def _gather(
    dk, dv, k, v, key, q_ptr, do_ptr, lse_ptr, delta_ptr, low, high, gap_at, gap, start, end, shift, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, GROUP: tl.constexpr,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, DO_ROW: tl.constexpr, DO_HEAD: tl.constexpr,
    DIM: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds the query blocks [low, high) of the run (start, end, shift); from gap_at on, those `gap` blocks later."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    CHECKED: tl.constexpr = MASKED or TOKENS * GROUP < BLOCK_M
    row = tl.arange(0, BLOCK_M)
    token, sub = row // GROUP, row % GROUP
    factor: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E
    for i in range(low, high):
        first = start + (i + tl.where(i < gap_at, 0, gap)) * TOKENS
        inside = row < TOKENS * GROUP
        if MASKED:
            inside = inside & (token < end - first)
        base = first.to(tl.int64)
        q = load_rows(q_ptr + base * Q_ROW, token * Q_ROW + sub * Q_HEAD, inside, DIM, BLOCK_D, CHECKED)
        do = load_rows(do_ptr + base * DO_ROW, token * DO_ROW + sub * DO_HEAD, inside, DIM, BLOCK_D, CHECKED)
        if CHECKED:  # exp(s - inf) = 0 in the rows that do not count
            lse = tl.load(lse_ptr + base * GROUP + row, mask=inside, other=float("inf"))
            delta = tl.load(delta_ptr + base * GROUP + row, mask=inside, other=0.0)
        else:
            lse = tl.load(lse_ptr + base * GROUP + row)
            delta = tl.load(delta_ptr + base * GROUP + row)
        s = tl.dot(k, tl.trans(q), input_precision="ieee", out_dtype=ACC)
        dp = tl.dot(v, tl.trans(do), input_precision="ieee", out_dtype=ACC)  # runs while p is made
        s = capped(s, SCALE, SOFTCAP)
        p = tl.exp2(s * factor - lse[None, :])
        if MASKED:
            distance = (first + token)[None, :] - key[:, None] + shift
            seen = distance >= 0
            if WINDOWED:
                seen = seen & (distance < window)
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee", out_dtype=ACC)
        ds = p * (dp - delta[None, :])
        if SOFTCAP > 0:
            ds *= 1.0 - s * s
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee", out_dtype=ACC)
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "window"])
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, dk_ptr, dv_ptr, parts_ptr, items_ptr, runs_ptr, tokens, window,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, DO_ROW: tl.constexpr, DO_HEAD: tl.constexpr,
    DK_ROW: tl.constexpr, DK_HEAD: tl.constexpr, DV_ROW: tl.constexpr, DV_HEAD: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0) % HEADS
    item_ptr = items_ptr + tl.program_id(0) // HEADS * 5
    key_start, key_end = tl.load(item_ptr), tl.load(item_ptr + 1)
    first_run, last_run, place = tl.load(item_ptr + 2), tl.load(item_ptr + 3), tl.load(item_ptr + 4)
    column = tl.arange(0, BLOCK_N)
    inside = column < key_end - key_start
    base = key_start.to(tl.int64)
    wide_head = head.to(tl.int64)
    k_ptr += base * K_ROW + wide_head * K_HEAD
    v_ptr += base * V_ROW + wide_head * V_HEAD
    dk_ptr += base * DK_ROW + wide_head * DK_HEAD
    dv_ptr += base * DV_ROW + wide_head * DV_HEAD
    q_ptr += wide_head * (GROUP * Q_HEAD)
    do_ptr += wide_head * (GROUP * DO_HEAD)
    lse_ptr = rows_ptr + wide_head * tokens * GROUP
    delta_ptr = lse_ptr + tokens.to(tl.int64) * (HEADS * GROUP)
    k = load_rows(k_ptr, column * K_ROW, inside, DIM, BLOCK_D, True)
    v = load_rows(v_ptr, column * V_ROW, inside, DIM, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=ACC)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=ACC)
    for run in range(first_run, last_run):
        start, end = tl.load(runs_ptr + run * 3), tl.load(runs_ptr + run * 3 + 1)
        shift = tl.load(runs_ptr + run * 3 + 2)
        # Blocks [0, diagonal) hide keys from queries, so do those from `whole` on, or they hold fewer tokens.
        count = tl.cdiv(end - start, TOKENS)
        diagonal = tl.minimum(tl.cdiv(tl.maximum(key_end - 1 - shift - start, 0), TOKENS), count)
        whole = (end - start) // TOKENS
        if WINDOWED:
            whole = tl.minimum(whole, tl.maximum(key_start + window - shift - start, 0) // TOKENS)
        whole = tl.maximum(whole, diagonal)
        dk, dv = _gather(
            dk, dv, k, v, key_start + column, q_ptr, do_ptr, lse_ptr, delta_ptr, diagonal, whole, whole, 0,
            start, end, shift, window, SCALE, SOFTCAP, WINDOWED, GROUP, Q_ROW, Q_HEAD, DO_ROW, DO_HEAD,
            DIM, ACC, False, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        dk, dv = _gather(
            dk, dv, k, v, key_start + column, q_ptr, do_ptr, lse_ptr, delta_ptr,
            0, diagonal + count - whole, diagonal, whole - diagonal,
            start, end, shift, window, SCALE, SOFTCAP, WINDOWED, GROUP, Q_ROW, Q_HEAD, DO_ROW, DO_HEAD,
            DIM, ACC, True, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    dk *= SCALE
    if place < 0:
        store_rows(dk_ptr, column * DK_ROW, inside, dk, DIM, BLOCK_D)
        store_rows(dv_ptr, column * DV_ROW, inside, dv, DIM, BLOCK_D)
    else:
        parts_ptr += (place.to(tl.int64) * HEADS + head) * (2 * BLOCK_N * BLOCK_D)
        store_rows(parts_ptr, column * BLOCK_D, inside, dk, BLOCK_D, BLOCK_D)
        store_rows(parts_ptr + BLOCK_N * BLOCK_D, column * BLOCK_D, inside, dv, BLOCK_D, BLOCK_D)


@triton.jit
def sum_parts_kernel(
    parts_ptr, dk_ptr, dv_ptr, sums_ptr,
    DK_ROW: tl.constexpr, DK_HEAD: tl.constexpr, DV_ROW: tl.constexpr, DV_HEAD: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums the parts of ROWS keys in the order of their places."""
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % HEADS
    sum_ptr = sums_ptr + tl.program_id(0) // (BLOCKS * HEADS) * 4
    key_start, key_end = tl.load(sum_ptr), tl.load(sum_ptr + 1)
    first, last = tl.load(sum_ptr + 2), tl.load(sum_ptr + 3)
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < key_end - key_start
    dk = tl.zeros([ROWS, BLOCK_D], dtype=parts_ptr.dtype.element_ty)
    dv = dk
    parts_ptr += (first.to(tl.int64) * HEADS + head) * (2 * BLOCK_N * BLOCK_D)
    for _ in range(first, last):
        dk += load_rows(parts_ptr, row * BLOCK_D, inside, BLOCK_D, BLOCK_D, True)
        dv += load_rows(parts_ptr + BLOCK_N * BLOCK_D, row * BLOCK_D, inside, BLOCK_D, BLOCK_D, True)
        parts_ptr += HEADS * 2 * BLOCK_N * BLOCK_D
    base, wide_head = key_start.to(tl.int64), head.to(tl.int64)
    dk_ptr += base * DK_ROW + wide_head * DK_HEAD
    dv_ptr += base * DV_ROW + wide_head * DV_HEAD
    store_rows(dk_ptr, row * DK_ROW, inside, dk, DIM, BLOCK_D)
    store_rows(dv_ptr, row * DV_ROW, inside, dv, DIM, BLOCK_D)
