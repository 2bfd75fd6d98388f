"""Frozen linear layers that share an input, with their low-rank adapters (LoRA, Hu et al. 2021), and the gradients.

Axes: T tokens, K inputs, N outputs of all of them together, R ranks of all adapters together, P >= R padded to a
multiple of 8. Linear i has the outputs n_i and the ranks r_i (slices of N and R), W [N, K] and A [R, K] are stacked by
rows, B [N, R] holds B_i at [n_i, r_i] and is 0 elsewhere:

    y  = x W^T + b + s (x A^T) B^T        dx = dy W + s (dy B) A
    dA += (s dy B)^T x                    dB_i += dy[:, n_i]^T (s x A^T)[:, r_i]

Added to a finished product the adapters would read and write y and dx once more, and round them twice. So they are part
of the product, by a matrix and inputs that are a little wider:

    W+ = [[W, B], [A, 0]]  [N + P, K + P]    x+ = [x, s x A^T, 0]  [T, K + P]    dy+ = [dy, s dy B, 0]  [T, N + P]
    y  = x+ W+[:N]^T + b                         dx = dy+ W+[:, :K]

W and b are frozen. dA and dB are accumulated in the dtype of the gradient buffers (float32 at least).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraPart:
    """The B of one linear of a group. Views, so they follow their buffers."""

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

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def padded_rank(rank: int) -> int:
    """P for R ranks in all: rows of bfloat16 that begin at multiples of 16 bytes."""
    return -(-rank // 8) * 8


def row_stride(columns: int) -> int:
    """Elements from row to row in a matrix of `columns`: the products are faster from multiples of 64."""
    return -(-columns // 64) * 64


def wide(tokens: int, columns: int, padding: int, like: Tensor) -> Tensor:
    """Room for x+ or dy+: [tokens, columns + padding] with rows a little further apart, nothing in it yet."""
    return like.new_empty(tokens, row_stride(columns + padding))[:, : columns + padding]


def adapter_places(matrix: Tensor, lora: LoraGroup) -> list[tuple[Tensor, Tensor]]:
    """(where, what) to copy so that W+ holds an adapter."""
    k = lora.a.shape[1]
    n = matrix.shape[0] - (matrix.shape[1] - k)
    places = [(matrix[n : n + lora.rank, :k], lora.a)]
    return places + [(matrix[part.outputs, k:][:, part.ranks], part.b) for part in lora.parts]


def attach_input(x_wide: Tensor, lora: LoraGroup, scale: float) -> None:
    """Fills the last P columns of x+ [T, K + P] from its first K."""
    k = lora.a.shape[1]
    x, z = x_wide[:, :k], x_wide[:, k : k + lora.rank]
    torch.addmm(z, x, lora.a.t(), beta=0.0, alpha=scale, out=z)
    _zero_padding(x_wide, k + lora.rank)


def attach_gradient(dy_wide: Tensor, padding: int, lora: LoraGroup, scale: float) -> None:
    """Fills the last P columns of dy+ [T, N + P] from its first N."""
    n = dy_wide.shape[1] - padding
    for part in lora.parts:
        dz = dy_wide[:, n:][:, part.ranks]
        torch.addmm(dz, dy_wide[:, part.outputs], part.b, beta=0.0, alpha=scale, out=dz)
    _zero_padding(dy_wide, n + lora.rank)


def linear(
    x_wide: Tensor, matrix: Tensor, n: int, bias_N: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """y [T, N] of x+ (or of x with the matrix W); `out` may be a view with rows of any stride."""
    w = matrix[:n, : x_wide.shape[1]].t()
    if bias_N is not None:
        return torch.addmm(bias_N, x_wide, w) if out is None else torch.addmm(bias_N, x_wide, w, out=out)
    return torch.mm(x_wide, w) if out is None else torch.mm(x_wide, w, out=out)


def input_gradient(dy_wide: Tensor, matrix: Tensor, k: int) -> Tensor:
    """dx [T, K] of dy+ (or of dy with the matrix W)."""
    return torch.mm(dy_wide, matrix[: dy_wide.shape[1], :k])


def adapter_gradients(x_TK: Tensor, z_TR: Tensor, dy_wide: Tensor, padding: int, lora: LoraGroup) -> None:
    """Adds dA and dB to their buffers. z: the columns s x A^T of x+; dy+ with its columns attached."""
    assert lora.grad_a is not None, "an adapter that is trained needs its gradient buffers"
    n = dy_wide.shape[1] - padding
    dz = dy_wide[:, n : n + lora.rank]
    lora.grad_a.add_(matmul_wide(dz.t(), x_TK, lora.grad_a.dtype))
    for part in lora.parts:
        assert part.grad_b is not None, "an adapter that is trained needs its gradient buffers"
        part.grad_b.add_(matmul_wide(dy_wide[:, part.outputs].t(), z_TR[:, part.ranks], part.grad_b.dtype))


def matmul_wide(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype` without rounding the result to the operands' narrower dtype first."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _zero_padding(x_wide: Tensor, used: int) -> None:
    """What multiplies zeros must be a number."""
    if used < x_wide.shape[1]:
        x_wide[:, used:] = 0
