"""Draws against plain enumeration in float64: ids, kept sets, log-probs, ties, limits, bad logits.

`path` runs the torch path and, in Triton's interpreter, the kernels with chunks and tiles of a few logits.
"""

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.kernels import sample as module
from covey.kernels.head import logit_gradients_reference
from covey.kernels.sample import log_prob, sample, sample_reference

F32, F64, INF, NAN = torch.float32, torch.float64, math.inf, math.nan
LAST = 1 - 2.0**-53  # the largest float64 below 1
CANARY = 77
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "greedy": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
    "top_k": {"temperature": 0.7, "top_k": 7},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"temperature": 0.6, "min_p": 0.1},
    "all": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.03},
}
# NumPy, in the interpreter, minds -inf and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


def choose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects an implementation; with the kernels, a silent fall back to torch fails the test."""
    monkeypatch.setenv("COVEY_KERNELS", name)
    if name == "triton":
        monkeypatch.setattr(module, "sample_reference", None)
        monkeypatch.setattr(module, "target_logp", None)


@pytest.fixture(params=["reference", "triton"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(request.param, monkeypatch)
    if request.param == "triton":
        from covey.kernels import sample_triton

        for name, size in (("CHUNK", 32), ("GROUP", 4), ("TILE", 16), ("LISTED", 8)):
            monkeypatch.setattr(sample_triton, name, size)
    return request.param


def draw(x: Tensor, u: Any, **settings: Any) -> tuple[list[int], list[float]]:
    """ids and logp of one distribution [V] at every u."""
    u = torch.as_tensor(u, dtype=F64)
    ids, logp = sample(x.expand(len(u), -1), u, **full(settings))
    assert ids.dtype == torch.int64 and logp.dtype == x.dtype and ids.shape == logp.shape == u.shape
    return ids.tolist(), logp.tolist()


def full(settings: dict[str, Any]) -> dict[str, Any]:
    return {"temperature": 1.0} | settings


def masses_of(
    x: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[int, float]:
    """{id: mass} of the kept tokens in the order of ids, by sorting in float64."""
    slack, z = 4 * torch.finfo(x.dtype).eps, x.tolist()
    if temperature == 0:
        return {v: math.exp(z[v] - max(z)) for v in range(len(z))}
    order = sorted((v for v in range(len(z)) if z[v] > -INF), key=lambda v: (-z[v], v))
    mass = {v: math.exp((z[v] - z[order[0]]) / temperature) for v in order}
    kept = order[: top_k or None]
    reach = top_p * (1 - slack) * math.fsum(mass[v] for v in kept)
    if top_p < 1:
        sums = list(accumulate(mass[v] for v in kept))
        kept = kept[: 1 + sum(total < reach for total in sums)]
    return {v: mass[v] for v in sorted(kept) if mass[v] >= min_p * (1 - slack)}


def expected(x: Tensor, u: float, **settings: Any) -> tuple[int, float, float]:
    """id, logp, and how far u is from the next boundary between two tokens."""
    mass = masses_of(x, **settings)
    total, ends = math.fsum(mass.values()), list(accumulate(mass.values()))
    if settings.get("temperature") == 0:
        y, distance = x.tolist().index(max(x.tolist())), 1.0
    else:
        y = next(v for v, end in zip(mass, ends, strict=True) if end > u * total)
        distance = min(abs(end / total - u) for end in ends)
    others = math.fsum(m for v, m in mass.items() if v != y)
    return y, -math.log1p(others / mass[y]), distance


# The draw


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab", [1, 17, 31, 32, 33, 67, 127])
def test_matches_enumeration(path, name: str, vocab: int):
    x, u = 3 * torch.randn(3, vocab, dtype=F64), torch.rand(3, dtype=F64)
    x[1:] = (2 * x[1:]).round() / 2  # ties
    ids, logp = sample(x, u, **full(SETTINGS[name]))
    for b in range(3):
        y, log_prob, distance = expected(x[b], u[b].item(), **SETTINGS[name])
        assert distance > 1e-9  # of this test's numbers
        assert ids[b] == y and logp[b].item() == pytest.approx(log_prob, abs=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
def test_float32_matches_enumeration(path, name: str):
    x, u = 4 * torch.randn(5, 211), torch.rand(5)
    ids, logp = sample(x, u, **full(SETTINGS[name]))
    for b in range(5):
        y, log_prob, distance = expected(x[b], u[b].item(), **SETTINGS[name])
        assert distance > 1e-6
        assert ids[b] == y and logp[b].item() == pytest.approx(log_prob, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "greedy"])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_exactly_the_kept_tokens_are_drawn(path, name: str, dtype: torch.dtype):
    """The middle of every kept token's share of [0, 1) draws it. Logits with many ties, over two chunks."""
    x = torch.randint(0, 8, (35,)).to(dtype) / 2
    x[::9] = -INF
    settings = SETTINGS[name]
    mass = masses_of(x, **settings)
    total, ends = math.fsum(mass.values()), list(accumulate(mass.values()))
    middles = [(end - m / 2) / total for end, m in zip(ends, mass.values(), strict=True)]
    ids, logp = draw(x, middles, **settings)
    assert ids == list(mass)
    assert logp == pytest.approx([math.log(m / total) for m in mass.values()], abs=1e-5)


