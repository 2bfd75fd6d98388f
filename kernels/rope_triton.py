"""Rotary position embedding of kernels/rope.py as one Triton kernel: one program per token, all its heads.

The arguments were checked there. Strides are compile-time constants for the reason given in
kernels/rmsnorm_triton.py. A program loads the elements of a pair before it stores them and no two programs share
a token, which is what allows src and dst to be the same tensor.
"""
# pyright: reportCallIssue=false

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_THREAD = 16  # of each half of the query heads: two vector loads of 16 bytes per half

Part = tuple[Tensor, Tensor]


def rotate_parts(
    rotated: tuple[Part, ...], copied: Part | None, cos: Tensor, sin: Tensor, backward: bool
) -> None:
    """Rotates one or two groups of heads and copies a third, in one launch."""
    q, q_out = rotated[0]
    k, k_out = rotated[1] if len(rotated) > 1 else (None, None)
    v, v_out = copied or (None, None)
    rows, n, d = q.shape
    m = 0 if k is None else k.shape[1]
    half = cos.shape[-1]
    block_half, block_rest, block_d, block_n, block_m, warps = _launch(n, m, d, half)
    _rotate[(rows,)](
        q, q_out, *_strides(q), *_strides(q_out), k, k_out, *_strides(k), *_strides(k_out),
        v, v_out, *_strides(v), *_strides(v_out), cos, sin, n, m, d, half, backward,
        _same(q, q_out) and _same(k, k_out), tl.float64 if q.dtype == torch.float64 else tl.float32,
        block_n, block_m, block_half, block_rest, block_d, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _rotate(
    q_ptr,
    q_out_ptr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    Q_OUT_ROW: tl.constexpr,
    Q_OUT_HEAD: tl.constexpr,
    k_ptr,  # None: one group of heads only
    k_out_ptr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_OUT_ROW: tl.constexpr,
    K_OUT_HEAD: tl.constexpr,
    v_ptr,  # None: nothing to copy
    v_out_ptr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    V_OUT_ROW: tl.constexpr,
    V_OUT_HEAD: tl.constexpr,
    cos_ptr,
    sin_ptr,
    N: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
    IN_PLACE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + row * HALF + pair, mask=pair < HALF, other=0.0).to(ACC)[None, :]
    sin = tl.load(sin_ptr + row * HALF + pair, mask=pair < HALF, other=0.0).to(ACC)[None, :]
    if BACKWARD:
        sin = -sin
    src, dst = q_ptr + row * Q_ROW, q_out_ptr + row * Q_OUT_ROW
    _turn(src, dst, cos, sin, N, HALF, Q_HEAD, Q_OUT_HEAD, ACC, BLOCK_N, BLOCK_HALF)
    if 2 * HALF < D and not IN_PLACE:
        _copy(src + 2 * HALF, dst + 2 * HALF, N, D - 2 * HALF, Q_HEAD, Q_OUT_HEAD, BLOCK_N, BLOCK_REST)
    if k_ptr is not None:
        src, dst = k_ptr + row * K_ROW, k_out_ptr + row * K_OUT_ROW
        _turn(src, dst, cos, sin, M, HALF, K_HEAD, K_OUT_HEAD, ACC, BLOCK_M, BLOCK_HALF)
        if 2 * HALF < D and not IN_PLACE:
            _copy(src + 2 * HALF, dst + 2 * HALF, M, D - 2 * HALF, K_HEAD, K_OUT_HEAD, BLOCK_M, BLOCK_REST)
    if v_ptr is not None:
        _copy(v_ptr + row * V_ROW, v_out_ptr + row * V_OUT_ROW, M, D, V_HEAD, V_OUT_HEAD, BLOCK_M, BLOCK_D)


@triton.jit
def _turn(
    src,
    dst,
    cos,
    sin,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SRC_HEAD: tl.constexpr,
    DST_HEAD: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotates all heads of one token."""
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS) & (pair < HALF)
    first = tl.load(src + head * SRC_HEAD + pair, mask=inside, other=0.0)
    second = tl.load(src + HALF + head * SRC_HEAD + pair, mask=inside, other=0.0)
    x1, x2 = first.to(ACC), second.to(ACC)
    tl.store(dst + head * DST_HEAD + pair, (x1 * cos - x2 * sin).to(first.dtype), mask=inside)
    tl.store(dst + HALF + head * DST_HEAD + pair, (x2 * cos + x1 * sin).to(first.dtype), mask=inside)


@triton.jit
def _copy(
    src,
    dst,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SRC_HEAD: tl.constexpr,
    DST_HEAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Copies WIDTH elements of every head of one token."""
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = (head < HEADS) & (column < WIDTH)
    x = tl.load(src + head * SRC_HEAD + column, mask=inside, other=0.0)
    tl.store(dst + head * DST_HEAD + column, x, mask=inside)


@cache
def _launch(n: int, m: int, d: int, half: int) -> tuple[int, int, int, int, int, int]:
    """Padded sizes of half a head, its unrotated rest, a whole head, the query heads, the others; and warps."""
    block_half, block_rest, block_d, block_n, block_m = (
        1 << (max(1, size) - 1).bit_length() for size in (half, d - 2 * half, d, n, m)
    )
    warps = block_n * block_half // (32 * ELEMENTS_PER_THREAD)
    return block_half, block_rest, block_d, block_n, block_m, min(16, max(1, warps))


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _same(src: Tensor | None, dst: Tensor | None) -> bool:
    return src is dst or (src is not None and dst is not None and src.data_ptr() == dst.data_ptr())
