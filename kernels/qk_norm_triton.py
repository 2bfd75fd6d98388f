"""The normed and rotated heads of kernels/qk_norm.py as Triton kernels: one program per token, all its heads.

The arguments were checked there. Strides are compile-time constants for the reason given in
kernels/rmsnorm_triton.py. Every program loads the heads of a group before it stores them and no two programs share
a token, which is what allows outputs to lie over inputs.
"""
# pyright: reportCallIssue=false

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of each half of the query heads: one or two vector loads of 16 bytes for every 16-bit tensor.
FORWARD_ELEMENTS_PER_THREAD = 16
BACKWARD_ELEMENTS_PER_THREAD = 8


def norm_rope(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    plus_one: bool,
) -> Tensor:
    (rows, n, d), m, half = q.shape, k.shape[1], cos.shape[-1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rstd = torch.empty((rows, n + m), dtype=wide, device=q.device)
    block_half, _, block_n, block_m, warps = _launch(n, m, d, half, FORWARD_ELEMENTS_PER_THREAD)
    _forward[(rows,)](
        q, *_strides(q), q_out, *_strides(q_out), k, *_strides(k), k_out, *_strides(k_out),
        *weights, rstd, cos, sin, eps, n, m, half, plus_one, _acc(q), block_n, block_m, block_half, num_warps=warps,
    )  # fmt: skip
    return rstd


def norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    q_to: Tensor,
    k_to: Tensor,
    v_to: Tensor,
    weights: tuple[Tensor, Tensor],
    rstd: Tensor,
    cos: Tensor,
    sin: Tensor,
    plus_one: bool,
) -> None:
    (rows, n, d), m, half = q.shape, k.shape[1], cos.shape[-1]
    block_half, block_d, block_n, block_m, warps = _launch(n, m, d, half, BACKWARD_ELEMENTS_PER_THREAD)
    _backward[(rows,)](
        dq, *_strides(dq), q, *_strides(q), q_to, dk, *_strides(dk), k, *_strides(k), k_to, dv, *_strides(dv), v_to,
        *_strides(q_to), *weights, rstd, cos, sin, n, m, d, half, plus_one, _acc(q),
        block_n, block_m, block_half, block_d, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _forward(
    q_ptr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    q_out_ptr,
    Q_OUT_ROW: tl.constexpr,
    Q_OUT_HEAD: tl.constexpr,
    k_ptr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    k_out_ptr,
    K_OUT_ROW: tl.constexpr,
    K_OUT_HEAD: tl.constexpr,
    weight_q_ptr,
    weight_k_ptr,
    rstd_ptr,
    cos_ptr,
    sin_ptr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    HALF: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + row * HALF + pair, mask=pair < HALF, other=0.0).to(ACC)[None, :]
    sin = tl.load(sin_ptr + row * HALF + pair, mask=pair < HALF, other=0.0).to(ACC)[None, :]
    rstd = rstd_ptr + row * (N + M)
    _norm_and_turn(
        q_ptr + row * Q_ROW, q_out_ptr + row * Q_OUT_ROW, weight_q_ptr, rstd, cos, sin,
        EPS, N, HALF, Q_HEAD, Q_OUT_HEAD, PLUS_ONE, ACC, BLOCK_N, BLOCK_HALF,
    )  # fmt: skip
    _norm_and_turn(
        k_ptr + row * K_ROW, k_out_ptr + row * K_OUT_ROW, weight_k_ptr, rstd + N, cos, sin,
        EPS, M, HALF, K_HEAD, K_OUT_HEAD, PLUS_ONE, ACC, BLOCK_M, BLOCK_HALF,
    )  # fmt: skip


@triton.jit
def _norm_and_turn(
    src,
    dst,
    weight,
    rstd_ptr,
    cos,
    sin,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SRC_HEAD: tl.constexpr,
    DST_HEAD: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """All heads of one token."""
    head = tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    at = head[:, None] * SRC_HEAD + pair
    inside = (head < HEADS)[:, None] & (pair < HALF)
    first = tl.load(src + at, mask=inside, other=0.0)
    second = tl.load(src + HALF + at, mask=inside, other=0.0)
    w1 = tl.load(weight + pair, mask=pair < HALF, other=0.0).to(ACC)
    w2 = tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(ACC)
    x1, x2 = first.to(ACC), second.to(ACC)
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) * (0.5 / HALF) + EPS)
    tl.store(rstd_ptr + head, rstd, mask=head < HEADS)
    x1, x2 = x1 * rstd[:, None], x2 * rstd[:, None]
    if PLUS_ONE:
        x1, x2 = x1 * (1.0 + w1), x2 * (1.0 + w2)
    else:
        x1, x2 = x1.to(first.dtype).to(ACC) * w1, x2.to(first.dtype).to(ACC) * w2
    x1, x2 = x1.to(first.dtype).to(ACC), x2.to(first.dtype).to(ACC)
    at = head[:, None] * DST_HEAD + pair
    tl.store(dst + at, (x1 * cos - x2 * sin).to(first.dtype), mask=inside)
    tl.store(dst + HALF + at, (x2 * cos + x1 * sin).to(first.dtype), mask=inside)