def test_boundaries_belong_to_the_next_token(path):
    edges = torch.arange(64, dtype=F64) / 64
    assert draw(torch.zeros(64), edges[::3])[0] == list(range(0, 64, 3))
    below = torch.nextafter(edges[1:], torch.zeros(63, dtype=F64))
    assert draw(torch.zeros(64), below[::3])[0] == list(range(0, 63, 3))
    assert draw(torch.zeros(64), [0.0, LAST], top_p=0.5)[0] == [0, 31]
    assert draw(torch.zeros(64), [0.0, 0.5, LAST], top_k=40)[0] == [0, 20, 39]


@pytest.mark.parametrize("settings", [{}, {"top_k": 60}, {"top_p": 0.999}, {"min_p": 0.5}])
def test_what_has_no_probability_is_never_drawn(path, settings: dict[str, Any]):
    """At either end of the row, of a chunk and of a tile, and where whole chunks are empty."""
    for alive, dead in (([1], -INF), ([69], -300.0), ([33, 40], torch.finfo(F32).min), ([3, 68], -INF)):
        x = torch.full((70,), dead)
        x[alive] = 2.5
        n = len(alive)
        ids, logp = draw(x, [0.0, 1 / n - 1e-9, 1 - 1 / n, LAST], **settings)
        assert ids == [alive[0], alive[0], alive[-1], alive[-1]]
        assert logp == pytest.approx([-math.log(n)] * 4, abs=1e-6)


def test_the_lowest_numbers_are_numbers(path):
    x = torch.full((70,), torch.finfo(F32).min)
    x[7] = -INF
    for settings, kept in (({}, 69), ({"top_k": 40}, 40), ({"top_p": 0.5}, 35), ({"min_p": 0.5}, 69)):
        ids, logp = draw(x, [0.0, 0.1, LAST], **settings)
        assert ids[0] == 0 and ids[2] == kept and logp == pytest.approx([-math.log(kept)] * 3, abs=1e-6)
    assert draw(x, [0.5], temperature=0.0)[0] == [0]


def test_rows_do_not_mix(path):
    """A row's result does not depend on the batch: bit for bit in Triton."""
    x, u = 3 * torch.randn(3, 70), torch.rand(3, dtype=F64)
    for settings in SETTINGS.values():
        settings = full(settings)
        together = sample(x, u, **settings)
        for b in range(3):
            ids, logp = sample(x[b : b + 1], u[b : b + 1], **settings)
            assert ids == together[0][b]
            assert (
                torch.equal(logp[0], together[1][b])
                if path == "triton"
                else torch.isclose(logp[0], together[1][b])
            )


# Truncation


