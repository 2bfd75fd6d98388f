"""LayerNorm, with and without a residual, through both implementations: against torch's.

In CI the Triton kernels run in the interpreter, on the CPU; there they get float64, float32 and float16.
"""

import pytest
import torch

from covey.kernels import layernorm as module
from covey.kernels.layernorm import add_layernorm, layernorm, layernorm_backward

REFERENCES = module, ("layernorm_reference", "layernorm_backward_reference", "_placed")
F64 = torch.float64
EPS = 1e-6
CANARY = 12345.0
PARTS = {"neither": (False, False), "weight": (True, False), "bias": (False, True), "both": (True, True)}
parts = pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
Weights = tuple[torch.Tensor | None, torch.Tensor | None]


def weights(size: int, parts: tuple[bool, bool], dtype=F64) -> Weights:
    """Weight and bias, or None for what is left out."""
    w, b = (torch.randn(size, dtype=dtype) if there else None for there in parts)
    return w, b


def framed(rows: int, columns: int, dtype=F64, *, fill: float = float("nan"), right: int = 3) -> torch.Tensor:
    """Uninitialised rows in the middle of a larger buffer, all of which is `fill`."""
    return torch.full((rows + 2, columns + 5 + right), fill, dtype=dtype)[1 : rows + 1, 5 : columns + 5]


def in_frame(x: torch.Tensor, **kwargs) -> torch.Tensor:
    return framed(*x.shape, dtype=x.dtype, **kwargs).copy_(x)


def assert_frame_untouched(view: torch.Tensor) -> None:
    """Only the view's own elements of the buffer of `framed(fill=CANARY)` were written."""
    assert view._base is not None
    whole = view._base.clone()
    whole[1 : view.shape[0] + 1, 5 : view.shape[1] + 5] = CANARY
    assert (whole == CANARY).all()


def normed(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (x.shape[1],), w, b, eps=EPS)


def statistics(x: torch.Tensor) -> torch.Tensor:
    """[T, 2]: mean and (variance + EPS)^(-1/2) of rows in float64."""
    mean = x.mean(1, keepdim=True)
    return torch.cat((mean, ((x - mean).square().mean(1, keepdim=True) + EPS) ** -0.5), 1)


@parts
@pytest.mark.parametrize("rows,size", [(0, 8), (1, 1), (3, 31), (3, 32), (4, 33), (2, 127), (1, 1021)])
def test_matches_torch_and_its_gradient(implementation, rows: int, size: int, parts):
    x = torch.randn(rows, size, dtype=F64, requires_grad=True)
    w, b = weights(size, parts)
    dy, skip = torch.randn(2, rows, size, dtype=F64).unbind()
    expected = normed(x, w, b)
    y, stats = layernorm(x.detach(), w, b, EPS)
    torch.testing.assert_close(y, expected.detach(), rtol=0, atol=1e-12)
    assert stats.shape == (rows, 2) and stats.dtype == F64
    torch.testing.assert_close(stats, statistics(x.detach()))
    (dx,) = torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(layernorm_backward(dy, x.detach(), w, stats), dx, rtol=1e-10, atol=1e-11)
    mine = layernorm_backward(dy, x.detach(), w, stats, residual=skip)
    torch.testing.assert_close(mine, dx + skip, rtol=1e-10, atol=1e-11)


@parts
@pytest.mark.parametrize("size", [33, 64])
def test_sum_and_norm_in_one_pass(implementation, size: int, parts):
    x, r = torch.randn(2, 5, size, dtype=F64).unbind()
    w, b = weights(size, parts)
    x_before, r_before = x.clone(), r.clone()
    h, y, stats = add_layernorm(x, r, w, b, EPS)
    assert torch.equal(h, x_before + r_before) and torch.equal(x, x_before) and torch.equal(r, r_before)
    torch.testing.assert_close(y, normed(h, w, b), rtol=0, atol=1e-12)
    torch.testing.assert_close(stats, statistics(h))
    again = add_layernorm(x, r, w, b, EPS, inplace=True)
    assert again[0].data_ptr() == x.data_ptr() and torch.equal(x, h) and torch.equal(r, r_before)
    assert torch.equal(again[1], y) and torch.equal(again[2], stats)


