"""The fused AdamW against torch.optim.AdamW in float64, which clips, counts and updates in steps of its own."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.kernels.adamw import Buffer, adamw, adamw_reference

# lr is no float32, so that one which is rounded on the way to the kernel shows.
RATES: dict[str, Any] = {
    "lr": 0.013,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 2.0,
}
F32, F64 = torch.float32, torch.float64


@pytest.fixture(params=["reference", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COVEY_KERNELS", request.param)
    return request.param


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs and several rounds in each for a few hundred elements."""
    from covey.kernels import adamw_triton

    monkeypatch.setattr(adamw_triton, "PARTIAL_SUMS", 4)
    monkeypatch.setattr(adamw_triton, "SQUARES", (32, 4))
    monkeypatch.setattr(adamw_triton, "UPDATE", (64, 4))


def buffer(size: int, dtype: torch.dtype = F64, seed: int = 0, shadow: torch.dtype | None = None) -> Buffer:
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(size, dtype=F64, generator=g).to(dtype)

    p, grad, m = normal(), normal(), 0.3 * normal()
    v = m.square() + 0.01 * normal().abs()
    return Buffer(p, grad, m, v, torch.tensor(3.0), None if shadow is None else p.to(shadow))


def moved(b: Buffer, *args) -> Buffer:
    """A copy on another device or in another dtype; the step count stays float32."""
    p, grad, m, v = (x.to(*args, copy=True) for x in (b.param, b.grad, b.exp_avg, b.exp_avg_sq))
    shadow = None if b.shadow is None else b.shadow.to(p.device, copy=True)
    return Buffer(p, grad, m, v, b.step.to(p.device, copy=True), shadow)


class Oracle:
    """torch's own optimiser in float64, unfused; a step of it is left out by not calling it."""

    def __init__(self, buffers: list[Buffer], rates: dict[str, Any]):
        self.rates = rates
        self.params = [b.param.double().cpu().clone().requires_grad_() for b in buffers]
        self.adamw = torch.optim.AdamW(
            self.params,
            lr=rates["lr"],
            betas=(rates["beta1"], rates["beta2"]),
            eps=rates["eps"],
            weight_decay=rates["weight_decay"],
            foreach=False,
        )
        for p, b in zip(self.params, buffers, strict=True):
            state = {"exp_avg": b.exp_avg, "exp_avg_sq": b.exp_avg_sq, "step": b.step}
            self.adamw.state[p] = {name: x.double().cpu().clone() for name, x in state.items()}

    def step(self, grads: list[Tensor]) -> float:
        grads = [g.double().cpu() for g in grads]
        norm = math.sqrt(math.fsum(math.fsum(x * x for x in g.tolist()) for g in grads))
        if math.isfinite(norm):
            clip = min(1.0, self.rates["max_grad_norm"] / norm) if self.rates["max_grad_norm"] else 1.0
            for p, g in zip(self.params, grads, strict=True):
                p.grad = g * clip
            self.adamw.step()
        return norm

    def assert_equal(self, buffers: list[Buffer], rtol: float) -> None:
        """Every tensor within rtol of its own largest element."""
        for p, b in zip(self.params, buffers, strict=True):
            state = self.adamw.state[p]
            assert b.step.item() == state["step"].item()
            for mine, theirs in (
                (b.param, p.detach()), (b.exp_avg, state["exp_avg"]), (b.exp_avg_sq, state["exp_avg_sq"])
            ):  # fmt: skip
                if len(theirs):
                    torch.testing.assert_close(
                        mine.double().cpu(), theirs, rtol=0, atol=rtol * theirs.abs().max().item()
                    )


def train(buffers: list[Buffer], rates: dict[str, Any], steps: int, rtol: float) -> None:
    """Gradients of changing size, so that some are clipped and some not, and now and then one that is not finite."""
    oracle = Oracle(buffers, rates)
    generator = torch.Generator().manual_seed(9)
    for i in range(steps):
        for b in buffers:
            noise = torch.randn(b.grad.shape, dtype=F64, generator=generator)
            b.grad.copy_((0.02, 0.2, 3.0)[i % 3] * noise)
        if i % 7 == 5 and len(buffers[-1].grad):
            buffers[-1].grad[-1] = (math.nan, math.inf, -math.inf)[i % 3]
        norm = oracle.step([b.grad for b in buffers])
        mine = adamw(buffers, **rates)
        assert mine.dtype == F64 and mine.shape == ()
        assert mine.item() == pytest.approx(norm, rel=1e-13, nan_ok=True)
    oracle.assert_equal(buffers, rtol)


