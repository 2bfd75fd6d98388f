"""Normed and rotated heads through both implementations: against torch's rms_norm, complex numbers and autograd.

In CI the Triton kernels run in the interpreter, on the CPU; there they get float64, float32 and float16.
"""

import pytest
import torch

from covey.kernels import qk_norm as module
from covey.kernels.qk_norm import pack_qk_norm_grad, qk_norm_rope
from covey.kernels.rmsnorm import rmsnorm, rmsnorm_backward
from covey.kernels.rope import rope, rope_backward, rope_tables

REFERENCES = module, ("rope_reference",)
F64 = torch.float64
EPS = 1e-6
CANARY = 12345.0
SHAPES = [
    (1, 1, 2),
    (4, 2, 8),
    (3, 1, 6),
    (7, 7, 10),
    (12, 2, 16),
]  # query heads, key-value heads, head dimension


def tables(tokens: int, rotated: int, dtype=F64, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    inv_freq = 100.0 ** -(torch.arange(0, rotated, 2, dtype=F64, device=device) / rotated)
    return rope_tables(torch.randint(0, 500, (tokens,), device=device), inv_freq, 1.2, dtype)


def expected_heads(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plus_one: bool):
    """Norm and rotation, the latter as a product of complex numbers; differentiable."""
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), 1 + w if plus_one else w, eps=EPS)
    half = cos.shape[-1]
    z = torch.complex(y[..., :half], y[..., half : 2 * half]) * torch.complex(cos, sin)
    return torch.cat((z.real, z.imag, y[..., 2 * half :]), -1)


