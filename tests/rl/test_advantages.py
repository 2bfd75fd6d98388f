import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from covey.rl.advantages import AdvantageKind, compute_advantages, whiten

NAN = float("nan")
KINDS = get_args(AdvantageKind)
GROUPED = tuple(kind for kind in KINDS if kind != "reinforce++")  # those that compare within a group

# Multiples of 1/8 are exact in floating point, so ties are ties and shifts and scales round nothing away.
eighths = st.integers(-80, 80).map(lambda i: i / 8)
groups = st.tuples(st.integers(1, 4), st.integers(2, 9)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.one_of(eighths, st.just(NAN)))
)


def advantages(reward, kind, **options) -> np.ndarray:
    """compute_advantages, where "gdpo" sees a single function."""
    reward = np.asarray(reward)
    extra = {"functions_KPG": reward[None], "weights_K": np.ones(1)} if kind == "gdpo" else {}
    return compute_advantages(reward, kind, **(extra | options))


# Numbers


def test_golden_values():
    """An independent script's, for rewards 1 0 0 1 in completions of 2, 4, 1 and 3 tokens."""
    reward, lengths = np.array([[1.0, 0.0, 0.0, 1.0]]), np.array([[2, 4, 1, 3]])
    signs = np.array([[1, -1, -1, 1]])
    for kind, expected, options in (
        ("group", 0.865875, {"eps": 1e-4}),
        ("rloo", 2 / 3, {}),
        ("none", 0.5, {}),
        ("maxrl", 1.0, {}),
        ("reinforce++-baseline", 0.948683, {"lengths_PG": lengths}),
    ):
        np.testing.assert_allclose(advantages(reward, kind, **options), expected * signs, atol=5e-7)


def test_one_right_of_four():
    reward = [[1.0, 0.0, 0.0, 0.0]]
    np.testing.assert_array_equal(advantages(reward, "none"), [[0.75, -0.25, -0.25, -0.25]])
    unbiased = advantages(reward, "group", eps=1e-12)
    np.testing.assert_allclose(unbiased, [[1.5, -0.5, -0.5, -0.5]], atol=1e-11)
    biased = advantages(reward, "group", std="biased", eps=1e-12)
    np.testing.assert_allclose(biased, [[3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]], atol=1e-11)
    np.testing.assert_allclose(advantages(reward, "maxrl"), [[3, -1, -1, -1]])


@pytest.mark.parametrize("std", ["unbiased", "biased"])
def test_batch_divides_by_the_std_of_all_rewards_of_the_step(std):
    reward = np.array([[1.0, 0.0, 2.0], [5.0, 5.0, NAN]])
    spread = np.std([1, 0, 2, 5, 5], ddof=1 if std == "unbiased" else 0)
    expected = np.array([[0, -1, 1], [0, 0, 0]]) / (spread + 1e-6)
    np.testing.assert_allclose(advantages(reward, "batch", std=std), expected, rtol=1e-12, atol=1e-15)