@pytest.mark.parametrize("sizes", [(1,), (31, 1), (64,), (129, 64, 5), (397,)])
def test_many_steps(sizes: tuple[int, ...], implementation: str, small_programs):
    train([buffer(n, seed=i) for i, n in enumerate(sizes)], RATES, 24, rtol=1e-13)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": 0.0},
        {"weight_decay": 0.0},
        {"beta1": 0.0},
        {"beta2": 0.0, "eps": 0.1},
        {"eps": 1e-3},
    ],
    ids=str,
)
def test_settings(changes: dict[str, float], implementation: str):
    train([buffer(50)], RATES | changes, 8, rtol=1e-13)


def test_sizes_of_the_real_launch(implementation: str):
    train([buffer(2048 + 3), buffer(513)], RATES, 2, rtol=1e-13)


@pytest.mark.parametrize("start", [0, 1, 99, 9_999, 1_000_000])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.99, 0.9999)])
def test_bias_correction(start: int, betas: tuple[float, float], implementation: str):
    b = buffer(20)
    b.step.fill_(start)
    if start == 0:
        b.exp_avg.zero_()
        b.exp_avg_sq.zero_()
    train([b], RATES | {"beta1": betas[0], "beta2": betas[1]}, 3, rtol=1e-13)
    assert b.step.item() == start + 3


def test_float32_stays_close_to_float64(implementation: str):
    """An error of the order of the weights' own rounding, 6e-8, in each of 40 steps."""
    train([buffer(300, F32), buffer(17, F32)], RATES, 40, rtol=1e-6)


def test_one_float32_step_is_rounded_like_its_inputs(implementation: str):
    """Relative to what each result is made of: the weights to 2 ulp, their change to 1e-6 of it."""
    b = buffer(1000, F32)
    before = b.param.double()
    oracle = Oracle([b], RATES)
    oracle.step([b.grad])
    adamw([b], **RATES)
    (p,) = oracle.params
    p = p.detach()
    assert ((b.param.double() - p).abs() <= 2.4e-7 * p.abs() + 1e-6 * (p - before).abs()).all()
    for mine, theirs in ((b.exp_avg, "exp_avg"), (b.exp_avg_sq, "exp_avg_sq")):
        expected = oracle.adamw.state[oracle.params[0]][theirs]
        scale = expected.abs().max().item() if theirs == "exp_avg" else 0.0  # its sum cancels
        torch.testing.assert_close(mine.double(), expected, rtol=5e-7, atol=1e-7 * scale)


def test_the_norm_is_summed_in_float64(implementation: str, small_programs):
    b = buffer(300, F32)
    b.grad.fill_(1e30)  # the square is no float32
    assert adamw([b], **RATES).item() == pytest.approx(math.sqrt(300) * torch.tensor(1e30).item(), rel=1e-15)
    b.grad.fill_(1.0)
    b.grad[0] = 4096.0  # in float32, 2^24 + 1 is 2^24
    assert adamw([b], **RATES).item() == math.sqrt(2**24 + 299)
    b.grad.fill_(1e-30)
    assert adamw([b], **RATES).item() == pytest.approx(math.sqrt(300) * torch.tensor(1e-30).item(), rel=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 77, -1])
def test_a_gradient_that_is_not_finite_changes_nothing(
    bad: float, where: int, implementation: str, small_programs
):
    buffers = [buffer(150, F32, shadow=torch.float16), buffer(200, F32)]
    buffers[1].grad[where] = bad
    before = [moved(b) for b in buffers]
    assert not math.isfinite(adamw(buffers, **RATES).item())
    for b, old in zip(buffers, before, strict=True):
        torch.testing.assert_close(tuple(b), tuple(old), rtol=0, atol=0, equal_nan=True)
    assert not math.isfinite(adamw(buffers, **RATES, zero_grad=True).item())
    for b, old in zip(buffers, before, strict=True):
        assert torch.equal(b.param, old.param) and not b.grad.any()


def test_the_gradient_is_left_clipped_as_it_was_or_zero(implementation: str):
    for norm, zero, expected in ((10.0, False, 2.0), (1.5, False, 1.5), (2.0, False, 2.0), (10.0, True, 0.0)):
        b = buffer(200, F32)
        b.grad.mul_(norm / b.grad.norm())
        before = b.grad.clone()
        adamw([b], **RATES, zero_grad=zero)
        torch.testing.assert_close(b.grad, before * expected / norm, rtol=1e-6, atol=0)
        if norm == 1.5:
            assert torch.equal(b.grad, before)


def test_the_shadow_is_the_rounded_weight(implementation: str, small_programs):
    for b in (buffer(131, F32, shadow=torch.float16), buffer(131, F64, shadow=F32)):
        assert b.shadow is not None
        adamw([b], **RATES)
        assert torch.equal(b.shadow, b.param.to(b.shadow.dtype))