def test_the_order_of_truncations(path):
    """Of 0.4 0.3 0.2 0.1: top-k 2 leaves 4/7 and 3/7, so top-p 0.55 leaves the first; min-p changes neither."""
    x = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()

    def found(**settings: Any) -> set[int]:
        return set(draw(x, torch.arange(0.05, 1.0, 0.1), **settings)[0])

    assert found(top_p=0.55) == {1, 3} and found(top_k=2, top_p=0.55) == {1}
    assert found(top_k=2, top_p=0.6) == {1, 3}
    assert found(top_p=0.9) == {1, 2, 3} and found(top_p=0.9, min_p=0.6) == {1, 3}
    assert found(top_p=0.7, min_p=0.1) == {1, 3}  # of the four, not of those that min-p leaves
    assert found(min_p=0.25) == {0, 1, 2, 3} and found(min_p=0.2501) == {1, 2, 3}
    assert found(min_p=0.25, temperature=0.5) == {1, 2, 3}  # squares: 16 9 4 1


def test_truncation_that_is_greedy_or_nothing(path):
    x = torch.randn(70)
    x[[20, 50]] = 5.0
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"top_k": 1, "top_p": 0.3, "min_p": 1.0}):
        assert draw(x, [0.0, LAST], **settings) == ([20, 20], [0.0, 0.0])
    assert draw(x, [0.0, LAST], min_p=1.0)[0] == [20, 50]
    us = [0.1, 0.5, 0.9]
    assert draw(x, us, top_k=70) == draw(x, us, top_k=1000) == draw(x, us)


@pytest.mark.parametrize("shift", [0.0, 1e30, -1e-30])
def test_cuts_between_any_numbers(path, shift: float):
    """Logits at all distances from each other, down to the smallest number; masses are all about 1 but for 1e30."""
    tiny = 2.0**-149
    x = torch.tensor([0.0, tiny, -tiny, 1e-40, 1e-30, 1e-20, 1e-10, -1e-38, -1e-7, 0.0, tiny, 1e-10]) + shift
    order = sorted(range(12), key=lambda v: (-x[v].item(), v))
    for k in (1, 3, 4, 7, 10):
        ids, _ = draw(x, [(i + 0.5) / k for i in range(k)], top_k=k)
        assert ids == sorted(order[:k])


def test_neighbouring_floats_are_told_apart(path):
    up = torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))
    x = torch.stack([torch.tensor(3.0), up, torch.tensor(3.0), up, torch.tensor(2.0)])
    for k, kept in ((1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3])):
        assert sorted(set(draw(x, torch.arange(12) / 12, top_k=k)[0])) == kept


def test_more_asked_for_than_has_any_mass(path):
    x = torch.full((70,), -200.0)  # exp(-200) is 0 in float32
    x[[5, 64]] = 0.0
    for settings in ({"top_k": 50}, {"top_p": 1 - 1e-12}, {"top_k": 50, "top_p": 1 - 1e-12}):
        assert draw(x, [0.0, 0.4999, 0.5, LAST], **settings)[0] == [5, 5, 64, 64]


# Log-probs


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"min_p": 1e-30}, {"temperature": 0.0}])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_near_certainty_all_digits_are_kept(path, settings: dict[str, Any], temperature: float):
    settings = {"temperature": temperature} | settings
    divisor = settings["temperature"] or 1.0
    for margin in (5.0, 10.0, 17.0, 25.0, 40.0):
        x = torch.full((35,), -INF)
        x[3], x[34] = 21.7, 21.7 - margin
        exact = -math.log1p(math.exp((x[34].double() - x[3].double()).item() / divisor))
        ids, logp = draw(x, [0.3], **settings)
        assert ids == [3] and logp[0] == pytest.approx(exact, rel=1e-5)


