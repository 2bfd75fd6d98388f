"""The gated activation of kernels/gated_mlp.py as Triton kernels: one program per piece of a row.

The arguments were checked there: matrices with contiguous rows. Row strides are compile-time constants for the
reason given in kernels/rmsnorm_triton.py. Every program loads all it needs before its first store and no two
programs share an element, which is what allows outputs to lie over inputs.
"""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns per program and warps: 16 and 8 elements per thread, since the backward has twice as many tensors.
FORWARD = (2048, 4)
BACKWARD = (1024, 4)


def gated(gate: Tensor, up: Tensor, kind: str, out: Tensor | None) -> Tensor:
    rows, size = gate.shape
    h = gate.new_empty(gate.shape) if out is None else out
    block, warps = _fitted(FORWARD, size)
    pieces = -(-size // block)
    _forward[(rows * pieces,)](
        gate, up, h, size, pieces, gate.stride(0), up.stride(0), h.stride(0),
        kind, _acc(gate), block, num_warps=warps,
    )  # fmt: skip
    return h


def gated_backward(
    dh: Tensor, gate: Tensor, up: Tensor, kind: str, dgate: Tensor, dup: Tensor, h: Tensor | None
) -> None:
    rows, size = gate.shape
    block, warps = _fitted(BACKWARD, size)
    pieces = -(-size // block)
    _backward[(rows * pieces,)](
        dh, gate, up, dgate, dup, h, size, pieces, dh.stride(0), gate.stride(0), up.stride(0),
        dgate.stride(0), dup.stride(0), 0 if h is None else h.stride(0),
        kind, _acc(gate), block, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _logistic(a):
    """1 / (1 + exp(-a)) and 1 / (1 + exp(a)), neither of which overflows or cancels."""
    e = tl.exp(-tl.abs(a))
    inverse = 1.0 / (1.0 + e)
    other = e * inverse
    return tl.where(a >= 0, inverse, other), tl.where(a >= 0, other, inverse)


@triton.jit
def _share(g, KIND: tl.constexpr):
    """p = act(g) / g and the slope act'(g), for g in the arithmetic dtype."""
    if KIND == "silu":
        p, q = _logistic(g)
        slope = p * (1.0 + g * q)
    elif KIND == "gelu_tanh":
        c = tl.minimum(tl.maximum(g, -32.0), 32.0)  # further out p is 0 or 1, and c^3 overflows long before c
        square = c * c
        p, q = _logistic(1.5957691216057308 * c * (1.0 + 0.044715 * square))  # 2 sqrt(2 / pi)
        slope = p * (1.0 + c * q * (1.5957691216057308 * (1.0 + 0.134145 * square)))
    else:
        p = 0.5 + 0.5 * tl.erf(g * 0.7071067811865476)  # 1 / sqrt(2)
        slope = p + g * (0.3989422804014327 * tl.exp(-0.5 * g * g))  # 1 / sqrt(2 pi)
    return p, slope


@triton.jit
def _forward(
    gate_ptr,
    up_ptr,
    h_ptr,
    F: tl.constexpr,
    PIECES: tl.constexpr,
    GATE_ROW: tl.constexpr,
    UP_ROW: tl.constexpr,
    H_ROW: tl.constexpr,
    KIND: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // PIECES).to(tl.int64)
    column = (program % PIECES) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(gate_ptr + row * GATE_ROW + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * UP_ROW + column, mask=inside, other=0.0)
    g = gate.to(ACC)
    p, _ = _share(g, KIND)
    h = (g * p).to(gate.dtype).to(ACC) * up.to(ACC)
    tl.store(h_ptr + row * H_ROW + column, h.to(gate.dtype), mask=inside)


@triton.jit
def _backward(
    dh_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    h_ptr,  # None: not wanted
    F: tl.constexpr,
    PIECES: tl.constexpr,
    DH_ROW: tl.constexpr,
    GATE_ROW: tl.constexpr,
    UP_ROW: tl.constexpr,
    DGATE_ROW: tl.constexpr,
    DUP_ROW: tl.constexpr,
    H_ROW: tl.constexpr,
    KIND: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // PIECES).to(tl.int64)
    column = (program % PIECES) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    dh = tl.load(dh_ptr + row * DH_ROW + column, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row * GATE_ROW + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * UP_ROW + column, mask=inside, other=0.0)
    d, g, u = dh.to(ACC), gate.to(ACC), up.to(ACC)
    p, slope = _share(g, KIND)
    act = g * p
    tl.store(dgate_ptr + row * DGATE_ROW + column, (d * u * slope).to(gate.dtype), mask=inside)
    tl.store(dup_ptr + row * DUP_ROW + column, (d * act).to(gate.dtype), mask=inside)
    if h_ptr is not None:
        h = act.to(gate.dtype).to(ACC) * u
        tl.store(h_ptr + row * H_ROW + column, h.to(gate.dtype), mask=inside)


def _fitted(launch: tuple[int, int], size: int) -> tuple[int, int]:
    """The launch, or a smaller one if it would be wider than a row."""
    block, warps = launch
    if size >= block:
        return launch
    narrow = 1 << (size - 1).bit_length()
    return narrow, max(1, warps * narrow // block)


def _acc(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
