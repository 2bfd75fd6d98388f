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
from covey.rl.correction import correction_weights
from covey.rl.kl import kl_term
from covey.rl.losses import Tokens
from covey.rl.objective_config import KlEstimator, ObjectiveSection
from covey.rl.objectives import policy_objective, sft_loss
from covey.rl.stats import Stats

# GOLDEN: four completions with advantages +-0.5, log-ratios to the old policy, log-prob -1 at every token.
LOG_RATIOS = [[0.1, -0.3], [0.3, 0.0, -0.2, 0.5], [-0.4], [0.25, -0.05, 0.0]]
ADVANTAGES = [0.5, -0.5, -0.5, 0.5]
TOKEN_LOSSES = [
    *(-0.552585, -0.370409),
    *(0.674929, 0.5, 0.409365, 0.824361),
    0.4,
    *(-0.64, -0.475615, -0.5),
]


def batch_of(advantage, row=None, **columns) -> Batch:
    """Scored tokens without a text: objectives look at the columns only. One row and weights of 1 unless given."""
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
        row=index.int() if row is None else torch.as_tensor(row, dtype=torch.int32),
        advantage=advantage,
        **tensors,
    )


def golden(aggregation) -> tuple[Tensor, Batch]:
    counts = np.array([len(row) for row in LOG_RATIOS])
    log_ratio = torch.from_numpy(np.concatenate(LOG_RATIOS))
    logp = torch.full_like(log_ratio, -1.0)
    weight = np.repeat(token_weights(counts[None], aggregation, max_new_tokens=8)[0], counts)
    row = np.repeat(np.arange(4), counts)
    return logp, batch_of(np.repeat(ADVANTAGES, counts), row, weight=weight, old=logp - log_ratio)


def loss_of(logp: Tensor, batch: Batch, entropy_M=None, bonus=0.0, **options) -> tuple[Tensor, Stats]:
    section = ObjectiveSection.model_validate({"correction": "none"} | options)
    return policy_objective(logp, batch, section, entropy_M=entropy_M, entropy_bonus=bonus)


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
    ("aggregation", "expected"),
    [("sequence", 0.000532083), ("token", 0.0270046), ("constant", 0.00843894), ("prompt", 0.0270046)],
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


def weights_of(log_weight: Tensor, row=None, **options) -> Tensor:
    tokens = Tokens(log_weight, log_weight, batch_of(np.zeros(len(log_weight)), row))
    return correction_weights(tokens, log_weight, ObjectiveSection.model_validate(options))


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
    weight = weights_of(log_weight, correction=correction)
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
    weight = weights_of(logp.detach() - torch.tensor(sampler), correction="truncate")
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Rows with token weights (2, 2, 0.5) and (1.02, 0.98): products 2 and 0.9996, geometric means 1.26 and 0.9998.
        ({"correction": "truncate", "correction_level": "sequence"}, [2, 2, 2, 0.9996, 0.9996]),
        (
            {"correction": "truncate", "correction_level": "sequence", "correction_high": 1.5},
            [1.5] * 3 + [0.9996] * 2,
        ),
        (
            {"correction": "mask", "correction_level": "sequence", "correction_high": 1.5},
            [0] * 3 + [0.9996] * 2,
        ),
        ({"correction": "mask", "correction_level": "sequence", "correction_low": 1.0}, [2, 2, 2, 0, 0]),
        ({"correction": "truncate", "correction_level": "geometric"}, [2 ** (1 / 3)] * 3 + [0.9996**0.5] * 2),
        ({"correction": "mask", "correction_level": "geometric"}, [0] * 3 + [0.9996**0.5] * 2),
        ({"correction": "mask", "correction_low": 0.6}, [2, 2, 0, 1.02, 0.98]),
    ],
)
def test_correction_over_whole_completions(options, expected):
    log_weight = torch.tensor([2, 2, 0.5, 1.02, 0.98], dtype=torch.float64).log()
    weight = weights_of(log_weight, row=[3, 3, 3, 5, 5], **options)
    torch.testing.assert_close(weight, torch.tensor(expected, dtype=torch.float64))


# The KL to the reference


