"""RoPE through both implementations: against complex numbers, transformers and autograd.

In CI the Triton kernel runs in the interpreter, on the CPU; there it gets float64 and float32.
"""

import pytest
import torch

from covey.kernels import rope as module
from covey.kernels.rope import pack_qkv_grad, rope, rope_backward, rope_copy, rope_inplace, rope_tables

REFERENCES = module, ("rope_reference",)
F64 = torch.float64
CANARY = 12345.0
# query heads, key-value heads, head dimension, rotated dimensions
SHAPES = [
    (1, 1, 2, 2),
    (4, 2, 8, 8),
    (3, 1, 6, 6),
    (7, 7, 10, 4),
    (12, 2, 16, 16),
    (5, 3, 12, 2),
    (28, 4, 16, 8),
]


def tables(tokens: int, rotated: int, dtype=F64, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    inv_freq = 100.0 ** -(torch.arange(0, rotated, 2, dtype=F64, device=device) / rotated)
    positions = torch.randint(0, 500, (tokens,), device=device)
    return rope_tables(positions, inv_freq, 1.2, dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """The same rotation as a product of complex numbers."""
    half = cos.shape[-1]
    z = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sign * sin)
    return torch.cat((z.real, z.imag, x[..., 2 * half :]), -1)


def packed(tokens: int, n: int, m: int, d: int, extra: int, fill: float, dtype=F64, device="cpu"):
    """A buffer [tokens + 2, ...] of `fill` and the q, k, v views [tokens, heads, d] in the middle of its rows."""
    buffer = torch.full((tokens + 2, (n + 2 * m) * d + extra), fill, dtype=dtype, device=device)
    heads = buffer[1 : tokens + 1, : (n + 2 * m) * d].view(tokens, n + 2 * m, d)
    return buffer, heads[:, :n], heads[:, n : n + m], heads[:, n + m :]


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_complex_numbers(implementation, shape):
    n, _, d, rotated = shape
    x, (cos, sin) = torch.randn(5, n, d, dtype=F64), tables(5, rotated)
    before = x.clone()
    torch.testing.assert_close(rope(x, cos, sin), turned(x, cos, sin), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rope_backward(x, cos, sin), turned(x, cos, sin, -1), rtol=1e-12, atol=1e-12)
    assert torch.equal(x, before)


def test_the_backward_is_the_gradient(kernels):
    cos, sin = tables(3, 4)

    class Turn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return rope(x, cos, sin)

        @staticmethod
        def backward(ctx, dy):
            return rope_backward(dy, cos, sin)

    assert torch.autograd.gradcheck(Turn.apply, torch.randn(3, 2, 6, dtype=F64, requires_grad=True))


@pytest.mark.parametrize("rotated", [64, 24])
def test_float32_matches_transformers(implementation, rotated: int):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, (cos, sin) = torch.randn(6, 4, 64), torch.randn(6, 2, 64), tables(6, rotated, torch.float32)
    both = [torch.cat((t, t), -1).transpose(0, 1) for t in (cos, sin)]  # [1, T, d_rot], as they have it
    turn = [x[..., :rotated].transpose(0, 1)[None] for x in (q, k)]  # [1, heads, T, d_rot]
    expected = [
        torch.cat((y[0].transpose(0, 1), x[..., rotated:]), -1)
        for x, y in zip((q, k), apply_rotary_pos_emb(turn[0], turn[1], both[0], both[1]), strict=True)
    ]
    rope_inplace(q, k, cos, sin)
    torch.testing.assert_close(q, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(k, expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_place_in_one_packed_buffer(implementation, shape):
    """Of a buffer full of canaries only q and k change, and turning back restores them."""
    (n, m, d, rotated), tokens = shape, 4
    cos, sin = tables(tokens, rotated)
    buffer, q, k, _ = packed(tokens, n, m, d, 3, CANARY)
    q.copy_(torch.randn(q.shape))
    k.copy_(torch.randn(k.shape))
    before = buffer.clone()
    expected = turned(q, cos, sin), turned(k, cos, sin)
    rope_inplace(q, k, cos, sin)
    torch.testing.assert_close(q, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(k, expected[1], rtol=1e-12, atol=1e-12)
    rest = buffer.clone()
    rest[1:-1, : (n + m) * d] = CANARY
    assert (rest == CANARY).all()
    rope_inplace(q, k, cos / 1.44, sin / 1.44, backward=True)  # the tables' scaling of 1.2 once each way
    torch.testing.assert_close(buffer, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_side_by_side(implementation, shape):
    """Attention's buffers, among NaN, to the columns of a wider one; the remaining columns keep what they hold."""
    (n, m, d, rotated), tokens = shape, 3
    cos, sin = tables(tokens, rotated)
    _, dq, dk, dv = packed(tokens, n, m, d, 5, float("nan"))
    for x in (dq, dk, dv):
        x.copy_(torch.randn(x.shape))
    out = torch.full((tokens + 2, (n + 2 * m) * d + 9), CANARY, dtype=F64)
    pack_qkv_grad(dq, dk, dv, out[1:-1, : (n + 2 * m) * d + 7], cos, sin)
    expected = torch.cat((turned(dq, cos, sin, -1), turned(dk, cos, sin, -1), dv), 1).flatten(1)
    torch.testing.assert_close(out[1:-1, : (n + 2 * m) * d], expected, rtol=1e-12, atol=1e-12)
    out[1:-1, : (n + 2 * m) * d] = CANARY
    assert (out == CANARY).all()


@pytest.mark.parametrize("rotated", [8, 4])
def test_copies_between_strides(implementation, rotated: int):
    """Heads before tokens in the source, as attention kernels return them, and one row for all tokens."""
    cos, sin = tables(5, rotated)
    for src in (
        torch.randn(3, 5, 8, dtype=F64).transpose(0, 1),
        torch.randn(1, 3, 8, dtype=F64).expand(5, 3, 8),
    ):
        dst = torch.full((5, 4, 9), CANARY, dtype=F64)
        rope_copy(src, dst[:, :3, :8], cos, sin)
        torch.testing.assert_close(dst[:, :3, :8], turned(src, cos, sin), rtol=1e-12, atol=1e-12)
        dst[:, :3, :8] = CANARY
        assert (dst == CANARY).all()


def test_no_tokens(implementation):
    cos, sin = tables(0, 8)
    q, k = torch.empty(0, 4, 8, dtype=F64), torch.empty(0, 2, 8, dtype=F64)
    rope_inplace(q, k, cos, sin)
    pack_qkv_grad(q, k, k, torch.empty(0, 64, dtype=F64), cos, sin)
    assert rope(q, cos, sin).shape == q.shape


def test_a_head_dimension_that_is_not_contiguous_goes_through_torch(monkeypatch):
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    x, (cos, sin) = torch.randn(5, 8, 3, dtype=F64).transpose(1, 2), tables(5, 8)
    torch.testing.assert_close(rope(x, cos, sin), turned(x, cos, sin), rtol=1e-12, atol=1e-12)


def test_mistakes_are_sentences(implementation):
    q, k, (cos, sin) = torch.randn(5, 4, 8), torch.randn(5, 2, 8), tables(5, 8, torch.float32)
    with pytest.raises(ValueError, match="out is"):
        pack_qkv_grad(q, k, k, torch.empty(5, 63), cos, sin)
    with pytest.raises(ValueError, match="heads"):
        rope_inplace(q, k[:4], cos, sin)
    with pytest.raises(ValueError, match="heads"):
        rope_copy(q, torch.empty(5, 4, 6), cos, sin)
    with pytest.raises(ValueError, match="tables"):
        rope_inplace(q, k, *tables(4, 8))
    with pytest.raises(ValueError, match="tables"):
        rope_inplace(q, k, *tables(5, 10))


# On a GPU, in bfloat16


def assert_no_worse(mine: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """At most 1.5 times eager torch's error, largest and root mean square, and no bias."""
    error, allowed = mine.double() - exact, eager.double() - exact
    assert error.abs().max() <= 1.5 * allowed.abs().max()
    assert error.square().mean().sqrt() <= 1.5 * allowed.square().mean().sqrt()
    assert error.mean().abs() <= 0.1 * error.square().mean().sqrt()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        (32, 8, 128, 128),
        (12, 2, 128, 128),
        (28, 4, 128, 128),
        (9, 3, 64, 64),
        (32, 32, 80, 32),
        (8, 1, 96, 96),
    ],
)
def test_bfloat16_is_as_good_as_eager_torch(kernels, shape):
    (n, m, d, rotated), tokens = shape, 300
    cos, sin = tables(tokens, rotated, torch.float32, "cuda")
    _, q, k, v = packed(tokens, n, m, d, 8, float("nan"), torch.bfloat16, "cuda")
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, device="cuda"))
    before = [x.clone() for x in (q, k)]
    rope_inplace(q, k, cos, sin)
    for mine, x in zip((q, k), before, strict=True):
        exact = turned(x.double(), cos.double(), sin.double())
        eager = turned(x.float(), cos, sin).bfloat16()
        assert_no_worse(mine, eager, exact)
        assert torch.equal(rope(x, cos, sin), mine), "in place or not is the same"

    size = (n + 2 * m) * d
    out = torch.full((tokens, size + 8), CANARY, dtype=torch.bfloat16, device="cuda")
    pack_qkv_grad(q.contiguous(), k.contiguous(), v, out, cos, sin)
    expected = torch.cat((rope_backward(q, cos, sin), rope_backward(k, cos, sin), v), 1).flatten(1)
    assert torch.equal(out[:, :size], expected)
    assert (out[:, size:] == out.new_tensor(CANARY)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_on_a_gpu(kernels, tokens: int):
    cos, sin = tables(tokens, 64, torch.float32, "cuda")
    q, k = (torch.randn(tokens, heads, 64, device="cuda").bfloat16() for heads in (4, 2))
    rope_inplace(q, k, cos, sin)
    pack_qkv_grad(q, k, k, torch.empty(tokens, 512, device="cuda", dtype=torch.bfloat16), cos, sin)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(kernels):
    stride, (n, m, d) = 2**30 + 8, (4, 2, 64)
    whole = torch.zeros(2 * stride + (n + m) * d, device="cuda", dtype=torch.bfloat16)
    q = whole.as_strided((3, n, d), (stride, d, 1))
    k = whole.as_strided((3, m, d), (stride, d, 1), n * d)
    q.copy_(torch.randn(3, n, d, device="cuda"))
    k.copy_(torch.randn(3, m, d, device="cuda"))
    cos, sin = tables(3, d, torch.float32, "cuda")
    expected = rope(q.clone(), cos, sin), rope(k.clone(), cos, sin)
    rope_inplace(q, k, cos, sin)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