def test_improbable_tokens(path):
    wide = torch.cat([torch.zeros(1), torch.full((300,), -15.0)])
    ids, logp = draw(wide, [LAST])
    assert ids == [300] and logp[0] == pytest.approx(-15 - math.log1p(300 * math.exp(-15)), abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_log_prob_is_the_head_s(path, temperature: float):
    x = 5 * torch.randn(6, 300)
    ids, logp = sample(x, torch.rand(6), temperature=temperature)
    (theirs, *_) = logit_gradients_reference(
        x.clone(), ids, temperature, entropy=False, gradient=False, entropy_gradient=False
    )
    torch.testing.assert_close(logp, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_the_log_prob_before_the_cut(path, temperature: float):
    """Of tokens inside and outside of what a truncation keeps, improbable and nearly certain ones."""
    x, ids = 3 * torch.randn(8, 67), torch.randint(0, 67, (8,))
    x[:, 5] = -INF
    x[0, 40], x[1, 40], ids[:3] = 30.0, 60.0, torch.tensor([40, 40, 0])
    x[2, 0] = -70.0
    before, divisor = x.clone(), temperature or 1.0
    found = log_prob(x, ids, temperature)
    assert found.dtype == F32 and torch.equal(x, before)
    z = x.double() / divisor
    others = z.scatter(1, ids[:, None], -INF).logsumexp(1)
    exact = -torch.log1p((others - z.gather(1, ids[:, None])[:, 0]).exp())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
    assert 0 > found[1] > -1e-10  # log_softmax would be 0
    torch.testing.assert_close(
        log_prob(x.double(), ids, temperature), z.log_softmax(1)[range(8), ids], rtol=0, atol=1e-12
    )


def test_greedy_takes_the_first_of_equals(path):
    x = torch.zeros(3, 100)
    x[0, [40, 41, 99]] = x[1, [0, 99]] = x[2, 99] = 2.0
    ids, logp = sample(x, torch.full((3,), 0.9), temperature=0.0)
    assert ids.tolist() == [40, 0, 99]
    torch.testing.assert_close(logp, x.log_softmax(-1).amax(-1))


# What surrounds it


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_that_are_not_finite_give_nan(path, name: str):
    x = torch.randn(6, 70)
    clean = x[:2].clone()
    x[2, 31], x[3, 69], x[4], x[5] = NAN, INF, -INF, NAN
    u = torch.tensor([0.2, 0.9, 0.0, 0.9, 0.5, LAST], dtype=F64)
    ids, logp = sample(x, u, **full(SETTINGS[name]))
    assert logp.isnan().tolist() == [False, False, True, True, True, True]
    assert ((ids >= 0) & (ids < 70)).all()
    alone = sample(clean, u[:2], **full(SETTINGS[name]))
    assert torch.equal(ids[:2], alone[0]) and torch.equal(logp[:2], alone[1])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab", [32, 67])
def test_views_and_what_lies_around_them(path, name: str, vocab: int):
    """Rows in the middle of a larger buffer full of NaN, results in the middle of others."""
    settings = full(SETTINGS[name])
    x, u = 3 * torch.randn(3, vocab), torch.rand(3, dtype=F64)
    frame = torch.full((5, vocab + 9), NAN)
    view = frame[1:4, 4 : 4 + vocab].copy_(x)
    before = frame.clone()
    ids, logp = torch.full((7,), CANARY), torch.full((7,), float(CANARY))
    every_other = torch.stack([u, torch.full((3,), NAN, dtype=F64)], 1)[:, 0]
    found = sample(view, every_other, **settings, out=(ids[2:5], logp[2:5]))
    plain = sample(x, u, **settings)
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])
    assert found[0].data_ptr() == ids[2:].data_ptr() and torch.equal(ids[2:5], plain[0])
    assert found[1].data_ptr() == logp[2:].data_ptr() and torch.equal(logp[2:5], plain[1])
    for outside in (ids[:2], ids[5:], logp[:2], logp[5:]):
        assert (outside == CANARY).all()
    assert torch.equal(frame.nan_to_num(CANARY), before.nan_to_num(CANARY))


def test_nothing_to_draw_and_columns_apart(path, monkeypatch):
    for settings in ({}, {"top_k": 2}):
        ids, logp = sample(torch.empty(0, 5), torch.empty(0), **full(settings))
        assert ids.shape == logp.shape == (0,) and ids.dtype == torch.int64 and logp.dtype == F32
    monkeypatch.undo()
    x = torch.randn(40, 3)
    monkeypatch.setenv("COVEY_KERNELS", path)
    transposed = sample(x.t(), torch.tensor([0.1, 0.5, 0.9]), temperature=1.0)
    straight = sample(x.t().contiguous(), torch.tensor([0.1, 0.5, 0.9]), temperature=1.0)
    assert torch.equal(transposed[0], straight[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": NAN},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"out": (torch.zeros(3), torch.zeros(3))},
        {"out": (torch.zeros(2, dtype=torch.int64), torch.zeros(2))},
        {"out": (torch.zeros(6, dtype=torch.int64)[::2], torch.zeros(3))},
    ],
)
def test_arguments_that_cannot_be_meant(settings: dict[str, Any]):
    with pytest.raises(AssertionError):
        sample(torch.zeros(3, 5), torch.zeros(3), **full(settings))


