"""RMSNorm, with and without a residual, through both implementations: against torch and transformers.

In CI the Triton kernels run in the interpreter, on the CPU; there they get float64, float32 and float16.
"""

import pytest
import torch

from covey.kernels import rmsnorm as module
from covey.kernels.rmsnorm import add_rmsnorm, rmsnorm, rmsnorm_apply, rmsnorm_backward

REFERENCES = module, ("rmsnorm_reference", "rmsnorm_backward_reference", "_placed")
F64 = torch.float64
EPS = 1e-6
CANARY = 12345.0


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


def normed(x: torch.Tensor, w: torch.Tensor, plus_one: bool) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[1],), 1 + w if plus_one else w, eps=EPS)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(
    "rows,size", [(0, 8), (1, 1), (3, 31), (3, 32), (4, 33), (2, 127), (1, 1021), (2, 2048)]
)
def test_matches_torch_and_its_gradient(implementation, rows: int, size: int, plus_one: bool):
    x = torch.randn(rows, size, dtype=F64, requires_grad=True)
    w, dy, skip = torch.randn(size, dtype=F64), torch.randn(rows, size, dtype=F64), torch.randn(rows, size)
    expected = normed(x, w, plus_one)
    y, rstd = rmsnorm(x.detach(), w, EPS, plus_one=plus_one)
    torch.testing.assert_close(y, expected.detach(), rtol=0, atol=1e-12)
    assert rstd.shape == (rows, 1) and rstd.dtype == F64
    torch.testing.assert_close(rstd, (x.detach().square().mean(1, True) + EPS) ** -0.5)
    assert torch.equal(rmsnorm_apply(x.detach(), w, rstd, plus_one=plus_one), y)
    (dx,) = torch.autograd.grad(expected, x, dy)
    mine = rmsnorm_backward(dy, x.detach(), w, rstd, plus_one=plus_one)
    torch.testing.assert_close(mine, dx, rtol=1e-10, atol=1e-12)
    mine = rmsnorm_backward(dy, x.detach(), w, rstd, residual=skip.double(), plus_one=plus_one)
    torch.testing.assert_close(mine, dx + skip, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("size", [33, 64])
def test_sum_and_norm_in_one_pass(implementation, size: int, plus_one: bool):
    x, r, w = torch.randn(5, size, dtype=F64), torch.randn(5, size, dtype=F64), torch.randn(size, dtype=F64)
    x_before, r_before = x.clone(), r.clone()
    h, y, rstd = add_rmsnorm(x, r, w, EPS, plus_one=plus_one)
    assert torch.equal(h, x_before + r_before) and torch.equal(x, x_before) and torch.equal(r, r_before)
    torch.testing.assert_close(y, normed(h, w, plus_one), rtol=0, atol=1e-12)
    torch.testing.assert_close(rstd, (h.square().mean(1, True) + EPS) ** -0.5)
    again = add_rmsnorm(x, r, w, EPS, plus_one=plus_one, inplace=True)
    assert again[0].data_ptr() == x.data_ptr() and torch.equal(x, h) and torch.equal(r, r_before)
    assert torch.equal(again[1], y) and torch.equal(again[2], rstd)


def test_the_gradient_of_both_outputs_of_the_sum(implementation):
    """With h and y both used, as in a decoder layer, the backward returns the gradient of x and of residual."""
    x, r, w = (torch.randn(*shape, dtype=F64, requires_grad=True) for shape in ((4, 21), (4, 21), (21,)))
    dh, dy = torch.randn(4, 21, dtype=F64), torch.randn(4, 21, dtype=F64)
    total = x + r
    expected = torch.autograd.grad((total, normed(total, w, False)), (x, r), (dh, dy))
    h, _, rstd = add_rmsnorm(x.detach(), r.detach(), w.detach(), EPS)
    mine = rmsnorm_backward(dy, h, w.detach(), rstd, residual=dh)
    for theirs in expected:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_gradcheck_through_the_kernels(kernels):
    w = torch.randn(7, dtype=F64)

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y, rstd = rmsnorm(x, w, EPS)
            ctx.save_for_backward(x, rstd)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, rstd = ctx.saved_tensors
            return rmsnorm_backward(dy.contiguous(), x, w, rstd)

    assert torch.autograd.gradcheck(Norm.apply, torch.randn(2, 7, dtype=F64, requires_grad=True))


def test_views_of_wider_buffers(implementation):
    """Every operand lies in a buffer full of NaN, every result in a buffer of canaries."""
    x, r, dy, skip = torch.randn(4, 3, 37, dtype=F64).unbind()
    w = torch.randn(37, dtype=F64)
    h, y, rstd = add_rmsnorm(x, r, w, EPS)
    out, scratch = (framed(3, 37, fill=CANARY, right=11) for _ in range(2))
    scratch.copy_(x)
    got = add_rmsnorm(scratch, in_frame(r), w, EPS, out=out, inplace=True)
    assert got[0].data_ptr() == scratch.data_ptr() and got[1].data_ptr() == out.data_ptr()
    assert torch.equal(scratch, h) and torch.equal(out, y) and torch.equal(got[2], rstd)
    assert_frame_untouched(out)
    assert_frame_untouched(scratch)
    for call in (
        lambda to: rmsnorm(in_frame(h), w, EPS, out=to)[0],
        lambda to: rmsnorm_apply(in_frame(h), w, rstd, out=to),
    ):
        out = framed(3, 37, fill=CANARY)
        assert call(out).data_ptr() == out.data_ptr() and torch.equal(out, y)
        assert_frame_untouched(out)
    dx, out = rmsnorm_backward(dy, h, w, rstd, residual=skip), framed(3, 37, fill=CANARY)
    rmsnorm_backward(in_frame(dy), in_frame(h), w, rstd, residual=in_frame(skip), out=out)
    assert torch.equal(out, dx)
    assert_frame_untouched(out)


def test_results_over_declared_scratch(implementation):
    x, r, dy, skip = torch.randn(4, 3, 40, dtype=F64).unbind()
    w = torch.randn(40, dtype=F64)
    h, y, rstd = add_rmsnorm(x, r, w, EPS)
    dx = rmsnorm_backward(dy, h, w, rstd, residual=skip)
    for k in (0, 1):
        operands = [dy.clone(), skip.clone()]
        rmsnorm_backward(operands[0], h, w, rstd, residual=operands[1], out=operands[k])
        assert torch.equal(operands[k], dx)
        assert torch.equal(operands[1 - k], (skip, dy)[k]), "the other operand is not scratch"
    over = r.clone()
    assert torch.equal(add_rmsnorm(x, over, w, EPS, out=over)[0], h) and torch.equal(over, y)
    over = x.clone()
    rmsnorm(over, w, EPS, out=over)
    assert torch.equal(over, rmsnorm(x, w, EPS)[0])


def test_a_gradient_that_is_one_row_for_all(implementation):
    x, w = torch.randn(4, 24, dtype=F64), torch.randn(24, dtype=F64)
    rstd, dy = rmsnorm(x, w, EPS)[1], torch.randn(1, 24, dtype=F64).expand(4, 24)
    assert torch.equal(rmsnorm_backward(dy, x, w, rstd), rmsnorm_backward(dy.contiguous(), x, w, rstd))


@pytest.mark.parametrize("size", [4096, 5000, 16384])
def test_float32_at_real_sizes(kernels, size: int):
    x, dy, w = torch.randn(2, size), torch.randn(2, size), torch.randn(size)
    wide = x.double().requires_grad_()
    expected = normed(wide, w.double(), False)
    y, rstd = rmsnorm(x, w, EPS)
    assert rstd.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    (dx,) = torch.autograd.grad(expected, wide, dy.double())
    torch.testing.assert_close(rmsnorm_backward(dy, x, w, rstd).double(), dx, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plus_one", [False, True], ids=["llama", "gemma"])
def test_rounds_where_transformers_rounds(implementation, plus_one: bool):
    """float16: the other order of rounding would change a third of the values."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, w = torch.randn(8, 200).half(), torch.randn(200).half()
    theirs = (GemmaRMSNorm if plus_one else LlamaRMSNorm)(200, eps=EPS).half()
    with torch.no_grad():
        theirs.weight.copy_(w)
        expected = theirs(x)
    y, rstd = rmsnorm(x, w, EPS, plus_one=plus_one)
    assert y.dtype == torch.float16 and rstd.dtype == torch.float32
    assert (y == expected).float().mean() > 0.995
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=0)
    h, y, _ = add_rmsnorm(x, x.flip(0), w, EPS, plus_one=plus_one)
    assert torch.equal(h, x + x.flip(0))
    assert (y == rmsnorm(h, w, EPS, plus_one=plus_one)[0]).all(), "statistics are those of the rounded sum"


def test_an_output_that_does_not_fit_is_refused(implementation, monkeypatch):
    monkeypatch.undo()  # shapes that no kernel takes fall back to torch, which finds the same mistake
    monkeypatch.setenv("COVEY_KERNELS", implementation)
    x, w = torch.randn(4, 8), torch.randn(8)
    for out in (torch.empty(4, 9), torch.empty(3, 8), torch.empty(4, 8, dtype=F64)):
        with pytest.raises(ValueError, match="out is"):
            rmsnorm(x, w, EPS, out=out)


def test_tensors_that_the_kernels_cannot_take_go_through_torch(monkeypatch):
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    for x, w in (
        (torch.randn(6, 9, dtype=F64), torch.randn(18, dtype=F64)[::2]),
        (torch.randn(9, 6, dtype=F64).t(), torch.randn(9, dtype=F64)),
        (torch.randn(2, 32769, dtype=F64), torch.randn(32769, dtype=F64)),
    ):
        torch.testing.assert_close(rmsnorm(x, w, EPS)[0], normed(x, w, False))


# On a GPU, in bfloat16


def assert_no_worse(mine: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """At most 1.5 times eager torch's error, largest and root mean square, and no bias."""
    error, allowed = mine.double() - exact, eager.double() - exact
    assert error.abs().max() <= 1.5 * allowed.abs().max()
    assert error.square().mean().sqrt() <= 1.5 * allowed.square().mean().sqrt()
    assert error.mean().abs() <= 0.1 * error.square().mean().sqrt()


@pytest.mark.gpu
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("size,extra", [(1536, 0), (3584, 16), (4096, 8), (5003, 1), (16384, 64), (32768, 0)])
def test_bfloat16_is_as_good_as_eager_torch(kernels, size: int, extra: int, plus_one: bool):
    def rows() -> torch.Tensor:
        return torch.randn(257, size + extra, device="cuda").bfloat16()[:, :size]

    x, r, dy, skip = rows(), rows(), rows(), rows()
    w = (torch.randn(size, device="cuda") * 0.3 + (not plus_one)).bfloat16()
    h, y, rstd = add_rmsnorm(x, r, w, EPS, out=rows(), plus_one=plus_one)
    dx = rmsnorm_backward(dy, h, w, rstd, residual=skip, plus_one=plus_one)
    assert torch.equal(h, x + r)
    wide = h.double().requires_grad_()
    exact = normed(wide, w.double(), plus_one)
    (exact_dx,) = torch.autograd.grad(exact, wide, dy.double())
    leaf = h.clone().requires_grad_()
    x_hat = leaf.float() * torch.rsqrt(leaf.float().square().mean(1, True) + EPS)
    eager = (x_hat * (1 + w.float())).bfloat16() if plus_one else x_hat.bfloat16() * w
    (eager_dx,) = torch.autograd.grad(eager, leaf, dy)
    assert_no_worse(y, eager.detach(), exact.detach())
    assert_no_worse(dx, eager_dx + skip, exact_dx + skip.double())
    exact_rstd = (wide.detach().square().mean(1, True) + EPS) ** -0.5
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-6, atol=0)

    assert torch.equal(rmsnorm_apply(h, w, rstd, plus_one=plus_one), y)
    assert torch.equal(rmsnorm(h, w, EPS, plus_one=plus_one)[0], y)
    over = skip.clone()
    assert torch.equal(rmsnorm_backward(dy, h, w, rstd, residual=over, plus_one=plus_one, out=over), dx)
    again = add_rmsnorm(x.clone(), r, w, EPS, plus_one=plus_one, inplace=True)
    assert all(torch.equal(a, b) for a, b in zip(again, (h, y, rstd), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_on_a_gpu(kernels, rows: int):
    x, w = torch.randn(rows, 64, device="cuda").bfloat16(), torch.ones(64, device="cuda").bfloat16()
    y, rstd = rmsnorm(x, w, EPS)
    assert y.shape == x.shape and rmsnorm_backward(y, x, w, rstd, residual=x).shape == x.shape


@pytest.mark.gpu
def test_offsets_beyond_32_bits(kernels):
    stride, size = 2**30 + 8, 256
    whole = torch.zeros(2 * stride + size, device="cuda", dtype=torch.bfloat16)
    x = whole.as_strided((3, size), (stride, 1))
    x.copy_(torch.randn(3, size, device="cuda"))
    w, dy = torch.randn(size, device="cuda").bfloat16(), torch.randn(3, size, device="cuda").bfloat16()
    near = x.clone()
    y, rstd = rmsnorm(near, w, EPS)
    assert torch.equal(rmsnorm(x, w, EPS)[0], y)
    dx = rmsnorm_backward(dy, near, w, rstd, residual=near)
    assert torch.equal(rmsnorm_backward(dy, x, w, rstd, residual=x, out=x), dx) and torch.equal(x, dx)
