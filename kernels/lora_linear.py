"""A frozen linear layer with a low-rank adapter (LoRA, Hu et al. 2021) and its gradients.

Axes: T tokens, K inputs, N outputs, r rank.

    z  = x A^T            y  = x W^T + b + s * z B^T
    dz = s * dy B         dx = dy W + dz A         dA += dz^T x         dB += s * dy^T z

W [N, K] and b [N] are frozen. dA and dB are accumulated in the dtype of the gradient buffers (float32 at least).
"""

import torch
from torch import Tensor


def lora_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    a_rK: Tensor | None,
    b_Nr: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """y [T, N] and z [T, r], which the backward needs. Without an adapter (a is None) z is None."""
    y = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    if a_rK is None or b_Nr is None:
        return y, None
    z = x_TK @ a_rK.t()
    return torch.addmm(y, z, b_Nr.t(), alpha=scale), z


def lora_linear_backward(
    dy_TN: Tensor,
    x_TK: Tensor,
    z_Tr: Tensor | None,
    weight_NK: Tensor,
    a_rK: Tensor | None,
    b_Nr: Tensor | None,
    scale: float,
    grad_a_rK: Tensor | None,
    grad_b_Nr: Tensor | None,
    *,
    need_dx: bool = True,
) -> Tensor | None:
    """dx [T, K] in dy's dtype, or None if not needed; adds dA and dB to the gradient buffers."""
    if a_rK is None or b_Nr is None or z_Tr is None:
        return dy_TN @ weight_NK if need_dx else None
    assert grad_a_rK is not None and grad_b_Nr is not None, "an adapter needs its gradient buffers"
    dz = (dy_TN @ b_Nr) * scale
    grad_a_rK += matmul_wide(dz.t(), x_TK, grad_a_rK.dtype)
    grad_b_Nr.add_(matmul_wide(dy_TN.t(), z_Tr, grad_b_Nr.dtype), alpha=scale)
    if not need_dx:
        return None
    return torch.addmm(dy_TN @ weight_NK, dz, a_rK)


def matmul_wide(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype` without rounding the result to the operands' narrower dtype first."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
