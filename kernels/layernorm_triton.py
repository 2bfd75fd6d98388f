"""LayerNorm of kernels/layernorm.py as Triton kernels: one program per row, which is read once and held in registers.

The arguments were checked there. Row strides are compile-time constants for the reason given in rmsnorm_triton.py.
"""
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.kernels.rmsnorm import accumulate_dtype
from covey.kernels.rmsnorm_triton import _acc, _launch


def layernorm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    stats = _new_stats(x)
    block, warps = _launch(size)
    _forward[(rows,)](
        x, None, None, out, weight, bias, stats, eps, size, x.stride(0), 0, 0, out.stride(0),
        _acc(x), block, num_warps=warps,
    )  # fmt: skip
    return out, stats


def add_layernorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    inplace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, size = x.shape
    stats = _new_stats(x)
    h = x if inplace else x.new_empty(x.shape)
    block, warps = _launch(size)
    _forward[(rows,)](
        x, residual, h, out, weight, bias, stats, eps, size,
        x.stride(0), residual.stride(0), h.stride(0), out.stride(0), _acc(x), block, num_warps=warps,
    )  # fmt: skip
    return h, out, stats


def layernorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, residual: Tensor | None, out: Tensor
) -> Tensor:
    rows, size = x.shape
    skip_row = 0 if residual is None else residual.stride(0)
    block, warps = _launch(size)
    _backward[(rows,)](
        dy, x, residual, out, weight, stats, size, dy.stride(0), x.stride(0), skip_row, out.stride(0),
        _acc(x), block, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _forward(
    x_ptr,
    residual_ptr,  # None: h is x, and h_ptr is not used
    h_ptr,
    y_ptr,
    weight_ptr,  # None: 1
    bias_ptr,  # None: 0
    stats_ptr,
    EPS: tl.constexpr,
    H: tl.constexpr,
    X_ROW: tl.constexpr,
    RESIDUAL_ROW: tl.constexpr,
    H_ROW: tl.constexpr,
    Y_ROW: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    x = tl.load(x_ptr + row * X_ROW + column, mask=inside, other=0.0)
    if weight_ptr is not None:  # asked for before the sums over the row, which wait for everything above
        w = tl.load(weight_ptr + column, mask=inside, other=0.0).to(ACC)
    if bias_ptr is not None:
        b = tl.load(bias_ptr + column, mask=inside, other=0.0).to(ACC)
    h = x.to(ACC)
    if residual_ptr is not None:
        r = tl.load(residual_ptr + row * RESIDUAL_ROW + column, mask=inside, other=0.0)
        rounded = (h + r.to(ACC)).to(x.dtype)
        tl.store(h_ptr + row * H_ROW + column, rounded, mask=inside)
        h = rounded.to(ACC)
    mean = tl.sum(h, axis=0) * (1.0 / H)
    centred = tl.where(inside, h - mean, 0.0)
    rest = tl.sum(centred, axis=0) * (1.0 / H)
    centred = tl.where(inside, centred - rest, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) * (1.0 / H) + EPS)
    tl.store(stats_ptr + 2 * row, mean + rest)
    tl.store(stats_ptr + 2 * row + 1, rstd)
    y = centred * rstd
    if weight_ptr is not None:
        y *= w
    if bias_ptr is not None:
        y += b
    tl.store(y_ptr + row * Y_ROW + column, y.to(x.dtype), mask=inside)


@triton.jit
def _backward(
    dy_ptr,
    x_ptr,
    skip_ptr,  # None: no gradient to add
    dx_ptr,
    weight_ptr,  # None: 1
    stats_ptr,
    H: tl.constexpr,
    DY_ROW: tl.constexpr,
    X_ROW: tl.constexpr,
    SKIP_ROW: tl.constexpr,
    DX_ROW: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    dy = tl.load(
        dy_ptr + row * DY_ROW + column, mask=inside, other=0.0
    )  # 0 outside makes g and its sums 0 there
    x = tl.load(x_ptr + row * X_ROW + column, mask=inside, other=0.0)
    mean = tl.load(stats_ptr + 2 * row)
    rstd = tl.load(stats_ptr + 2 * row + 1)
    g = dy.to(ACC)
    if weight_ptr is not None:
        g *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(ACC)
    if skip_ptr is not None:  # asked for before the sums over the row, which wait for everything above
        skip = tl.load(skip_ptr + row * SKIP_ROW + column, mask=inside, other=0.0)
    x_hat = (x.to(ACC) - mean) * rstd
    dx = (g - tl.sum(g, axis=0) * (1.0 / H) - x_hat * (tl.sum(g * x_hat, axis=0) * (1.0 / H))) * rstd
    if skip_ptr is not None:
        dx += skip.to(ACC)
    tl.store(dx_ptr + row * DX_ROW + column, dx.to(x.dtype), mask=inside)


def _new_stats(x: Tensor) -> Tensor:
    return torch.empty((x.shape[0], 2), dtype=accumulate_dtype(x.dtype), device=x.device)
