"""Draws against closed forms."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from covey.kernels.sample_inputs import draw as numbers
from covey.rollout import sampling as module
from covey.rollout.engine import Sampling
from covey.rollout.sampling import Sampler, check_sampling, draw_states, pick, uniforms

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


# Frequencies

PROBABILITIES = torch.tensor([0.06, 0.40, 0.04, 0.25, 0.10, 0.15], dtype=torch.float64)
# The 99.9 % quantiles of the chi-square distribution, by degrees of freedom.
CRITICAL = {1: 10.828, 2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515}


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, [6, 40, 4, 25, 10, 15]),
        ({"temperature": 0.5}, [36, 1600, 16, 625, 100, 225]),
        ({"top_k": 3}, [0, 40, 0, 25, 0, 15]),
        ({"top_p": 0.75}, [0, 40, 0, 25, 0, 15]),  # 0.65 without the third
        ({"min_p": 0.2}, [0, 40, 0, 25, 10, 15]),  # at least 0.08
        # Of 0.40 0.25 0.15 0.10 the first three reach 0.72; two of them are at least 0.2.
        ({"top_k": 4, "top_p": 0.8, "min_p": 0.5}, [0, 40, 0, 25, 0, 0]),
        ({"logit_bias": {1: -math.log(4), 2: math.log(5)}}, [6, 10, 20, 25, 10, 15]),
        # Tokens 1 (twice) and 4 were drawn before, token 3 is in the prompt; x_v = log p_v < 0.
        ({"presence_penalty": math.log(5)}, [6, 8, 4, 25, 2, 15]),
        ({"frequency_penalty": math.log(2)}, [6, 10, 4, 25, 5, 15]),
        ({"repetition_penalty": 2.0}, [6, 16, 4, 6.25, 1, 15]),
        ({"repetition_penalty": 2.0, "top_p": 0.6}, [0, 16, 0, 0, 0, 15]),  # 31 of 48.25 are 0.64
    ],
)
def test_frequencies_are_those_of_the_distribution(settings: dict[str, Any], weights: list[float]):
    n = 20000
    logits, uniform = PROBABILITIES.log().expand(n, -1), numbers(draw_states(7, [3] * n, range(n)), arange(n))
    sampler = Sampler(Sampling(**settings), n, 6, torch.float64, "cpu")
    sampler.admit(torch.arange(n), [[3]] * n, [[1, 4, 1]] * n)
    ids, logp, full = sampler.pick(logits, uniform, torch.ones(n, dtype=torch.bool))
    expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    kept = expected > 0
    counts = ids.bincount(minlength=6)
    assert counts[~kept].sum() == 0
    statistic = ((counts - n * expected)[kept].square() / (n * expected[kept])).sum()
    assert statistic < CRITICAL[int(kept.sum()) - 1]
    torch.testing.assert_close(logp, expected.log()[ids], rtol=0, atol=1e-12)
    whole = (PROBABILITIES.log() / settings.get("temperature", 1.0)).log_softmax(0)[ids]
    if "temperature" in settings or not settings:
        assert full is None
    else:
        torch.testing.assert_close(full, whole, rtol=0, atol=1e-12)


# A batch that changes


def arange(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32)


def distribution(x: list[float], s: Sampling, prompt: list[int], own: list[int]) -> list[float]:
    """Logits over temperature that a row's next token is drawn from, written out token by token."""
    z = []
    for v, logit in enumerate(x):
        logit += s.logit_bias.get(v, 0.0)
        if v in prompt or v in own:
            logit = logit / s.repetition_penalty if logit > 0 else logit * s.repetition_penalty
        logit -= s.frequency_penalty * own.count(v) + s.presence_penalty * (v in own)
        z.append(logit / (s.temperature or 1.0))
    return z


