"""Every policy loss: values of an independent script (GOLDEN), gradients in closed form, and what no loss may do."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from covey.policies.policy import Batch
from covey.rl.batch import token_weights
from covey.rl.losses import LOSSES, Tokens, held
from covey.rl.objective_config import LOSS_DEFAULTS, Loss, ObjectiveSection
from covey.rl.objectives import policy_objective

# GOLDEN: four completions, their log-ratios to the old policy, advantages +-0.5, log-prob -1 at every token.
LOG_RATIOS = [[0.1, -0.3], [0.3, 0.0, -0.2, 0.5], [-0.4], [0.25, -0.05, 0.0]]
ADVANTAGES = [0.5, -0.5, -0.5, 0.5]
COUNTS = np.array([len(row) for row in LOG_RATIOS])
LOSS_NAMES = get_args(Loss)


def tokens_of(log_ratio, advantage, row=None, logp: Any = -1.0, sampler=None) -> Tokens:
    """Tokens with these log-ratios and advantages; logp is a leaf. One row unless given."""
    delta = torch.as_tensor(log_ratio, dtype=torch.float64)
    logp_M = torch.as_tensor(logp, dtype=torch.float64).expand(len(delta)).clone().requires_grad_()
    index = torch.zeros(len(delta), dtype=torch.int64)
    columns: dict[str, Any] = {
        name: torch.as_tensor(value, dtype=torch.float64)
        for name, value in {"advantage": advantage, "weight": np.ones(len(delta))}.items()
    }
    batch = Batch(
        index,
        index.int(),
        torch.zeros(0, 4, dtype=torch.int32),
        index,
        index,
        index.int() if row is None else torch.as_tensor(row, dtype=torch.int32),
        **columns,
        sampler=None if sampler is None else torch.as_tensor(sampler, dtype=torch.float64),
    )
    return Tokens(logp_M, logp_M.detach() - delta, batch)


def golden() -> Tokens:
    return tokens_of(
        np.concatenate(LOG_RATIOS), np.repeat(ADVANTAGES, COUNTS), np.repeat(np.arange(4), COUNTS)
    )


def option_of(loss: str, **given):
    return ObjectiveSection.model_validate({"loss": loss, "correction": "none"} | given).option


def run(loss: str, tokens: Tokens, **given) -> tuple[Tensor, Tensor]:
    """Loss per token, and the gradient of their sum."""
    loss_M = LOSSES[loss](tokens, option_of(loss, **given))
    (gradient,) = torch.autograd.grad(loss_M.sum(), tokens.logp)
    return loss_M.detach(), gradient


SAME_CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("loss", "given_options", "aggregation", "expected"),
    [
        ("grpo", SAME_CLIP, "sequence", 0.000532083),
        ("grpo", SAME_CLIP, "token", 0.0270046),
        ("grpo", SAME_CLIP, "constant", 0.00843894),
        ("gspo", SAME_CLIP, "sequence", -0.00149279),
        ("luspo", SAME_CLIP, "sequence", 0.0538556),
        ("cispo", {"ratio_cap": 1.28}, "token", 0.00140839),
        ("sapo", {}, "sequence", -0.0401074),
        ("gmpo", SAME_CLIP, "sequence", 0.000848559),
        ("vespo", {}, "token", -0.0321902),
        ("dppo_tv", {"max_divergence": 0.1}, "token", 0.0131967),
    ],
)
def test_golden_losses(loss, given_options, aggregation, expected):
    weight = np.repeat(token_weights(COUNTS[None], aggregation, max_new_tokens=8)[0], COUNTS)
    loss_M, _ = run(loss, golden(), **given_options)
    assert (
        float(f"{(loss_M.numpy() * weight).sum():.6g}") == expected
    )  # all six digits that the script printed


def test_golden_sequence_ratios_and_vespo_weights():
    tokens = golden()
    first = np.cumsum([0, *COUNTS[:-1]])
    ratios = tokens.row_mean(tokens.log_ratio).exp().detach().numpy()[first]
    np.testing.assert_allclose(ratios, [0.904837, 1.161834, 0.670320, 1.068939], atol=5e-7)
    loss_M, _ = run("vespo", golden())  # -A phi logp with logp = -1 is A phi
    phi = loss_M.numpy()[first] / np.array(ADVANTAGES)
    np.testing.assert_allclose(phi, [1.154662, 1.168549, 0.582375, 0.767814], atol=5e-7)


def test_a_sequence_ratio_is_the_exponential_of_a_mean():
    """100 tokens of log-ratio 0.01: e^0.01, neither e nor the mean of exponentials of something else."""
    loss_M, _ = run("gspo", tokens_of(np.full(100, 0.01), np.ones(100)), clip_low=0.2, clip_high=0.28)
    assert -loss_M[0].item() == pytest.approx(1.01005, abs=1e-6)


# Two-sided clip and dual clip


def test_two_sided_and_dual_clip_are_the_same_function():
    """INTELLECT-2: -min(min(r, d) A, clip(r) A). Dual clip: min(max-form, c |A|) where A < 0. Golden: 1.5 and 1.0."""
    for cap, expected in ((3.0, 1.5), (2.0, 1.0)):
        loss_M, _ = run("grpo", tokens_of([math.log(4)], [-0.5]), ratio_cap=cap)
        assert loss_M.item() == pytest.approx(expected, abs=1e-12)
    ratio = torch.linspace(0.05, 6, 200, dtype=torch.float64)
    for a in (-1.3, 0.7):
        clipped = ratio.clamp(0.8, 1.28)
        ppo = -torch.minimum(ratio * a, clipped * a)
        two_sided = -torch.minimum(ratio.clamp(max=3.0) * a, clipped * a) if a < 0 else ppo
        dual = torch.minimum(ppo, torch.tensor(-3.0 * a)) if a < 0 else ppo
        loss_M, gradient = run("grpo", tokens_of(ratio.log(), torch.full((200,), a)), ratio_cap=3.0)
        torch.testing.assert_close(loss_M, two_sided)
        torch.testing.assert_close(loss_M, dual)
        if a < 0:
            assert (gradient[ratio > 3.0] == 0).all() and (gradient[(ratio > 1.3) & (ratio < 3)] != 0).all()


# Gradients in closed form


def test_gspo_spreads_the_gradient_of_a_row_evenly():
    """d s / d logp_t = s / T: with weights 1 / T every token gets -A s / T, until the clip holds the row."""
    for mean, live in ((0.1, True), (0.4, False)):
        delta = torch.tensor([mean - 0.05, mean, mean + 0.05], dtype=torch.float64)
        tokens = tokens_of(delta, np.full(3, 2.0))
        loss_M = LOSSES["gspo"](tokens, option_of("gspo", clip_low=0.2, clip_high=0.28))
        (gradient,) = torch.autograd.grad((loss_M / 3).sum(), tokens.logp)
        expected = -2.0 * math.exp(mean) / 3 if live else 0.0
        torch.testing.assert_close(gradient, torch.full_like(gradient, expected))


def test_luspo_is_gspo_times_the_length():
    tokens = golden()
    gspo, luspo = (LOSSES[name](tokens, option_of(name)) for name in ("gspo", "luspo"))
    torch.testing.assert_close(luspo, gspo * torch.from_numpy(np.repeat(COUNTS, COUNTS)))


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """-A min(r, cap): where the ratio passes the cap the weight stays at the cap instead of becoming 0."""
    ratio = torch.tensor([0.1, 1.0, 4.0, 6.0, 50.0], dtype=torch.float64)
    _, gradient = run("cispo", tokens_of(ratio.log(), np.full(5, 2.0)))
    torch.testing.assert_close(gradient, -2.0 * torch.tensor([0.1, 1.0, 4.0, 5.0, 5.0], dtype=torch.float64))


def test_sapo_weighs_by_a_bell_around_ratio_one():
    ratio = torch.tensor([0.2, 1.0, 1.7], dtype=torch.float64)
    for a, tau in ((1.5, 1.0), (-1.5, 1.05)):
        _, gradient = run("sapo", tokens_of(ratio.log(), np.full(3, a)))
        s = torch.sigmoid(tau * (ratio - 1))
        torch.testing.assert_close(gradient, -a * 4 * s * (1 - s) * ratio)
    assert gradient[1].item() == pytest.approx(1.5)  # weight 1 at ratio 1


def test_gmpo_clips_in_log_space_on_the_side_where_the_advantage_pushes():
    delta = torch.tensor([0.5, -0.5, 0.1], dtype=torch.float64)
    for a, bounded in ((1.0, [0.4, -0.5, 0.1]), (-1.0, [0.5, -0.4, 0.1])):
        loss_M, gradient = run("gmpo", tokens_of(delta, np.full(3, a)))
        value = math.exp(sum(bounded) / 3)
        torch.testing.assert_close(loss_M, torch.full_like(loss_M, -a * value))
        live = torch.tensor([d == b for d, b in zip(delta.tolist(), bounded, strict=True)])
        torch.testing.assert_close(gradient, torch.where(live, -a * value, 0.0).double())


def test_vespo_takes_the_whole_weight_against_the_sampler():
    """log W = sum of (logp - old) + sum of (old - sampler) = sum of (logp - sampler); no gradient through phi."""
    tokens = tokens_of([0.1, -0.2], [1.0, 1.0], logp=[-1.0, -0.5], sampler=[-1.3, -0.45])
    loss_M, gradient = run("vespo", tokens)
    log_weight = (-1.0 + 1.3) + (-0.5 + 0.45)
    phi = math.exp(3 + 2 * log_weight - 3 * math.exp(log_weight))
    torch.testing.assert_close(loss_M, phi * torch.tensor([1.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.full_like(gradient, -phi))


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
def test_dppo_drops_only_tokens_that_move_away_and_are_too_far(loss):
    old, new = np.array([0.5, 0.5, 0.5, 0.5, 0.01]), np.array([0.9, 0.9, 0.1, 0.1, 0.02])
    advantage = np.array([1.0, -1.0, 1.0, -1.0, 1.0])
    tokens = tokens_of(np.log(new / old), advantage, logp=np.log(new))
    _, gradient = run(loss, tokens)
    kept = torch.tensor([0, 1, 1, 0, 1], dtype=torch.float64)  # twice as likely, but only 0.01 further: kept
    torch.testing.assert_close(gradient, -kept * torch.from_numpy(advantage * new / old))
    low, high = held(loss, tokens, option_of(loss))
    assert low.tolist() == [False, False, False, True, False] and high.tolist() == [True] + 4 * [False]


def test_dppo_kl_uses_the_kl_of_two_coins():
    p, q = 0.3, 0.45
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    for bound, live in ((kl * 1.001, True), (kl * 0.999, False)):
        tokens = tokens_of([math.log(q / p)], [1.0], logp=math.log(q))
        assert bool(run("dppo_kl", tokens, max_divergence=bound)[1].any()) is live


def test_sft_is_the_negative_log_prob():
    loss_M, gradient = run_sft(tokens_of([0.0, 0.0], [1.0, 1.0], logp=[-0.5, -2.0]))
    assert loss_M.tolist() == [0.5, 2.0] and gradient.tolist() == [-1.0, -1.0]


def run_sft(tokens: Tokens) -> tuple[Tensor, Tensor]:
    loss_M = LOSSES["sft"](tokens, lambda key: None)
    return loss_M.detach(), torch.autograd.grad(loss_M.sum(), tokens.logp)[0]


# What holds for every loss


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(loss):
    """At ratio 1 (and W = 1) the gradient is -A per token (luspo: -T A), whatever the bounds."""
    row, advantage = np.array([0, 0, 0, 1]), np.array([1.5, 1.5, 1.5, -0.5])
    scale = np.array([3, 3, 3, 1]) if loss == "luspo" else np.ones(4)
    _, gradient = run(loss, tokens_of(np.zeros(4), advantage, row, logp=[-0.3, -2.0, -1e-3, -7.0]))
    expected = -torch.from_numpy(advantage * scale)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_advantage_zero_means_no_loss_and_no_gradient(loss):
    loss_M, gradient = run(loss, tokens_of([0.3, -5.0, 40.0], np.zeros(3)))
    assert not loss_M.any() and not gradient.any()


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_rows_do_not_touch_each_other(loss):
    """The tokens of one row give the same loss and gradient whatever other rows are in the batch."""
    together = run(loss, golden())
    at = 0
    for delta, advantage in zip(LOG_RATIOS, ADVANTAGES, strict=True):
        alone = run(loss, tokens_of(delta, np.full(len(delta), advantage)))
        for x, y in zip(together, alone, strict=True):
            torch.testing.assert_close(x[at : at + len(delta)], y, rtol=1e-14, atol=1e-14)
        at += len(delta)


EXTREMES = [-200.0, -88.8, -21.0, -1e-8, 0.0, 1e-8, 21.0, 88.8, 200.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [-1.5, 0.0, 1.5])
@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_hundreds_of_nats_stay_finite(loss, advantage, dtype, level):
    gaps = torch.tensor(EXTREMES, dtype=dtype)
    old_gap, sampler_gap, reference_gap = torch.cartesian_prod(gaps, gaps, gaps).T
    logp = torch.full_like(old_gap, -1.0).requires_grad_()
    old = logp.detach() - old_gap
    index = torch.zeros(len(old), dtype=torch.int64)
    full = torch.full_like(old, 1e-3)
    batch = Batch(
        index,
        index.int(),
        torch.zeros(0, 4, dtype=torch.int32),
        index,
        index,
        torch.arange(len(old), dtype=torch.int32) // 3,
        advantage=torch.full_like(old, advantage),
        weight=full,
        old=old,
        sampler=old - sampler_gap,
        reference=logp.detach() - reference_gap,
    )
    form = {"correction": "none"} if loss == "vespo" else {"correction": "mask", "correction_level": level}
    section = ObjectiveSection.model_validate({"loss": loss, "beta": 0.1} | form)
    value, stats = policy_objective(logp, batch, section)
    value.backward()
    assert logp.grad is not None and value.dtype == dtype
    assert value.isfinite() and logp.grad.isfinite().all()
    assert all(math.isfinite(number) for number in stats.finish().values())


@given(
    st.sampled_from(LOSS_NAMES),
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=9),
)
def test_the_loss_never_rewards_moving_against_the_advantage(loss, rows):
    """The gradient of one row's sum has the sign of -A at every token, or is 0."""
    delta, (advantage, *_) = [d for d, _ in rows], [a for _, a in rows]
    _, gradient = run(loss, tokens_of(delta, np.full(len(rows), advantage)))
    assert (gradient * advantage <= 0).all()


def test_no_tokens():
    for loss in LOSS_NAMES:
        loss_M, gradient = run(loss, tokens_of([], []))
        assert len(loss_M) == len(gradient) == 0


def test_every_loss_has_defaults():
    assert set(LOSS_DEFAULTS) == set(LOSS_NAMES) == set(LOSSES) - {"sft"}