# On a GPU


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    choose("triton", monkeypatch)


def like_a_model(rows: int, vocab: int) -> Tensor:
    """Zipf's law with noise: of 128256 tokens some 200 hold 95%."""
    x = -1.5 * torch.arange(1, vocab + 1, device="cuda").log() + 0.3 * torch.randn(rows, vocab, device="cuda")
    return 20 + x[:, torch.randperm(vocab, device="cuda")]


def drawn_in_float64(
    x: Tensor, u: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
):
    """ids, log-probs and whether both are beyond doubt: u and top_p further than 1e-6 from where the result changes."""
    top = x.amax(-1, keepdim=True)
    mass = ((x - top).double() / temperature).exp()
    sorted_mass = mass.topk(top_k or mass.shape[1], -1).values
    kept = mass >= sorted_mass[:, -1:] if top_k else torch.ones_like(mass, dtype=torch.bool)  # no ties here
    sums = sorted_mass.cumsum(-1) / sorted_mass.sum(-1, keepdim=True)
    sure = torch.ones_like(u, dtype=torch.bool)
    if top_p < 1:
        count = (sums < top_p).sum(-1, keepdim=True)
        kept &= mass >= sorted_mass.gather(-1, count)
        sure = (sums - top_p).abs().amin(-1) > 1e-6
    mass = mass.where(kept & (mass >= min_p * (1 - 1e-6)), 0.0)
    shares = mass / mass.sum(-1, keepdim=True)
    ends = shares.cumsum(-1)
    ids = (ends > u[:, None]).int().argmax(-1, keepdim=True)
    end, share = ends.gather(-1, ids)[:, 0], shares.gather(-1, ids)[:, 0]
    sure &= (end - u > 1e-6) & (u - (end - share) > 1e-6)
    return ids[:, 0], share.log(), sure


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 151936, 32003])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    ],
)
def test_a_thousand_rows_on_a_gpu(kernels, vocab: int, settings: dict[str, Any]):
    x, u = like_a_model(1000, vocab), torch.rand(1000, device="cuda", dtype=F64)
    ids, logp = sample(x, u, **settings)
    wanted, log_prob, sure = drawn_in_float64(x, u, **settings)
    assert sure.float().mean() > 0.8
    assert torch.equal(ids[sure], wanted[sure])
    torch.testing.assert_close(logp[sure].double(), log_prob[sure], rtol=1e-5, atol=2e-6)
    reference_ids, reference_logp = sample_reference(x, u, **settings)
    assert torch.equal(ids[sure], reference_ids[sure])
    torch.testing.assert_close(logp[sure], reference_logp[sure], rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [151936, 32003])