def test_the_gradient_of_both_outputs_of_the_sum(implementation):
    """With h and y both used, as in a decoder layer, the backward returns the gradient of x and of residual."""
    x, r = (torch.randn(4, 21, dtype=F64, requires_grad=True) for _ in range(2))
    w, b = weights(21, (True, True))
    dh, dy = torch.randn(2, 4, 21, dtype=F64).unbind()
    total = x + r
    expected = torch.autograd.grad((total, normed(total, w, b)), (x, r), (dh, dy))
    h, _, stats = add_layernorm(x.detach(), r.detach(), w, b, EPS)
    mine = layernorm_backward(dy, h, w, stats, residual=dh)
    for theirs in expected:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_gradcheck_through_the_kernels(kernels):
    w, b = weights(7, (True, True))

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y, stats = layernorm(x, w, b, EPS)
            ctx.save_for_backward(x, stats)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, stats = ctx.saved_tensors
            return layernorm_backward(dy.contiguous(), x, w, stats)

    assert torch.autograd.gradcheck(Norm.apply, torch.randn(2, 7, dtype=F64, requires_grad=True))


def test_views_of_wider_buffers(implementation):
    """Every operand lies in a buffer full of NaN, every result in a buffer of canaries."""
    x, r, dy, skip = torch.randn(4, 3, 37, dtype=F64).unbind()
    w, b = weights(37, (True, True))
    h, y, stats = add_layernorm(x, r, w, b, EPS)
    out, scratch = (framed(3, 37, fill=CANARY, right=11) for _ in range(2))
    scratch.copy_(x)
    got = add_layernorm(scratch, in_frame(r), w, b, EPS, out=out, inplace=True)
    assert got[0].data_ptr() == scratch.data_ptr() and got[1].data_ptr() == out.data_ptr()
    assert torch.equal(scratch, h) and torch.equal(out, y) and torch.equal(got[2], stats)
    assert_frame_untouched(out)
    assert_frame_untouched(scratch)
    out = framed(3, 37, fill=CANARY)
    assert layernorm(in_frame(h), w, b, EPS, out=out)[0].data_ptr() == out.data_ptr() and torch.equal(out, y)
    assert_frame_untouched(out)
    dx, out = layernorm_backward(dy, h, w, stats, residual=skip), framed(3, 37, fill=CANARY)
    layernorm_backward(in_frame(dy), in_frame(h), w, stats, residual=in_frame(skip), out=out)
    assert torch.equal(out, dx)
    assert_frame_untouched(out)


def test_results_over_declared_scratch(implementation):
    x, r, dy, skip = torch.randn(4, 3, 40, dtype=F64).unbind()
    w, b = weights(40, (True, True))
    h, y, stats = add_layernorm(x, r, w, b, EPS)
    dx = layernorm_backward(dy, h, w, stats, residual=skip)
    for k in (0, 1):
        operands = [dy.clone(), skip.clone()]
        layernorm_backward(operands[0], h, w, stats, residual=operands[1], out=operands[k])
        assert torch.equal(operands[k], dx)
        assert torch.equal(operands[1 - k], (skip, dy)[k]), "the other operand is not scratch"
    over = r.clone()
    assert torch.equal(add_layernorm(x, over, w, b, EPS, out=over)[0], h) and torch.equal(over, y)
    over = x.clone()
    layernorm(over, w, b, EPS, out=over)
    assert torch.equal(over, layernorm(x, w, b, EPS)[0])


def test_a_gradient_that_is_one_row_for_all(implementation):
    x, (w, b) = torch.randn(4, 24, dtype=F64), weights(24, (True, True))
    stats, dy = layernorm(x, w, b, EPS)[1], torch.randn(1, 24, dtype=F64).expand(4, 24)
    assert torch.equal(layernorm_backward(dy, x, w, stats), layernorm_backward(dy.contiguous(), x, w, stats))


