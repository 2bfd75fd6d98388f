"""Group relative policy optimisation (GRPO): the step, from prompts to new weights.

Axes: P prompts of a step, G completions per prompt, M scored tokens of a pass.

    reward_PG     the reward functions' weighted sum; NaN where none had an opinion
    advantage_PG  the reward relative to the other completions (rl/advantages.py)
    loss          a sum over scored tokens (rl/objectives.py) whose weights carry the denominator (rl/batch.py)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from covey.policies.policy import Batch, Policy
from covey.rewards.runner import Pending, Scorer, ScoreTable
from covey.rl.advantages import compute_advantages, whiten
from covey.rl.batch import pack, split, to_device, trained_tokens
from covey.rl.config import GrpoConfig
from covey.rl.curriculum import Supply
from covey.rl.distributed import gather_objects, share, sum_gradients, sum_over_ranks
from covey.rl.entropy import EntropyBonus, keep_top_entropy
from covey.rl.kl import kl_value
from covey.rl.metrics import Sample, sample_rows
from covey.rl.objectives import policy_objective
from covey.rl.optimizer import FlatAdamW
from covey.rl.stats import Stats, merge_updates, over_ranks
from covey.rl.step_metrics import Clock, Measured, rollout_metrics
from covey.rollout.engine import Group, Prompt, RolloutEngine, Sampling


@dataclass(frozen=True, slots=True)
class GrpoMachine:
    """What a step works with."""

    policy: Policy
    engine: RolloutEngine
    scorer: Scorer
    optimizer: FlatAdamW
    entropy: EntropyBonus
    device: torch.device


def grpo_step(
    machine: GrpoMachine,
    prompts: Sequence[Prompt],
    config: GrpoConfig,
    step: int,
    supply: Supply | None = None,
) -> tuple[Measured, list[Sample]]:
    """One step (counted from 0) on these P prompts: sample, score, learn, hand the new weights to the engine.

    supply: where other prompts come from, in place of those whose groups teach nothing.
    """
    clock = Clock(machine.device)

    def sample(prompts: Sequence[Prompt]) -> tuple[list[Group], ScoreTable]:
        """Every rank samples and scores its share, and then knows all of them."""
        machine.engine.wake()
        pending: dict[int, Pending] = {}

        def score(index: int, group: Group) -> None:  # while the others are still sampled
            pending[index] = machine.scorer.submit(group, index)

        sampling = step_sampling(config, step)
        groups = sample_share(machine.engine, prompts, config.rollout.group_size, sampling, score)
        machine.engine.sleep()
        clock.lap("rollout")
        scores = machine.scorer.gather([pending[index] for index in range(len(groups))])
        groups, scores = gather_groups(prompts, groups, scores)
        clock.lap("reward")
        return groups, scores

    groups, scores = sample(prompts)
    supplied: Measured = {}
    if supply is not None:
        groups, scores, supplied = supply.complete(groups, scores, sample, step)

    advantage_PG, learned = learn(machine, groups, scores, config, step)
    machine.engine.update(machine.policy.weights(), step + 1)
    clock.lap("train")

    metrics = rollout_metrics(groups, scores, advantage_PG, clock.seconds["rollout"]) | supplied | learned
    terms = ("loss/policy", "loss/kl", "loss/entropy")
    metrics["loss/total"] = sum(metrics.get(name, 0.0) for name in terms)
    return metrics | clock.metrics(), sample_rows(groups, scores.total, scores.per_function, advantage_PG)


def sample_share(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    finished: Callable[[int, Group], None] | None = None,
) -> list[Group]:
    """n completions for each of this rank's share of the prompts; there may be none."""
    mine = share(prompts)
    return engine.generate(mine, n, sampling, finished) if mine else []


def gather_groups(
    prompts: Sequence[Prompt], groups: Sequence[Group], scores: ScoreTable
) -> tuple[list[Group], ScoreTable]:
    """The groups of these prompts from all ranks, with their scores.

    All ranks know the prompts, whose columns may be long, and need not be what can travel.
    """
    gathered = gather_objects(([group.completions for group in groups], scores))
    completions = [one for theirs, _ in gathered for one in theirs]
    whole = [Group(*pair) for pair in zip(prompts, completions, strict=True)]
    return whole, ScoreTable.join([scores for _, scores in gathered])


