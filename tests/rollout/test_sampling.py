"""Draws against closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from covey.rollout.engine import Sampling
from covey.rollout.sampling import _splitmix64, check_sampling, pick, uniforms

LAST = 1 - 2.0**-53  # the largest float64 below 1


def draw(logits, u, **settings):
    """ids and logp of one distribution at every u."""
    u = torch.as_tensor(u, dtype=torch.float64)
    return pick(torch.as_tensor(logits).expand(len(u), -1), Sampling(**settings), u)


def support(logits, **settings):
    """{id: logp} of everything that a fine grid of draws returns."""
    ids, logp = draw(logits, torch.arange(20000, dtype=torch.float64) / 20000, **settings)
    return dict(zip(ids.tolist(), logp.tolist(), strict=True))


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float32).log()


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, [-0.440190, -1.440190, -2.440190, -3.440190]),
        (0.5, [-0.145078, -2.145078, -4.145078, -6.145078]),
        (2.0, [-0.787342, -1.287342, -1.787342, -2.287342]),
    ],
)
def test_logp_is_that_of_the_sampling_temperature(temperature, expected):
    logits = torch.full((64,), -30.0)
    logits[:4] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    found = support(logits, temperature=temperature)
    assert [found[i] for i in range(4)] == pytest.approx(expected, abs=1e-6)


def test_greedy_takes_the_argmax_and_reports_temperature_1():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 3.0]])
    ids, logp = pick(logits, Sampling(temperature=0, top_k=2, top_p=0.1), torch.tensor([0.9, 0.9]).double())
    assert ids.tolist() == [1, 0]
    expected = torch.log_softmax(logits, -1)[[0, 1], [1, 0]]
    torch.testing.assert_close(logp, expected)


def test_a_draw_is_the_inverse_of_the_cumulative_distribution():
    ids, _ = draw(logs(0.25, 0.25, 0.5), [0.0, 0.2499999, 0.25, 0.4999999, 0.5, LAST])
    assert ids.tolist() == [0, 0, 1, 1, 2, 2]


def test_what_has_no_probability_is_never_drawn():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert draw(logits, [0.0, 0.4999, 0.5, LAST])[0].tolist() == [1, 1, 3, 3]
    far_below = torch.tensor([-200.0, 0.0, -200.0])  # exp(-200) is 0 in float32
    assert draw(far_below, [0.0, LAST])[0].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logp_of_a_near_certain_token_keeps_its_digits(dtype):
    ids, logp = draw(torch.tensor([0.0, -30.0], dtype=dtype), [0.3])
    assert ids.item() == 0 and logp.dtype == dtype
    assert logp.item() == pytest.approx(-math.exp(-30), rel=1e-5)  # z - logsumexp(z) would be 0
    assert draw(torch.tensor([0.0, -math.inf]), [0.3])[1].item() == 0


def test_logp_of_an_improbable_token():
    logits = torch.tensor([0.0, -80.0])
    _, logp = pick(logits[None], Sampling(), torch.tensor([LAST]).double())
    assert logp.item() == 0 or logp.item() == pytest.approx(-80)
    wide = torch.cat([torch.zeros(1), torch.full((60000,), -15.0)])
    ids, logp = draw(wide, [LAST])
    assert ids.item() == 60000
    assert logp.item() == pytest.approx(-15 - math.log(1 + 60000 * math.exp(-15)), abs=1e-5)


def test_top_k_keeps_k_and_renormalises():
    found = support(logs(0.1, 0.4, 0.2, 0.3), top_k=2)
    assert found == pytest.approx({1: math.log(4 / 7), 3: math.log(3 / 7)}, abs=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.3, [1]), (0.4, [1]), (0.41, [1, 3]), (0.7, [1, 3]), (0.71, [1, 2, 3]), (0.95, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    probabilities = [0.1, 0.4, 0.2, 0.3]
    mass = sum(probabilities[i] for i in kept)
    found = support(logs(*probabilities), top_p=top_p)
    assert found == pytest.approx({i: math.log(probabilities[i] / mass) for i in kept}, abs=1e-6)


def test_top_p_is_a_share_of_what_top_k_left():
    # Of 0.4 0.3 (0.2 0.1) top-k 2 leaves 4/7 and 3/7: a top_p of 0.5 is reached by the first alone.
    assert list(support(logs(0.1, 0.4, 0.2, 0.3), top_k=2, top_p=0.5)) == [1]
    assert sorted(support(logs(0.1, 0.4, 0.2, 0.3), top_k=2, top_p=0.6)) == [1, 3]


@pytest.mark.parametrize(
    ("min_p", "kept"),
    [(0.2, [0, 1, 2, 3]), (0.25, [0, 1, 2, 3]), (0.26, [1, 2, 3]), (0.6, [1, 3]), (1.0, [1])],
)
def test_min_p_is_a_share_of_the_most_probable(min_p, kept):
    probabilities = [0.1, 0.4, 0.2, 0.3]
    mass = sum(probabilities[i] for i in kept)
    found = support(logs(*probabilities), min_p=min_p)
    assert found == pytest.approx({i: math.log(probabilities[i] / mass) for i in kept}, abs=1e-6)


def test_min_p_comes_last():
    # A top_p of 0.7 is reached by 0.4 0.3 of the four; of the three that min-p leaves it would take 0.2 too.
    assert sorted(support(logs(0.1, 0.4, 0.2, 0.3), top_p=0.7, min_p=0.3)) == [1, 3]
    assert sorted(support(logs(0.1, 0.4, 0.2, 0.3), top_k=3, min_p=0.6)) == [1, 3]


def test_truncation_looks_at_temperature_first():
    # At temperature 1/2 the squares 16 9 4 1 (of 30) are drawn from: 16/30 reaches 0.5.
    assert list(support(logs(0.1, 0.4, 0.2, 0.3), temperature=0.5, top_p=0.5)) == [1]
    assert sorted(support(logs(0.1, 0.4, 0.2, 0.3), temperature=0.5, min_p=0.3)) == [1, 3]


def test_ties_at_the_cut_are_kept_in_the_order_of_ids():
    ties = logs(0.125, 0.25, 0.125, 0.25, 0.125, 0.125)
    assert sorted(support(ties, top_k=1)) == [1]
    assert sorted(support(ties, top_k=4)) == [0, 1, 2, 3]
    assert sorted(support(ties, top_p=0.625)) == [0, 1, 3]
    assert sorted(support(torch.zeros(64), top_p=0.5)) == list(range(32))


def test_top_p_of_a_flat_distribution_over_a_large_vocabulary():
    ids, logp = draw(torch.zeros(6000), [0.0, 0.5, LAST], top_p=0.5)
    assert ids.tolist() == [0, 1500, 2999]
    assert logp.tolist() == pytest.approx([-math.log(3000)] * 3, abs=1e-6)


def test_rows_do_not_mix():
    logits = torch.randn(50, 300) * 3
    u = torch.rand(50, dtype=torch.float64)
    for sampling in (
        Sampling(temperature=0.7),
        Sampling(top_p=0.8),
        Sampling(top_k=20, top_p=0.9),
        Sampling(min_p=0.1),
    ):
        ids, logp = pick(logits, sampling, u)
        each = [pick(logits[i : i + 1], sampling, u[i : i + 1]) for i in range(50)]
        assert ids.tolist() == [i.item() for i, _ in each]
        torch.testing.assert_close(logp, torch.cat([x for _, x in each]), atol=1e-6, rtol=0)


def test_pick_leaves_the_logits_as_they_are():
    logits = torch.randn(4, 64)
    before = logits.clone()
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(top_k=3, top_p=0.5)):
        pick(logits, sampling, torch.rand(4, dtype=torch.float64))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0), Sampling(top_k=3, top_p=0.5, min_p=0.1)]
)
def test_the_kernels_draw_the_same(monkeypatch, sampling):
    logits, u = torch.randn(4, 64) * 3, torch.rand(4, dtype=torch.float64)
    ids, logp = pick(logits, sampling, u)
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    their_ids, their_logp = pick(logits, sampling, u)
    assert ids.tolist() == their_ids.tolist()
    torch.testing.assert_close(their_logp, logp)


def test_splitmix64_matches_the_published_sequence():
    # First outputs of the reference implementation for the seed 1234567.
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.array([1234567], dtype=np.uint64) + golden * np.arange(3, dtype=np.uint64)
    assert _splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniforms_depend_on_their_coordinates_alone():
    rows, samples = np.repeat(np.arange(40), 8), np.tile(np.arange(8), 40)
    together = uniforms(5, rows, samples, 3)
    shuffled = np.random.default_rng(0).permutation(320)
    assert (uniforms(5, rows[shuffled], samples[shuffled], 3) == together[shuffled]).all()
    assert uniforms(5, rows[17:18], samples[17:18], 3)[0] == together[17]
    others = [uniforms(6, rows, samples, 3), uniforms(5, rows + 1, samples, 3), uniforms(5, rows, samples, 4)]
    for other in others:
        assert (other != together).all()
    for seed in (-1, 2**64 + 5, 2**31):
        assert uniforms(seed, rows, samples, 0).shape == (320,)


def test_uniforms_are_uniform_and_independent():
    rows, samples = np.repeat(np.arange(500), 8), np.tile(np.arange(8), 500)
    u = np.stack([uniforms(0, rows, samples, t) for t in range(25)])  # [25, 4000]
    assert u.min() >= 0 and u.max() < 1
    n = u.size
    counts = np.histogram(u, bins=1000, range=(0, 1))[0]
    assert p_value(counts, np.full(1000, n / 1000)) > 1e-3
    neighbours = {"step": (u[:-1], u[1:]), "row": (u[:, :-8], u[:, 8:]), "sample": (u[:, :-1], u[:, 1:])}
    for a, b in neighbours.values():
        joint = np.histogram2d(a.ravel(), b.ravel(), bins=16, range=((0, 1), (0, 1)))[0]
        assert p_value(joint.ravel(), np.full(256, a.size / 256)) > 1e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("stop", ("",)),
    ],
)
def test_settings_that_cannot_be_meant(name, value):
    with pytest.raises(ValueError, match=name):
        check_sampling(replace(Sampling(), **{name: value}))


def p_value(observed, expected):
    """Of Pearson's chi-square test."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    half_freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item()
