"""A user's mistake ends in one sentence with the next thing to do, and in exit code 2; never in a traceback."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from covey.rl.cli import app

GOOD = {
    "model.path": "tiny",
    "data.train": "rows.jsonl",
    "rewards": "[{use: exact}]",
    "rollout.prompts_per_step": "2",
    "rollout.max_new_tokens": "2",
    "optim.steps": "1",
    "optim.warmup_steps": "0",
}
TINY = "model: {path: tiny}\ndata: {train: rows.jsonl}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("broken.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    Path("empty.jsonl").write_text("")
    Path("good.yaml").write_text(TINY)
    Path("short.py").write_text("def short(completions):\n    return [0.0]\n")
    Path("file").write_text("")
    return tmp_path


def run(command: str = "grpo", recipe: str = "good.yaml", **changes: str):
    settings = GOOD | {key.replace("__", "."): value for key, value in changes.items()}
    if command == "sft":
        settings = {k: v for k, v in settings.items() if not k.startswith(("rollout", "rewards"))}
    arguments = [f"{key}={value}" for key, value in settings.items()]
    return CliRunner().invoke(app, [command, recipe, *arguments])


def test_the_good_recipe_runs():
    done = run()
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "god.yaml"}, ["god.yaml", "good.yaml"]),
        ({"data__train": "row.jsonl"}, ["row.jsonl", "rows.jsonl"]),
        ({"data__train": "broken.jsonl"}, ["broken.jsonl:2"]),
        ({"data__train": "empty.jsonl"}, ["empty.jsonl", "no rows"]),
        ({"data__prompt": "question"}, ['no column "question"', "prompt, answer"]),
        ({"data__max_prompt_tokens": "1"}, ["rows.jsonl:1", "max_prompt_tokens"]),
        ({"data__max_prompt_tokens": "1", "data__overlong": "drop"}, ["max_prompt_tokens"]),
        ({"rewards": "[{use: exakt}]"}, ['no built-in reward "exakt"', '"exact"']),
        ({"rewards": "[]"}, ["rewards"]),
        ({"rewards": "[{use: short.py:short}]"}, ["short", "1 value", "16"]),
        ({"rewards": "[{use: short.py:long}]"}, ["short.py has no function long", "short"]),
        ({"rollout__group_size": "1"}, ["rollout.group_size", "at least 2"]),
        ({"rollout__prompts_per_step": "5"}, ["rollout.prompts_per_step", "only 4"]),
        ({"rollout__max_new_tokens": "100000"}, ["rollout.max_new_tokens"]),
        ({"optim__learning_rte": "1.0e-5"}, ["optim.learning_rte", "optim.lr"]),
        ({"optim__lr": "fast"}, ["optim.lr", '"fast"']),
        ({"optim__lr": "-1"}, ["optim.lr", "-1"]),
        ({"optim__lr": ".nan"}, ["optim.lr"]),
        ({"model__path": "nowhere/model"}, ["nowhere/model"]),
        ({"lora__targets": "[c_attn]"}, ["c_attn", "q_proj"]),
    ],
)
def test_a_mistake_is_a_sentence(changes, words):
    done = run(**changes)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ") and "Traceback" not in done.output
    for word in words:
        assert word in done.stderr


def test_models_that_cannot_be_used(tiny_llama: Path):
    shutil.copytree(tiny_llama, "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "no_tokenizer has no tokenizer" in run(model__path="no_tokenizer").stderr
    shutil.copytree(tiny_llama, "other")
    config = json.loads(Path("other/config.json").read_text())
    Path("other/config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    done = run(model__path="other")
    assert done.exit_code == 2 and '"mamba" is not supported yet' in done.stderr


def test_a_folder_that_cannot_be_written_is_a_failed_run():
    done = run(run__dir="file/runs")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: cannot write to") and "run.dir" in done.stderr


def test_nothing_is_overwritten():
    assert run(run__name="mine").exit_code == 0
    before = sorted(path.name for path in Path("runs/mine").rglob("*"))
    done = run(run__name="mine")
    assert done.exit_code == 2 and "--resume auto" in done.stderr
    assert sorted(path.name for path in Path("runs/mine").rglob("*")) == before


def test_sft_without_anything_to_learn():
    Path("questions.jsonl").write_text('{"prompt": "a"}\n')
    done = run("sft", data__train="questions.jsonl", optim__rows_per_step="1")
    assert done.exit_code == 2 and "data.completion" in done.stderr


def test_an_interrupted_run_says_how_to_go_on():
    Path("once.py").write_text(
        "import os, signal\nseen = []\n\ndef once(completions):\n    if not seen:\n        seen.append(1)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n    return [0.0] * len(completions)\n"
    )
    done = run(rewards="[{use: once.py:once}]", optim__steps="3", run__name="stopped")
    assert done.exit_code == 130, done.output
    assert "--resume runs/stopped" in done.stderr
    assert [path.name for path in Path("runs/stopped/checkpoints").iterdir()] == ["step-000001"]
