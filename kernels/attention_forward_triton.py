"""Forward kernel of kernels/attention_triton.py, and what the backward kernels share with it."""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(pointer, offset, inside, DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK_D] at pointer + offset; zero beyond DIM and, where MASKED, in rows that are not inside."""
    dim = tl.arange(0, BLOCK_D)
    address = pointer + (offset[:, None] + dim[None, :])
    if MASKED:
        if DIM < BLOCK_D:
            values = tl.load(address, mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)
        else:
            values = tl.load(address, mask=inside[:, None], other=0.0)
    elif DIM < BLOCK_D:
        values = tl.load(address, mask=(dim < DIM)[None, :], other=0.0)
    else:
        values = tl.load(address)
    return values


@triton.jit
def store_rows(pointer, offset, inside, values, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dim = tl.arange(0, BLOCK_D)
    address = pointer + (offset[:, None] + dim[None, :])
    mask = inside[:, None]
    if DIM < BLOCK_D:
        mask = mask & (dim < DIM)[None, :]
    tl.store(address, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def capped(s, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """tanh(scale s / c), or s itself where there is no soft-cap; times c (or scale) it is the score."""
    if SOFTCAP > 0:
        s = 1.0 - 2.0 / (tl.exp2(s * (2.0 * SCALE / SOFTCAP * LOG2E)) + 1.0)
    return s


@triton.jit
def key_blocks(start, end, own, prefix, prefix_end, window, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """How the key blocks of a query tile are counted.

    Whole blocks: 0 .. prefix_blocks - 1 in the prefix, then own_blocks of the own segment before the tile. Of those
    [seen, full) hide some key from some row (sliding window only) and [full, prefix_blocks + own_blocks) hide none.
    The others: `tail` is prefix_blocks if the prefix has a rest and somebody sees it, else one more; then come
    `diagonal` blocks of the own segment.
    """
    length = prefix_end - prefix
    prefix_blocks = length // BLOCK_N
    own_blocks = (start - own) // BLOCK_N
    diagonal = tl.cdiv(end - own, BLOCK_N) - own_blocks
    tail = tl.where(length > prefix_blocks * BLOCK_N, prefix_blocks, prefix_blocks + 1)
    seen = prefix_blocks * 0
    full = seen
    if WINDOWED:
        # Positions, counted through the prefix, of the first key that the first row and that the last row see.
        lowest = tl.maximum(length + start - own - window + 1, 0)
        highest = tl.maximum(length + end - own - window, 0)
        whole = prefix_blocks * BLOCK_N
        seen = tl.where(
            lowest < whole, lowest // BLOCK_N, prefix_blocks + tl.maximum(lowest - length, 0) // BLOCK_N
        )
        full = tl.where(
            highest < whole,
            tl.cdiv(highest, BLOCK_N),
            prefix_blocks + tl.cdiv(tl.maximum(highest - length, 0), BLOCK_N),
        )
        seen = tl.minimum(seen, prefix_blocks + own_blocks)
        full = tl.minimum(full, prefix_blocks + own_blocks)
        tail = tl.where(lowest >= length, prefix_blocks + 1, tail)
    return prefix_blocks, own_blocks, seen, full, tail, diagonal


@triton.jit
def visible(
    first, in_prefix, query, own, end, prefix_end, window, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Of a block of keys from `first` on: which lie in the segment or prefix [N], and which a query sees [M, N]."""
    key = first + tl.arange(0, BLOCK_N)
    inside = key < tl.where(in_prefix, prefix_end, end)
    distance = query[:, None] - key[None, :] + tl.where(in_prefix, prefix_end - own, 0)
    seen = inside[None, :] & (distance >= 0)
    if WINDOWED:
        seen = seen & (distance < window)
    return inside, seen


