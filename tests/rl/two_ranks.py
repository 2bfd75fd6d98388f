"""One step on some groups. Run as a script it is one rank of several (gloo, on CPUs)."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from covey.policies.load import load_policy
from covey.rewards.runner import ScoreTable
from covey.rl.config import GrpoConfig
from covey.rl.entropy import EntropyBonus
from covey.rl.grpo import GrpoMachine, learn
from covey.rollout.engine import Completion, Group, Prompt

NAN = float("nan")
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "batch": {"advantage": "batch", "aggregation": "sequence", "count_zero_advantage": False, "beta": 0.1},
    "reinforce++": {"advantage": "reinforce++", "beta": 0.05, "kl_in": "reward", "aggregation": "constant"},
    "baseline": {"advantage": "reinforce++-baseline", "aggregation": "prompt", "truncated": "mask"},
    "gdpo": {"advantage": "gdpo", "loss": "gspo", "entropy_bonus": 0.1},
    "entropy": {"top_entropy": 0.4, "advantage": "rloo"},
    "minibatches": {"updates_per_rollout": 2, "epochs": 2, "loss": "cispo"},
    # An update has one prompt, so that one rank has nothing; that of prompt 1 has no gradient at all.
    "single": {"updates_per_rollout": 4, "loss": "gmpo"},
    "episodes": {
        **{"advantage": "reinforce++", "beta": 0.05, "kl_in": "reward", "truncated": "mask"},
        **{"updates_per_rollout": 2, "count_zero_advantage": False, "episodes": True},
    },
    "episodes, prompt": {
        "beta": 0.1,
        "kl_in": "reward",
        "aggregation": "prompt",
        "epochs": 2,
        "episodes": True,
    },
}
NOTHING = (0.0, NAN)  # factors of all rewards: none differs from another, nobody scored


class Recorder:
    """Takes the place of the optimiser: notes the gradients, and moves the weights a little along them."""

    def __init__(self, policy: Any, rate: float = 0.0):
        self.params, self.rate = policy.parameters(), rate
        self.gradients: list[torch.Tensor] = []

    def step(self, index: int, total: int) -> dict[str, float]:
        (flat,) = self.params
        self.gradients.append(flat.grad.clone())
        with torch.no_grad():
            flat -= self.rate * flat.grad
        return {"grad/norm": float(flat.grad.norm())}

    def zero_grad(self) -> None:
        for parameter in self.params:
            parameter.grad.zero_()


def some_groups() -> tuple[list[Group], dict[str, np.ndarray]]:
    """Four prompts with three completions each; rewards of two functions with gaps, ties and a group without spread."""
    random = np.random.default_rng(0)

    def completion(length: int, finish: Any) -> Completion:
        ids = tuple(random.integers(3, 60, size=length).tolist())
        logprobs = tuple((-4.0 - 0.3 * random.random(length)).tolist())
        return Completion(ids, logprobs, (True,) * length, "", finish)

    groups = [
        Group(
            Prompt(p, tuple(random.integers(3, 60, size=2 + p).tolist()), ""),
            tuple(
                completion(1 + int(random.integers(7)), "length" if p == 1 and g == 0 else "eos")
                for g in range(3)
            ),
        )
        for p in range(4)
    ]
    first = np.array([[1.0, 0.0, 0.5], [0.7, 0.7, 0.7], [NAN, 1.0, 0.0], [0.0, 3.0, 1.0]])
    second = np.array([[0.0, 0.0, 2.0], [0.1, 0.1, 0.1], [NAN, NAN, 1.0], [1.0, 0.0, 0.0]])
    return groups, {"first": first, "second": second}


def some_episodes() -> tuple[list[Group], dict[str, np.ndarray]]:
    """some_groups, in which every third token is one that was observed: nobody drew it, so it has no log-prob."""
    groups, functions = some_groups()

    def observed(c: Completion) -> Completion:
        trained = tuple(i % 3 != 1 for i in range(len(c.ids)))
        return replace(c, trained=trained, logprobs=tuple(np.where(trained, c.logprobs, NAN).tolist()))

    return [replace(g, completions=tuple(map(observed, g.completions))) for g in groups], functions


def configuration(objective: dict[str, Any], tokens_per_pass: int = 1000) -> GrpoConfig:
    return GrpoConfig.model_validate(
        {
            "model": {"path": "tiny"},
            "data": {"train": "rows"},
            "objective": objective,
            "rollout": {"prompts_per_step": 4, "group_size": 3, "max_new_tokens": 8},
            "optim": {"tokens_per_pass": tokens_per_pass, "steps": 10},
        }
    )


def policy_in_float64(folder: Path) -> Any:
    policy = load_policy(folder, method="lora", dtype="float64", rank=2, alpha=4.0, device="cpu")
    (flat,) = policy.parameters()
    with torch.no_grad():
        flat.copy_(
            0.3 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1), dtype=flat.dtype)
        )
    return policy


def run_case(
    folder: Path,
    objective: dict[str, Any],
    tokens_per_pass: int = 1000,
    order: Sequence[int] = range(4),
    factor: float = 1.0,
) -> dict[str, Any]:
    """Gradients of every update, metrics and advantages of one step. factor: of the rewards."""
    objective = dict(objective)
    groups, functions = some_episodes() if objective.pop("episodes", False) else some_groups()
    functions = {name: factor * table for name, table in functions.items()}
    config, policy = configuration(objective, tokens_per_pass), policy_in_float64(folder)
    functions = {name: table[list(order)] for name, table in functions.items()}
    stacked = np.stack(list(functions.values()))
    weights = np.array([1.0, 0.5])
    total = np.where(np.isnan(stacked).all(0), NAN, np.nansum(stacked * weights[:, None, None], axis=0))
    rewards = [SimpleNamespace(weight=weight) for weight in weights]
    recorder = Recorder(policy, rate=0.1)
    machine = GrpoMachine(
        policy,
        cast(Any, None),
        cast(Any, SimpleNamespace(rewards=rewards)),
        cast(Any, recorder),
        EntropyBonus(config.objective),
        torch.device("cpu"),
    )
    advantages, metrics = learn(
        machine, [groups[p] for p in order], ScoreTable(total, functions, []), config, step=0
    )
    return {"gradients": recorder.gradients, "metrics": metrics, "advantages": advantages}


def main() -> None:
    import torch.distributed as dist

    rank, world, meeting, folder, out = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world))
    torch.set_num_threads(1)
    found = {name: run_case(Path(folder), case) for name, case in CASES.items()}
    found |= {f"nothing {factor}": run_case(Path(folder), {}, factor=factor) for factor in NOTHING}
    torch.save(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