def test_reinforce_plus_plus_whitens_over_tokens():
    """Rewards 3, 1, 2 in completions of 1, 4 and 5 tokens, as if every token held its completion's reward."""
    tokens = np.repeat([3.0, 1.0, 2.0], [1, 4, 5])
    expected = ([[3.0, 1.0, 2.0]] - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(
        advantages([[3.0, 1.0, 2.0]], "reinforce++", lengths_PG=np.array([[1, 4, 5]])), expected
    )
    alone = advantages([[3.0], [1.0], [2.0]], "reinforce++", lengths_PG=np.array([[1], [4], [5]]))
    np.testing.assert_allclose(alone[:, 0], expected[0])  # needs no group


def test_reinforce_plus_plus_baseline_whitens_what_is_left_of_the_groups_mean():
    reward, lengths = np.array([[1.0, 0.0, 0.0], [4.0, 4.0, 4.0]]), np.array([[2, 4, 1], [3, 3, 3]])
    tokens = np.repeat([2 / 3, -1 / 3, -1 / 3, 0, 0, 0], lengths.ravel())
    white = (np.array([2 / 3, -1 / 3, -1 / 3]) - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    found = advantages(reward, "reinforce++-baseline", lengths_PG=lengths)
    np.testing.assert_allclose(found[0], white)
    np.testing.assert_array_equal(found[1], np.zeros(3))  # the second group has nothing to say


def test_opo_weighs_the_baseline_by_length():
    found = advantages([[1.0, 0.0, 2.0]], "opo", lengths_PG=np.array([[10, 30, 60]]))
    baseline = (10 * 1 + 60 * 2) / 100
    np.testing.assert_allclose(found, [[1 - baseline, -baseline, 2 - baseline]])


def test_passk_rewards_only_the_lead_of_the_best():
    np.testing.assert_allclose(advantages([[1.0, 4.0, 2.5, NAN]], "passk"), [[0, 1.5, 0, 0]])
    np.testing.assert_array_equal(advantages([[1.0, 4.0, 4.0]], "passk"), np.zeros((1, 3)))


def test_maxrl_is_zero_where_nothing_was_right():
    np.testing.assert_array_equal(advantages([[0.0, -1.0, 0.5]], "maxrl"), np.zeros((1, 3)))


def test_gdpo_normalises_every_function_on_its_own():
    """Two functions of very different scale, one without an opinion on two rows, weights 1 and 0.5."""
    first, second = np.array([[1.0, 0.0, 0.0, 1.0]]), np.array([[NAN, 100.0, 300.0, NAN]])
    total = np.where(np.isnan(second), first, first + 0.5 * second)
    found = compute_advantages(
        total, "gdpo", functions_KPG=np.stack([first, second]), weights_K=np.array([1.0, 0.5]), eps=1e-12
    )
    z = np.array([0.866025, -0.866025, -0.866025, 0.866025]) + 0.5 * np.array([0, -0.707107, 0.707107, 0])
    np.testing.assert_allclose(found[0], z / z.std(ddof=1), atol=1e-6)
    with pytest.raises(ValueError, match="needs the rewards of the single functions"):
        compute_advantages(total, "gdpo")


def test_one_better_reward_among_sevens():
    reward = np.array([[0.7] * 7 + [0.8]])
    std = (0.1**2 * (7 / 8**2 + (7 / 8) ** 2) / 7) ** 0.5  # deviations -0.1/8 (seven times) and 0.1*7/8
    expected = np.array([[-0.1 / 8] * 7 + [0.1 * 7 / 8]]) / (std + 1e-6)
    np.testing.assert_allclose(advantages(reward, "group"), expected, rtol=1e-9)
    np.testing.assert_allclose(advantages(reward.astype(np.float32), "group"), expected, atol=1e-5)


# Zeros, and no opinions


@pytest.mark.parametrize("size", [2, 3, 6, 8, 64])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.3, 0.7, -1e9, np.float32(0.7)])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exact_zeros(kind, value, size):
    advantage = advantages(np.full((3, size), value), kind, eps=1e-30)
    np.testing.assert_array_equal(advantage, np.zeros((3, size)))


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_that_differ_by_rounding_are_equal(kind):
    reward = np.array([[0.1 + 0.2, 0.3, 0.3, 0.1 * 3]])
    assert np.ptp(reward) > 0
    np.testing.assert_array_equal(advantages(reward, kind), np.zeros((1, 4)))


@pytest.mark.parametrize("kind", GROUPED)
def test_a_group_without_spread_has_exact_zeros_beside_one_with_spread(kind):
    advantage = advantages([[0.7] * 8, [1.0] + [0.1] * 7], kind)
    np.testing.assert_array_equal(advantage[0], np.zeros(8))
    assert advantage[1, 0] > 0


def test_no_opinion_is_neither_zero_nor_nan():
    first, second = np.array([1, NAN, 0, NAN]), np.array([NAN, NAN, 2, 1])
    total = np.where(np.isnan(first) & np.isnan(second), NAN, np.nansum([first, 0.5 * second], axis=0))[None]
    np.testing.assert_allclose(
        advantages(total, "group", eps=1e-4), [[0.57715, 0, 0.57715, -1.15430]], atol=5e-6
    )
    np.testing.assert_allclose(advantages(total, "group"), [[0.57735, 0, 0.57735, -1.15470]], atol=1e-5)
    np.testing.assert_allclose(advantages(total, "none"), [[0.16667, 0, 0.16667, -0.33333]], atol=1e-5)
    np.testing.assert_allclose(advantages(total, "rloo"), [[0.25, 0, 0.25, -0.5]], atol=1e-12)


@pytest.mark.parametrize("kind", GROUPED)
def test_groups_with_fewer_than_two_opinions_give_zeros(kind):
    advantage = advantages([[NAN, NAN, NAN], [NAN, 5.0, NAN], [1.0, NAN, 0.0]], kind)
    np.testing.assert_array_equal(advantage[:2], np.zeros((2, 3)))
    assert advantage[2, 0] > 0 >= advantage[2, 2] and advantage[2, 1] == 0


