"""RMSNorm of kernels/rmsnorm.py as Triton kernels: one program per row, which is read once and held in registers.

The arguments were checked there: matrices with contiguous rows of any stride, H at most WIDEST. Row strides are
compile-time constants, because a buffer of [T, K + r] has rows of 8 k elements for r = 8, and Triton's own
specialisation of integers recognises multiples of 16 only: it would give up vector loads.
"""
# pyright: reportCallIssue=false

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_THREAD = 16  # of a row: two vector loads of 16 bytes in flight per 16-bit input


def rmsnorm(x: Tensor, weight: Tensor, eps: float, out: Tensor, plus_one: bool) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    rstd = _new_rstd(x)
    block, warps = _launch(size)
    _forward[(rows,)](
        x, None, None, out, weight, rstd, eps, size, x.stride(0), 0, 0, out.stride(0),
        False, plus_one, _acc(x), block, num_warps=warps,
    )  # fmt: skip
    return out, rstd


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, plus_one: bool, inplace: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, size = x.shape
    rstd = _new_rstd(x)
    h = x if inplace else x.new_empty(x.shape)
    block, warps = _launch(size)
    _forward[(rows,)](
        x, residual, h, out, weight, rstd, eps, size, x.stride(0), residual.stride(0), h.stride(0), out.stride(0),
        False, plus_one, _acc(x), block, num_warps=warps,
    )  # fmt: skip
    return h, out, rstd


def rmsnorm_apply(x: Tensor, weight: Tensor, rstd: Tensor, out: Tensor, plus_one: bool) -> Tensor:
    rows, size = x.shape
    block, warps = _launch(size)
    _forward[(rows,)](
        x, None, None, out, weight, rstd, 0.0, size, x.stride(0), 0, 0, out.stride(0),
        True, plus_one, _acc(x), block, num_warps=warps,
    )  # fmt: skip
    return out


def rmsnorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None, plus_one: bool, out: Tensor
) -> Tensor:
    rows, size = x.shape
    skip_row = 0 if residual is None else residual.stride(0)
    block, warps = _launch(size)
    _backward[(rows,)](
        dy, x, residual, out, weight, rstd, size, dy.stride(0), x.stride(0), skip_row, out.stride(0),
        plus_one, _acc(x), block, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _forward(
    x_ptr,
    residual_ptr,  # None: h is x, and h_ptr is not used
    h_ptr,
    y_ptr,
    weight_ptr,
    rstd_ptr,
    EPS: tl.constexpr,
    H: tl.constexpr,
    X_ROW: tl.constexpr,
    RESIDUAL_ROW: tl.constexpr,
    H_ROW: tl.constexpr,
    Y_ROW: tl.constexpr,
    GIVEN: tl.constexpr,  # rstd is read instead of computed
    PLUS_ONE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    x = tl.load(x_ptr + row * X_ROW + column, mask=inside, other=0.0)
    w = tl.load(weight_ptr + column, mask=inside, other=0.0).to(ACC)
    h = x.to(ACC)
    if residual_ptr is not None:
        r = tl.load(residual_ptr + row * RESIDUAL_ROW + column, mask=inside, other=0.0)
        rounded = (h + r.to(ACC)).to(x.dtype)
        tl.store(h_ptr + row * H_ROW + column, rounded, mask=inside)
        h = rounded.to(ACC)
    if GIVEN:
        rstd = tl.load(rstd_ptr + row)
    else:
        rstd = tl.rsqrt(tl.sum(h * h, axis=0) * (1.0 / H) + EPS)
        tl.store(rstd_ptr + row, rstd)
    h_hat = h * rstd
    if PLUS_ONE:
        w += 1.0
    else:
        h_hat = h_hat.to(x.dtype).to(ACC)
    y = h_hat * w
    tl.store(y_ptr + row * Y_ROW + column, y.to(x.dtype), mask=inside)


@triton.jit
def _backward(
    dy_ptr,
    x_ptr,
    skip_ptr,  # None: no gradient to add
    dx_ptr,
    weight_ptr,
    rstd_ptr,
    H: tl.constexpr,
    DY_ROW: tl.constexpr,
    X_ROW: tl.constexpr,
    SKIP_ROW: tl.constexpr,
    DX_ROW: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    dy = tl.load(dy_ptr + row * DY_ROW + column, mask=inside, other=0.0)
    x = tl.load(x_ptr + row * X_ROW + column, mask=inside, other=0.0)
    w = tl.load(weight_ptr + column, mask=inside, other=0.0).to(ACC)
    rstd = tl.load(rstd_ptr + row)
    if skip_ptr is not None:  # asked for before the sum over the row, which waits for everything above
        skip = tl.load(skip_ptr + row * SKIP_ROW + column, mask=inside, other=0.0)
    if PLUS_ONE:
        w += 1.0
    g = dy.to(ACC) * w
    x_hat = x.to(ACC) * rstd
    dx = (g - x_hat * (tl.sum(g * x_hat, axis=0) * (1.0 / H))) * rstd
    if skip_ptr is not None:
        dx += skip.to(ACC)
    tl.store(dx_ptr + row * DX_ROW + column, dx.to(x.dtype), mask=inside)


@cache
def _launch(size: int) -> tuple[int, int]:
    """Block of columns and number of warps for rows of this size."""
    block = 1 << (size - 1).bit_length()
    return block, min(32, max(1, block // (32 * ELEMENTS_PER_THREAD)))


def _new_rstd(x: Tensor) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty((x.shape[0], 1), dtype=dtype, device=x.device)


def _acc(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
