"""Root-mean-square layer norm.

Axes: T rows (tokens), H hidden size. Statistics in float32 (float64 for float64 inputs).

    rstd = (mean_H(x^2) + eps)^(-1/2)        x_hat = x * rstd        y = x_hat * w
    dx   = rstd * (g - x_hat * mean_H(g * x_hat))        with g = dy * w

x_hat is rounded to the input's dtype before it is multiplied by w, as transformers does. The weight is frozen.
"""

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to do arithmetic in: float64 stays, everything narrower becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rmsnorm(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y [T, H] in x's dtype and rstd [T, 1] in float32, which the backward needs."""
    x = x_TH.to(accumulate_dtype(x_TH.dtype))
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * rstd).to(x_TH.dtype) * weight_H, rstd


def rmsnorm_apply(x_TH: Tensor, weight_H: Tensor, rstd_T1: Tensor) -> Tensor:
    """y [T, H] from a kept rstd."""
    return (x_TH * rstd_T1).to(x_TH.dtype) * weight_H


def rmsnorm_backward(dy_TH: Tensor, x_TH: Tensor, weight_H: Tensor, rstd_T1: Tensor) -> Tensor:
    """dx [T, H] in x's dtype."""
    x_hat = x_TH * rstd_T1
    g = dy_TH.to(rstd_T1.dtype) * weight_H
    return ((g - x_hat * (g * x_hat).mean(-1, keepdim=True)) * rstd_T1).to(x_TH.dtype)
