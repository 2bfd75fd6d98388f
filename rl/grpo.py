"""Group relative policy optimisation (GRPO): the step, and what is measured of it.

Axes: P prompts of a step, G completions per prompt, M scored tokens of a pass.

    reward_PG     the reward functions' weighted sum; NaN where none had an opinion
    advantage_PG  the reward relative to the other completions of its prompt
    loss          a sum over scored tokens (rl/objectives.py) whose weights carry the denominator (rl/batch.py)
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from covey.policies.policy import Batch, Policy
from covey.rewards.runner import Scorer, ScoreTable
from covey.rl.advantages import group_advantages
from covey.rl.batch import pack, split, to_device
from covey.rl.config import GrpoConfig
from covey.rl.metrics import Sample, sample_rows
from covey.rl.objectives import Stats, grpo_loss
from covey.rl.optimizer import FlatAdamW
from covey.rollout.engine import Group, Prompt, RolloutEngine, Sampling

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class GrpoMachine:
    """What a step works with."""

    policy: Policy
    engine: RolloutEngine
    scorer: Scorer
    optimizer: FlatAdamW
    device: torch.device


def grpo_step(
    machine: GrpoMachine, prompts: Sequence[Prompt], config: GrpoConfig, step: int
) -> tuple[Metrics, list[Sample]]:
    """One step (counted from 0) on these P prompts: sample, score, learn, hand the new weights to the engine."""
    rollout, objective = config.rollout, config.objective
    clock = Clock(machine.device)
    machine.engine.wake()
    groups = machine.engine.generate(prompts, rollout.group_size, step_sampling(config, step))
    machine.engine.sleep()
    clock.lap("rollout")

    scores = machine.scorer(groups)
    advantage_PG = group_advantages(scores.total, objective.advantage)
    clock.lap("reward")

    batch = pack(
        groups,
        advantage_PG,
        ~np.isnan(scores.total),
        aggregation=objective.aggregation,
        max_new_tokens=rollout.max_new_tokens,
        truncated=objective.truncated,
        skip_zero=objective.beta == 0,
        temperature=rollout.temperature,
    )
    parts = [to_device(part, machine.device) for part in split(batch, config.optim.tokens_per_pass)]
    if objective.beta:
        parts = with_reference(machine.policy, parts)
    # Without parts (no group has any spread) there is no update at all: AdamW's momentum would move the weights.
    learned: Metrics = {}
    for update in range(objective.updates_per_rollout if parts else 0):
        parts, stats = accumulate(machine.policy, parts, config)
        index = step * objective.updates_per_rollout + update
        total = config.optim.steps * objective.updates_per_rollout
        learned = stats.finish() | machine.optimizer.step(index, total)
        machine.optimizer.zero_grad()
    machine.engine.update(machine.policy.weights(), step + 1)
    clock.lap("train")

    metrics = rollout_metrics(groups, scores, advantage_PG, clock.seconds["rollout"]) | learned
    metrics["loss/total"] = metrics.get("loss/policy", 0.0) + metrics.get("loss/kl", 0.0)
    metrics["tokens/computed"] = len(batch.input_ids)
    return metrics | clock.metrics(), sample_rows(groups, scores.total, scores.per_function, advantage_PG)


def accumulate(policy: Policy, parts: list[Batch], config: GrpoConfig) -> tuple[list[Batch], Stats]:
    """Gradients of the whole step, part by part. Returns the parts with their old log-probs filled in.

    In the first update the old log-probs are the present ones (no pass of their own, ratio exactly 1); they are
    kept for the updates that follow on the same rollouts.
    """
    o = config.objective
    stats, seen = Stats(), []
    for part in parts:
        scored = policy.logprobs(part, entropy=True)
        loss, part_stats = grpo_loss(
            scored.logp,
            part,
            clip_low=o.clip_low,
            clip_high=o.clip_high,
            beta=o.beta,
            correction=o.correction,
            correction_cap=o.correction_cap,
            entropy_M=scored.entropy,
        )
        loss.backward()
        stats += part_stats
        seen.append(part if part.old is not None else replace(part, old=scored.logp.detach()))
    return seen, stats


def with_reference(policy: Policy, parts: list[Batch]) -> list[Batch]:
    """The parts with the reference policy's log-probs."""
    with policy.reference():
        return [replace(part, reference=policy.logprobs(part).logp) for part in parts]


def step_sampling(config: GrpoConfig, step: int) -> Sampling:
    """How completions are drawn in this step: every step has its own seed."""
    rollout = config.rollout
    seed = int(np.random.SeedSequence([config.run.seed, step]).generate_state(1, np.uint64)[0] >> 1)
    return Sampling(rollout.max_new_tokens, rollout.temperature, stop=tuple(rollout.stop), seed=seed)


def rollout_metrics(
    groups: Sequence[Group], scores: ScoreTable, advantage_PG: NDArray[np.float64], seconds: float
) -> Metrics:
    """Rewards, lengths and what share of the completions can teach something."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(completion.ids) for completion in completions])
    scored = scores.total[~np.isnan(scores.total)]
    return {
        "reward/mean": float(scored.mean()) if len(scored) else float("nan"),
        "reward/std": float(scored.std()) if len(scored) else float("nan"),
        **{f"reward/{name}": value for name, value in scores.means().items()},
        "reward/unscored": float(np.isnan(scores.total).mean()),
        "groups/no_spread": float((advantage_PG == 0).all(1).mean()),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([completion.finish == "length" for completion in completions])),
        "rollout/tokens_per_s": float(lengths.sum()) / max(seconds, 1e-9),
    }


class Clock:
    """Seconds of the phases of a step, the device's work included."""

    def __init__(self, device: torch.device):
        self._device = device
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now

    def metrics(self) -> Metrics:
        times = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        times["time/step_s"] = sum(self.seconds.values())
        if self._device.type == "cuda":
            times["memory/peak_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return times