def test_the_log_prob_before_the_cut_on_a_gpu(kernels, vocab: int):
    x, u = like_a_model(65, vocab), torch.rand(65, device="cuda", dtype=F64)
    ids, cut = sample(x, u, temperature=0.8, top_p=0.9)
    whole = log_prob(x, ids, 0.8)
    exact = (x.double() / 0.8).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=2e-6)
    kept = (whole - cut).double().exp()  # share of the mass that top-p leaves, 0.9 and up to one token more
    assert ((kept > 0.9 - 1e-5) & (kept < 1 + 1e-5)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_a_graph_draws_from_what_it_finds(kernels, name: str):
    settings = full(SETTINGS[name])
    x, u = like_a_model(16, 128256), torch.rand(16, device="cuda", dtype=F64)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # no wait for the device
    try:
        sample(x, u, **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    out = torch.empty(16, device="cuda", dtype=torch.int64), torch.empty(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own = sample(x, u, **settings)
        sample(x, u, **settings, out=out)
    for _ in range(3):
        x.copy_(like_a_model(16, 128256))
        u.uniform_()
        graph.replay()
        ids, logp = sample(x, u, **settings)
        assert torch.equal(own[0], ids) and torch.equal(own[1], logp)
        assert torch.equal(out[0], ids) and torch.equal(out[1], logp)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_runs_agree_bit_for_bit_and_rows_do_not_mix_on_a_gpu(kernels, name: str):
    settings = full(SETTINGS[name])
    x, u = like_a_model(300, 151936), torch.rand(300, device="cuda", dtype=F64)
    x[100:200] = 3 * torch.randn(100, 151936, device="cuda")  # thousands of tokens in the nucleus
    x[200:] = (8 * x[200:]).round() / 8  # ties
    ids, logp = sample(x, u, **settings)
    for _ in range(10):
        again = sample(x, u, **settings)
        assert torch.equal(again[0], ids) and torch.equal(again[1], logp)
    for b in (0, 150, 299):
        alone = sample(x[b : b + 1], u[b : b + 1], **settings)
        assert alone[0] == ids[b] and alone[1] == logp[b]


@pytest.mark.gpu
def test_kept_sets_and_ties_on_a_gpu(kernels):
    """Equal logits have equal masses, so these results are exact."""
    u = torch.tensor([0.0, 0.5, LAST], device="cuda", dtype=F64)
    flat = torch.zeros(3, 128256, device="cuda")
    assert sample(flat, u, temperature=1.0)[0].tolist() == [0, 64128, 128255]
    for settings in ({"top_p": 0.5}, {"top_k": 64128}, {"top_k": 128000, "top_p": 64128 / 128000}):
        ids, logp = sample(flat, u, **full(settings))
        assert ids.tolist() == [0, 32064, 64127]
        assert logp.tolist() == pytest.approx([-math.log(64128)] * 3, rel=1e-6)
    x = torch.randint(0, 40, (5003,), device="cuda") / 8
    order = sorted(range(5003), key=lambda v: (-x[v].item(), v))
    for k in (1, 50, 300):
        us = (torch.arange(4000, device="cuda", dtype=F64) + 0.5) / 4000
        ids, _ = sample(x.expand(4000, -1), us, temperature=100.0, top_k=k)
        assert ids.unique().tolist() == sorted(order[:k])
    steps = x.expand(64, -1).clone()
    ids, logp = sample(steps, torch.zeros(64, device="cuda"), temperature=0.0)
    assert (ids == order[0]).all()
    torch.testing.assert_close(logp, steps.double().log_softmax(-1).amax(-1).float())


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("settings", [{}, {"top_k": 2}])
def test_near_certainty_on_a_gpu(kernels, temperature: float, settings: dict[str, Any]):
    margins = torch.tensor([5.0, 10.0, 17.0, 25.0, 40.0], device="cuda") * temperature
    x = torch.full((5, 128256), -INF, device="cuda")
    x[:, 100000] = 21.7
    x[:, 7] = 21.7 - margins
    exact = -((x[:, 7].double() - x[:, 100000].double()) / temperature).exp().log1p()
    ids, logp = sample(x, torch.full((5,), 0.5, device="cuda"), temperature=temperature, **settings)
    assert (ids == 100000).all()
    torch.testing.assert_close(logp.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_that_are_not_finite_give_nan_on_a_gpu(kernels, name: str):
    settings = full(SETTINGS[name])
    for place in (0, 4095, 5002):
        x, u = torch.randn(6, 5003, device="cuda"), torch.rand(6, device="cuda")
        x[2, place], x[3, place], x[4], x[5] = NAN, INF, -INF, NAN
        ids, logp = sample(x, u, **settings)
        assert logp.isnan().tolist() == [False, False, True, True, True, True]
        assert ((ids >= 0) & (ids < 5003)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_offsets_beyond_32_bits(kernels, name: str):
    settings, stride, vocab = full(SETTINGS[name]), 2**31 + 16, 32016
    far = torch.empty(stride + vocab, device="cuda").as_strided((2, vocab), (stride, 1))
    near, u = like_a_model(2, vocab), torch.rand(2, device="cuda")
    ids, logp = sample(far.copy_(near), u, **settings)
    wanted = sample(near, u, **settings)
    assert torch.equal(ids, wanted[0]) and torch.equal(logp, wanted[1])
