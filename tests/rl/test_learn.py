"""From scores to gradients on a real (tiny, float64) policy: splits, ranks, minibatches, KL in the reward, entropy."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.rl import grpo
from covey.rl.advantages import compute_advantages
from covey.rl.batch import pack
from covey.rl.entropy import EntropyBonus, keep_top_entropy
from covey.rl.objective_config import ObjectiveSection
from covey.rl.objectives import policy_objective
from covey.rl.stats import merge_updates

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("two_ranks", HERE / "two_ranks.py")
assert _spec is not None and _spec.loader is not None
two_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(two_ranks)
CASES, run_case = two_ranks.CASES, two_ranks.run_case


def close(left: list[torch.Tensor], right: list[torch.Tensor], tolerance: float = 1e-10) -> None:
    assert len(left) == len(right) > 0
    for x, y in zip(left, right, strict=True):
        assert x.abs().max() > 1e-4
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_no_token_budget_and_no_order_changes_a_gradient(case: str, tiny_llama: Path) -> None:
    whole = run_case(tiny_llama, CASES[case])
    for tokens_per_pass in (1, 12, 30):
        close(
            run_case(tiny_llama, CASES[case], tokens_per_pass=tokens_per_pass)["gradients"],
            whole["gradients"],
        )
    if "updates_per_rollout" not in CASES[case]:  # there the order says which prompts share an update
        close(run_case(tiny_llama, CASES[case], order=[2, 0, 3, 1])["gradients"], whole["gradients"])


@pytest.fixture(scope="module")
def ranks(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes made of the cases together."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                HERE / "two_ranks.py",
                str(rank),
                "2",
                folder / "meet",
                tiny_llama,
                folder / f"{rank}.pt",
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        assert process.wait(timeout=240) == 0, process.stderr and process.stderr.read()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_what_one_gives(case: str, ranks: list[dict[str, Any]], tiny_llama: Path) -> None:
    """Advantages, denominators, quantiles, gradients and metrics are those of the whole step."""
    one = run_case(tiny_llama, CASES[case])
    for rank in ranks:
        close(rank[case]["gradients"], one["gradients"])
        assert rank[case]["metrics"] == pytest.approx(one["metrics"], rel=1e-9, abs=1e-12)
        np.testing.assert_allclose(rank[case]["advantages"], one["advantages"], rtol=0, atol=1e-14)


@pytest.mark.parametrize("factor", two_ranks.NOTHING)
def test_two_processes_learn_nothing_from_nothing(factor: float, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank[f"nothing {factor}"]
        assert found["gradients"] == [] and found["metrics"]["tokens/computed"] == 0
        assert not np.nan_to_num(found["advantages"]).any()


def test_a_share_is_by_what_is_computed(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt once and its completions whole, those parts that were observed too; of prompt 1 nothing is."""
    found: list[list[float]] = []

    def shared(items: list[int], size: Any) -> list[int]:
        found.append([size(item) for item in items])
        return items

    monkeypatch.setattr(grpo, "share", shared)
    run_case(tiny_llama, {"episodes": True})
    groups, _ = two_ranks.some_episodes()
    ids = [[len(completion.ids) for completion in group.completions] for group in groups]
    assert found == [
        [2 + sum(ids[0]), 0, 4 + sum(ids[2][1:]), 5 + sum(ids[3])]
    ]  # nobody scored the first of 2


# Several updates


def flat_policy(folder: Path) -> tuple[Any, torch.Tensor]:
    policy = two_ranks.policy_in_float64(folder)
    return policy, policy.parameters()[0]


def packed(config, share: slice, advantages: np.ndarray):
    groups, functions = two_ranks.some_groups()
    scored = ~np.isnan(functions["first"])
    return pack(
        groups[share],
        advantages[share],
        scored[share],
        aggregation=config.objective.denominator,
        max_new_tokens=8,
        truncated="keep",
        skip_zero=False,
        temperature=1.0,
    )


