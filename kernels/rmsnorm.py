"""Root-mean-square layer norm, alone or with the residual sum before it.

Axes: T rows (tokens), H hidden size. Statistics in float32 (float64 for float64 inputs).

    h    = x + r (add_rmsnorm; otherwise h = x)
    rstd = (mean_H(h^2) + eps)^(-1/2)        h_hat = h * rstd        y = h_hat * w
    dh   = rstd * (g - h_hat * mean_H(g * h_hat)) + s        with g = dy * w

s is the gradient that reaches h along the skip connection. The weight w is frozen. Roundings are those of
transformers: h to its dtype before it is used, h_hat to the same dtype before it is multiplied by w. `plus_one` is
Gemma's form: y = h_hat * (1 + w), all in float32 and rounded once. The backward rounds once, after adding s.
"""

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton

WIDEST = 32768  # the kernels hold one row in the registers of one program


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to do arithmetic in: float64 stays, everything narrower becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rmsnorm(
    x_TH: Tensor, weight_H: Tensor, eps: float, out: Tensor | None = None, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """y [T, H] in x's dtype and rstd [T, 1] in float32 (float64 for float64), which the backward needs.

    out: where y goes; [T, H] in x's dtype, rows of any stride, no overlap with x unless it is x itself (then x is
    lost). Raises ValueError if its shape or dtype is another.
    """
    if use_triton(x_TH, "rmsnorm", unless=_unfit(weight_H, x_TH, out)):
        from covey.kernels import rmsnorm_triton

        return rmsnorm_triton.rmsnorm(x_TH, weight_H, eps, _checked(out, x_TH), plus_one)
    y, rstd = rmsnorm_reference(x_TH, weight_H, eps, plus_one)
    return _placed(y, out), rstd


def add_rmsnorm(
    x_TH: Tensor,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    out: Tensor | None = None,
    plus_one: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """h = x + residual [T, H] in x's dtype, then y and rstd of h as `rmsnorm` returns them.

    inplace: h is written over x, which the caller declares scratch. `out` is for y, as in `rmsnorm`, and may also be
    the storage of residual.
    """
    if use_triton(x_TH, "add_rmsnorm", unless=_unfit(weight_H, x_TH, residual_TH, out)):
        from covey.kernels import rmsnorm_triton

        y = _checked(out, x_TH)
        return rmsnorm_triton.add_rmsnorm(x_TH, residual_TH, weight_H, eps, y, plus_one, inplace)
    h = x_TH.add_(residual_TH) if inplace else x_TH + residual_TH
    y, rstd = rmsnorm_reference(h, weight_H, eps, plus_one)
    return h, _placed(y, out), rstd


def rmsnorm_apply(
    x_TH: Tensor, weight_H: Tensor, rstd_T1: Tensor, out: Tensor | None = None, plus_one: bool = False
) -> Tensor:
    """y [T, H] from a kept rstd, bit-equal to what `rmsnorm` returned; `out` as there."""
    if use_triton(x_TH, "rmsnorm_apply", unless=_unfit(weight_H, x_TH, out, rstd=rstd_T1)):
        from covey.kernels import rmsnorm_triton

        return rmsnorm_triton.rmsnorm_apply(x_TH, weight_H, rstd_T1, _checked(out, x_TH), plus_one)
    return _placed(_scaled(x_TH * rstd_T1, weight_H, x_TH.dtype, plus_one), out)


def rmsnorm_backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    weight_H: Tensor,
    rstd_T1: Tensor,
    residual: Tensor | None = None,
    plus_one: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """dx [T, H] in x's dtype, plus `residual` [T, H], the gradient along the skip connection, if given.

    The sum is made in float32 and rounded once (eager torch rounds dx first). out: where it goes, as in `rmsnorm`;
    it may be the storage of dy or of residual, declared scratch.
    """
    unfit = _unfit(weight_H, x_TH, dy_TH, residual, out, rstd=rstd_T1)
    if use_triton(x_TH, "rmsnorm_backward", unless=unfit):
        from covey.kernels import rmsnorm_triton

        dx = _checked(out, x_TH)
        return rmsnorm_triton.rmsnorm_backward(dy_TH, x_TH, weight_H, rstd_T1, residual, plus_one, dx)
    return _placed(rmsnorm_backward_reference(dy_TH, x_TH, weight_H, rstd_T1, residual, plus_one), out)


def rmsnorm_reference(
    x_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    x = x_TH.to(accumulate_dtype(x_TH.dtype))
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return _scaled(x * rstd, weight_H, x_TH.dtype, plus_one), rstd


def rmsnorm_backward_reference(
    dy_TH: Tensor,
    x_TH: Tensor,
    weight_H: Tensor,
    rstd_T1: Tensor,
    residual: Tensor | None = None,
    plus_one: bool = False,
) -> Tensor:
    acc = rstd_T1.dtype
    x_hat = x_TH * rstd_T1
    g = dy_TH.to(acc) * (weight_H.to(acc) + 1 if plus_one else weight_H)
    dx = (g - x_hat * (g * x_hat).mean(-1, keepdim=True)) * rstd_T1
    return (dx if residual is None else dx + residual).to(x_TH.dtype)


def _scaled(x_hat_TH: Tensor, weight_H: Tensor, dtype: torch.dtype, plus_one: bool) -> Tensor:
    """y in `dtype` from x_hat in the arithmetic dtype."""
    if plus_one:
        return (x_hat_TH * (1 + weight_H.to(x_hat_TH.dtype))).to(dtype)
    return (x_hat_TH.to(dtype) * weight_H).to(dtype)


def _unfit(weight_H: Tensor | None, x_TH: Tensor, *more: Tensor | None, rstd: Tensor | None = None) -> str:
    """Why the kernels cannot take these tensors; empty if they can."""
    shape = x_TH.shape
    if x_TH.dim() != 2 or x_TH.stride(1) != 1:
        return "not a matrix with contiguous rows"
    if weight_H is not None and (weight_H.shape != shape[1:] or weight_H.stride(0) != 1):
        return "a weight that is not contiguous or of another size than x's rows"
    for rows in more:
        if rows is not None and (rows.shape != shape or rows.stride(1) != 1):
            return "a tensor of another shape than x, or without contiguous rows"
    if shape[1] > WIDEST:
        return f"more than {WIDEST} columns"
    return "" if rstd is None or rstd.is_contiguous() else "rstd is not contiguous"


def _checked(out: Tensor | None, like: Tensor) -> Tensor:
    if out is None:
        return like.new_empty(like.shape)
    if out.shape != like.shape or out.dtype != like.dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not {like.dtype} {tuple(like.shape)}")
    return out


def _placed(y: Tensor, out: Tensor | None) -> Tensor:
    return y if out is None else _checked(out, y).copy_(y)
