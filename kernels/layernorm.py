"""Layer norm, alone or with the residual sum before it; with frozen weight and bias, with either, or with neither.

Axes: T rows (tokens), H hidden size. Statistics in float32 (float64 for float64 inputs).

    h    = x + r (add_layernorm; otherwise h = x)
    mean = mean_H(h)        rstd = (mean_H((h - mean)^2) + eps)^(-1/2)
    h_hat = (h - mean) * rstd        y = h_hat * w + b
    dh   = rstd * (g - mean_H(g) - h_hat * mean_H(g * h_hat)) + s        with g = dy * w

s is the gradient that reaches h along the skip connection. h is rounded to its dtype before it is used; y and dh are
rounded once, as in torch's layer_norm. The mean is taken off twice, the second time what rounding left of it: in a row
with a large mean and next to no spread, rstd = 1 / sqrt(eps) would make that visible.
"""

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton
from covey.kernels.rmsnorm import _checked, _placed, _unfit, accumulate_dtype


def layernorm(
    x_TH: Tensor, weight_H: Tensor | None, bias_H: Tensor | None, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y [T, H] in x's dtype, and mean and rstd as [T, 2] in float32 (float64 for float64), which the backward needs.

    out: where y goes; [T, H] in x's dtype, rows of any stride, no overlap with x unless it is x itself (then x is
    lost). Raises ValueError if its shape or dtype is another.
    """
    if use_triton(x_TH, "layernorm", unless=_unfit(weight_H, x_TH, out) or _unfit(bias_H, x_TH)):
        from covey.kernels import layernorm_triton

        return layernorm_triton.layernorm(x_TH, weight_H, bias_H, eps, _checked(out, x_TH))
    y, stats = layernorm_reference(x_TH, weight_H, bias_H, eps)
    return _placed(y, out), stats


def add_layernorm(
    x_TH: Tensor,
    residual_TH: Tensor,
    weight_H: Tensor | None,
    bias_H: Tensor | None,
    eps: float,
    out: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """h = x + residual [T, H] in x's dtype, then y and the statistics of h as `layernorm` returns them.

    inplace: h is written over x, which the caller declares scratch. `out` is for y, as in `layernorm`, and may also be
    the storage of residual.
    """
    unfit = _unfit(weight_H, x_TH, residual_TH, out) or _unfit(bias_H, x_TH)
    if use_triton(x_TH, "add_layernorm", unless=unfit):
        from covey.kernels import layernorm_triton

        y = _checked(out, x_TH)
        return layernorm_triton.add_layernorm(x_TH, residual_TH, weight_H, bias_H, eps, y, inplace)
    h = x_TH.add_(residual_TH) if inplace else x_TH + residual_TH
    y, stats = layernorm_reference(h, weight_H, bias_H, eps)
    return h, _placed(y, out), stats


def layernorm_backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    weight_H: Tensor | None,
    stats_T2: Tensor,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """dx [T, H] in x's dtype, plus `residual` [T, H], the gradient along the skip connection, if given.

    The sum is made in float32 and rounded once (eager torch rounds dx first). out: where it goes, as in `layernorm`;
    it may be the storage of dy or of residual, declared scratch.
    """
    unfit = _unfit(weight_H, x_TH, dy_TH, residual, out, rstd=stats_T2)
    if use_triton(x_TH, "layernorm_backward", unless=unfit):
        from covey.kernels import layernorm_triton

        dx = _checked(out, x_TH)
        return layernorm_triton.layernorm_backward(dy_TH, x_TH, weight_H, stats_T2, residual, dx)
    return _placed(layernorm_backward_reference(dy_TH, x_TH, weight_H, stats_T2, residual), out)


def layernorm_reference(
    x_TH: Tensor, weight_H: Tensor | None, bias_H: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    x = x_TH.to(accumulate_dtype(x_TH.dtype))
    mean = x.mean(-1, keepdim=True)
    rest = (x - mean).mean(-1, keepdim=True)
    centred = x - mean - rest
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    y = centred * rstd
    y = y if weight_H is None else y * weight_H
    y = y if bias_H is None else y + bias_H
    return y.to(x_TH.dtype), torch.cat((mean + rest, rstd), dim=-1)


def layernorm_backward_reference(
    dy_TH: Tensor,
    x_TH: Tensor,
    weight_H: Tensor | None,
    stats_T2: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    mean, rstd = stats_T2.split(1, dim=-1)
    x_hat = (x_TH - mean) * rstd
    g = dy_TH.to(stats_T2.dtype)
    g = g if weight_H is None else g * weight_H
    dx = (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True)) * rstd
    return (dx if residual is None else dx + residual).to(x_TH.dtype)
