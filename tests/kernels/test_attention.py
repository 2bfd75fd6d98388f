"""Packed attention with shared prefixes against softmax over an explicit mask, in float64."""

import pytest
import torch

from covey.kernels import attention as module
from covey.kernels.attention import attention, attention_backward, attention_plan

LAYOUTS = {
    "one": [(0, 5, 0, 0)],
    "documents": [(0, 4, 0, 0), (4, 5, 0, 0), (5, 12, 0, 0)],
    "group": [(0, 3, 0, 0), (3, 5, 0, 3), (5, 9, 0, 3), (9, 10, 0, 3)],
    "two groups": [(0, 3, 0, 0), (3, 5, 0, 3), (5, 9, 0, 0), (9, 10, 5, 9), (10, 14, 5, 9)],
    "empty segment": [(0, 3, 0, 0), (3, 3, 0, 3), (3, 6, 0, 3)],
}


def explicit(q, k, v, segments, scale):
    """softmax(scale q k^T + mask) v with the mask written down pair by pair."""
    tokens, n, _ = q.shape
    allowed = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, end, prefix_start, prefix_end in segments:
        for i in range(start, end):
            for j in range(tokens):
                allowed[i, j] = start <= j <= i or prefix_start <= j < prefix_end
    k, v = (x.repeat_interleave(n // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ind,jnd->nij", q, k) * scale
    p = torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1)
    return torch.einsum("nij,jnd->ind", p, v), torch.logsumexp(
        scores.masked_fill(~allowed, float("-inf")), -1
    )


@pytest.mark.parametrize("family_tokens", [0, 512], ids=["by segment", "by family"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_an_explicit_mask(layout, heads, family_tokens, monkeypatch):
    monkeypatch.setattr(module, "FAMILY_TOKENS", family_tokens)
    segments = LAYOUTS[layout]
    tokens, (n, m) = segments[-1][1], heads
    q, k, v = (torch.randn(tokens, h, 8, dtype=torch.float64, requires_grad=True) for h in (n, m, m))
    do = torch.randn(tokens, n, 8, dtype=torch.float64)
    plan = attention_plan(torch.tensor(segments, dtype=torch.int32), q.device)
    expected, expected_lse = explicit(q, k, v, segments, 0.3)
    with torch.no_grad():
        o, lse = attention(q, k, v, plan, 0.3)
        grads = attention_backward(do, q, k, v, o, lse, plan, 0.3)
    torch.testing.assert_close(o, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=0, atol=1e-12)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, (q, k, v), do), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_allowed_pairs_of_two_documents():
    """B23: documents of 4 and 3 tokens allow 10 + 6 = 16 pairs; plain causal attention over 7 tokens would be 28."""
    plan = attention_plan(torch.tensor([[0, 4, 0, 0], [4, 7, 0, 0]], dtype=torch.int32), torch.device("cpu"))
    assert sum(int(block.allowed.sum()) for block in plan.blocks) == 16


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (28, 4)])
@pytest.mark.parametrize("layout", [*LAYOUTS, "long"])
def test_flash_is_as_exact_as_bf16_allows(layout, heads):
    segments = LAYOUTS.get(layout) or [
        (0, 300, 0, 0),
        (300, 700, 0, 300),
        (700, 701, 0, 300),
        (701, 900, 0, 0),
    ]
    tokens, (n, m) = segments[-1][1], heads
    q64, k64, v64, do64 = wide = [
        torch.randn(tokens, h, 64, dtype=torch.float64).bfloat16().double() for h in (n, m, m, n)
    ]
    table = torch.tensor(segments, dtype=torch.int32)
    plan = attention_plan(table, torch.device("cpu"))
    o, lse = attention(q64, k64, v64, plan, 0.125)
    exact = [o, *attention_backward(do64, q64, k64, v64, o, lse, plan, 0.125)]
    results = {}
    for flash in (True, False):
        q, k, v, do = (x.to("cuda", torch.bfloat16) for x in wide)
        plan = attention_plan(table, q.device, flash=flash)
        o, lse = attention(q, k, v, plan, 0.125)
        results[flash] = [o, *attention_backward(do, q, k, v, o, lse, plan, 0.125)]
    for stock, dense, true in zip(results[True], results[False], exact, strict=True):
        error, baseline = ((x.cpu().double() - true).pow(2).mean().sqrt() for x in (stock, dense))
        # The dense path works in float32 and rounds once, so it is the smallest error that bf16 outputs can have;
        # FlashAttention also rounds p to bf16 before its second product, and the merge rounds o once more.
        assert error <= 3 * baseline + 1e-12
