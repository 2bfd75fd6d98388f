"""Runs of which every number is compared between one process and several: python ranks_run.py FOLDER RESULT DEVICE.

On a CPU in float64, which recipes do not offer, so that another order of sums shows in the last digits only.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

import covey
from covey.policies import load
from covey.policies import open as open_
from covey.rl.distributed import is_first, world_size

WORDS = ("one", "two", "three", "four", "five", "six", "seven")
GRPO_ROWS = [{"prompt": f"{word}:"} for word in WORDS]
SFT_ROWS = [{"prompt": f"{word}:", "completion": f" {i} and {i}"} for i, word in enumerate(WORDS)]
DPO_ROWS = [{"prompt": f"{a}:", "chosen": 2 * a, "rejected": f"{a}!"} for a in "abcdefg"]
MODEL = {"path": "tiny", "method": "lora", "dtype": "float32", "device": "cpu"}
RUN = {"threads": 1, "samples_every": 0, "save_every": 2, "keep": 100}


def rare(completion: str) -> float:
    """Equal for most completions, so that groups without spread come up."""
    return float(completion[:1] in "abcdefgh")


def letters(completions: list[str]) -> list[float]:
    return [len(set(text)) + sum(map(ord, text)) % 7 / 7 for text in completions]


def grpo(
    folder: Path, name: str, steps: int = 4, resume: str | None = None, reward: Any = letters, **sections: Any
):
    config: dict[str, Any] = {
        "model": MODEL,
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6},
        "optim": {"lr": 1e-2, "steps": steps},
        "eval": {"every": 2, "temperature": 1.0},
        "run": RUN | {"dir": str(folder), "name": name},
    }
    config = {key: {**config.get(key, {}), **sections.get(key, {})} for key in {*config, *sections}}
    data = {"data": GRPO_ROWS, "eval_data": GRPO_ROWS[:3]}
    return covey.grpo(config, rewards=[reward], resume=resume, plain=True, **data)


def supervised(algorithm: Any, rows: Any, folder: Path, name: str, method: str = "lora", **optim: Any):
    config = {
        "model": MODEL | {"method": method},
        "optim": {"lr": 1e-2, "rows_per_step": 4} | optim,
        "eval": {"every": 1},
        "run": RUN | {"dir": str(folder), "name": name},
    }
    return algorithm(config, data=rows, eval_data=rows[:4], plain=True)


def all_runs(folder: Path) -> dict[str, Any]:
    """The runs by name. The last step of an epoch of seven rows has three rows, and three evaluation rows are few."""
    reinforce = {"advantage": "reinforce++", "beta": 0.1, "kl_in": "reward"}
    runs = {
        "grpo": grpo(folder, "grpo"),
        "kl": grpo(folder, "kl", 2, objective=reinforce),
        "supply": grpo(
            folder, "supply", reward=rare, rollout={"dynamic_sampling": 2}, curriculum={"drop_solved": 2}
        ),
        "short": grpo(folder, "short", 2),
        "sft": supervised(covey.sft, SFT_ROWS, folder, "sft", epochs=2),
        "full": supervised(covey.sft, SFT_ROWS, folder, "full", "full", steps=3, lr=1e-3),
        "dpo": supervised(covey.dpo, DPO_ROWS, folder, "dpo", epochs=2),
    }
    runs["longer"] = grpo(folder, "short", 4, resume=str(folder / "short"))
    return runs


def main() -> None:
    folder = Path(sys.argv[1])
    MODEL["device"] = sys.argv[3]
    if MODEL["device"] == "cpu":
        load.pick_dtype = open_.pick_dtype = lambda *given: torch.float64
    runs = all_runs(folder)
    weights = {name: {k: w.tolist() for k, w in run.policy.weights().items()} for name, run in runs.items()}
    metrics = {name: list(run.metrics) for name, run in runs.items()}
    out = {"metrics": metrics, "weights": weights, "first": is_first(), "world": world_size()}
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
