import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from covey.rl.advantages import FORMULAS, group_advantages

NAN = float("nan")
KINDS = tuple(FORMULAS)

# Multiples of 1/8 are exact in floating point, so ties are ties and shifts and scales round nothing away.
eighths = st.integers(-80, 80).map(lambda i: i / 8)
groups = st.tuples(st.integers(1, 4), st.integers(2, 9)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.one_of(eighths, st.just(NAN)))
)


def test_golden_values():
    reward = np.array([[1.0, 0.0, 0.0, 1.0]])
    signs = np.array([[1, -1, -1, 1]])
    np.testing.assert_allclose(group_advantages(reward, "group", eps=1e-4), 0.865875 * signs, atol=5e-7)
    np.testing.assert_allclose(group_advantages(reward, "rloo"), 2 / 3 * signs, rtol=1e-15)
    np.testing.assert_array_equal(group_advantages(reward, "none"), 0.5 * signs)


def test_one_right_of_four():
    reward = np.array([[1.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(group_advantages(reward, "none"), [[0.75, -0.25, -0.25, -0.25]])
    unbiased = group_advantages(reward, "group", eps=1e-12)
    np.testing.assert_allclose(unbiased, [[1.5, -0.5, -0.5, -0.5]], atol=1e-11)
    biased = group_advantages(reward, "group", std="biased", eps=1e-12)
    np.testing.assert_allclose(biased, [[3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]], atol=1e-11)


@pytest.mark.parametrize("size", [2, 3, 6, 8, 64])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.3, 0.7, -1e9, np.float32(0.7)])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exact_zeros(kind, value, size):
    advantage = group_advantages(np.full((3, size), value), kind, eps=1e-30)
    np.testing.assert_array_equal(advantage, np.zeros((3, size)))


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_that_differ_by_rounding_are_equal(kind):
    reward = np.array([[0.1 + 0.2, 0.3, 0.3, 0.1 * 3]])
    assert np.ptp(reward) > 0
    np.testing.assert_array_equal(group_advantages(reward, kind), np.zeros((1, 4)))


def test_one_better_reward_among_sevens():
    reward = np.array([[0.7] * 7 + [0.8]])
    std = (0.1**2 * (7 / 8**2 + (7 / 8) ** 2) / 7) ** 0.5  # deviations -0.1/8 (seven times) and 0.1*7/8
    expected = np.array([[-0.1 / 8] * 7 + [0.1 * 7 / 8]]) / (std + 1e-6)
    np.testing.assert_allclose(group_advantages(reward, "group"), expected, rtol=1e-9)
    np.testing.assert_allclose(group_advantages(reward.astype(np.float32), "group"), expected, atol=1e-5)


def test_no_opinion_is_neither_zero_nor_nan():
    first, second = np.array([1, NAN, 0, NAN]), np.array([NAN, NAN, 2, 1])
    total = np.where(np.isnan(first) & np.isnan(second), NAN, np.nansum([first, 0.5 * second], axis=0))[None]
    np.testing.assert_allclose(
        group_advantages(total, "group", eps=1e-4), [[0.57715, 0, 0.57715, -1.15430]], atol=5e-6
    )
    np.testing.assert_allclose(group_advantages(total, "group"), [[0.57735, 0, 0.57735, -1.15470]], atol=1e-5)
    np.testing.assert_allclose(group_advantages(total, "none"), [[0.16667, 0, 0.16667, -0.33333]], atol=1e-5)
    np.testing.assert_allclose(group_advantages(total, "rloo"), [[0.25, 0, 0.25, -0.5]], atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_with_fewer_than_two_opinions_give_zeros(kind):
    reward = np.array([[NAN, NAN, NAN], [NAN, 5.0, NAN], [1.0, NAN, 0.0]])
    advantage = group_advantages(reward, kind)
    np.testing.assert_array_equal(advantage[:2], np.zeros((2, 3)))
    assert advantage[2, 0] > 0 > advantage[2, 2] and advantage[2, 1] == 0


def test_what_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(np.array([[1.0], [0.0]]), "group")
    with pytest.raises(ValueError, match="completion 1 of prompt 0 is inf"):
        group_advantages(np.array([[1.0, np.inf]]), "group")
    with pytest.raises(ValueError, match="completion 0 of prompt 1 is -inf"):
        group_advantages(np.array([[1.0, NAN], [-np.inf, 0.0]]), "none")
    with pytest.raises(ValueError, match="must be \\[prompts, completions\\]"):
        group_advantages(np.zeros(4), "group")
    with pytest.raises(ValueError, match="one of group, none, rloo"):
        group_advantages(np.array([[1.0, 0.0]]), "best")  # pyright: ignore[reportArgumentType]


def test_no_prompts():
    assert group_advantages(np.zeros((0, 4)), "group").shape == (0, 4)


@given(groups, st.sampled_from(KINDS))
def test_finite_centred_and_zero_where_required(reward, kind):
    advantage = group_advantages(reward, kind)
    assert np.isfinite(advantage).all()
    assert (advantage[np.isnan(reward)] == 0).all()
    np.testing.assert_allclose(advantage.sum(axis=1), 0, atol=1e-9)
    for reward_G, advantage_G in zip(reward, advantage, strict=True):
        opinions = set(reward_G[~np.isnan(reward_G)].tolist())
        assert advantage_G.any() == (len(opinions) > 1)


@given(groups, st.sampled_from(KINDS), eighths)
def test_shifting_all_rewards_changes_nothing(reward, kind, shift):
    np.testing.assert_allclose(
        group_advantages(reward + shift, kind), group_advantages(reward, kind), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_offset_costs_no_digits(kind):  # the mean of the raw rewards would be off by 1e-5
    reward = np.array([[0.0, 1.0, 1.0]])
    np.testing.assert_array_equal(group_advantages(reward + 1e11, kind), group_advantages(reward, kind))


@given(groups, st.sampled_from([0.25, 4.0, 1024.0]))
def test_scaling_the_rewards(reward, scale):
    for kind in ("none", "rloo"):
        np.testing.assert_allclose(
            group_advantages(scale * reward, kind), scale * group_advantages(reward, kind), rtol=1e-12
        )
    np.testing.assert_allclose(
        group_advantages(scale * reward, "group", eps=1e-12),
        group_advantages(reward, "group", eps=1e-12),
        atol=1e-9,
    )


@given(groups, st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_order_does_not_matter(reward, kind, random):
    order = list(range(reward.shape[1]))
    random.shuffle(order)
    np.testing.assert_allclose(
        group_advantages(reward[:, order], kind), group_advantages(reward, kind)[:, order], atol=1e-12
    )
