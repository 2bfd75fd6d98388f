"""Frozen linear layers that share an input, with their low-rank adapters (LoRA, Hu et al. 2021), and the gradients.

Axes: T tokens, K inputs, N outputs of all of them together, R ranks of all adapters together. For the linear with the
outputs n and the ranks r (slices of N and R), W [N, K] stacked by rows, A [R, K] too, and B of each by itself:

    z  = x A^T            y[n]  = x W[n]^T + b[n] + s z[r] B^T
    dz[r] = s dy[n] B     dx = dy W + dz A         dA += dz^T x         dB += s dy[n]^T z[r]

W and b are frozen. dA and dB are accumulated in the dtype of the gradient buffers (float32 at least). Stacking makes
one product of q, k and v, and one of gate and up: x is read once, and dx is written once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraPart:
    """The B of one linear: columns `outputs` of y get s z[:, ranks] B^T. Views, so they follow their buffers."""

    outputs: slice
    ranks: slice
    b: Tensor  # [n, r]
    grad_b: Tensor | None  # [n, r] float32 (float64)


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """The adapters of linears that share an input; of those that have one."""

    a: Tensor  # [R, K]
    grad_a: Tensor | None
    parts: tuple[LoraPart, ...]


def lora_linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, lora: LoraGroup | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """y [T, N] and z [T, R], which the backward needs; z is None without an adapter."""
    y = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    if lora is None:
        return y, None
    z = x_TK @ lora.a.t()
    for part in lora.parts:
        y[:, part.outputs].addmm_(z[:, part.ranks], part.b.t(), alpha=scale)
    return y, z


def lora_linear_backward(
    dy_TN: Tensor,
    x_TK: Tensor,
    z_TR: Tensor | None,
    weight_NK: Tensor | None,
    lora: LoraGroup | None,
    scale: float,
) -> Tensor | None:
    """dx [T, K] in dy's dtype, or None if weight_NK is None: nothing needs it. Adds dA and dB to their buffers."""
    dx = None if weight_NK is None else dy_TN @ weight_NK
    if lora is None or z_TR is None:
        return dx
    assert lora.grad_a is not None, "an adapter that is trained needs its gradient buffers"
    dz = torch.empty_like(z_TR)
    for part in lora.parts:
        torch.mm(dy_TN[:, part.outputs], part.b, out=dz[:, part.ranks])
    dz *= scale
    lora.grad_a.add_(matmul_wide(dz.t(), x_TK, lora.grad_a.dtype))
    for part in lora.parts:
        assert part.grad_b is not None, "an adapter that is trained needs its gradient buffers"
        dy, z = dy_TN[:, part.outputs], z_TR[:, part.ranks]
        part.grad_b.add_(matmul_wide(dy.t(), z, part.grad_b.dtype), alpha=scale)
    return None if dx is None else dx.addmm_(dz, lora.a)


def matmul_wide(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype` without rounding the result to the operands' narrower dtype first."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