@triton.jit
def _attend(
    q, acc, top, total, k_ptr, v_ptr, low, high, split, own_first,
    query, own, end, prefix, prefix_end, window,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    DIM: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds key blocks [low, high): those below `split` are in the prefix, the others follow `own_first`."""
    column = tl.arange(0, BLOCK_N)
    factor: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E
    for i in range(low, high):
        in_prefix = i < split
        first = tl.where(in_prefix, prefix + i * BLOCK_N, own_first + (i - split) * BLOCK_N)
        inside = column
        if MASKED:
            inside, seen = visible(first, in_prefix, query, own, end, prefix_end, window, WINDOWED, BLOCK_N)
        k = load_rows(k_ptr + first.to(tl.int64) * K_ROW, column * K_ROW, inside, DIM, BLOCK_D, MASKED)
        s = capped(tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC), SCALE, SOFTCAP)
        if MASKED:
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1) * factor)
        shift = new_top
        if WINDOWED:  # a row may have seen no key yet
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s * factor - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        v = load_rows(v_ptr + first.to(tl.int64) * V_ROW, column * V_ROW, inside, DIM, BLOCK_D, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee", out_dtype=ACC)
        top = new_top
    return acc, top, total


@triton.jit
def _attend_ahead(
    q, acc, top, total, k_desc, v_desc, head, low, high, split, prefix, own,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    ACC: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_attend` without masks, for Hopper: the next block's scores are asked for before this block's exponentials.

    The tensor cores then work while the exponentials are made. It wants loads by descriptor: with pointers the
    assembler puts both products into one stage and lets them wait for each other.
    """
    factor: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E
    first = tl.where(low < split, prefix + low * BLOCK_N, own + (low - split) * BLOCK_N)
    k = k_desc.load([head, first, 0]).reshape(BLOCK_N, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
    for i in range(low, high):
        first = tl.where(i < split, prefix + i * BLOCK_N, own + (i - split) * BLOCK_N)
        following = tl.minimum(i + 1, high - 1)
        second = tl.where(
            following < split, prefix + following * BLOCK_N, own + (following - split) * BLOCK_N
        )
        k = k_desc.load([head, second, 0]).reshape(BLOCK_N, BLOCK_D)
        next_s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        s = capped(s, SCALE, SOFTCAP)
        new_top = tl.maximum(top, tl.max(s, axis=1) * factor)
        p = tl.exp2(s * factor - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        v = v_desc.load([head, first, 0]).reshape(BLOCK_N, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee", out_dtype=ACC)
        top = new_top
        s = next_s
    return acc, top, total


@triton.jit(do_not_specialize=["tokens", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, o_ptr, lse_ptr, tiles_ptr, tokens, window,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, O_ROW: tl.constexpr, O_HEAD: tl.constexpr,
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
    lse_ptr += wide_head * GROUP * tokens + start
    k_ptr += wide_head * K_HEAD
    v_ptr += wide_head * V_HEAD
    q = load_rows(q_ptr, token * Q_ROW + sub * Q_HEAD, inside, DIM, BLOCK_D, True)
    query = start + token
    prefix_blocks, own_blocks, seen, full, tail, diagonal = key_blocks(
        start, end, own, prefix, prefix_end, window, WINDOWED, BLOCK_N
    )
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=ACC)
    top = tl.full([BLOCK_M], float("-inf"), dtype=ACC)
    total = tl.zeros([BLOCK_M], dtype=ACC)
    if WINDOWED:
        acc, top, total = _attend(
            q, acc, top, total, k_ptr, v_ptr, seen, full, prefix_blocks, own,
            query, own, end, prefix, prefix_end, window,
            SCALE, SOFTCAP, WINDOWED, K_ROW, V_ROW, DIM, ACC, True, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    if k_desc is None:
        acc, top, total = _attend(
            q, acc, top, total, k_ptr, v_ptr, full, prefix_blocks + own_blocks, prefix_blocks, own,
            query, own, end, prefix, prefix_end, window,
            SCALE, SOFTCAP, WINDOWED, K_ROW, V_ROW, DIM, ACC, False, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    elif full < prefix_blocks + own_blocks:
        acc, top, total = _attend_ahead(
            q, acc, top, total, k_desc, v_desc, head, full, prefix_blocks + own_blocks, prefix_blocks, prefix, own,
            SCALE, SOFTCAP, ACC, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, top, total = _attend(
        q, acc, top, total, k_ptr, v_ptr, tail, prefix_blocks + 1 + diagonal, prefix_blocks + 1,
        own + own_blocks * BLOCK_N, query, own, end, prefix, prefix_end, window,
        SCALE, SOFTCAP, WINDOWED, K_ROW, V_ROW, DIM, ACC, True, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    total = tl.where(inside, total, 1.0)  # a row beyond the tile may have seen nothing
    store_rows(o_ptr, token * O_ROW + sub * O_HEAD, inside, acc / total[:, None], DIM, BLOCK_D)
    tl.store(lse_ptr + sub.to(tl.int64) * tokens + token, (top + tl.log2(total)) * LN2, mask=inside)
