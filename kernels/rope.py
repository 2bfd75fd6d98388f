"""Rotary position embedding on half-split heads (Su et al. 2021, in the layout of Llama and Qwen checkpoints).

Axes: T tokens, n heads, d head dimension. With x = [x1, x2] split in the middle of d and the angles a = p * f:

    y1 = x1 cos a - x2 sin a        y2 = x2 cos a + x1 sin a

The map is a rotation, so its gradient is the rotation by -a.
"""

import torch
from torch import Tensor

from covey.kernels.rmsnorm import accumulate_dtype


def rope_tables(
    positions_T: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, d/2] in the arithmetic dtype for `dtype`; `scaling` multiplies both (YaRN)."""
    acc = accumulate_dtype(dtype)
    angles = positions_T.to(acc)[:, None, None] * inv_freq.to(acc)
    return angles.cos() * scaling, angles.sin() * scaling


def rope(x_Tnd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotated heads, in x's dtype; the input is left as it is."""
    x1, x2 = x_Tnd.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_Tnd.dtype)


def rope_backward(dy_Tnd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient with respect to the unrotated heads."""
    return rope(dy_Tnd, cos, -sin)
