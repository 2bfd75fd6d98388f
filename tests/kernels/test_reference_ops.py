"""The hand-written gradients of the small ops against autograd in float64."""

import pytest
import torch

from covey.kernels.gated_mlp import swiglu, swiglu_backward
from covey.kernels.lora_linear import (
    LoraGroup,
    LoraPart,
    adapter_gradients,
    adapter_places,
    attach_gradient,
    attach_input,
    input_gradient,
    linear,
    padded_rank,
    wide,
)
from covey.kernels.rmsnorm import rmsnorm, rmsnorm_apply, rmsnorm_backward
from covey.kernels.rope import rope, rope_backward, rope_tables

F64 = torch.float64


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, requires_grad=True)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rmsnorm_matches_torch_and_autograd(rows: int):
    x, w, dy = leaf(rows, 33), torch.randn(33, dtype=F64), torch.randn(rows, 33, dtype=F64)
    expected = torch.nn.functional.rms_norm(x, (33,), w, eps=1e-6)
    y, rstd = rmsnorm(x.detach(), w, 1e-6)
    torch.testing.assert_close(y, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(rmsnorm_apply(x.detach(), w, rstd), y, rtol=0, atol=0)
    (dx,) = torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(rmsnorm_backward(dy, x.detach(), w, rstd), dx, rtol=0, atol=1e-12)


def test_swiglu_matches_autograd_over_a_wide_range():
    gate = torch.linspace(-60, 60, 101, dtype=F64, requires_grad=True)
    up, dh = leaf(101), torch.randn(101, dtype=F64)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(swiglu(gate, up), expected, rtol=1e-12, atol=0)
    grads = torch.autograd.grad(expected, (gate, up), dh)
    for mine, theirs in zip(swiglu_backward(dh, gate.detach(), up.detach()), grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_rope_rotates_pairs_by_position_times_frequency():
    inv_freq = torch.tensor([1.0, 0.1], dtype=F64)
    cos, sin = rope_tables(torch.tensor([0, 3]), inv_freq, 1.0, torch.float64)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]], dtype=F64)
    y = rope(x, cos, sin)
    torch.testing.assert_close(y[0], x[0])  # position 0 turns nothing
    # Complex numbers (x1 + i x2) times exp(i * p * f) are the same rotation.
    turned = torch.complex(x[1, 0, :2], x[1, 0, 2:]) * torch.polar(torch.ones(2, dtype=F64), 3 * inv_freq)
    torch.testing.assert_close(y[1, 0], torch.cat((turned.real, turned.imag)))
    torch.testing.assert_close(rope_backward(y, cos, sin), x)  # the transpose of a rotation undoes it


@pytest.mark.parametrize("which", [(0,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("rank", [3, 8])
def test_stacked_lora_linears_match_autograd(which: tuple[int, ...], rank: int):
    """Three linears with 4, 2 and 5 outputs on one input; those in `which` have an adapter."""
    sizes, x, bias = (4, 2, 5), leaf(6, 7), torch.randn(11, dtype=F64)
    w, dy = torch.randn(11, 7, dtype=F64), torch.randn(6, 11, dtype=F64)
    pairs = {i: (leaf(rank, 7), leaf(sizes[i], rank)) for i in which}
    outs = [
        x @ w_i.t() + b_i + (0.5 * (x @ pairs[i][0].t()) @ pairs[i][1].t() if i in pairs else 0)
        for i, (w_i, b_i) in enumerate(zip(w.split(sizes), bias.split(sizes), strict=True))
    ]
    expected = torch.cat(outs, dim=1)
    ends = [0, 4, 6, 11]
    parts = tuple(
        LoraPart(
            slice(ends[i], ends[i + 1]),
            slice(rank * at, rank * at + rank),
            pairs[i][1].detach(),
            torch.ones_like(pairs[i][1]),
        )
        for at, i in enumerate(which)
    )
    a = torch.cat([pairs[i][0].detach() for i in which])
    group, padding = LoraGroup(a, torch.ones_like(a), parts), padded_rank(rank * len(which))
    matrix = torch.zeros(11 + padding, 7 + padding, dtype=F64)
    matrix[:11, :7] = w
    for where, what in adapter_places(matrix, group):
        where.copy_(what)

    with torch.no_grad():
        x_wide, dy_wide = wide(6, 7, padding, x).fill_(torch.nan), wide(6, 11, padding, dy).fill_(torch.nan)
        x_wide[:, :7] = x
        attach_input(x_wide, group, 0.5)
        torch.testing.assert_close(linear(x_wide, matrix, 11, bias), expected)
        plain = linear(x.detach(), matrix, 11, bias)  # without the columns: W alone
        torch.testing.assert_close(plain, x @ w.t() + bias)
        dy_wide[:, :11] = dy
        attach_gradient(dy_wide, padding, group, 0.5)
        adapter_gradients(x.detach(), x_wide[:, 7:], dy_wide, padding, group)
        dx = input_gradient(dy_wide, matrix, 7)
    leaves = [x, *(t for i in which for t in pairs[i])]
    grads = torch.autograd.grad(expected, leaves, dy)
    torch.testing.assert_close(dx, grads[0])
    # Gradients are added to what was there.
    torch.testing.assert_close(group.grad_a, torch.cat(grads[1::2]) + 1)
    for part, grad in zip(parts, grads[2::2], strict=True):
        torch.testing.assert_close(part.grad_b, grad + 1)