@triton.jit
def _backward(
    dq_ptr,
    DQ_ROW: tl.constexpr,
    DQ_HEAD: tl.constexpr,
    q_ptr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    q_to_ptr,
    dk_ptr,
    DK_ROW: tl.constexpr,
    DK_HEAD: tl.constexpr,
    k_ptr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    k_to_ptr,
    dv_ptr,
    DV_ROW: tl.constexpr,
    DV_HEAD: tl.constexpr,
    v_to_ptr,
    TO_ROW: tl.constexpr,  # of all three results, which share one buffer
    TO_HEAD: tl.constexpr,
    weight_q_ptr,
    weight_k_ptr,
    rstd_ptr,
    cos_ptr,
    sin_ptr,
    N: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + row * HALF + pair, mask=pair < HALF, other=0.0).to(ACC)[None, :]
    sin = tl.load(sin_ptr + row * HALF + pair, mask=pair < HALF, other=0.0).to(ACC)[None, :]
    rstd = rstd_ptr + row * (N + M)
    _turn_and_norm_back(
        dq_ptr + row * DQ_ROW, q_ptr + row * Q_ROW, q_to_ptr + row * TO_ROW, weight_q_ptr, rstd, cos, sin,
        N, HALF, DQ_HEAD, Q_HEAD, TO_HEAD, PLUS_ONE, ACC, BLOCK_N, BLOCK_HALF,
    )  # fmt: skip
    _turn_and_norm_back(
        dk_ptr + row * DK_ROW, k_ptr + row * K_ROW, k_to_ptr + row * TO_ROW, weight_k_ptr, rstd + N, cos, sin,
        M, HALF, DK_HEAD, K_HEAD, TO_HEAD, PLUS_ONE, ACC, BLOCK_M, BLOCK_HALF,
    )  # fmt: skip
    head = tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < M) & (column < D)
    dv = tl.load(dv_ptr + row * DV_ROW + head * DV_HEAD + column, mask=inside, other=0.0)
    tl.store(v_to_ptr + row * TO_ROW + head * TO_HEAD + column, dv, mask=inside)


@triton.jit
def _turn_and_norm_back(
    dy_ptr,
    x_ptr,
    dx_ptr,
    weight,
    rstd_ptr,
    cos,
    sin,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    DY_HEAD: tl.constexpr,
    X_HEAD: tl.constexpr,
    DX_HEAD: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """All heads of one token."""
    head = tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS)[:, None] & (pair < HALF)
    at = head[:, None] * DY_HEAD + pair
    dy1 = tl.load(dy_ptr + at, mask=inside, other=0.0).to(ACC)
    dy2 = tl.load(dy_ptr + HALF + at, mask=inside, other=0.0).to(ACC)
    at = head[:, None] * X_HEAD + pair
    first = tl.load(x_ptr + at, mask=inside, other=0.0)
    second = tl.load(x_ptr + HALF + at, mask=inside, other=0.0)
    w1 = tl.load(weight + pair, mask=pair < HALF, other=0.0).to(ACC)
    w2 = tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(ACC)
    rstd = tl.load(rstd_ptr + head, mask=head < HEADS, other=0.0)[:, None]
    if PLUS_ONE:
        w1, w2 = 1.0 + w1, 1.0 + w2
    g1 = (dy1 * cos + dy2 * sin) * w1
    g2 = (dy2 * cos - dy1 * sin) * w2
    x1, x2 = first.to(ACC) * rstd, second.to(ACC) * rstd
    mean = (tl.sum(g1 * x1 + g2 * x2, axis=1) * (0.5 / HALF))[:, None]
    at = head[:, None] * DX_HEAD + pair
    tl.store(dx_ptr + at, ((g1 - x1 * mean) * rstd).to(first.dtype), mask=inside)
    tl.store(dx_ptr + HALF + at, ((g2 - x2 * mean) * rstd).to(first.dtype), mask=inside)


@cache
def _launch(n: int, m: int, d: int, half: int, per_thread: int) -> tuple[int, int, int, int, int]:
    """Padded sizes of half a head, a whole head, the query heads, the others; and warps."""
    block_half, block_d, block_n, block_m = (1 << (size - 1).bit_length() for size in (half, d, n, m))
    warps = block_n * block_half // (32 * per_thread)
    return block_half, block_d, block_n, block_m, min(16, max(1, warps))


def _strides(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)


def _acc(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