def learn(
    machine: GrpoMachine, groups: Sequence[Group], scores: ScoreTable, config: GrpoConfig, step: int
) -> tuple[np.ndarray, Measured]:
    """All optimiser steps over one batch of rollouts, of which every rank trains on its share.

    Returns the advantages [P, G] and what was measured.
    """
    o, policy = config.objective, machine.policy
    advantages = _advantages(machine, groups, scores, config)
    minibatches = _minibatches(machine, groups, scores, advantages, config)
    computed = sum(len(part.source) for parts in minibatches for part in parts)
    if o.top_entropy < 1:
        minibatches = keep_top_entropy(policy, minibatches, o.top_entropy)
    if o.kl_place == "loss":
        minibatches = [with_reference(policy, parts) for parts in minibatches]
    # The first update needs no pass for its old log-probs: they are the present ones. The others' are taken now.
    minibatches[1:] = [with_old(policy, parts) for parts in minibatches[1:]]

    updates: list[Measured] = []
    first, total = step * o.updates, config.optim.steps * o.updates
    for index in range(o.updates):
        parts = minibatches[index % o.updates_per_rollout]
        # Without parts (no group has any spread) there is no update: AdamW's momentum would move the weights.
        if not any(gather_objects(bool(parts))):
            continue
        parts, stats = accumulate(policy, parts, config, machine.entropy.value)
        minibatches[index % o.updates_per_rollout] = parts
        measured = over_ranks(stats).finish()
        sum_gradients(machine.optimizer.params)
        if o.has_entropy_term:
            measured["entropy/bonus"] = machine.entropy.value
            machine.entropy.observe(measured.get("entropy/mean", float("nan")))
        updates.append(measured | machine.optimizer.step(first + index, total))
        machine.optimizer.zero_grad()

    metrics = advantages.metrics | merge_updates(updates)
    metrics["tokens/computed"] = sum_over_ranks(
        len(part.input_ids) for parts in minibatches for part in parts
    )
    computed, trained = sum_over_ranks([computed]), int(advantages.trained_PG.sum())
    metrics["tokens/skipped"] = 1.0 - computed / trained if trained else 0.0
    return advantages.rows_PG, metrics


def accumulate(
    policy: Policy, parts: list[Batch], config: GrpoConfig, entropy_bonus: float = 0.0
) -> tuple[list[Batch], Stats]:
    """Gradients of one optimiser step, part by part. Returns the parts with their old log-probs filled in.

    Where there are none the old log-probs are the present ones (no pass of their own, ratio exactly 1); they are
    kept for the updates that follow on the same rollouts.
    """
    stats, seen = Stats(), []
    for part in parts:
        scored = policy.logprobs(part, entropy=True, entropy_gradient=entropy_bonus > 0)
        loss, part_stats = policy_objective(
            scored.logp, part, config.objective, entropy_M=scored.entropy, entropy_bonus=entropy_bonus
        )
        loss.backward()
        stats += part_stats
        seen.append(part if part.old is not None else replace(part, old=scored.logp.detach()))
    return seen, stats


def with_reference(policy: Policy, parts: list[Batch]) -> list[Batch]:
    """The parts with the reference policy's log-probs."""
    with policy.reference():
        return [replace(part, reference=policy.logprobs(part).logp) for part in parts]


def with_old(policy: Policy, parts: list[Batch]) -> list[Batch]:
    """The parts with the present policy's log-probs as the old ones."""
    with torch.no_grad():
        return [replace(part, old=policy.logprobs(part).logp) for part in parts]


def step_sampling(config: GrpoConfig, step: int) -> Sampling:
    """How completions are drawn in this step: every step has its own seed."""
    rollout = config.rollout
    seed = int(np.random.SeedSequence([config.run.seed, step]).generate_state(1, np.uint64)[0] >> 1)
    return Sampling(rollout.max_new_tokens, rollout.temperature, stop=tuple(rollout.stop), seed=seed)


@dataclass(frozen=True, slots=True)
class _Advantages:
    rows_PG: np.ndarray
    tokens: (
        dict[int, np.ndarray] | None
    )  # of every row p G + g in the loss, where its tokens differ; else None
    trained_PG: np.ndarray  # trained tokens of the rows in the loss
    metrics: Measured


def _advantages(
    machine: GrpoMachine, groups: Sequence[Group], scores: ScoreTable, config: GrpoConfig
) -> _Advantages:
    o, reward_PG = config.objective, scores.total
    trained_PG = trained_tokens(groups, ~np.isnan(reward_PG), o.truncated)
    penalties: dict[int, np.ndarray] = {}
    metrics: Measured = {}
    if o.kl_place == "reward":
        penalties = _kl_penalties(machine, groups, scores, config)
        penalty_PG = np.zeros(reward_PG.size)
        for row, k in penalties.items():
            penalty_PG[row] = o.beta * k.sum()
        reward_PG = reward_PG - penalty_PG.reshape(reward_PG.shape)
        counted = sum(map(len, penalties.values()))
        metrics["kl/reference"] = sum(float(k.sum()) for k in penalties.values()) / max(1, counted)
        metrics["reward/kl_penalty"] = float(penalty_PG.mean())

    rows_PG = compute_advantages(
        reward_PG,
        o.advantage,
        std=o.std or "unbiased",
        lengths_PG=trained_PG,
        functions_KPG=np.stack(list(scores.per_function.values())),
        weights_K=np.array([reward.weight for reward in machine.scorer.rewards]),
    )
    tokens = None
    if o.kl_place == "reward" and o.advantage == "reinforce++":
        tokens = _token_returns(scores.total, penalties, o.beta)
    return _Advantages(rows_PG, tokens, trained_PG, metrics)


