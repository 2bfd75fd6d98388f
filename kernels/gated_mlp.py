"""The gated activation of Llama- and Gemma-like MLPs (Shazeer 2020): SwiGLU and the two forms of GEGLU.

Axes: T tokens, F intermediate size.

    h  = act(g) * u        dg = dh * u * act'(g)        du = dh * act(g)

    silu       act = g s(g)                                     act' = s (1 + g (1 - s)),  s the logistic function
    gelu_tanh  act = g s(a),  a = 2 sqrt(2/pi) (g + 0.044715 g^3)   act' = s (1 + g (1 - s) a')
    gelu       act = g P(g),  P the normal distribution function    act' = P + g p(g),     p its density

gelu_tanh is g (1 + tanh(a / 2)) / 2 written with s, which never overflows and never cancels. act(g) is computed in
float32 and rounded to the input's dtype before it meets u, as transformers does; the gradients are rounded once.
"""

import math

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton
from covey.kernels.rmsnorm import accumulate_dtype

KINDS = ("silu", "gelu_tanh", "gelu")
SCALE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gated(gate_TF: Tensor, up_TF: Tensor, kind: str = "silu", out: Tensor | None = None) -> Tensor:
    """h [T, F] in gate's dtype. gate and up may be the halves of one [T, 2F] buffer: rows have any stride.

    out: where h goes; [T, F] in gate's dtype, rows of any stride; it may be gate's or up's own storage, declared
    scratch. Raises ValueError for a kind not in KINDS and for an `out` of another shape or dtype.
    """
    _check(kind, gate_TF, up_TF, out)
    if use_triton(gate_TF, "gated", unless=_unfit(gate_TF, up_TF, out)):
        from covey.kernels import gated_mlp_triton

        return gated_mlp_triton.gated(gate_TF, up_TF, kind, out)
    h = gated_reference(gate_TF, up_TF, kind)
    return h if out is None else out.copy_(h)


def gated_backward(
    dh_TF: Tensor,
    gate_TF: Tensor,
    up_TF: Tensor,
    kind: str,
    dgate_out: Tensor,
    dup_out: Tensor,
    h_out: Tensor | None = None,
) -> None:
    """Writes dgate and dup [T, F] and, if h_out is given, h as `gated` returned it: bit for bit, in the same pass.

    Rows have any stride. Each output may be the storage of one input, the same elements in the same places, which
    the caller thereby declares scratch. Raises ValueError like `gated`.
    """
    _check(kind, gate_TF, dh_TF, up_TF, dgate_out, dup_out, h_out)
    if use_triton(gate_TF, "gated_backward", unless=_unfit(gate_TF, dh_TF, up_TF, dgate_out, dup_out, h_out)):
        from covey.kernels import gated_mlp_triton

        return gated_mlp_triton.gated_backward(dh_TF, gate_TF, up_TF, kind, dgate_out, dup_out, h_out)
    h = None if h_out is None else gated_reference(gate_TF, up_TF, kind)
    dgate, dup = gated_backward_reference(dh_TF, gate_TF, up_TF, kind)
    dgate_out.copy_(dgate)
    dup_out.copy_(dup)
    if h_out is not None and h is not None:
        h_out.copy_(h)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise, in the inputs' dtype."""
    return gated(gate, up)


def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup) in the inputs' dtype."""
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    gated_backward(dh, gate, up, "silu", dgate, dup)
    return dgate, dup


def gated_reference(gate: Tensor, up: Tensor, kind: str = "silu") -> Tensor:
    g = gate.to(accumulate_dtype(gate.dtype))
    if kind == "silu":
        act = torch.nn.functional.silu(g)
    else:
        act = torch.nn.functional.gelu(g, approximate="tanh" if kind == "gelu_tanh" else "none")
    return act.to(gate.dtype) * up


def gated_backward_reference(
    dh: Tensor, gate: Tensor, up: Tensor, kind: str = "silu"
) -> tuple[Tensor, Tensor]:
    acc = accumulate_dtype(gate.dtype)
    g, u, d = gate.to(acc), up.to(acc), dh.to(acc)
    if kind == "silu":
        p = torch.sigmoid(g)
        slope = p * (1 + g * (1 - p))
    elif kind == "gelu_tanh":
        c = g.clamp(-32, 32)  # further out p is 0 or 1 in every dtype, and c^3 overflows long before c
        p = torch.sigmoid(SCALE * (c + CUBIC * c**3))
        slope = p * (1 + c * (1 - p) * SCALE * (1 + 3 * CUBIC * c * c))
    else:
        p = torch.special.ndtr(g)
        slope = p + g * torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    return (d * u * slope).to(gate.dtype), (d * g * p).to(up.dtype)


def _check(kind: str, gate: Tensor, *others: Tensor | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"gated activation {kind!r}: one of {', '.join(KINDS)}")
    for x in others:
        if x is not None and (x.shape != gate.shape or x.dtype != gate.dtype):
            raise ValueError(f"{x.dtype} {tuple(x.shape)} beside a gate of {gate.dtype} {tuple(gate.shape)}")


def _unfit(*tensors: Tensor | None) -> str:
    """Why the kernels cannot take these tensors; empty if they can."""
    for x in tensors:
        if x is not None and (x.dim() != 2 or x.stride(1) != 1):
            return "not matrices with contiguous rows"
    return ""
