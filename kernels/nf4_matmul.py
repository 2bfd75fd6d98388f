"""Products of few rows with linears in NF4 that share their input, as in decoding: weights are read once, in 4 bits.

Axes: M rows (1 to 64 or so), K inputs, N outputs of all linears together, R ranks of their adapters together. Linear i
has the outputs n_i and the ranks r_i; W [N, K] and A [R, K] are stacked by rows, B_i is [n_i, r_i] (lora_linear.py):

    z = s x A^T        y[:, n_i] = x W[n_i]^T + z[:, r_i] B_i^T + b[n_i]
    out = y, or act(y_gate) * y_up where the linears are gate and up

W is what `dequantize_nf4` gives in x's dtype (for float64 in float32), products are added up in float32 (float64), and
z, y, act(y_gate) and its product with y_up are rounded to x's dtype, as the separate operations would.

With so few rows, reading W is all that takes time. Written back in 16 bits first it costs 4.5 bytes a weight instead of
half a byte; a copy in 16 bits costs two bytes a weight, and its memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton
from covey.kernels.gated_mlp import KINDS, gated_reference
from covey.kernels.lora_linear import LoraGroup
from covey.kernels.nf4 import BLOCK, DTYPES, NF4, dequantize_nf4


def nf4_matmul(
    x_MK: Tensor,
    weights: Sequence[NF4],
    lora: LoraGroup | None = None,
    scale: float = 1.0,
    bias_N: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out [M, N] in x's dtype; [M, N / 2] with an activation.

    x: rows of any stride, fastest if they begin at multiples of 16 bytes. scale: s. activation: one of gated_mlp.KINDS.
    out: where the result goes, rows of any stride; it does not overlap with x. Everything is on one device, and all but
    the weights in x's dtype. Two launches and no wait for the device, so that a CUDA graph can hold it; the adapter's
    tensors are read anew each time. Raises ValueError for tensors that do not agree.
    """
    weights = tuple(weights)
    _check(x_MK, weights, lora, bias_N, activation)
    n = sum(weight.shape[0] for weight in weights) // (1 if activation is None else 2)
    out = x_MK.new_empty(len(x_MK), n) if out is None else out
    if out.shape != (len(x_MK), n) or out.dtype != x_MK.dtype:
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}, not {x_MK.dtype} {(len(x_MK), n)}")
    arguments = x_MK, weights, lora, scale, bias_N, activation
    if use_triton(x_MK, "nf4_matmul", unless=_unfit(x_MK, weights, lora, bias_N, out)):
        from covey.kernels import nf4_matmul_triton

        nf4_matmul_triton.matmul(*arguments, out)
        return out
    return out.copy_(nf4_matmul_reference(*arguments))


def nf4_matmul_reference(
    x_MK: Tensor,
    weights: Sequence[NF4],
    lora: LoraGroup | None = None,
    scale: float = 1.0,
    bias_N: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The same in torch operations, as one product of [x, z] and [W, B]."""
    w_NK = torch.cat([_dense(weight, x_MK.dtype) for weight in weights])
    if lora is not None:
        b_NR = x_MK.new_zeros(len(w_NK), lora.rank)
        for part in lora.parts:
            b_NR[part.outputs, part.ranks] = part.b
        z_MR = x_MK.new_empty(len(x_MK), lora.rank)
        torch.addmm(z_MR, x_MK, lora.a.t(), beta=0.0, alpha=scale, out=z_MR)
        x_MK, w_NK = torch.cat((x_MK, z_MR), 1), torch.cat((w_NK, b_NR), 1)
    y = torch.mm(x_MK, w_NK.t()) if bias_N is None else torch.addmm(bias_N, x_MK, w_NK.t())
    return y if activation is None else gated_reference(*y.chunk(2, 1), kind=activation)


def _dense(weight: NF4, dtype: torch.dtype) -> Tensor:
    narrow = dtype if dtype in DTYPES else torch.float32
    out = torch.empty(weight.shape, dtype=narrow, device=weight.packed.device)
    return dequantize_nf4(weight, out).to(dtype)


def _check(
    x: Tensor, weights: tuple[NF4, ...], lora: LoraGroup | None, bias: Tensor | None, activation: str | None
) -> None:
    shapes = [weight.shape for weight in weights]
    if not weights or x.dim() != 2 or any(k != x.shape[1] for _, k in shapes):
        raise ValueError(f"an input {tuple(x.shape)} for weights {shapes}: [M, K] for [n, K] each")
    if activation is not None and (activation not in KINDS or len(shapes) != 2 or shapes[0] != shapes[1]):
        raise ValueError(
            f"activation {activation!r} for weights {shapes}: one of {', '.join(KINDS)}, and two alike"
        )
    n = sum(rows for rows, _ in shapes)
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias: {bias.dtype} {tuple(bias.shape)}, not {x.dtype} {(n,)}")
    if lora is None:
        return
    if lora.a.shape[1] != x.shape[1] or lora.a.dtype != x.dtype:
        raise ValueError(f"A: {lora.a.dtype} {tuple(lora.a.shape)} for {x.dtype} {tuple(x.shape)}")
    places = [(part.outputs.start, part.outputs.stop) for part in lora.parts]
    if not set(places) <= set(_places(weights)):
        raise ValueError(f"the adapter's outputs {places} are not those of the weights, {_places(weights)}")


def _places(weights: tuple[NF4, ...]) -> list[tuple[int, int]]:
    """Where each weight's outputs are: (first, one after the last)."""
    stops = [sum(weight.shape[0] for weight in weights[: i + 1]) for i in range(len(weights))]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _unfit(
    x: Tensor, weights: tuple[NF4, ...], lora: LoraGroup | None, bias: Tensor | None, out: Tensor
) -> str:
    """Why the kernels cannot take these tensors; empty if they can."""
    if x.shape[1] % BLOCK or any(weight.blocksize != BLOCK for weight in weights):
        return f"rows that are not whole blocks of {BLOCK}"
    if len({weight.nested is None for weight in weights}) > 1:
        return "some scales are nested and others are not"
    adapter = [] if lora is None else [lora.a, *(part.b for part in lora.parts)]
    if any(matrix.stride(1) != 1 for matrix in (x, out, *adapter)) or (
        bias is not None and bias.stride(0) != 1
    ):
        return "rows that are not contiguous"
    return ""