def _kl_penalties(
    machine: GrpoMachine, groups: Sequence[Group], scores: ScoreTable, config: GrpoConfig
) -> dict[int, np.ndarray]:
    """The KL estimator at every trained token of every row in the loss, by row, before the first update.

    Each rank computes those of its share.
    """
    mine = share(range(len(groups)))
    ones_PG, scored_PG = np.ones((len(mine), scores.total.shape[1])), ~np.isnan(scores.total[mine])
    batch = _pack([groups[p] for p in mine], ones_PG, scored_PG, config, skip_zero=False)
    found: dict[int, np.ndarray] = {}
    for part in split(batch, config.optim.tokens_per_pass):
        (moved,) = with_old(machine.policy, [to_device(part, machine.device)])
        (moved,) = with_reference(machine.policy, [moved])
        assert moved.old is not None and moved.reference is not None
        k_M = kl_value(moved.old - moved.reference, config.objective.kl_estimator).double().cpu().numpy()
        row_M = _rows_of_step(part, mine, scores.total.shape[1])
        first = np.flatnonzero(np.diff(row_M, prepend=-1))
        found |= zip(row_M[first].tolist(), np.split(k_M, first[1:]), strict=True)
    return dict(sorted((row, k) for rows in gather_objects(found) for row, k in rows.items()))


def _token_returns(
    reward_PG: np.ndarray, penalties: dict[int, np.ndarray], beta: float
) -> dict[int, np.ndarray]:
    """REINFORCE++: the reward minus the penalties from a token on, whitened over all tokens of the step."""
    reward = reward_PG.ravel()
    returns = [reward[row] - beta * np.cumsum(k[::-1])[::-1] for row, k in penalties.items()]
    flat = np.concatenate([np.zeros(0), *returns])
    white = np.split(whiten(flat, np.ones(len(flat))), np.cumsum([len(r) for r in returns])[:-1])
    return dict(zip(penalties, white, strict=True)) if returns else {}


def _minibatches(
    machine: GrpoMachine,
    groups: Sequence[Group],
    scores: ScoreTable,
    advantages: _Advantages,
    config: GrpoConfig,
) -> list[list[Batch]]:
    """The passes of each optimiser step of an epoch: equal parts of the groups, each with its own denominator, of which
    this rank has its share."""
    o, scored_PG, rows_PG = config.objective, ~np.isnan(scores.total), advantages.rows_PG
    skip_zero = (
        o.kl_place != "loss" and not o.has_entropy_term and o.top_entropy == 1 and not advantages.tokens
    )
    computed_PG = advantages.trained_PG * (rows_PG != 0) if skip_zero else advantages.trained_PG
    prompts_P = np.array([len(group.prompt.ids) for group in groups])
    # An episode's observations are computed and not trained.
    ids_PG = np.array([[len(completion.ids) for completion in group.completions] for group in groups])
    work_P = (ids_PG * (computed_PG > 0)).sum(axis=1) + prompts_P * computed_PG.any(axis=1)
    minibatches = []
    for places in np.array_split(np.arange(len(groups)), o.updates_per_rollout):
        mine = share(places.tolist(), size=work_P.__getitem__)
        batch = _pack([groups[p] for p in mine], rows_PG[mine], scored_PG[mine], config, skip_zero=skip_zero)
        if advantages.tokens is not None:
            rows = np.unique(_rows_of_step(batch, mine, rows_PG.shape[1]))
            values = np.concatenate([np.zeros(0), *(advantages.tokens[row] for row in rows.tolist())])
            batch = replace(batch, advantage=torch.from_numpy(values.astype(np.float32)))
        parts = split(batch, config.optim.tokens_per_pass)
        minibatches.append([to_device(part, machine.device) for part in parts])
    return minibatches


def _rows_of_step(batch: Batch, mine: list[int], size: int) -> np.ndarray:
    """batch.row, which counts the rows of these groups, as p G + g of all groups of the step."""
    row_M = batch.row.numpy()
    return np.array(mine, np.int64)[row_M // size] * size + row_M % size


def _pack(
    groups: Sequence[Group],
    advantage_PG: np.ndarray,
    scored_PG: np.ndarray,
    config: GrpoConfig,
    *,
    skip_zero: bool,
) -> Batch:
    o = config.objective
    return pack(
        groups,
        advantage_PG,
        scored_PG,
        aggregation=o.denominator,
        max_new_tokens=config.rollout.max_new_tokens,
        truncated=o.truncated,
        skip_zero=skip_zero,
        temperature=config.rollout.temperature,
        count_zero_advantage=o.count_zero_advantage,
    )