def test_what_is_refused():
    for kind in GROUPED:
        with pytest.raises(ValueError, match="at least 2"):
            advantages([[1.0], [0.0]], kind)
    with pytest.raises(ValueError, match="completion 1 of prompt 0 is inf"):
        advantages([[1.0, np.inf]], "group")
    with pytest.raises(ValueError, match="completion 0 of prompt 1 is -inf"):
        advantages([[1.0, NAN], [-np.inf, 0.0]], "none")
    with pytest.raises(ValueError, match="must be \\[prompts, completions\\]"):
        advantages(np.zeros(4), "group")
    with pytest.raises(ValueError, match="one of group, batch, none, rloo"):
        advantages([[1.0, 0.0]], "best")


def test_no_prompts():
    for kind in KINDS:
        assert advantages(np.zeros((0, 4)), kind).shape == (0, 4)


def test_whitening_of_nothing_and_of_one_token():
    np.testing.assert_array_equal(whiten(np.zeros(0), np.zeros(0)), np.zeros(0))
    np.testing.assert_array_equal(whiten(np.array([3.0, 5.0]), np.array([1, 0])), [0, 0])


# Any groups


@given(groups, st.sampled_from(KINDS))
def test_finite_and_zero_where_required(reward, kind):
    advantage = advantages(reward, kind)
    assert np.isfinite(advantage).all()
    assert (advantage[np.isnan(reward)] == 0).all()
    for reward_G, advantage_G in zip(reward, advantage, strict=True):
        opinions = set(reward_G[~np.isnan(reward_G)].tolist())
        if kind != "reinforce++" and len(opinions) < 2:
            assert not advantage_G.any()
        if kind in ("group", "batch", "none", "rloo", "gdpo"):
            assert advantage_G.any() == (len(opinions) > 1)
            assert abs(advantage_G.sum()) < 1e-9


@given(groups, st.sampled_from(KINDS))
def test_the_better_completion_has_the_higher_advantage(reward, kind):
    advantage = advantages(reward, kind)
    for reward_G, advantage_G in zip(reward, advantage, strict=True):
        known = ~np.isnan(reward_G)
        order = np.argsort(reward_G[known], kind="stable")
        assert (np.diff(advantage_G[known][order]) >= -1e-12).all()


@given(groups, st.sampled_from(sorted(set(KINDS) - {"maxrl"})), eighths)
def test_shifting_all_rewards_changes_nothing(reward, kind, shift):
    np.testing.assert_allclose(
        advantages(reward + shift, kind), advantages(reward, kind), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"maxrl"}))
def test_a_large_offset_costs_no_digits(kind):  # the mean of the raw rewards would be off by 1e-5
    reward = np.array([[0.0, 1.0, 1.0, 2.0]])
    np.testing.assert_array_equal(advantages(reward + 1e11, kind), advantages(reward, kind))


@given(groups, st.sampled_from([0.25, 4.0, 1024.0]))
def test_scaling_the_rewards(reward, scale):
    """Proportional without a std, unchanged with one; maxrl has the mean as its unit."""
    for kind in ("none", "rloo", "opo", "passk"):
        np.testing.assert_allclose(
            advantages(scale * reward, kind), scale * advantages(reward, kind), rtol=1e-12
        )
    for kind in ("group", "batch", "maxrl"):
        np.testing.assert_allclose(
            advantages(scale * reward, kind, eps=1e-12), advantages(reward, kind, eps=1e-12), atol=1e-9
        )
    for kind in ("reinforce++", "reinforce++-baseline"):
        # 1e-8 stands inside the root: a share of 1e-8 / (2 v), and eighths scaled by 1/4 have v > 2e-5.
        found, other = advantages(scale * reward, kind), advantages(reward, kind)
        np.testing.assert_allclose(found, other, rtol=3e-4, atol=3e-4)


@given(groups, st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_order_does_not_matter(reward, kind, random):
    order = list(range(reward.shape[1]))
    random.shuffle(order)
    np.testing.assert_allclose(
        advantages(reward[:, order], kind), advantages(reward, kind)[:, order], rtol=1e-11, atol=1e-12
    )


@given(groups)
def test_only_step_wide_kinds_look_at_other_groups(reward):
    for kind in ("group", "none", "rloo", "maxrl", "opo", "passk"):
        alone = np.concatenate([advantages(row[None], kind) for row in reward])
        np.testing.assert_array_equal(advantages(reward, kind), alone)


def test_std_of_a_zero_one_group():
    """k right of G: the unbiased variance is k (G - k) / (G (G - 1))."""
    for size in (2, 5, 8):
        for right in range(1, size):
            reward = np.array([[1.0] * right + [0.0] * (size - right)])
            std = math.sqrt(right * (size - right) / (size * (size - 1)))
            np.testing.assert_allclose(
                advantages(reward, "group", eps=0.0)[0, 0], (1 - right / size) / std, rtol=1e-12
            )
