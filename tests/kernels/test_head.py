"""Selected log-probs against float64 softmax: values, gradients, entropies, chunks and confident tokens."""

import pytest
import torch

from covey.kernels import head as module
from covey.kernels.head import (
    selected_logprobs_backward,
    selected_logprobs_forward,
    selected_logprobs_reference,
    target_logp,
)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_matches_autograd_in_any_chunks(rows_per_chunk, temperature, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_LOGITS", rows_per_chunk * 37)
    h = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(37, 6, dtype=torch.float64)
    target = torch.randint(37, (10,))
    g = torch.randn(10, dtype=torch.float64)  # non-uniform upstream gradients of both signs
    g[3] = 0
    logp, entropy = selected_logprobs_reference(h, w, target, temperature)
    (dh,) = torch.autograd.grad(logp, h, g)
    with torch.no_grad():
        mine, my_entropy, u = selected_logprobs_forward(
            h, w, target, temperature, entropy=True, gradient=True
        )
    torch.testing.assert_close(mine, logp.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(my_entropy, entropy.detach(), rtol=0, atol=1e-12)
    assert u is not None
    torch.testing.assert_close(selected_logprobs_backward(g, u), dh, rtol=0, atol=1e-12)


@pytest.mark.parametrize("margin", [5.0, 16.0, 20.0, 40.0])
def test_confident_tokens_keep_value_and_gradient(margin):
    """logits (margin, 0): log p = -log(1 + e^-margin), and d log p / dz_0 = 1 - p, exactly, far below float32's eps."""
    w = torch.tensor([[1.0], [0.0]])
    h = torch.tensor([[margin]])
    logp, _, u = selected_logprobs_forward(h, w, torch.tensor([0]), 1.0, entropy=False, gradient=True)
    assert u is not None
    tail = torch.exp(torch.tensor(-margin, dtype=torch.float64))
    torch.testing.assert_close(logp.double(), -torch.log1p(tail)[None], rtol=1e-5, atol=0)
    torch.testing.assert_close(u.double(), (tail / (1 + tail)).view(1, 1), rtol=1e-5, atol=0)


def test_closed_forms():
    uniform = target_logp(torch.zeros(1, 64), torch.tensor([5]))
    assert abs(uniform.item() + 4.158883) < 1e-6  # -ln 64
    pair = target_logp(torch.tensor([[20.06, 20.0]]), torch.tensor([0]))
    assert abs(pair.item() + 0.663597) < 1e-6  # B22; bf16 logits would give -0.693147
    three = target_logp(torch.tensor([[30.1, 30.0, 29.9]]), torch.tensor([0]))
    assert abs(three.item() + 1.001943) < 2e-6
    assert target_logp(torch.tensor([[3.0, float("-inf")]]), torch.tensor([0])).item() == 0.0


def test_no_rows():
    logp, entropy, u = selected_logprobs_forward(
        torch.zeros(0, 6),
        torch.zeros(9, 6),
        torch.zeros(0, dtype=torch.int64),
        1.0,
        entropy=True,
        gradient=True,
    )
    assert entropy is not None and u is not None
    assert logp.shape == (0,) and entropy.shape == (0,) and u.shape == (0, 6)
