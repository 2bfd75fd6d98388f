import math

import numpy as np
import pytest
import torch

from covey.rl.config import OptimSection
from covey.rl.optimizer import FlatAdamW, global_norm, learning_rate


@pytest.fixture(params=["reference", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """torch's AdamW and ours."""
    monkeypatch.setenv("COVEY_KERNELS", request.param)
    return request.param


@pytest.mark.usefixtures("implementation")
def test_adamw_matches_three_steps_by_hand() -> None:
    section = OptimSection(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.2, max_grad_norm=0.0)
    start = np.array([1.0, -2.0, 0.5])
    gradients = np.array([[0.3, -0.1, 2.0], [0.0, 5.0, -1.0], [-0.7, 0.2, 0.01]])
    p, m, v = start.copy(), np.zeros(3), np.zeros(3)
    for t, g in enumerate(gradients, start=1):
        m = 0.8 * m + 0.2 * g
        v = 0.95 * v + 0.05 * g * g
        p = p * (1 - 0.1 * 0.2) - 0.1 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)

    weights = torch.tensor(start, requires_grad=True)
    optimizer = FlatAdamW([weights], section)
    for i, g in enumerate(gradients):
        optimizer.zero_grad()
        (weights * torch.tensor(g)).sum().backward()
        optimizer.step(i, 3)

    np.testing.assert_allclose(weights.detach().numpy(), p, rtol=1e-12)


@pytest.mark.usefixtures("implementation")
def test_clipping_divides_by_the_norm_over_all_buffers() -> None:
    # |(3, 4), (12)| = 13. After the first step without momentum the update shows only the sign, so look at
    # the gradients themselves: clipped to norm 6.5 they are halved.
    a, b = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = FlatAdamW([a, b], OptimSection(max_grad_norm=6.5))
    assert a.grad is not None and b.grad is not None
    a.grad.copy_(torch.tensor([3.0, 4.0]))
    b.grad.copy_(torch.tensor([12.0]))
    metrics = optimizer.step(0, 1)
    assert metrics["grad/norm"] == 13.0
    assert a.grad.tolist() == [1.5, 2.0] and b.grad.tolist() == [6.0]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("limit", [0.0, 13.0, 20.0])
def test_a_small_gradient_is_not_clipped(limit: float) -> None:
    p = torch.zeros(2, requires_grad=True)
    optimizer = FlatAdamW([p], OptimSection(max_grad_norm=limit))
    assert p.grad is not None
    p.grad.copy_(torch.tensor([5.0, 12.0]))
    optimizer.step(0, 1)
    assert p.grad.tolist() == [5.0, 12.0]


def test_norm_neither_overflows_nor_loses_small_elements() -> None:
    assert global_norm([torch.full((4,), 1e30)]) == pytest.approx(2e30, rel=1e-7)
    parts = [torch.tensor([value]) for value in (4096.0, 1.0, 1.0, 1.0)]
    assert global_norm(parts) == math.sqrt(2**24 + 3)  # in float32 2^24 + 1 is 2^24
    n = (1 << 23) + 5  # more than one chunk, and not a multiple of it
    assert global_norm([torch.ones(n)]) == math.sqrt(n)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    p = torch.tensor([1.0, 2.0], requires_grad=True)
    optimizer = FlatAdamW([p], OptimSection(weight_decay=0.1))
    assert p.grad is not None
    p.grad.copy_(torch.tensor([0.5, 0.5]))
    optimizer.step(0, 9)
    before, moments = p.detach().clone(), {k: v for k, v in optimizer.state_dict().items() if k != "skipped"}
    moments = {name: tensor.clone() for name, tensor in moments.items()}

    p.grad.copy_(torch.tensor([bad, 1.0]))
    metrics = optimizer.step(1, 9)

    assert metrics["grad/skipped"] == 1 and not math.isfinite(metrics["grad/norm"])
    assert torch.equal(p.detach(), before)
    after = optimizer.state_dict()
    assert after.pop("skipped") == 1
    assert after.keys() == moments.keys() and all(torch.equal(after[k], moments[k]) for k in after)


@pytest.mark.usefixtures("implementation")
def test_zero_grad_keeps_the_buffer_that_views_add_to() -> None:
    p = torch.zeros(4, requires_grad=True)
    optimizer = FlatAdamW([p], OptimSection())
    buffer = p.grad
    assert buffer is not None
    buffer[1:3].add_(2.0)
    (3.0 * p).sum().backward()
    assert buffer.tolist() == [3.0, 5.0, 5.0, 3.0]
    optimizer.zero_grad()
    assert p.grad is buffer and buffer.tolist() == [0.0] * 4


def _train(optimizer: FlatAdamW, p: torch.Tensor, steps: range) -> None:
    for i in steps:
        optimizer.zero_grad()
        ((p - torch.linspace(-1, 1, p.numel(), device=p.device)) ** 4).sum().backward()
        optimizer.step(i, 5)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_resume_is_bit_equal(device: str) -> None:
    section = OptimSection(lr=0.05, schedule="cosine", warmup_steps=2, weight_decay=0.01)
    start = torch.randn(37, generator=torch.Generator().manual_seed(0)).to(device)

    straight = start.clone().requires_grad_()
    _train(FlatAdamW([straight], section), straight, range(5))

    first = start.clone().requires_grad_()
    optimizer = FlatAdamW([first], section)
    _train(optimizer, first, range(2))
    saved = {k: v.to("cpu", copy=True) if k != "skipped" else v for k, v in optimizer.state_dict().items()}
    second = first.detach().clone().requires_grad_()
    resumed = FlatAdamW([second], section)
    resumed.load_state_dict(saved)
    _train(optimizer, first, range(2, 5))  # the resumed one shares no memory with it
    _train(resumed, second, range(2, 5))

    assert torch.equal(second, straight) and torch.equal(first, straight)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("second", ["reference", "triton"])
@pytest.mark.parametrize("first", ["reference", "triton"])
def test_a_checkpoint_of_either_implementation_continues_in_the_other(
    first: str, second: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = OptimSection(lr=0.05, schedule="linear", weight_decay=0.01, max_grad_norm=0.5)
    start = torch.randn(37, generator=torch.Generator().manual_seed(0)).to(device)
    expected = start.double().cpu().requires_grad_()
    monkeypatch.setenv("COVEY_KERNELS", "reference")
    _train(FlatAdamW([expected], section), expected, range(5))

    monkeypatch.setenv("COVEY_KERNELS", first)
    p = start.clone().requires_grad_()
    optimizer = FlatAdamW([p], section)
    _train(optimizer, p, range(3))
    saved = optimizer.state_dict()
    assert list(saved) == ["skipped", "0/step", "0/exp_avg", "0/exp_avg_sq"]
    assert saved["0/step"].item() == 3 and saved["0/step"].dtype == torch.float32

    monkeypatch.setenv("COVEY_KERNELS", second)
    resumed = FlatAdamW([p], section)
    resumed.load_state_dict(saved)
    _train(resumed, p, range(3, 5))
    torch.testing.assert_close(p.detach().double().cpu(), expected.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_shadow_follows_the_weights(device: str, dtype: torch.dtype) -> None:
    p = torch.randn(37).to(device).requires_grad_()
    shadow = p.detach().to(dtype)
    optimizer = FlatAdamW([p], OptimSection(lr=0.5), [shadow])
    _train(optimizer, p, range(2))
    assert torch.equal(shadow, p.detach().to(dtype))
    before = shadow.clone()
    assert p.grad is not None
    p.grad.fill_(math.nan)
    optimizer.step(2, 5)
    assert torch.equal(shadow, before)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("value", [3.0, 1e-3, math.nan])
def test_a_step_that_zeroes_the_gradient(value: float) -> None:
    pairs = []
    for zero_grad in (True, False):
        p = torch.ones(5, requires_grad=True)
        optimizer = FlatAdamW([p], OptimSection())
        buffer = p.grad
        assert buffer is not None
        buffer.fill_(value)
        metrics = optimizer.step(0, 1, zero_grad=zero_grad)
        assert p.grad is buffer and bool(buffer.any()) != zero_grad
        pairs.append((p.detach(), metrics["grad/skipped"]))
    assert torch.equal(pairs[0][0], pairs[1][0]) and pairs[0][1] == pairs[1][1] == math.isnan(value)


@pytest.mark.usefixtures("implementation")
def test_state_before_the_first_step_and_of_other_weights() -> None:
    p, q = torch.zeros(3, requires_grad=True), torch.zeros(4, requires_grad=True)
    optimizer = FlatAdamW([p], OptimSection())
    other = FlatAdamW([q], OptimSection())
    other.load_state_dict(optimizer.state_dict())
    other.step(0, 1)
    with pytest.raises(ValueError, match=r"\(4,\).*\(3,\).*lora settings"):
        optimizer.load_state_dict(other.state_dict())
    pair = FlatAdamW([p, q], OptimSection())
    pair.step(0, 1)
    with pytest.raises(ValueError, match="lora settings"):
        optimizer.load_state_dict(pair.state_dict())


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        # lr 8, warm-up 4 of 12 steps, down to a quarter: 2 + 6 x left
        ("constant", 0, 2.0),  # 8 * 1/4
        ("constant", 3, 8.0),
        ("constant", 11, 8.0),
        ("linear", 0, 2.0),
        ("linear", 3, 8.0),
        ("linear", 4, 8.0),
        ("linear", 8, 5.0),  # half-way
        ("linear", 11, 2.75),  # 2 + 6/8
        ("linear", 12, 2.0),
        ("linear", 99, 2.0),
        ("cosine", 3, 8.0),
        ("cosine", 4, 8.0),
        ("cosine", 8, 5.0),
        ("cosine", 6, 2 + 3 * (1 + math.sqrt(0.5))),  # cos 45 degrees
        ("cosine", 12, 2.0),
    ],
)
def test_schedule(schedule: str, step: int, expected: float) -> None:
    section = OptimSection.model_validate(
        {"lr": 8.0, "schedule": schedule, "warmup_steps": 4, "min_lr_ratio": 0.25}
    )
    assert learning_rate(section, step, 12) == pytest.approx(expected, rel=1e-12)


def test_schedule_without_warm_up_and_with_nothing_but_warm_up() -> None:
    assert learning_rate(OptimSection(lr=1.0, schedule="linear"), 0, 4) == 1.0
    assert learning_rate(OptimSection(lr=1.0, schedule="linear"), 3, 4) == 0.25
    assert learning_rate(OptimSection(lr=1.0, schedule="cosine", warmup_steps=10), 4, 5) == 0.5


@pytest.mark.usefixtures("implementation")
def test_the_update_uses_the_scheduled_rate() -> None:
    # The first AdamW step moves each weight by lr * g / (|g| + eps), that is by the rate.
    p = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = FlatAdamW([p], OptimSection(lr=0.4, warmup_steps=4, eps=1e-12))
    assert p.grad is not None
    p.grad.fill_(1.0)
    assert optimizer.step(0, 10)["optim/lr"] == 0.1
    assert p.item() == pytest.approx(-0.1, rel=1e-9)


EIGHT_BIT = ["adamw8bit", "paged_adamw8bit"]


@pytest.mark.parametrize("name", EIGHT_BIT)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_moments_in_eight_bits_follow_adamw(name: str, device: str) -> None:
    """The first step rounds nothing that it uses: it is AdamW's. Twenty of them end within a few percent of its way.

    On a GPU bitsandbytes lets weights decay after the update and not before it.
    """
    section = OptimSection.model_validate(
        {"lr": 0.01, "optimizer": name, "weight_decay": 0.1, "max_grad_norm": 0.5, "schedule": "linear"}
    )
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(9000, generator=generator).to(device)
    exact, rounded = start.double().requires_grad_(), start.clone().requires_grad_()
    optimizers = [
        FlatAdamW([exact], section.model_copy(update={"optimizer": "adamw"})),
        FlatAdamW([rounded], section),
    ]
    for step in range(20):
        gradient = torch.randn(9000, generator=generator).to(device) + 0.3
        for p, optimizer in zip((exact, rounded), optimizers, strict=True):
            (p * gradient).sum().backward()
            optimizer.step(step, 20, zero_grad=True)
        if step == 0:
            left = 1 - 0.01 * 0.1
            expected = exact if device == "cpu" else (start + exact - left * start) * left
            torch.testing.assert_close(rounded.double(), expected, rtol=0, atol=2e-6)
    moved = (exact - start).norm()
    assert (rounded.double() - exact).norm() < 0.05 * moved
    state = optimizers[1].state_dict()
    assert state["0/state1"].dtype == state["0/state2"].dtype == torch.uint8 and state["0/step"] == 20


@pytest.mark.parametrize("name", EIGHT_BIT)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_resume_in_eight_bits_is_bit_equal(name: str, device: str) -> None:
    """In a buffer of 8 bits, and in one so small that bitsandbytes keeps 32."""
    section = OptimSection.model_validate({"lr": 0.05, "optimizer": name})
    start = [
        torch.randn(size, generator=torch.Generator().manual_seed(size)).to(device) for size in (5000, 60)
    ]

    def train(params: list[torch.Tensor], optimizer: FlatAdamW, steps: range) -> None:
        for step in steps:
            sum(((p - 1) ** 4).sum() for p in params).backward()  # type: ignore[union-attr]
            optimizer.step(step, 5, zero_grad=True)

    straight = [p.clone().requires_grad_() for p in start]
    train(straight, FlatAdamW(straight, section), range(5))
    first = [p.clone().requires_grad_() for p in start]
    optimizer = FlatAdamW(first, section)
    train(first, optimizer, range(2))
    saved = {
        k: v.to("cpu", copy=True) if isinstance(v, torch.Tensor) else v
        for k, v in optimizer.state_dict().items()
    }
    second = [p.detach().clone().requires_grad_() for p in first]
    resumed = FlatAdamW(second, section)
    resumed.load_state_dict(saved)
    train(second, resumed, range(2, 5))
    assert all(torch.equal(a, b) for a, b in zip(second, straight, strict=True))

    with pytest.raises(ValueError, match=r"another one: resume with the optim\.optimizer"):
        FlatAdamW(second, OptimSection()).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"another one: resume with the optim\.optimizer"):
        plain = FlatAdamW(second, OptimSection())
        plain.step(0, 1)
        resumed.load_state_dict(plain.state_dict())


def test_where_bitsandbytes_has_no_eight_bits_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False)
    with pytest.raises(
        ValueError, match=r"optim\.optimizer: bitsandbytes .* has no adamw8bit on CPU: use adamw"
    ):
        FlatAdamW([torch.zeros(3, requires_grad=True)], OptimSection(optimizer="adamw8bit"))
