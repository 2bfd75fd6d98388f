"""The hand-written gradients of the small ops against autograd in float64."""

import pytest
import torch

from covey.kernels.gated_mlp import swiglu, swiglu_backward
from covey.kernels.lora_linear import lora_linear, lora_linear_backward
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


@pytest.mark.parametrize("adapter", [True, False])
def test_lora_linear_matches_autograd(adapter: bool):
    x, w, bias = leaf(5, 7), torch.randn(11, 7, dtype=F64), torch.randn(11, dtype=F64)
    a, b = (leaf(3, 7), leaf(11, 3)) if adapter else (None, None)
    dy = torch.randn(5, 11, dtype=F64)
    expected = x @ w.t() + bias
    if a is not None and b is not None:
        expected = expected + 0.5 * (x @ a.t()) @ b.t()
    y, z = lora_linear(x.detach(), w, bias, a, b, 0.5)
    torch.testing.assert_close(y, expected)
    ga, gb = (torch.ones(3, 7, dtype=F64), torch.ones(11, 3, dtype=F64)) if adapter else (None, None)
    with torch.no_grad():
        dx = lora_linear_backward(dy, x, z, w, a, b, 0.5, ga, gb)
    grads = torch.autograd.grad(expected, [t for t in (x, a, b) if t is not None], dy)
    torch.testing.assert_close(dx, grads[0])
    if adapter:  # gradients are added to what was there
        torch.testing.assert_close(ga, grads[1] + 1)
        torch.testing.assert_close(gb, grads[2] + 1)
