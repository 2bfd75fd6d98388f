"""GRPO with an environment of the package verifiers, from a recipe to its metrics."""

from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import yaml

import covey
from covey.rl.config import GrpoConfig
from covey.rl.config_file import load_config
from covey.rl.environments import Stage
from covey.rl.sources import DataError, read_source

pytest.importorskip("verifiers", reason="verifiers has no release for this version of Python")

WORLD = '''
import verifiers as vf
from datasets import Dataset


class Echo(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="Again.")]


async def short(completion):
    """The share of what may be said that was not said."""
    return 1 - sum(len(m.content) for m in completion if m.role == "assistant") / 32


def load_environment(turns=2):
    data = Dataset.from_dict({"question": [f"Say {word}." for word in ("one", "two", "six")], "answer": ["", "", ""]})
    return Echo(dataset=data, eval_dataset=data.select([2]), max_turns=turns, rubric=vf.Rubric(funcs=[short]))
'''

STOPS = list("abcdefghijklmnopqrstuvwxyz .,")  # so that some replies of random bytes end themselves


def recipe(folder: Path) -> Path:
    (folder / "world.py").write_text(WORLD)
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"path": "tiny", "method": "lora", "dtype": "float32", "device": "cpu"},
                "data": {"train": "environment", "eval": "environment"},
                "environment": {
                    "use": f"verifiers:{folder / 'world.py'}",
                    "max_tokens_per_turn": 16,
                    "weight": 2.0,
                },
                "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 100, "stop": STOPS},
                "optim": {"steps": 2, "lr": 1e-3},
                "run": {"dir": str(folder), "name": "run", "threads": 1, "save_every": 0},
            }
        )
    )
    return folder / "recipe.yaml"


def test_its_rows_are_the_data_and_its_rubric_the_reward(tmp_path: Path) -> None:
    run = covey.grpo(str(recipe(tmp_path)), plain=True)
    steps = [row for row in run.metrics if "reward/mean" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["reward/mean"] == pytest.approx(2 * row["reward/environment"])
        assert row["reward/environment"] == pytest.approx(row["environment/short"])
        assert 1 <= row["environment/num_turns"] == row["environment/turns"] <= 2
    held_out = [row for row in run.metrics if "eval/reward" in row]
    assert held_out and all(
        row["eval/reward"] == pytest.approx(2 * row["eval/environment"]) for row in held_out
    )

    rows = parquet.read_table(run.folder / "samples/step-000001.parquet").to_pylist()
    assert len(rows) == 8 and any("\n[user] Again.\n" in row["completion"] for row in rows)
    for row in rows:
        said = row["completion"].replace("\n[user] Again.\n", "").removesuffix("\n[user] Again.")
        assert row["reward/environment"] == pytest.approx(1 - len(said) / 32)
    prompts = {
        f"<|im_start|>user\nSay {word}.<|im_end|>\n<|im_start|>assistant\n" for word in ("one", "two", "six")
    }
    assert len({row["prompt"] for row in rows} & prompts) == 2
    # Every ratio is 1 before an update: what was sampled, in both turns, is what is trained.
    assert {steps[0]["ratio/min"], steps[0]["ratio/max"]} == {1.0}


def test_what_is_played_is_said(tmp_path: Path) -> None:
    config = load_config(str(recipe(tmp_path)), ["environment.args={turns: 3}"], GrpoConfig)
    stage = Stage(config.environment)
    assert stage.describe() == f"verifiers:{tmp_path / 'world.py'}; at most 3 turns"
    assert [spec.name for spec in stage.rewards] == ["environment"]


def test_only_verifiers_brings_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.train: only environments of verifiers bring rows along"):
        read_source("environment", "data.train", False)
    (tmp_path / "data.jsonl").write_text('{"prompt": "Say one."}\n')
    with pytest.raises(
        ValueError, match=r'needs rows with messages as "prompt". Use its own: data.train: environment'
    ):
        covey.grpo(
            str(recipe(tmp_path)),
            **{"data.train": str(tmp_path / "data.jsonl"), "data.chat": True, "plain": True},
        )