def test_golden_kl():
    logp, batch = golden("token")
    assert batch.old is not None
    golden_values: dict[KlEstimator, float] = {"k1": 0.02, "k2": 0.03525, "k3": 0.0345344}
    for estimator, expected in golden_values.items():
        value, _ = kl_term(logp, batch.old, torch.ones_like(logp), estimator, live_ratio=True)
        assert value.mean().item() == pytest.approx(expected, abs=5e-8)
    batch = replace(batch, reference=batch.old, advantage=torch.zeros(10))
    loss, stats = loss_of(logp, replace(batch, old=None), beta=0.5)
    assert loss.item() == pytest.approx(0.5 * 0.0345344, abs=5e-8)
    assert stats.finish()["kl/reference"] == pytest.approx(0.0345344, abs=5e-8)
    assert stats.finish()["loss/kl"] == loss.item()


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_with_the_live_ratio_the_gradient_is_that_of_the_estimators_expectation(estimator, off_policy):
    """Five outcomes, every expectation enumerated: an outcome weighs as much as the old policy samples it.

    k1 and k3 have the expectation KL(policy || reference), so their gradients must be its gradient."""
    logits, logp, old, reference = five_outcomes(off_policy)
    k = logp - reference
    formula = {"k1": k, "k2": 0.5 * k**2, "k3": torch.exp(-k) - 1 + k}[estimator]
    expectation = (logp.exp() * formula).sum()
    if estimator != "k2":
        kl = (logp.exp() * k).sum()
        torch.testing.assert_close(expectation, kl, rtol=0, atol=1e-14)

    batch = batch_of(np.zeros(5), weight=old.exp(), old=old, reference=reference)
    loss, _ = loss_of(logp, batch, beta=1.0, kl=estimator, kl_ratio=True)
    assert loss.item() == pytest.approx(expectation.item(), abs=1e-12)
    expected = torch.autograd.grad(expectation, logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected, rtol=0, atol=1e-12)


def five_outcomes(off_policy):
    """logits (a leaf) and the log-probs of policy, old policy and reference."""
    generator = torch.Generator().manual_seed(1)
    logits, old_logits, reference_logits = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logp = logits.log_softmax(0)
    old = old_logits.log_softmax(0) if off_policy else logp.detach()
    return logits, logp, old, reference_logits.log_softmax(0)


def test_without_the_ratio_k2_is_right_on_policy_and_k3_is_that_of_the_other_kl():
    logits, logp, old, reference = five_outcomes(off_policy=False)
    batch = batch_of(np.zeros(5), weight=old.exp(), old=old, reference=reference)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    k2, _ = loss_of(logp, batch, beta=1.0, kl="k2")
    torch.testing.assert_close(gradient(k2), gradient((logp.exp() * (logp - reference)).sum()))
    k3, _ = loss_of(logp, batch, beta=1.0, kl="k3", kl_ratio=False)
    other = (
        reference.exp() * (reference - logp)
    ).sum()  # KL(reference || policy), whose gradient is p - p_ref
    torch.testing.assert_close(gradient(k3), gradient(other))


@pytest.mark.parametrize("live_ratio", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_written_kl_gradients_are_the_derivatives(estimator, live_ratio):
    logp, reference = leaf([-1.0, -0.2, -4.0]), torch.tensor([-1.5, -2.0, -0.5], dtype=torch.float64)
    ratio = (logp - torch.tensor([-1.1, -0.1, -3.5], dtype=torch.float64)).exp()
    k = logp - reference
    formula = {"k1": k, "k2": 0.5 * k**2, "k3": torch.exp(-k) - 1 + k}[estimator]
    plain = (ratio * formula if live_ratio else formula).sum()
    expected = torch.autograd.grad(plain, logp, retain_graph=True)[0]
    value, term = kl_term(logp, reference, ratio, estimator, live_ratio=live_ratio)
    assert not value.requires_grad
    torch.testing.assert_close(term.sum(), plain)
    torch.testing.assert_close(torch.autograd.grad(term.sum(), logp)[0], expected)


def test_k1_in_the_loss_has_no_gradient_on_average_which_is_why_it_is_refused():
    logits, logp, old, reference = five_outcomes(off_policy=False)
    _, term = kl_term(logp, reference, torch.ones_like(logp), "k1", live_ratio=False)
    gradient = torch.autograd.grad((old.exp() * term).sum(), logits)[0]
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-15)


# Entropy


def test_the_entropy_term_has_the_weights_of_the_loss_and_its_own_gradient():
    logits = leaf(np.random.default_rng(0).normal(size=(3, 7)))
    logp_all = logits.log_softmax(-1)
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    weight = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    loss, stats = loss_of(logp_all[:, 0], batch_of(np.zeros(3), weight=weight), entropy, bonus=0.3)
    expected = -0.3 * (weight * entropy).sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-15)
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, expected)]
    torch.testing.assert_close(*gradients)
    assert stats.finish()["loss/entropy"] == loss.item()
    with pytest.raises(ValueError, match="needs the entropies"):
        loss_of(logp_all[:, 0], batch_of(np.zeros(3)), bonus=0.3)


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
    assert metrics["sampler/kl"] == pytest.approx(-weight.log().mean().item())
    assert metrics["sampler/weight"] == pytest.approx(1.5)
    assert metrics["sampler/weight_max"] == pytest.approx(3.95)
    assert metrics["sampler/applied"] == pytest.approx((0.05 + 0.95 + 1.05 + 2.0) / 4)
    assert metrics["sampler/masked"] == 0
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