@pytest.mark.parametrize("size", [6, 100, 4096, 5000, 16384])
def test_a_row_without_spread_gives_the_bias(implementation, size: int):
    """x is 1000.1 everywhere: a mean that is off by a rounding would be multiplied by 1 / sqrt(EPS) = 1000."""
    x, dy, (w, b) = (
        torch.full((1, size), 1000.1),
        torch.randn(1, size),
        weights(size, (True, True), torch.float32),
    )
    assert w is not None and b is not None
    y, stats = layernorm(x, w, b, EPS)
    torch.testing.assert_close(y, b[None], rtol=0, atol=1e-5)
    torch.testing.assert_close(stats, torch.tensor([[1000.1, 1000.0]]), rtol=1e-6, atol=0)
    g = (dy * w).double()  # x_hat = 0, so that only the mean of the gradient is taken out
    expected = 1000 * (g - g.mean())
    torch.testing.assert_close(layernorm_backward(dy, x, w, stats).double(), expected, rtol=1e-5, atol=0.01)


def test_a_mean_far_above_the_spread(implementation):
    """E[x^2] - E[x]^2 = 1e8 - (1e8 - 1) has no correct digit in float32."""
    x = 1e4 + torch.randn(3, 2500)
    y, stats = layernorm(x, None, None, EPS)
    torch.testing.assert_close(y.double(), normed(x.double(), None, None), rtol=0, atol=1e-5)
    torch.testing.assert_close(stats.double(), statistics(x.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [4096, 5000, 16384])
def test_float32_at_real_sizes(kernels, size: int):
    x, dy = torch.randn(2, 2, size).unbind()
    w, b = weights(size, (True, True), torch.float32)
    assert w is not None and b is not None
    wide = x.double().requires_grad_()
    expected = normed(wide, w.double(), b.double())
    y, stats = layernorm(x, w, b, EPS)
    assert stats.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-5, atol=2e-6)
    (dx,) = torch.autograd.grad(expected, wide, dy.double())
    torch.testing.assert_close(layernorm_backward(dy, x, w, stats).double(), dx, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [(False, False), (True, True)], ids=["olmo", "stablelm"])
def test_rounds_where_transformers_rounds(implementation, parts):
    """float16: another order of rounding would change a third of the values. OLMo's is a norm of its own code."""
    from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

    x, (w, b) = torch.randn(8, 200).half(), weights(200, parts, torch.float16)
    theirs = torch.nn.LayerNorm(200, eps=1e-5).half() if parts[0] else OlmoLayerNorm(200)
    theirs.load_state_dict({"weight": w, "bias": b} if parts[0] else {})
    with torch.no_grad():
        expected = theirs(x)
    y, stats = layernorm(x, w, b, 1e-5)
    assert y.dtype == torch.float16 and stats.dtype == torch.float32
    assert (y == expected).float().mean() > 0.995
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=1e-6)
    h, y, _ = add_layernorm(x, x.flip(0), w, b, 1e-5)
    assert torch.equal(h, x + x.flip(0))
    assert (y == layernorm(h, w, b, 1e-5)[0]).all(), "statistics are those of the rounded sum"


def test_an_output_that_does_not_fit_is_refused(implementation, monkeypatch):
    monkeypatch.undo()  # shapes that no kernel takes fall back to torch, which finds the same mistake
    monkeypatch.setenv("COVEY_KERNELS", implementation)
    x = torch.randn(4, 8)
    for out in (torch.empty(4, 9), torch.empty(3, 8), torch.empty(4, 8, dtype=F64)):
        with pytest.raises(ValueError, match="out is"):
            layernorm(x, None, None, EPS, out=out)