def test_writes_nothing_beside_its_buffers(implementation: str, small_programs):
    """Views at odd offsets between NaNs: a NaN that is read would spread, one that is overwritten would show."""
    good = buffer(171, F32, shadow=torch.float16)
    assert good.shadow is not None
    originals = [good.param, good.grad, good.exp_avg, good.exp_avg_sq, good.shadow]
    padded = [torch.full((171 + 40,), torch.nan, dtype=x.dtype) for x in originals]
    p, grad, m, v, shadow = (x[13 : 13 + 171] for x in padded)
    for view, x in zip((p, grad, m, v, shadow), originals, strict=True):
        view.copy_(x)
    norm = adamw([Buffer(p, grad, m, v, good.step.clone(), shadow)], **RATES)
    assert norm.item() == adamw([good], **RATES).item()
    for x, expected in zip(padded, originals, strict=True):
        assert torch.equal(x[13 : 13 + 171], expected)
        assert x[:13].isnan().all() and x[13 + 171 :].isnan().all()


def test_an_empty_buffer_among_others(implementation: str):
    train([buffer(0), buffer(5, seed=1)], RATES, 3, rtol=1e-13)


def test_autograd_learns_of_the_update(implementation: str):
    b = buffer(5, F32, shadow=torch.float16)
    assert b.shadow is not None
    weight = b.param.clone().requires_grad_()
    old = weight._version, b.shadow._version
    adamw([b._replace(param=weight.detach())], **RATES)
    assert weight._version > old[0] and b.shadow._version > old[1]


@pytest.mark.gpu
@pytest.mark.parametrize("shadow", [torch.bfloat16, None])
@pytest.mark.parametrize("size", [1, 511, 512, 4097, 1 << 20])
def test_gpu_against_float64(size: int, shadow: torch.dtype | None):
    made = buffer(size, F32, shadow=shadow)
    b = moved(made, "cuda")
    oracle = Oracle([b], RATES)
    for i in range(6):
        b.grad.copy_((0.01, 30.0)[i % 2] * torch.randn(size, generator=torch.Generator().manual_seed(i)))
        if i == 3:
            b.grad[size // 2] = math.nan
        norm = oracle.step([b.grad])
        assert adamw([b], **RATES, zero_grad=i == 5).item() == pytest.approx(norm, rel=1e-12, nan_ok=True)
    oracle.assert_equal([b], 1e-6)
    assert not b.grad.any()
    if shadow is not None:
        assert b.shadow is not None and torch.equal(b.shadow, b.param.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, 1_000_000])
def test_gpu_bias_correction(start: int):
    b = moved(buffer(1000, F32), "cuda")
    b.step.fill_(start)
    rates: dict[str, Any] = RATES | {"beta2": 0.9999}
    oracle = Oracle([b], rates)
    oracle.step([b.grad])
    adamw([b], **rates)
    oracle.assert_equal([b], 1e-6)


@pytest.mark.gpu
def test_gpu_runs_are_bit_equal_and_do_not_wait():
    made = moved(buffer(3_000_017, F32, shadow=torch.bfloat16), "cuda")
    results = []
    adamw([moved(made)], **RATES)  # compiled
    for _ in range(3):
        b = moved(made)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        norm = adamw([b], **RATES)
        torch.cuda.set_sync_debug_mode("default")
        results.append((norm, *b))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@pytest.mark.gpu
def test_gpu_offsets_beyond_int32():
    size = (1 << 31) + 1000
    p, grad, m, v = (torch.zeros(size, device="cuda") for _ in range(4))
    b = Buffer(p, grad, m, v, torch.zeros((), device="cuda"))
    b.grad[-3:] = torch.tensor([3.0, -4.0, 12.0], device="cuda")
    rates: dict[str, Any] = RATES | {"max_grad_norm": 0.0}
    assert adamw([b], **rates).item() == 13.0
    torch.testing.assert_close(b.param[-3:].cpu(), torch.tensor([-0.013, 0.013, -0.013]), rtol=1e-6, atol=0)
    assert not b.param[:-3].any()
    torch.testing.assert_close(b.exp_avg[-3:].cpu(), torch.tensor([0.3, -0.4, 1.2]), rtol=1e-6, atol=0)


def test_reference_needs_no_kernel():
    """Directly, one weight, by hand: m = 0.1 g, v = 0.01 g^2, so that the step is lr g / (|g| + eps)."""
    p, grad, m, v = (torch.tensor([x], dtype=F64) for x in (1.0, 0.5, 0.0, 0.0))
    b = Buffer(p, grad, m, v, torch.zeros(()))
    assert adamw_reference([b], 0.01, 0.9, 0.99, 0.5, 0.2, 0.0).item() == 0.5
    assert b.param.item() == pytest.approx(1 - 0.01 * 0.2 - 0.01 * 0.5, rel=1e-14)
    assert b.step.item() == 1
