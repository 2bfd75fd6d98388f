"""AdamW with gradient clipping on flat buffers (Loshchilov & Hutter 2019, algorithm 2), without waiting for the GPU.

For the gradient g of all buffers together, at their t-th update:

    norm = |g|       (float64)        g = g * min(1, max_grad_norm / norm)        (max_grad_norm = 0: no clipping)
    m = b1 m + (1 - b1) g             v = b2 v + (1 - b2) g^2
    p = p - lr wd p - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

Where norm is not finite, p, m, v and t stay as they were. Everything that depends on norm or t happens on the device.
The clipped gradient replaces the old one, as it would if it were clipped in a step of its own.

On a GPU it is three launches for one buffer: sums of squares over pieces of g; the norm and the scalars that follow
from it; the update. It is 32 bytes an element, 2 more for a 16-bit shadow and 4 more if g is clipped or zeroed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from covey.kernels.dispatch import interpreted, use_triton
from covey.kernels.rmsnorm import accumulate_dtype


class Buffer(NamedTuple):
    """Parameters with all that is kept about them; tensors of one size, contiguous and on one device."""

    param: Tensor  # float32 or float64; changed in place like everything else here
    grad: Tensor  # in param's dtype
    exp_avg: Tensor  # m
    exp_avg_sq: Tensor  # v
    step: Tensor  # t, float32 []
    shadow: Tensor | None = None  # a copy of param in another dtype, rewritten with every update


def uses_kernel(params: Sequence[Tensor], shadows: Sequence[Tensor | None] = ()) -> bool:
    """True if `adamw` runs as Triton code on such parameters."""
    reason = ""
    if not all(x.is_contiguous() for x in (*params, *shadows) if x is not None):
        reason = "buffers that are not contiguous"
    elif len({(x.device, x.dtype) for x in params}) > 1:
        reason = "buffers of different devices or dtypes"
    elif interpreted() and any(x is not None and x.dtype == torch.bfloat16 for x in shadows):
        reason = "Triton's interpreter truncates to bfloat16"
    return use_triton(params[0], "adamw", unless=reason)


def adamw(
    buffers: Sequence[Buffer],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
    zero_grad: bool = False,
) -> Tensor:
    """One update in place; returns the norm of the gradient before clipping, float64 [] on the device.

    zero_grad: leave zeros in the gradient buffers, even if the update was left out.
    """
    for b in buffers:
        assert all(
            x.shape == b.param.shape for x in (b.grad, b.exp_avg, b.exp_avg_sq, b.shadow) if x is not None
        )
        assert all(x.dtype == b.param.dtype for x in (b.grad, b.exp_avg, b.exp_avg_sq))
    rates = lr, beta1, beta2, eps, weight_decay, max_grad_norm
    if not uses_kernel([b.param for b in buffers], [b.shadow for b in buffers]):
        return adamw_reference(buffers, *rates, zero_grad)
    from covey.kernels import adamw_triton

    assert all(x.is_contiguous() for b in buffers for x in (b.grad, b.exp_avg, b.exp_avg_sq)), "see Buffer"
    norm = adamw_triton.adamw(buffers, *rates, zero_grad)
    for b in buffers:  # torch has not seen the writes: without this, autograd would take stale saved tensors
        for x in (b.param, b.shadow):
            if x is not None:
                torch.autograd.graph.increment_version(x)
    return norm


@torch.no_grad()
def adamw_reference(
    buffers: Sequence[Buffer],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
    zero_grad: bool = False,
) -> Tensor:
    """The same in torch operations."""
    norm = torch.stack([b.grad.double().square().sum() for b in buffers]).sum().sqrt()
    finite = norm.isfinite()
    clip = (
        torch.where(norm > max_grad_norm, max_grad_norm / norm, 1.0)
        if max_grad_norm > 0
        else torch.ones_like(norm)
    )
    for b in buffers:
        acc = accumulate_dtype(b.param.dtype)
        t = b.step.double() + 1
        g = b.grad * clip.to(acc)
        m = beta1 * b.exp_avg + (1 - beta1) * g
        v = beta2 * b.exp_avg_sq + (1 - beta2) * g * g
        rate = (lr / (1 - beta1**t)).to(acc)
        root = (v / (1 - beta2**t).to(acc)).sqrt()
        p = b.param - lr * weight_decay * b.param - rate * m / (root + eps)
        for tensor, new in ((b.param, p), (b.exp_avg, m), (b.exp_avg_sq, v), (b.step, t), (b.grad, g)):
            tensor.copy_(torch.where(finite, new, tensor))
        if b.shadow is not None:
            b.shadow.copy_(torch.where(finite, b.param, b.shadow))
        if zero_grad:
            b.grad.zero_()
    return norm
