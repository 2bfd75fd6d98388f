"""Objectives against closed forms and against values computed by an independent script (GOLDEN)."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from covey.policies.policy import Batch
from covey.rl.batch import token_weights
from covey.rl.config import ObjectiveSection
from covey.rl.objectives import (
    SFT_OBJECTIVE,
    Stats,
    correction_weights,
    explain,
    grpo_loss,
    kl_terms,
    sft_loss,
)

# GOLDEN: four completions with advantages +-0.5, log-ratios to the old policy, log-prob -1 at every token.
LOG_RATIOS = [[0.1, -0.3], [0.3, 0.0, -0.2, 0.5], [-0.4], [0.25, -0.05, 0.0]]
ADVANTAGES = [0.5, -0.5, -0.5, 0.5]
TOKEN_LOSSES = [
    *(-0.552585, -0.370409),
    *(0.674929, 0.5, 0.409365, 0.824361),
    0.4,
    *(-0.64, -0.475615, -0.5),
]


def batch_of(advantage, **columns) -> Batch:
    """Scored tokens without a text: objectives look at the columns only. The weights are 1 unless given."""
    advantage = torch.as_tensor(advantage, dtype=torch.float64)
    count = len(advantage)
    index = torch.zeros(count, dtype=torch.int64)
    tensors: dict[str, Any] = {"weight": torch.ones(count, dtype=torch.float64)}
    tensors |= {name: torch.as_tensor(value, dtype=torch.float64) for name, value in columns.items()}
    return Batch(
        input_ids=index,
        positions=index.int(),
        segments=torch.zeros(0, 4, dtype=torch.int32),
        source=index,
        target=index,
        row=index.int(),
        advantage=advantage,
        **tensors,
    )


def golden(aggregation) -> tuple[Tensor, Batch]:
    counts = np.array([len(row) for row in LOG_RATIOS])
    log_ratio = torch.from_numpy(np.concatenate(LOG_RATIOS))
    logp = torch.full_like(log_ratio, -1.0)
    weight = np.repeat(token_weights(counts, aggregation, max_new_tokens=8), counts)
    return logp, batch_of(np.repeat(ADVANTAGES, counts), weight=weight, old=logp - log_ratio)


def loss_of(logp: Tensor, batch: Batch, **options) -> tuple[Tensor, Stats]:
    defaults = {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "beta": 0.0,
        "correction": "none",
        "correction_cap": 2.0,
    }
    return grpo_loss(logp, batch, **(defaults | options))


def leaf(values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64).clone().requires_grad_()


# The policy term


@pytest.mark.parametrize("m", range(10))
def test_golden_loss_of_every_token(m):
    logp, batch = golden("token")
    only_m = torch.nn.functional.one_hot(torch.tensor(m), 10).double()
    loss, _ = loss_of(logp, replace(batch, weight=only_m))
    assert loss.item() == pytest.approx(TOKEN_LOSSES[m], abs=5e-7)


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("sequence", 0.000532083), ("token", 0.0270046), ("constant", 0.00843894)]
)
def test_golden_aggregates(aggregation, expected):
    loss, _ = loss_of(*golden(aggregation))
    assert loss.item() == pytest.approx(expected, rel=3e-6)


def test_gradient_is_that_of_the_branch_that_min_takes():
    """-w A r where the token still has room, 0 where the clip holds it; the clip never holds the way back."""
    ratio = torch.tensor([1.1, 1.4, 0.5, 0.9, 0.7, 1.4], dtype=torch.float64)
    advantage = torch.tensor([2.0, 2.0, 2.0, -3.0, -3.0, -3.0], dtype=torch.float64)
    live = torch.tensor([1, 0, 1, 1, 0, 1])
    weight = torch.arange(1, 7) / 10
    logp = leaf(np.full(6, -1.5))
    loss_of(logp, batch_of(advantage, weight=weight, old=-1.5 - ratio.log()))[0].backward()
    torch.testing.assert_close(logp.grad, -weight * advantage * ratio * live)


def test_without_old_log_probs_the_ratio_is_exactly_one():
    advantage = torch.tensor([1.5, -0.5, 0.0, 2.0], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        logp = torch.tensor([-0.1, -3.3, -1e-6, -12.34], dtype=dtype, requires_grad=True)
        loss, stats = loss_of(logp, batch_of(advantage, weight=np.full(4, 0.25)))
        loss.backward()
        assert logp.grad is not None
        assert loss.item() == -0.25 * advantage.sum().item()
        assert torch.equal(logp.grad.double(), -0.25 * advantage)
        metrics = stats.finish()
        assert metrics["ratio/min"] == metrics["ratio/max"] == metrics["ratio/mean"] == 1
        assert metrics["clip/low"] == metrics["clip/high"] == metrics["kl/old"] == 0


def test_old_log_probs_of_the_same_forward_change_nothing():
    logp = leaf([-0.1, -3.3, -1e-6])
    batch = batch_of([1.0, -2.0, 0.5])
    results = []
    for old in (None, logp.detach()):
        loss, _ = loss_of(logp, replace(batch, old=old))
        results.append((loss.item(), *torch.autograd.grad(loss, logp)))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


# The correction for the sampler

WEIGHTS = [0.1, 0.51, 0.9, 1.0, 1.9, 1.99, 2.1, 30.0]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [1] * 8),
        ("truncate", [0.1, 0.51, 0.9, 1.0, 1.9, 1.99, 2.0, 2.0]),
        ("mask", [0, 0.51, 0.9, 1.0, 1.9, 1.99, 0, 0]),
    ],
)
def test_correction_weights(correction, expected):
    log_weight = torch.tensor(WEIGHTS, dtype=torch.float64).log()
    weight = correction_weights(log_weight, correction, 2.0)
    torch.testing.assert_close(weight, torch.tensor(expected, dtype=torch.float64))

    old, logp, count = torch.full((8,), -2.0, dtype=torch.float64), leaf(np.full(8, -1.9)), len(expected)
    batch = batch_of(np.full(count, 3.0), old=old, sampler=old - log_weight, reference=np.full(count, -2.5))
    plain, corrected = (
        torch.autograd.grad(loss_of(logp, batch, correction=kind)[0], logp)[0]
        for kind in ("none", correction)
    )
    torch.testing.assert_close(corrected, plain * torch.tensor(expected, dtype=torch.float64))


def test_the_correction_has_no_gradient_and_leaves_the_kl_alone():
    sampler = [-1.2, -0.1, -5.0]
    logp = leaf([-1.0, -0.5, -2.0])
    batch = batch_of([1.0, -1.0, 0.5], sampler=sampler, reference=[-1.1, -0.7, -1.0])
    weight = correction_weights(logp.detach() - torch.tensor(sampler), "truncate", 2.0)
    gradient = torch.autograd.grad(loss_of(logp, batch, correction="truncate")[0], logp)[0]
    torch.testing.assert_close(gradient, -weight * batch.advantage)  # old is None: also not through log w
    kl = [
        torch.autograd.grad(
            loss_of(logp, replace(batch, advantage=torch.zeros(3)), beta=1.0, correction=c)[0], logp
        )
        for c in ("none", "truncate", "mask")
    ]
    torch.testing.assert_close(kl[0], kl[1], rtol=0, atol=0)
    torch.testing.assert_close(kl[0], kl[2], rtol=0, atol=0)


# The KL to the reference


def test_golden_k3():
    logp, batch = golden("token")
    assert batch.old is not None
    k3, _ = kl_terms(logp, batch.old, torch.ones_like(logp))
    assert k3.mean().item() == pytest.approx(0.0345344, abs=5e-8)
    batch = replace(batch, reference=batch.old, advantage=torch.zeros(10))
    loss, stats = loss_of(logp, replace(batch, old=None), beta=0.5)
    assert loss.item() == pytest.approx(0.5 * 0.0345344, abs=5e-8)
    assert stats.finish()["kl/reference"] == pytest.approx(0.0345344, abs=5e-8)
    assert stats.finish()["loss/kl"] == loss.item()


@pytest.mark.parametrize("off_policy", [False, True])
def test_the_kl_term_has_value_and_gradient_of_the_reverse_kl(off_policy):
    """Five outcomes, every expectation enumerated: an outcome weighs as much as the old policy samples it."""
    generator = torch.Generator().manual_seed(1)
    logits, old_logits, reference_logits = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logp, reference = logits.log_softmax(0), reference_logits.log_softmax(0)
    old = old_logits.log_softmax(0) if off_policy else logp.detach()
    kl = (logp.exp() * (logp - reference)).sum()

    batch = batch_of(np.zeros(5), weight=old.exp(), old=old, reference=reference)
    loss, _ = loss_of(logp, batch, beta=1.0)
    assert loss.item() == pytest.approx(kl.item(), abs=1e-12)
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected, rtol=0, atol=1e-12)


def test_the_kl_gradient_is_the_derivative_of_ratio_times_k3():
    logp, reference = leaf([-1.0, -0.2, -4.0]), torch.tensor([-1.5, -2.0, -0.5])
    ratio = (logp - torch.tensor([-1.1, -0.1, -3.5])).exp()
    k = logp - reference
    expected = torch.autograd.grad((ratio * (torch.exp(-k) - 1 + k)).sum(), logp, retain_graph=True)[0]
    _, pull = kl_terms(logp, reference, ratio)
    torch.testing.assert_close(torch.autograd.grad(pull.sum(), logp)[0], expected)


# Supervised fine-tuning


def test_sft_is_cross_entropy():
    generator = torch.Generator().manual_seed(2)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-15)):
        logits = (3 * torch.randn(40, 97, generator=generator, dtype=dtype)).requires_grad_()
        target = torch.randint(97, (40,), generator=generator)
        expected = torch.nn.functional.cross_entropy(logits, target)
        batch = batch_of(np.ones(40), weight=np.full(40, 1 / 40))
        loss, stats = sft_loss(logits.log_softmax(-1).gather(1, target[:, None])[:, 0], batch)
        assert loss.item() == pytest.approx(expected.item(), abs=tolerance)
        pair = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, expected)]
        torch.testing.assert_close(*pair, rtol=0, atol=tolerance)
        assert stats.finish() == {"loss/sft": loss.item(), "tokens/trained": 40}


# Extremes

EXTREMES = [-200.0, -88.8, -21.0, -1e-8, 0.0, 1e-8, 21.0, 88.8, 200.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
@pytest.mark.parametrize("advantage", [-1.5, 0.0, 1.5])
def test_hundreds_of_nats_stay_finite(advantage, correction, dtype):
    gaps = torch.tensor(EXTREMES, dtype=dtype)
    old_gap, sampler_gap, reference_gap = torch.cartesian_prod(gaps, gaps, gaps).T
    logp = torch.full_like(old_gap, -1.0).requires_grad_()
    start = logp.detach() - old_gap
    batch = batch_of(np.full(len(logp), advantage), weight=np.full(len(logp), 1e-3))
    batch = replace(batch, weight=batch.weight.to(dtype), advantage=batch.advantage.to(dtype))
    batch = replace(batch, old=start, sampler=start - sampler_gap, reference=logp.detach() - reference_gap)
    loss, stats = loss_of(logp, batch, beta=0.1, correction=correction)
    loss.backward()
    assert logp.grad is not None and loss.dtype == dtype
    assert loss.isfinite() and logp.grad.isfinite().all()
    assert all(math.isfinite(value) for value in stats.finish().values())


def test_the_kl_keeps_its_gradient_far_from_the_reference():
    """k = -18: as a difference of exponentials (7e7 each) float32 makes the gradient -16."""
    logp = torch.tensor([-19.0], requires_grad=True)
    batch = replace(batch_of([0.0]), weight=torch.ones(1), reference=torch.tensor([-1.0]))
    loss, _ = loss_of(logp, batch, beta=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(18) - 1 - 18, rel=1e-6)
    torch.testing.assert_close(logp.grad, torch.tensor([-18.0]))


finite = st.floats(-250, 0, allow_subnormal=False)


@given(st.lists(st.tuples(finite, finite, finite, finite, st.floats(-5, 5)), max_size=12))
def test_any_log_probs_give_finite_losses_that_add_up(rows):
    columns = torch.tensor(rows, dtype=torch.float32).reshape(-1, 5)
    whole, total, stats = [], 0.0, Stats()
    for part in (columns, columns[::2], columns[1::2]):
        logp = part[:, 0].clone().requires_grad_()
        old, sampler, reference, advantage = (column.double() for column in part.T[1:])
        batch = batch_of(advantage, old=old, sampler=sampler, reference=reference)
        loss, part_stats = loss_of(logp, batch, beta=0.01, correction="mask")
        loss.backward()
        assert loss.isfinite() and logp.grad is not None and logp.grad.isfinite().all()
        if part is columns:
            whole = [loss.item(), part_stats.finish()]
        else:
            total, stats = total + loss.item(), stats + part_stats
    assert total == pytest.approx(whole[0], rel=1e-6, abs=1e-6)
    assert stats.finish() == pytest.approx(whole[1], rel=1e-6, abs=1e-6)


# Statistics


def test_metrics_of_the_golden_step():
    logp, batch = golden("token")
    entropy = torch.linspace(0, 1, 10)
    loss, stats = loss_of(logp, batch, entropy_M=entropy)
    metrics = stats.finish()
    delta = np.concatenate(LOG_RATIOS)
    assert metrics == pytest.approx(
        {
            "loss/policy": loss.item(),
            "tokens/trained": 10,
            "entropy/mean": 0.5,
            "ratio/mean": np.exp(delta).mean(),
            "ratio/min": math.exp(-0.4),
            "ratio/max": math.exp(0.5),
            "clip/low": 0.1,  # the third completion: A < 0, r = 0.67; the first one's 0.74 has A > 0
            "clip/high": 0.1,  # r = 1.284 of the last completion; the second one's 1.35 and 1.65 have A < 0
            "kl/old": (np.exp(delta) - 1 - delta).mean(),
        }
    )


def test_clip_shares_count_only_what_the_clip_holds():
    ratio = torch.tensor([0.5, 0.5, 0.5, 1.5, 1.0], dtype=torch.float64)
    batch = batch_of([-1.0, -1.0, 1.0, 1.0, 1.0], old=-ratio.log())
    metrics = loss_of(torch.zeros(5, dtype=torch.float64), batch)[1].finish()
    assert (metrics["clip/low"], metrics["clip/high"]) == (0.4, 0.2)


def test_metrics_of_the_sampler_are_raw():
    weight = torch.tensor([0.05, 0.95, 1.05, 3.95], dtype=torch.float64)
    sampler = torch.full((4,), -3.0, dtype=torch.float64)
    batch = batch_of(np.ones(4), old=sampler + weight.log(), sampler=sampler)
    metrics = loss_of(sampler, batch, correction="truncate")[1].finish()
    assert metrics["sampler/logp_diff"] == pytest.approx(weight.log().abs().mean().item())
    assert metrics["sampler/logp_diff_max"] == pytest.approx(math.log(20))
    assert metrics["sampler/outside"] == 0.5
    assert metrics["sampler/above_cap"] == 0.25
    assert metrics["sampler/ess"] == pytest.approx(6.0**2 / (4 * (weight**2).sum().item()))


def test_a_forgotten_temperature_shows_token_by_token_though_the_mean_weight_is_one():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    sampler, old = (logits / 0.5).log_softmax(0), logits.log_softmax(0)
    assert (sampler.exp() * (old - sampler).exp()).sum().item() == pytest.approx(1)
    metrics = loss_of(old, batch_of(np.ones(4), old=old, sampler=sampler))[1].finish()
    assert metrics["sampler/logp_diff_max"] == pytest.approx(math.log(14.95265), abs=1e-6)
    assert metrics["sampler/outside"] == 1


def test_an_empty_batch_gives_zero_and_no_nan():
    logp = leaf([])
    empty: list[float] = []
    batch = batch_of(empty, old=empty, sampler=empty, reference=empty)
    loss, stats = loss_of(logp, batch, beta=0.1, correction="truncate")
    loss.backward()
    assert loss.item() == 0
    assert stats.finish() == {"loss/policy": 0, "loss/kl": 0, "tokens/trained": 0}
    logp, full = golden("token")
    both = stats + loss_of(logp, full)[1]
    assert both.finish()["ratio/max"] == pytest.approx(math.exp(0.5))
    assert Stats().finish() == {"tokens/trained": 0}


def test_missing_columns_are_refused():
    with pytest.raises(ValueError, match="needs the sampler's log-probs"):
        loss_of(leaf([-1.0]), batch_of([1.0]), correction="truncate")
    with pytest.raises(ValueError, match="needs the reference's log-probs"):
        loss_of(leaf([-1.0]), batch_of([1.0]), beta=0.1)


# In words


def test_explain_names_formula_and_denominator():
    text = explain(ObjectiveSection(), max_new_tokens=64)
    assert "-c * min(r * A, clip(r, 0.8, 1.28) * A)" in text and "N_t: all trained tokens" in text
    assert "(R - mean of the group) / (std of the group + eps), std unbiased" in text and "eps 1e-06" in text
    assert "at most 2" in text and "the reference is never computed" in text and "nothing is clipped" in text
    section = ObjectiveSection(
        advantage="rloo",
        aggregation="constant",
        beta=0.04,
        correction="mask",
        correction_cap=4.0,
        truncated="mask",
        updates_per_rollout=2,
    )
    text = explain(section, max_new_tokens=64)
    assert "N_s * 64" in text and "+ 0.04 * r * k3" in text and "mean of the other rewards" in text
    assert (
        "0 outside [0.25, 4]" in text
        and "max_new_tokens cut off" in text
        and "nothing is clipped" not in text
    )
    plain = explain(ObjectiveSection(aggregation="sequence", correction="none"), max_new_tokens=64)
    assert "[-min(" in plain and "N_s * T" in plain
    assert "cross-entropy" in SFT_OBJECTIVE
