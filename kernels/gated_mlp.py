"""The gated activation of Llama-like MLPs (SwiGLU, Shazeer 2020).

    h = silu(g) * u        silu(g) = g * s, s = sigmoid(g)
    dg = dh * u * s * (1 + g * (1 - s))        du = dh * silu(g)

silu is computed in float32 and rounded to the input's dtype before it meets u, as transformers does.
"""

import torch
from torch import Tensor

from covey.kernels.rmsnorm import accumulate_dtype


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise, in the inputs' dtype."""
    g = gate.to(accumulate_dtype(gate.dtype))
    return torch.nn.functional.silu(g).to(gate.dtype) * up


def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup) in the inputs' dtype."""
    acc = accumulate_dtype(gate.dtype)
    g, u, d = gate.to(acc), up.to(acc), dh.to(acc)
    s = torch.sigmoid(g)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(up.dtype)