def test_old_log_probs_are_those_before_the_first_update(tiny_llama: Path) -> None:
    """Two updates per pass and two passes, against a loop that scores everything before it moves a weight."""
    config = two_ranks.configuration(CASES["minibatches"])
    found = run_case(tiny_llama, CASES["minibatches"])
    policy, flat = flat_policy(tiny_llama)
    batches = [packed(config, share, found["advantages"]) for share in (slice(0, 2), slice(2, 4))]
    with torch.no_grad():
        batches = [replace(batch, old=policy.logprobs(batch).logp) for batch in batches]
    for index, gradient in enumerate(found["gradients"]):
        batch = batches[index % 2]
        loss, _ = policy_objective(policy.logprobs(batch).logp, batch, config.objective)
        loss.backward()
        assert flat.grad is not None
        torch.testing.assert_close(gradient, flat.grad, rtol=0, atol=1e-10)
        with torch.no_grad():
            flat -= 0.1 * flat.grad
        policy.zero_grad()
    assert len(found["gradients"]) == 4
    assert found["metrics"]["ratio/max"] > 1.001 > 0.999 > found["metrics"]["ratio/min"]


def test_metrics_of_several_updates() -> None:
    first = {"loss/policy": 1.0, "ratio/max": 2.0, "ratio/min": 0.5, "tokens/trained": 3.0, "optim/lr": 0.1}
    second = {"loss/policy": 2.0, "ratio/max": 1.5, "ratio/min": 0.25, "tokens/trained": 4.0, "optim/lr": 0.2}
    assert merge_updates([first, second]) == {
        "loss/policy": 1.5,
        "ratio/max": 2.0,
        "ratio/min": 0.25,
        "tokens/trained": 7.0,
        "optim/lr": 0.2,
    }
    assert merge_updates([first]) == first and merge_updates([]) == {}


# Skipping work


def test_rows_without_gradient_are_skipped_and_change_nothing(tiny_llama: Path) -> None:
    """Prompt 1 has no spread: its 3 completions are not computed, but stay in the denominator."""
    found = run_case(tiny_llama, {})
    groups, functions = two_ranks.some_groups()
    tokens = np.array([[len(c.ids) for c in group.completions] for group in groups])
    in_loss = tokens * ~np.isnan(functions["first"])
    dead = in_loss * (found["advantages"] == 0)
    assert dead[1].all()
    assert found["metrics"]["tokens/skipped"] == pytest.approx(dead.sum() / in_loss.sum())

    config, (policy, flat) = two_ranks.configuration({}), flat_policy(tiny_llama)
    batch = packed(config, slice(None), found["advantages"])
    policy_objective(policy.logprobs(batch).logp, batch, config.objective)[0].backward()
    torch.testing.assert_close(found["gradients"][0], flat.grad, rtol=0, atol=1e-12)
    for term in ({"beta": 0.1}, {"entropy_bonus": 0.1}, {"top_entropy": 0.5}):
        assert run_case(tiny_llama, term)["metrics"]["tokens/skipped"] == 0


# KL in the reward


def log_ratio_to_the_base(policy: Any, groups) -> list[list[np.ndarray]]:
    """logp - reference of every completion, one unpacked sequence after another."""

    def logp(group, completion) -> np.ndarray:
        ids = [*group.prompt.ids, *completion.ids]
        logits = policy.forward_logits(ids).log_softmax(-1)[len(group.prompt.ids) - 1 : -1]
        return logits.gather(1, torch.tensor(completion.ids)[:, None])[:, 0].numpy()

    trained = [[logp(group, c) for c in group.completions] for group in groups]
    with policy.reference():
        return [
            [now - logp(group, c) for now, c in zip(row, group.completions, strict=True)]
            for row, group in zip(trained, groups, strict=True)
        ]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_kl_in_the_reward_is_subtracted_before_the_advantage(estimator: str, tiny_llama: Path) -> None:
    found = run_case(tiny_llama, {"beta": 0.2, "kl_in": "reward", "kl": estimator})
    groups, functions = two_ranks.some_groups()
    k = log_ratio_to_the_base(flat_policy(tiny_llama)[0], groups)
    value = {"k1": lambda x: x, "k3": lambda x: np.exp(-x) - 1 + x}[estimator]
    penalty = np.array([[0.2 * value(x).sum() for x in row] for row in k])
    total = np.where(
        np.isnan(functions["first"]), np.nan, functions["first"] + 0.5 * np.nan_to_num(functions["second"])
    )
    np.testing.assert_allclose(found["advantages"], compute_advantages(total - penalty, "group"), atol=1e-8)
    assert "loss/kl" not in found["metrics"]


