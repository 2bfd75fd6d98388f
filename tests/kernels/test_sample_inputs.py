"""Penalties against transformers and plain loops, random numbers against Python's integers.

`path` runs the torch path and, in Triton's interpreter, the kernels with programs of a few logits.
"""

import math

import pytest
import torch
from torch import Tensor

from covey.kernels import sample_inputs as module
from covey.kernels.sample_inputs import PROMPT, draw, penalize, splitmix64

F64, INF = torch.float64, math.inf


def choose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects an implementation; with the kernels, a silent fall back to torch fails the test."""
    monkeypatch.setenv("COVEY_KERNELS", name)
    if name == "triton":
        monkeypatch.setattr(module, "penalize_reference", None)
        monkeypatch.setattr(module, "draw_reference", None)


@pytest.fixture(params=["reference", "triton"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(request.param, monkeypatch)
    if request.param == "triton":
        from covey.kernels import sample_inputs_triton

        monkeypatch.setattr(sample_inputs_triton, "BLOCK", 32)
        monkeypatch.setattr(sample_inputs_triton, "ROWS", 64)
    return request.param


# Penalties


def counts_of(prompts: list[list[int]], completions: list[list[int]], vocab: int) -> Tensor:
    count_BV = torch.zeros(len(prompts), vocab, dtype=torch.int32)
    for b, (prompt, own) in enumerate(zip(prompts, completions, strict=True)):
        for v in set(prompt):
            count_BV[b, v] += PROMPT
        for v in own:
            count_BV[b, v] += 1
    return count_BV


PROMPTS = [[5, 5, 9, 66], [0], [1, 2, 3], [64, 65, 66]]
COMPLETIONS = [[5, 7, 7, 7], [], [3, 3, 40], [0, 32, 31]]


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_is_that_of_transformers(path: str, penalty: float):
    from transformers import RepetitionPenaltyLogitsProcessor

    x_BV = 3 * torch.randn(4, 67)
    x_BV[:, [5, 31]] = 0.0
    x_BV[:, 7] = -INF
    found = penalize(x_BV, None, counts_of(PROMPTS, COMPLETIONS, 67), repetition=penalty)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for b in range(4):
        ids = torch.tensor([PROMPTS[b] + COMPLETIONS[b]])
        expected = processor(ids, x_BV[b : b + 1].clone())  # type: ignore[arg-type]
        torch.testing.assert_close(found[b : b + 1], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    "settings",
    [
        {"presence": 0.8},
        {"frequency": 0.3},
        {"presence": -0.5, "frequency": 0.1},
        {"repetition": 1.2, "presence": 0.8, "frequency": -0.25},
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_penalties_are_the_formulas(path: str, dtype: torch.dtype, settings: dict[str, float], biased: bool):
    x_BV = 3 * torch.randn(4, 67, dtype=dtype)
    bias_V = torch.where(torch.arange(67) % 5 == 0, 2.5, 0.0).to(dtype) if biased else None
    found = penalize(x_BV, bias_V, counts_of(PROMPTS, COMPLETIONS, 67), **settings)
    assert found.dtype == dtype
    for b in range(4):
        for v in range(67):
            z = x_BV[b, v].item() + (2.5 if biased and v % 5 == 0 else 0.0)
            if v in PROMPTS[b] or v in COMPLETIONS[b]:
                r = settings.get("repetition", 1.0)
                z = z / r if z > 0 else z * r
            z -= settings.get("presence", 0.0) * (v in COMPLETIONS[b])
            z -= settings.get("frequency", 0.0) * COMPLETIONS[b].count(v)
            assert found[b, v].item() == pytest.approx(z, abs=1e-14 if dtype == F64 else 2e-6)


def test_bias_alone(path: str):
    x_BV, bias_V = torch.randn(3, 70), torch.randn(70)
    assert torch.equal(penalize(x_BV, bias_V, None), x_BV + bias_V)
    assert penalize(torch.empty(0, 70), bias_V, None).shape == (0, 70)


def test_rows_within_larger_buffers(path: str):
    x_BV, count_BV = torch.randn(4, 67), counts_of(PROMPTS, COMPLETIONS, 67)
    frame, counts = torch.full((6, 80), math.nan), torch.full((6, 90), PROMPT + 7, dtype=torch.int32)
    frame[1:5, 3:70], counts[1:5, 2:69] = x_BV, count_BV
    before = frame.clone()
    settings = {"repetition": 1.3, "presence": 0.4, "frequency": 0.2}
    found = penalize(frame[1:5, 3:70], None, counts[1:5, 2:69], **settings)
    assert torch.equal(found, penalize(x_BV, None, count_BV, **settings))
    assert torch.equal(frame.nan_to_num(7.0), before.nan_to_num(7.0))


# Random numbers


def splitmix64_in_integers(state: int) -> int:
    """As published: the step of the state, then its mix."""
    x = (state + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_splitmix64_matches_the_published_sequence():
    # First outputs of the reference implementation for the seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    golden = 0x9E3779B97F4A7C15 - 2**64
    states = 1234567 + golden * torch.arange(3)
    assert [x % 2**64 for x in splitmix64(states).tolist()] == published
    assert splitmix64_in_integers(1234567) == published[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_draws_are_those_of_integer_arithmetic(path: str, dtype: torch.dtype):
    state_B = torch.randint(-(2**63), 2**63 - 1, (150,))
    state_B[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    step_B = torch.randint(0, 2**31 - 1, (150,)).to(dtype)
    step_B[:8] = torch.arange(8)
    expected = [
        (splitmix64_in_integers(state % 2**64 ^ step) >> 11) / 2**53
        for state, step in zip(state_B.tolist(), step_B.tolist(), strict=True)
    ]
    found = draw(state_B, step_B)
    assert found.dtype == F64 and found.tolist() == expected
    assert draw(state_B[:0], step_B[:0]).shape == (0,)


# On a GPU


@pytest.mark.gpu
def test_the_same_numbers_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    state_B = torch.randint(-(2**63), 2**63 - 1, (3000,))
    step_B = torch.randint(0, 2**31 - 1, (3000,), dtype=torch.int32)
    expected = module.draw_reference(state_B, step_B)
    assert torch.equal(module.draw_reference(state_B.cuda(), step_B.cuda()).cpu(), expected)
    choose("triton", monkeypatch)
    assert torch.equal(draw(state_B.cuda(), step_B.cuda()).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [151936, 32003])
def test_penalties_on_a_gpu(monkeypatch: pytest.MonkeyPatch, vocab: int):
    x_BV, bias_V = 3 * torch.randn(65, vocab), torch.randn(vocab)
    count_BV = torch.randint(0, 3, (65, vocab), dtype=torch.int32)
    count_BV += PROMPT * torch.randint(0, 2, (65, vocab), dtype=torch.int32)
    settings = {"repetition": 1.3, "presence": 0.4, "frequency": 0.2}
    expected = module.penalize_reference(x_BV, bias_V, count_BV, **settings)
    choose("triton", monkeypatch)
    found = penalize(x_BV.cuda(), bias_V.cuda(), count_BV.cuda(), **settings)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
