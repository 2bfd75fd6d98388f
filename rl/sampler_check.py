"""Does another sampler sample from what is trained? Asked once, on a few prompts, before the first step.

The log-probs that the sampler reports are held against the trainer's. Other weights, another temperature, tokens that
one of them does not see and adapters that are not applied all show in them. An adapter starts as zero, and what is not
there cannot be missed: so the question is asked again with weights that are shaken, and then put back.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.policies.policy import Batch, Policy
from covey.rl.batch import pack, split, to_device
from covey.rl.config import GrpoConfig
from covey.rl.distributed import from_first
from covey.rl.engines import base_weights
from covey.rl.grpo import step_sampling
from covey.rollout.engine import Prompt, RolloutEngine, Sampling

PROMPTS, SAMPLES, TOKENS = 4, 2, 16
BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-3}  # mean difference in nats
COARSE = 0.1  # in 16 bits, where two ways to compute the same are 0.01 to 0.05 apart
# The least of them that moves log-probs well beyond the bound is taken.
NOISE = [1e-4 * 2**k for k in range(15)]


class SamplerMismatch(RuntimeError):
    """The sampler does not sample from the policy that is trained."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of the sampler's log-probs from the trainer's, absolute, in nats, over so many tokens."""

    mean: float
    largest: float
    tokens: int


def check_start(
    engine: RolloutEngine, policy: Any, prompts: Sequence[Prompt], config: GrpoConfig
) -> dict[str, str]:
    """check_sampler for a run that is about to start, and what to say of it; the sampler of the house is the policy."""
    if config.rollout.engine == "inprocess":
        return {}
    found = check_sampler(
        engine,
        policy,
        [prompts[i] for i in range(min(PROMPTS, len(prompts)))],
        step_sampling(config, 0),
        bound=config.rollout.vllm.max_difference,
        tokens_per_pass=config.optim.tokens_per_pass,
    )
    name = f"{config.rollout.engine}, {base_weights(config)} weights"
    apart = f"{found.mean:.1e} from the trainer's on average, {found.largest:.1e} at most"
    return {"sampler": f"{name}: log-probs {apart} ({found.tokens} tokens)"}


def check_sampler(
    engine: RolloutEngine,
    policy: Any,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    bound: float | None,
    tokens_per_pass: int,
) -> Difference:
    """The difference with the weights as they are, on a few prompts.

    sampling: as in training; completions are cut short. bound: for the mean difference, by default 0.001 in 32 bits and
    0.1 in 16. policy: a Policy with `device` and `dtype`. Raises SamplerMismatch for a mean difference above the bound,
    or above a quarter of what shaken weights move; afterwards these are what they were, in the policy and the engine.
    """
    bound = bound or BOUNDS.get(policy.dtype, COARSE)
    sampling = replace(sampling, max_new_tokens=min(TOKENS, sampling.max_new_tokens))

    def sample() -> list[Batch]:
        groups = engine.generate(prompts, SAMPLES, sampling)
        ones_PG = np.ones((len(groups), SAMPLES))
        batch = pack(
            groups, ones_PG, ones_PG > 0, aggregation="token", max_new_tokens=sampling.max_new_tokens,
            truncated="keep", skip_zero=False, temperature=sampling.temperature,
        )  # fmt: skip
        return [to_device(part, policy.device) for part in split(batch, tokens_per_pass)]

    parts = sample()
    logp_M = _logprobs(policy, parts)
    found = _compare(logp_M, parts)
    _judge(found, bound, "")
    for noise in NOISE:
        with _shaken(policy, noise):
            moved = from_first(partial(_moved, policy, parts, logp_M))  # one decision for all processes
            if moved > 4 * min(bound, COARSE) or noise == NOISE[-1]:
                engine.update(policy.weights(), 0)
                parts = sample()
                after = _compare(_logprobs(policy, parts), parts)
                _judge(after, max(bound, moved / 4), f" after an update that moved them by {moved:.2g}")
                break
    engine.update(policy.weights(), 0)
    return found


def _moved(policy: Policy, parts: Sequence[Batch], logp_M: Tensor) -> float:
    return float((_logprobs(policy, parts) - logp_M).abs().mean())


def _logprobs(policy: Policy, parts: Sequence[Batch]) -> Tensor:
    with torch.no_grad():
        return torch.cat([policy.logprobs(part).logp for part in parts])


def _compare(logp_M: Tensor, parts: Sequence[Batch]) -> Difference:
    sampler = torch.cat([part.sampler for part in parts if part.sampler is not None])
    apart_M = (logp_M - sampler).abs().double()
    return Difference(float(apart_M.mean()), float(apart_M.max()), len(apart_M))


def _judge(found: Difference, bound: float, when: str) -> None:
    if not found.mean <= bound:
        raise SamplerMismatch(
            f"the sampler's log-probs are {found.mean:.2g} nats from the trainer's on average{when} (the bound is "
            f"{bound:g}): it does not sample from what is trained. Are base model, dtype, quantisation and adapter the "
            "same? rollout.vllm.max_difference allows more"
        )


@contextmanager
def _shaken(policy: Policy, noise: float) -> Iterator[None]:
    """The policy with random numbers added to its adapter's B; without an adapter to all vectors: norms and biases."""
    weights = policy.weights()
    chosen = {name: w for name, w in weights.items() if "lora_B" in name}
    chosen = chosen or {name: w for name, w in weights.items() if w.ndim == 1}
    before = {name: w.clone() for name, w in chosen.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        for w in chosen.values():
            w.add_(noise * torch.randn(w.shape, generator=generator).to(w))
        yield
    finally:
        for name, w in chosen.items():
            w.copy_(before[name])