def test_tensors_that_the_kernels_cannot_take_go_through_torch(monkeypatch):
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    spread, dense = torch.randn(18, dtype=F64)[::2], torch.randn(9, dtype=F64)
    for x, w, b in (
        (torch.randn(6, 9, dtype=F64), spread, dense),
        (torch.randn(6, 9, dtype=F64), dense, spread),
        (torch.randn(9, 6, dtype=F64).t(), None, None),
        (torch.randn(2, 32769, dtype=F64), None, None),
    ):
        torch.testing.assert_close(layernorm(x, w, b, EPS)[0], normed(x, w, b))


# On a GPU, in bfloat16


def assert_no_worse(mine: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """At most 1.5 times eager torch's error, largest and root mean square, and no bias."""
    error, allowed = mine.double() - exact, eager.double() - exact
    assert error.abs().max() <= 1.5 * allowed.abs().max()
    assert error.square().mean().sqrt() <= 1.5 * allowed.square().mean().sqrt()
    assert error.mean().abs() <= 0.1 * error.square().mean().sqrt()


@pytest.mark.gpu
@parts
@pytest.mark.parametrize("offset", [0.0, 30.0], ids=["", "mean"])
@pytest.mark.parametrize("size,extra", [(2048, 0), (2560, 16), (4096, 8), (5003, 1), (16384, 64), (32768, 0)])
def test_bfloat16_is_as_good_as_eager_torch(kernels, size: int, extra: int, offset: float, parts):
    def rows() -> torch.Tensor:
        return torch.randn(257, size + extra, device="cuda").bfloat16()[:, :size]

    x, r, dy, skip = rows().add_(offset), rows(), rows(), rows()
    w = (1 + 0.3 * torch.randn(size, device="cuda")).bfloat16() if parts[0] else None
    b = torch.randn(size, device="cuda").bfloat16() if parts[1] else None
    h, y, stats = add_layernorm(x, r, w, b, EPS, out=rows())
    dx = layernorm_backward(dy, h, w, stats, residual=skip)
    assert torch.equal(h, x + r)
    wide, leaf = h.double().requires_grad_(), h.clone().requires_grad_()
    exact = normed(wide, None if w is None else w.double(), None if b is None else b.double())
    (exact_dx,) = torch.autograd.grad(exact, wide, dy.double())
    eager = normed(leaf, w, b)
    (eager_dx,) = torch.autograd.grad(eager, leaf, dy)
    assert_no_worse(y, eager.detach(), exact.detach())
    assert_no_worse(dx, eager_dx + skip, exact_dx + skip.double())
    torch.testing.assert_close(stats.double(), statistics(wide.detach()), rtol=1e-6, atol=1e-6)

    assert_no_worse(layernorm(h, w, b, EPS)[0], eager.detach(), exact.detach())
    over = skip.clone()
    assert torch.equal(layernorm_backward(dy, h, w, stats, residual=over, out=over), dx)
    again = add_layernorm(x.clone(), r, w, b, EPS, inplace=True)
    assert all(torch.equal(a, b) for a, b in zip(again, (h, y, stats), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_on_a_gpu(kernels, rows: int):
    x = torch.randn(rows, 64, device="cuda").bfloat16()
    y, stats = layernorm(x, None, None, EPS)
    assert y.shape == x.shape and layernorm_backward(y, x, None, stats, residual=x).shape == x.shape


@pytest.mark.gpu
def test_offsets_beyond_32_bits(kernels):
    stride, size = 2**30 + 8, 256
    whole = torch.zeros(2 * stride + size, device="cuda", dtype=torch.bfloat16)
    x = whole.as_strided((3, size), (stride, 1))
    x.copy_(torch.randn(3, size, device="cuda"))
    w, dy = torch.randn(size, device="cuda").bfloat16(), torch.randn(3, size, device="cuda").bfloat16()
    near = x.clone()
    y, stats = layernorm(near, w, w, EPS)
    assert torch.equal(layernorm(x, w, w, EPS)[0], y)
    dx = layernorm_backward(dy, near, w, stats, residual=near)
    assert torch.equal(layernorm_backward(dy, x, w, stats, residual=x, out=x), dx) and torch.equal(x, dx)
