"""SwiGLU and GEGLU through both implementations: against torch, its gradient, and values worked out by hand.

In CI the Triton kernels run in the interpreter, on the CPU; there they get float64, float32 and float16.
"""

import math

import pytest
import torch

from covey.kernels import gated_mlp as module
from covey.kernels.gated_mlp import KINDS, gated, gated_backward, swiglu, swiglu_backward

REFERENCES = module, ("gated_reference", "gated_backward_reference")
F64 = torch.float64
CANARY = 12345.0
ACT = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
}


def framed(rows: int, columns: int, dtype=F64, *, fill: float = float("nan"), right: int = 3) -> torch.Tensor:
    """Uninitialised rows in the middle of a larger buffer, all of which is `fill`."""
    return torch.full((rows + 2, columns + 5 + right), fill, dtype=dtype)[1 : rows + 1, 5 : columns + 5]


def assert_frame_untouched(view: torch.Tensor) -> None:
    """Only the view's own elements of the buffer of `framed(fill=CANARY)` were written."""
    assert view._base is not None
    whole = view._base.clone()
    whole[1 : view.shape[0] + 1, 5 : view.shape[1] + 5] = CANARY
    assert (whole == CANARY).all()


def backward(dh, gate, up, kind: str, want_h: bool = True):
    dgate, dup, h = (torch.full_like(gate, float("nan")) for _ in range(3))
    gated_backward(dh, gate, up, kind, dgate, dup, h if want_h else None)
    return dgate, dup, h


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows,size", [(0, 8), (1, 1), (3, 31), (3, 32), (4, 33), (2, 1023), (2, 1024), (2, 2053), (1, 4099)]
)
def test_matches_torch_and_its_gradient(implementation, rows: int, size: int, kind: str):
    gate = (3 * torch.randn(rows, size, dtype=F64)).requires_grad_()
    up, dh = torch.randn(rows, size, dtype=F64, requires_grad=True), torch.randn(rows, size, dtype=F64)
    expected = ACT[kind](gate) * up
    torch.testing.assert_close(
        gated(gate.detach(), up.detach(), kind), expected.detach(), rtol=1e-10, atol=1e-12
    )
    theirs = torch.autograd.grad(expected, (gate, up), dh)
    dgate, dup, h = backward(dh, gate.detach(), up.detach(), kind)
    torch.testing.assert_close(dgate, theirs[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dup, theirs[1], rtol=1e-10, atol=1e-12)
    assert torch.equal(h, gated(gate.detach(), up.detach(), kind))
    without = backward(dh, gate.detach(), up.detach(), kind, want_h=False)
    assert torch.equal(without[0], dgate) and torch.equal(without[1], dup)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_through_the_kernels(kernels, kind: str):
    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return gated(gate, up, kind)

        @staticmethod
        def backward(ctx, dh):
            gate, up = ctx.saved_tensors
            return backward(dh.contiguous(), gate, up, kind)[:2]

    inputs = [torch.randn(2, 5, dtype=F64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(Gate.apply, inputs)


def test_values_worked_out_by_hand(implementation):
    """At g = ln 3 the logistic function is 3/4; at g = 1 the two forms of GELU have these published values."""
    g, u, d = (torch.full((1, 1), v, dtype=F64) for v in (math.log(3), 2.0, 5.0))
    assert gated(g, u).item() == pytest.approx(2 * 0.75 * math.log(3), rel=1e-14)
    dgate, dup, _ = backward(d, g, u, "silu")
    assert dgate.item() == pytest.approx(5 * 2 * 0.75 * (1 + 0.25 * math.log(3)), rel=1e-14)
    assert dup.item() == pytest.approx(5 * 0.75 * math.log(3), rel=1e-14)
    one = torch.ones(1, 1, dtype=F64)
    assert gated(one, one, "gelu").item() == pytest.approx(0.8413447460685429, rel=1e-14)
    assert gated(one, one, "gelu_tanh").item() == pytest.approx(0.8411919906082768, rel=1e-14)


@pytest.mark.filterwarnings(
    "ignore:overflow:RuntimeWarning"
)  # the interpreter squares g on the way to exp(-g^2)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", KINDS)
def test_far_from_zero_nothing_overflows(implementation, kind: str, dtype: torch.dtype):
    """act(g) tends to g and 0, its slope to 1 and 0; up to numbers whose cube is not finite."""
    g = torch.tensor([[60.0, 1e4, 1e15, 3e37, -200.0, -1e4, -1e15, -3e37]], dtype=dtype)
    one = torch.ones_like(g)
    dgate, dup, h = backward(one, g, one, kind)
    limit = torch.where(g > 0, g, 0)
    for got in (gated(g, one, kind), h, dup):
        torch.testing.assert_close(got, limit, rtol=1e-6, atol=1e-80)
    torch.testing.assert_close(dgate, (g > 0).to(dtype), rtol=1e-6, atol=1e-80)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_against_float64(kernels, kind: str):
    gate, up, dh = torch.linspace(-12, 12, 1201)[None], torch.randn(1, 1201), torch.randn(1, 1201)
    wide = gate.double().requires_grad_(), up.double().requires_grad_()
    expected = ACT[kind](wide[0]) * wide[1]
    torch.testing.assert_close(gated(gate, up, kind).double(), expected.detach(), rtol=1e-5, atol=1e-6)
    theirs = torch.autograd.grad(expected, wide, dh.double())
    for mine, exact in zip(backward(dh, gate, up, kind), theirs, strict=False):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_where_transformers_rounds(implementation, kind: str):
    """float16: the activation is rounded before the product, which changes a third of the values.

    Gates are positive: below zero 1 + tanh and 1 + erf cancel in transformers' float32.
    """
    from transformers.activations import ACT2FN

    gate, up = (2 * torch.randn(8, 300)).abs().half(), torch.randn(8, 300).half()
    name = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}[kind]
    expected = ACT2FN[name](gate) * up
    h = gated(gate, up, kind)
    assert h.dtype == torch.float16 and (h == expected).float().mean() > 0.99
    torch.testing.assert_close(h, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_halves_of_packed_buffers(implementation, kind: str):
    """gate and up are the halves of [T, 2F] among NaN; results go into [T, F + r] and [T, 2F + r] among canaries."""
    rows, size, rank = 3, 35, 6

    def same(got: torch.Tensor, expected: torch.Tensor) -> None:  # torch's vector units round differently
        torch.testing.assert_close(got, expected, rtol=1e-13 * (implementation == "reference"), atol=0)

    gate_up = framed(rows, 2 * size).copy_(torch.randn(rows, 2 * size))
    dh = framed(rows, size).copy_(torch.randn(rows, size))
    gate, up = gate_up[:, :size], gate_up[:, size:]
    dgate, dup, h = backward(dh.clone(), gate.clone(), up.clone(), kind)

    out = framed(rows, size, fill=CANARY, right=rank)
    assert gated(gate, up, kind, out=out).data_ptr() == out.data_ptr()
    same(out, h)
    assert_frame_untouched(out)

    grads, h_out = (
        framed(rows, 2 * size, fill=CANARY, right=rank),
        framed(rows, size, fill=CANARY, right=rank),
    )
    gated_backward(dh, gate, up, kind, grads[:, :size], grads[:, size:], h_out)
    same(grads, torch.cat((dgate, dup), 1))
    same(h_out, h)
    assert_frame_untouched(grads)
    assert_frame_untouched(h_out)


@pytest.mark.parametrize("kind", KINDS)
def test_results_over_declared_scratch(implementation, kind: str):
    dh, gate, up = torch.randn(3, 4, 50, dtype=F64).unbind()
    dgate, dup, h = backward(dh, gate, up, kind)
    a, b, c = dh.clone(), gate.clone(), up.clone()
    gated_backward(a, b, c, kind, b, c, a)
    assert torch.equal(b, dgate) and torch.equal(c, dup) and torch.equal(a, h)
    a, b, c = dh.clone(), gate.clone(), up.clone()
    gated_backward(a, b, c, kind, c, a)
    assert torch.equal(c, dgate) and torch.equal(a, dup) and torch.equal(b, gate), "gate is not scratch"
    over = gate.clone()
    gated(over, up, kind, out=over)
    assert torch.equal(over, h)


def test_swiglu_is_the_silu_form(implementation):
    dh, gate, up = torch.randn(3, 4, 50, dtype=F64).unbind()
    dgate, dup, h = backward(dh, gate, up, "silu")
    assert torch.equal(swiglu(gate, up), h)
    mine = swiglu_backward(dh, gate, up)
    assert torch.equal(mine[0], dgate) and torch.equal(mine[1], dup)
    one_row = torch.randn(1, 50, dtype=F64).expand(4, 50)
    assert all(
        map(torch.equal, swiglu_backward(one_row, gate, up), swiglu_backward(one_row.clone(), gate, up))
    )


def test_mistakes_are_sentences(implementation):
    gate = torch.randn(4, 8)
    with pytest.raises(ValueError, match="one of silu, gelu_tanh, gelu"):
        gated(gate, gate, "relu")
    with pytest.raises(ValueError, match=r"\(4, 9\).*\(4, 8\)"):
        gated(gate, gate, out=torch.empty(4, 9))
    with pytest.raises(ValueError, match=r"float64.*float32"):
        gated_backward(gate, gate, gate, "silu", gate.double(), gate)


# On a GPU, in bfloat16


def assert_no_worse(mine: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """At most 1.5 times eager torch's error, largest and root mean square, and no bias."""
    error, allowed = mine.double() - exact, eager.double() - exact
    assert error.abs().max() <= 1.5 * allowed.abs().max()
    assert error.square().mean().sqrt() <= 1.5 * allowed.square().mean().sqrt()
    assert error.mean().abs() <= 0.1 * error.square().mean().sqrt()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size,extra", [(8960, 16), (14336, 8), (18944, 0), (5003, 1), (100, 4)])
def test_bfloat16_is_as_good_as_eager_torch(kernels, size: int, extra: int, kind: str):
    packed = (2 * torch.randn(130, 2 * size + extra, device="cuda")).bfloat16()
    gate, up = packed[:, :size], packed[:, size : 2 * size]
    dh = torch.randn(130, size, device="cuda").bfloat16()
    out = torch.empty(130, size + extra, device="cuda", dtype=torch.bfloat16)
    h = gated(gate, up, kind, out=out[:, :size])
    dgate, dup, again = backward(dh, gate, up, kind)
    assert torch.equal(again, h)

    wide = [x.double().requires_grad_() for x in (gate, up)]
    exact = ACT[kind](wide[0]) * wide[1]
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    eager = ACT[kind](leaves[0]) * leaves[1]
    assert_no_worse(h, eager.detach(), exact.detach())
    exact_grads = torch.autograd.grad(exact, wide, dh.double())
    eager_grads = torch.autograd.grad(eager, leaves, dh)
    for mine, theirs, true in zip((dgate, dup), eager_grads, exact_grads, strict=True):
        assert_no_worse(mine, theirs, true)

    gated_backward(dh, gate, up, kind, gate, up, dh)  # everything over its own input
    assert torch.equal(gate, dgate) and torch.equal(up, dup) and torch.equal(dh, h)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_on_a_gpu(kernels, rows: int):
    x = torch.randn(rows, 64, device="cuda").bfloat16()
    assert gated(x, x).shape == x.shape and swiglu_backward(x, x, x)[0].shape == x.shape


@pytest.mark.gpu
def test_offsets_beyond_32_bits(kernels):
    stride, size = 2**30 + 8, 256
    whole = torch.zeros(2 * stride + 2 * size, device="cuda", dtype=torch.bfloat16)
    packed = whole.as_strided((3, 2 * size), (stride, 1))
    packed.copy_(torch.randn(3, 2 * size, device="cuda"))
    near, dh = packed.clone(), torch.randn(3, size, device="cuda").bfloat16()
    dgate, dup, h = backward(dh, near[:, :size], near[:, size:], "silu")
    gate, up = packed[:, :size], packed[:, size:]
    assert torch.equal(gated(gate, up), h)
    gated_backward(dh, gate, up, "silu", gate, up)
    assert torch.equal(gate, dgate) and torch.equal(up, dup)