def packed(tokens: int, n: int, m: int, d: int, extra: int, fill: float, dtype=F64, device="cpu"):
    """A buffer [tokens + 2, ...] of `fill` and the q, k, v views [tokens, heads, d] in the middle of its rows."""
    buffer = torch.full((tokens + 2, (n + 2 * m) * d + extra), fill, dtype=dtype, device=device)
    heads = buffer[1 : tokens + 1, : (n + 2 * m) * d].view(tokens, n + 2 * m, d)
    return buffer, heads[:, :n], heads[:, n : n + m], heads[:, n + m :]


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_torch_and_its_gradient(implementation, shape, plus_one: bool):
    """Forward from a packed buffer among NaN; gradients into the columns of a buffer full of canaries."""
    (n, m, d), tokens = shape, 4
    cos, sin = tables(tokens, d)
    buffer, q, k, v = packed(tokens, n, m, d, 3, float("nan"))
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape))
    before = buffer.clone()
    wq, wk = torch.randn(d, dtype=F64), torch.randn(d, dtype=F64)
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    expected = [expected_heads(x, w, cos, sin, plus_one) for x, w in zip(leaves, (wq, wk), strict=True)]
    q_out, k_out, rstd = qk_norm_rope(q, k, wq, wk, EPS, cos, sin, plus_one=plus_one)
    torch.testing.assert_close(q_out, expected[0].detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(k_out, expected[1].detach(), rtol=1e-10, atol=1e-12)
    exact_rstd = (torch.cat((q, k), 1).square().mean(-1) + EPS) ** -0.5
    torch.testing.assert_close(rstd, exact_rstd, rtol=1e-12, atol=0)
    assert torch.equal(buffer.nan_to_num(), before.nan_to_num()), "the inputs stay as they were"

    dq, dk, dv = (torch.randn(x.shape, dtype=F64) for x in (q, k, v))
    grads = [*torch.autograd.grad(expected, leaves, (dq, dk)), dv]
    out = torch.full((tokens + 2, (n + 2 * m) * d + 9), CANARY, dtype=F64)
    pack_qk_norm_grad(dq, dk, dv, q, k, wq, wk, rstd, out[1:-1], cos, sin, plus_one)
    columns = out[1:-1, : (n + 2 * m) * d]
    torch.testing.assert_close(columns, torch.cat(grads, 1).flatten(1), rtol=1e-10, atol=1e-11)
    mine = columns.clone()
    columns.fill_(CANARY)
    assert (out == CANARY).all()

    # The same over declared scratch: gradients over the heads they belong to, then results over inputs.
    scratch = buffer[1:-1, : (n + 2 * m) * d].clone()
    q_there, k_there, _ = scratch.view(tokens, -1, d).split((n, m, m), 1)
    pack_qk_norm_grad(dq, dk, dv, q_there, k_there, wq, wk, rstd, scratch, cos, sin, plus_one)
    torch.testing.assert_close(scratch, mine, rtol=1e-13, atol=1e-13)
    qk_norm_rope(q, k, wq, wk, EPS, cos, sin, q_out=q, k_out=k, plus_one=plus_one)
    torch.testing.assert_close(q, q_out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(k, k_out, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("plus_one", [False, True])
def test_rounds_like_the_norm_followed_by_the_rotation(kernels, plus_one: bool):
    """float16 against transformers' norm of Qwen3 (or Gemma 3) and a float32 rotation rounded once."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    q, k, w = torch.randn(6, 4, 64).half(), torch.randn(6, 2, 64).half(), torch.randn(64).half()
    cos, sin = tables(6, 64, torch.float32)
    theirs = (Gemma3RMSNorm if plus_one else Qwen3RMSNorm)(64, eps=EPS).half()
    got = qk_norm_rope(q, k, w, w, EPS, cos, sin, plus_one=plus_one)
    assert got[2].dtype == torch.float32
    with torch.no_grad():
        theirs.weight.copy_(w)
        for x, y in zip((q, k), got, strict=False):
            normed = theirs(x).float()
            z = torch.complex(normed[..., :32], normed[..., 32:]) * torch.complex(cos, sin)
            expected = torch.cat((z.real, z.imag), -1).half()
            assert (y == expected).float().mean() > 0.99
            torch.testing.assert_close(y, expected, rtol=2e-3, atol=1e-3)


def test_heads_of_which_a_part_is_rotated_go_through_torch(monkeypatch):
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    q, k, w = torch.randn(3, 4, 8, dtype=F64), torch.randn(3, 2, 8, dtype=F64), torch.randn(8, dtype=F64)
    cos, sin = tables(3, 4)
    leaf = q.clone().requires_grad_()
    expected = expected_heads(leaf, w, cos, sin, False)
    q_out, _, rstd = qk_norm_rope(q, k, w, w, EPS, cos, sin)
    torch.testing.assert_close(q_out, expected.detach(), rtol=1e-12, atol=1e-12)
    out, dq = torch.empty(3, 64, dtype=F64), torch.randn(3, 4, 8, dtype=F64)
    pack_qk_norm_grad(dq, k, k, q, k, w, w, rstd, out, cos, sin)
    (exact,) = torch.autograd.grad(expected, leaf, dq)
    torch.testing.assert_close(out[:, :32].view(3, 4, 8), exact, rtol=1e-10, atol=1e-12)


def test_mistakes_are_sentences(implementation):
    q, k, w, (cos, sin) = (
        torch.randn(5, 4, 8),
        torch.randn(5, 2, 8),
        torch.ones(8),
        tables(5, 8, torch.float32),
    )
    with pytest.raises(ValueError, match="heads"):
        qk_norm_rope(q, k[:4], w, w, EPS, cos, sin)
    with pytest.raises(ValueError, match="tables"):
        qk_norm_rope(q, k, w, w, EPS, cos[:4], sin[:4])
    with pytest.raises(ValueError, match="out is"):
        pack_qk_norm_grad(q, k, k, q, k, w, w, torch.ones(5, 6), torch.empty(5, 63), cos, sin)


@pytest.mark.gpu
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", [(32, 8, 128), (16, 8, 128), (8, 1, 256), (9, 3, 64)])
def test_bfloat16_is_as_good_as_two_steps(kernels, shape, plus_one: bool):
    (n, m, d), tokens = shape, 300
    cos, sin = tables(tokens, d, torch.float32, "cuda")
    _, q, k, v = packed(tokens, n, m, d, 8, float("nan"), torch.bfloat16, "cuda")
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, device="cuda"))
    w = (torch.randn(d, device="cuda") * 0.3 + (not plus_one)).bfloat16()
    q_out, k_out, rstd = qk_norm_rope(q, k, w, w, EPS, cos, sin, plus_one=plus_one)
    dq, dk = torch.randn_like(q_out), torch.randn_like(k_out)
    out = torch.full((tokens, (n + 2 * m) * d + 8), CANARY, dtype=torch.bfloat16, device="cuda")
    pack_qk_norm_grad(dq, dk, v, q, k, w, w, rstd, out, cos, sin, plus_one)
    assert (out[:, (n + 2 * m) * d :] == out.new_tensor(CANARY)).all()
    dx_q, dx_k, dv = out[:, : (n + 2 * m) * d].view(tokens, -1, d).split((n, m, m), 1)
    assert torch.equal(dv, v)
    for x, y, dy, dx in ((q, q_out, dq, dx_q), (k, k_out, dk, dx_k)):
        leaf = x.double().requires_grad_()
        exact = expected_heads(leaf, w.double(), cos.double(), sin.double(), plus_one)
        (exact_dx,) = torch.autograd.grad(exact, leaf, dy.double())
        rows = x.reshape(-1, d)
        normed, rstd_rows = rmsnorm(rows, w, EPS, plus_one=plus_one)
        g = rope_backward(dy, cos, sin).view(-1, d)
        two_steps = rope(normed.view(x.shape), cos, sin)
        two_steps_dx = rmsnorm_backward(g, rows, w, rstd_rows, plus_one=plus_one).view(x.shape)
        for mine, theirs, true in ((y, two_steps, exact.detach()), (dx, two_steps_dx, exact_dx)):
            error, allowed = mine.double() - true, theirs.double() - true
            assert error.abs().max() <= 1.5 * allowed.abs().max()
            assert error.square().mean().sqrt() <= 1.1 * allowed.square().mean().sqrt()
    again = out.clone()
    pack_qk_norm_grad(dq, dk, v, q, k, w, w, rstd, again, cos, sin, plus_one)
    assert torch.equal(again, out)
    before = q.clone()
    qk_norm_rope(q, k, w, w, EPS, cos, sin, q_out=q, k_out=k, plus_one=plus_one)
    assert torch.equal(q, q_out) and torch.equal(k, k_out) and not torch.equal(q, before)
