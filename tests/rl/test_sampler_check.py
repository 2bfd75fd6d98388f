"""The check of a sampler before the first step: what passes, what does not, and that it leaves nothing behind."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.policies.open import open_policy
from covey.rl.sampler_check import SamplerMismatch, check_sampler
from covey.rollout.engine import Prompt, Sampling
from covey.rollout.local import local_engine

PROMPTS = [Prompt(i, tuple(range(3, 3 + length)), "") for i, length in enumerate((2, 9, 30))]
SAMPLING = Sampling(64, temperature=0.7, seed=3)


def policy_of(folder: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {"method": "lora", "dtype": "float32", "device": "cpu", "reference": "none"}
    return open_policy(folder, **settings | options)


class Sampler:
    """An engine on a policy of its own, with a flaw."""

    def __init__(self, policy: Any, flaw: str = ""):
        self.policy, self.flaw, self.updates = policy, flaw, 0
        self.engine = local_engine(policy, lambda ids: "", [0])

    def generate(self, prompts: Any, n: int, sampling: Sampling) -> Any:
        self.longest = sampling.max_new_tokens
        return self.engine.generate(
            prompts, n, replace(sampling, temperature=1.0) if self.flaw == "hot" else sampling
        )

    def update(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.updates += 1
        if self.flaw != "deaf":
            self.policy.load_weights(weights)


def check(sampler: Sampler, policy: Any, bound: float | None = None) -> Any:
    return check_sampler(sampler, policy, PROMPTS, SAMPLING, bound=bound, tokens_per_pass=40)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"method": "full"}, {"targets": ["q_proj"], "dropout": 0.1}], ids=str
)
def test_a_sampler_that_samples_from_the_policy(options: dict[str, Any], tiny_qwen2: Path) -> None:
    policy = policy_of(tiny_qwen2, **options)
    before = {name: weight.clone() for name, weight in policy.weights().items()}
    sampler = Sampler(policy_of(tiny_qwen2, **options))
    found = check(sampler, policy)
    assert found.mean <= found.largest < 2e-5 and 6 <= found.tokens <= 6 * 16
    assert sampler.longest == 16 and sampler.updates == 2
    for weights in (policy.weights(), sampler.policy.weights()):
        assert all(torch.equal(weight, before[name]) for name, weight in weights.items())


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_sampler_that_never_sees_an_update(method: str, tiny_qwen2: Path) -> None:
    """With an adapter of zeros it is right until the first step, so only the second question shows it."""
    sampler = Sampler(policy_of(tiny_qwen2, method=method), "deaf")
    policy = policy_of(tiny_qwen2, method=method)
    before = {name: weight.clone() for name, weight in policy.weights().items()}
    with pytest.raises(
        SamplerMismatch, match=r"after an update that moved them by 0\.00\d+ \(the bound is 0.00\d+\)"
    ):
        check(sampler, policy)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.weights().items())


def test_a_bound_above_the_least_noise_is_tested_with_more(tiny_qwen2: Path) -> None:
    with pytest.raises(SamplerMismatch, match="after an update that moved them by") as caught:
        check(Sampler(policy_of(tiny_qwen2), "deaf"), policy_of(tiny_qwen2), bound=0.1)
    moved = float(str(caught.value).split("moved them by ")[1].split()[0])
    assert 0.4 < moved < 1.2


def test_a_sampler_at_another_temperature(tiny_qwen2: Path) -> None:
    with pytest.raises(
        SamplerMismatch, match=r"are 0\.\d+ nats from the trainer's on average \(the bound is 0.001\)"
    ):
        check(Sampler(policy_of(tiny_qwen2), "hot"), policy_of(tiny_qwen2))


def test_a_sampler_with_another_base_model(tiny_qwen2: Path, tiny_llama: Path) -> None:
    with pytest.raises(SamplerMismatch, match="it does not sample from what is trained"):
        check(Sampler(policy_of(tiny_llama)), policy_of(tiny_qwen2))


def test_log_probs_that_are_no_numbers_do_not_pass(tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(tiny_qwen2)
    sampler = Sampler(policy_of(tiny_qwen2))
    with torch.no_grad():
        for weight in policy.weights().values():
            weight.fill_(float("nan"))
    with pytest.raises(SamplerMismatch, match="nan nats"):
        check(sampler, policy)