@pytest.mark.parametrize(("path", "steps"), [("reference", 40), ("triton", 6)])
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "temperature": 0.8},
        {"frequency_penalty": 0.4, "logit_bias": {2: 1.5, 3: -2.0}},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.2, "temperature": 0.0},
    ],
)
def test_rows_that_enter_move_and_leave_are_counted_alone(
    path: str, steps: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Against Python lists, while rows are admitted (some with tokens), compacted or ignored."""
    monkeypatch.setenv("COVEY_KERNELS", path)
    rng, sampling, vocab = random.Random(1), Sampling(**settings), 19
    sampler = Sampler(sampling, 6, vocab, torch.float64, "cpu")
    prompts: list[list[int]] = []
    owns: list[list[int]] = []
    for _ in range(steps):
        if len(prompts) > 2 and rng.random() < 0.3:  # the last two rows take the places of two others
            sampler.move(torch.tensor([0, 1]), torch.tensor([len(prompts) - 2, len(prompts) - 1]))
            for rows in (prompts, owns):
                rows[0], rows[1] = rows[-2], rows[-1]
                del rows[max(2, len(rows) - 2) :]
        entering = rng.randint(0, 6 - len(prompts))
        slots = torch.arange(len(prompts), len(prompts) + entering)
        new = [
            [rng.choices(range(vocab), k=rng.randint(least, 5)) for _ in range(entering)] for least in (1, 0)
        ]
        sampler.admit(slots, *new)
        prompts += new[0]
        owns += [list(own) for own in new[1]]
        n = len(prompts)
        if not n:
            continue
        x, u = 2 * torch.randn(n, vocab, dtype=torch.float64), torch.rand(n, dtype=torch.float64)
        alive = torch.rand(n) < 0.8
        before = x.clone()
        ids, logp, full = sampler.pick(x, u, alive)
        assert full is not None and torch.equal(x, before)
        for b, token in enumerate(ids.tolist()):
            z = torch.tensor(distribution(x[b].tolist(), sampling, prompts[b], owns[b])).double()
            p = z.softmax(0)
            expected = p.argmax() if sampling.temperature == 0 else (p.cumsum(0) > u[b]).int().argmax()
            assert token == expected
            assert logp[b].item() == pytest.approx(p.log()[token].item(), abs=1e-6)
            whole = (x[b] / (sampling.temperature or 1.0)).log_softmax(0)[token].item()
            assert full[b].item() == pytest.approx(whole, abs=1e-6)
            if alive[b]:
                owns[b].append(token)


def test_the_whole_distribution_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    """Without truncation, bias and penalties (and greedily whatever the truncation) nothing is counted or computed."""
    for name in ("penalize", "log_prob"):
        monkeypatch.setattr(module, name, None)
    x, u, alive = torch.randn(3, 9), torch.rand(3).double(), torch.ones(3, dtype=torch.bool)
    for sampling in (
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(top_k=9),
        Sampling(temperature=0.0, top_k=3, top_p=0.5),
    ):
        sampler = Sampler(sampling, 3, 9, torch.float32, "cpu")
        sampler.admit(torch.arange(3), [[1], [2], [3]], [[], [], []])
        sampler.move(torch.tensor([0]), torch.tensor([2]))
        ids, logp, full = sampler.pick(x, u, alive)
        plain = pick(x, sampling, u)
        assert torch.equal(ids, plain[0]) and torch.equal(logp, plain[1]) and full is None
        assert sampler.count_SV is None


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_full_logp_is_that_of_the_whole_distribution(temperature: float):
    logits, u = 3 * torch.randn(200, 50), torch.rand(200, dtype=torch.float64)
    for cut in (Sampling(top_k=5), Sampling(top_p=0.5), Sampling(min_p=0.2), Sampling(logit_bias={4: 3.0})):
        sampler = Sampler(replace(cut, temperature=temperature), 200, 50, torch.float32, "cpu")
        ids, logp, full = sampler.pick(logits, u, torch.ones(200, dtype=torch.bool))
        assert full is not None
        exact = (logits.double() / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        torch.testing.assert_close(full.double(), exact, rtol=0, atol=2e-6)
        assert (logp - full).abs().max() > 0.1  # what was cut shows


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 50, "top_p": 0.95},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {5: 2.0}, "min_p": 0.05},
        {"frequency_penalty": 0.5, "temperature": 0.0},
    ],
)
def test_a_step_on_a_gpu_does_not_wait(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    n, vocab = 64, 5003
    prompts = [[b, b, 7] for b in range(n)]
    owns = [[b + 1] * (b % 3) for b in range(n)]
    x = 8 * torch.randn(n, vocab)  # few tokens hold the mass: no draw is within rounding of two
    states, steps = draw_states(1, range(n), [0] * n), torch.tensor([len(own) for own in owns])

    def steps_on(device: str, mode: str) -> list[torch.Tensor]:
        """Two tokens, the second after a row has taken another's place."""
        sampler = Sampler(Sampling(**settings), n, vocab, torch.float32, device)
        logits, state, step, alive = (tensor.to(device) for tensor in (x, states, steps, arange(n) % 5 > 0))
        slots, to, source = (torch.tensor(slot, device=device) for slot in (range(n), [0], [9]))
        if device == "cuda":
            sampler.pick(logits, numbers(state, step), alive)  # compiles
            torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            sampler.admit(slots, prompts, owns)
            first = sampler.pick(logits, numbers(state, step), alive)
            sampler.move(to, source)
            second = sampler.pick(logits, numbers(state, step + 1), alive)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [tensor.cpu() for tensor in (*first, *second) if tensor is not None]

    found = steps_on("cuda", "error")
    monkeypatch.setenv("COVEY_KERNELS", "reference")
    expected = steps_on("cpu", "default")
    for there, here in zip(found, expected, strict=True):
        if here.dtype == torch.int64:
            assert torch.equal(there, here)
        else:
            torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5)


# Random numbers


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
    assert (uniforms(2**64 + 5, rows, samples, 3) == together).all()


def test_uniforms_are_rounds_of_splitmix64():
    """In Python's integers: the seed, then a round for the prompt's row, the sample and the step."""

    def mix(state: int) -> int:
        x = (state + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    for seed, row, sample, step in ((0, 0, 0, 0), (2**63 + 11, 123456, 7, 4095), (-3, 5, 63, 1)):
        expected = (mix(mix(mix(mix(seed % 2**64) ^ row) ^ sample) ^ step) >> 11) / 2**53
        assert uniforms(seed, np.array([row]), np.array([sample]), step).tolist() == [expected]


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
        ("temperature", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("logit_bias", {3: math.inf}),
        ("logit_bias", {-1: 2.0}),
        ("stop", ("",)),
    ],
)
def test_settings_that_cannot_be_meant(name, value):
    sampling = replace(Sampling(), **{name: value})
    with pytest.raises(ValueError, match=name):
        check_sampling(sampling)
    with pytest.raises(ValueError, match=name):
        Sampler(sampling, 1, 8, torch.float32, "cpu")


def test_a_bias_beyond_the_vocabulary():
    Sampler(Sampling(logit_bias={7: 1.0}), 1, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match="token 8, but the vocabulary ends at 7"):
        Sampler(Sampling(logit_bias={8: 1.0}), 1, 8, torch.float32, "cpu")


def test_settings_can_be_keys():
    assert {Sampling(logit_bias={3: 1.0}): 1}[Sampling(logit_bias={3: 1.0})] == 1
    assert Sampling(logit_bias={3: 1.0}) != Sampling()


def p_value(observed, expected):
    """Of Pearson's chi-square test."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    half_freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item()