def test_reinforce_plus_plus_gives_every_token_its_own_return(tiny_llama: Path) -> None:
    """R minus the KL from the token on, whitened over all tokens: the gradient of the first update says so."""
    objective = CASES["reinforce++"]
    found = run_case(tiny_llama, objective)
    groups, functions = two_ranks.some_groups()
    policy, flat = flat_policy(tiny_llama)
    k = log_ratio_to_the_base(policy, groups)
    total = np.where(
        np.isnan(functions["first"]), np.nan, functions["first"] + 0.5 * np.nan_to_num(functions["second"])
    )
    rows = [(p, g) for p in range(4) for g in range(3) if not np.isnan(total[p, g])]
    returns = [[total[p, g] - 0.05 * k[p][g][t:].sum() for t in range(len(k[p][g]))] for p, g in rows]
    flat_returns = np.concatenate(returns)
    white = (flat_returns - flat_returns.mean()) / np.sqrt(flat_returns.var(ddof=1) + 1e-8)

    config = two_ranks.configuration(objective)
    batch = packed(config, slice(None), np.ones((4, 3)))
    batch = replace(batch, advantage=torch.from_numpy(white))
    policy_objective(policy.logprobs(batch).logp, batch, config.objective)[0].backward()
    torch.testing.assert_close(
        found["gradients"][0], flat.grad, rtol=1e-6, atol=1e-7
    )  # advantages are float32


# Entropy


def test_only_the_tokens_with_the_highest_entropy_are_trained(tiny_llama: Path) -> None:
    policy, _ = flat_policy(tiny_llama)
    config = two_ranks.configuration({})
    batches = [[packed(config, share, np.ones((4, 3)))] for share in (slice(0, 1), slice(1, 4))]
    entropies = np.concatenate([policy.logprobs(b, entropy=True).entropy.detach() for (b,) in batches])
    kept = keep_top_entropy(policy, batches, share=0.25)
    threshold = np.sort(entropies)[::-1][int(np.ceil(0.25 * len(entropies))) - 1]
    advantage = np.concatenate([b.advantage for (b,) in kept])
    np.testing.assert_array_equal(advantage, (entropies >= threshold).astype(np.float32))
    assert advantage.mean() == pytest.approx(0.25, abs=1 / len(advantage))
    for (before,), (after,) in zip(batches, kept, strict=True):
        torch.testing.assert_close(after.weight, before.weight, rtol=0, atol=0)


def test_an_entropy_bonus_adds_the_gradient_of_the_entropy(tiny_llama: Path) -> None:
    """The difference of two steps is that of -0.3 sum w H, by finite differences along the gradient."""
    plain = run_case(tiny_llama, {})["gradients"][0]
    found = run_case(tiny_llama, {"entropy_bonus": 0.3})
    direction = found["gradients"][0] - plain
    config, (policy, flat) = two_ranks.configuration({}), flat_policy(tiny_llama)
    batch = packed(config, slice(None), np.ones((4, 3)))

    def term(step: float) -> float:
        with torch.no_grad():
            flat.add_(step * direction)
            scored = policy.logprobs(batch, entropy=True)
            flat.sub_(step * direction)
        return -0.3 * float((batch.weight * scored.entropy).sum())

    slope = (term(1e-5) - term(-1e-5)) / 2e-5
    assert slope == pytest.approx(float(direction @ direction), rel=1e-5)
    assert found["metrics"]["loss/entropy"] == pytest.approx(term(0.0), rel=1e-9)
    assert found["metrics"]["entropy/bonus"] == 0.3


def test_an_entropy_target_moves_the_bonus() -> None:
    """Entropies 0.1, 0.1, 0.4, 0.4, 0.1 against a target of 0.25: up, up, down (and off), down, up."""
    bonus = EntropyBonus(ObjectiveSection(entropy_target=0.25, entropy_step=0.01, entropy_bonus=0.005))
    assert bonus.value == 0.005
    seen = []
    for entropy in (0.1, 0.1, 0.4, 0.4, 0.1):
        bonus.observe(entropy)
        seen.append((round(bonus.coefficient, 10), round(bonus.value, 10)))
    assert seen == [(0.015, 0.015), (0.025, 0.025), (0.015, 0.0), (0.005, 0.0), (0.015, 0.015)]
    for _ in range(3):
        bonus.observe(1.0)
    assert bonus.coefficient == 0.0
    other = EntropyBonus(ObjectiveSection(entropy_target=0.25))
    other.load_state_dict(bonus.state_dict())
    assert (other.coefficient, other.active) == (bonus.coefficient, bonus.active)
    fixed = EntropyBonus(ObjectiveSection(entropy_bonus=0.02))
    fixed.observe(0.0)
    assert fixed.value == 0.02
