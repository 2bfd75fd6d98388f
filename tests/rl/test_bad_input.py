"""What a user can get wrong, each through `covey grpo` or `covey sft`: exit code 2 and a sentence that names it.

Nothing may be left behind either: a run that was refused has no folder.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from covey.rl.cli import app

RECIPE = """\
model: {path: tiny, device: cpu}
data: {train: rows.jsonl}
rewards: [{use: rewards.py:fine}]
rollout: {prompts_per_step: 2, group_size: 2, max_new_tokens: 2}
optim: {steps: 1}
run: {threads: 1, samples_every: 0}
"""
SFT_RECIPE = """\
model: {path: tiny, device: cpu}
data: {train: pairs.jsonl}
optim: {steps: 1}
run: {threads: 1}
"""
REWARDS = """\
def fine(completion):
    return float(len(completion))

def short(completions):
    return [0.0, 1.0, 2.0]

def word(completion):
    return "good"

def needs(completion, colour):
    return 1.0

def divides(completion):
    return 1 / 0
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]
    files = {
        "grpo.yaml": RECIPE,
        "sft.yaml": SFT_RECIPE,
        "rewards.py": REWARDS,
        "rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "pairs.jsonl": '{"prompt": "a", "completion": "b"}\n' * 3,
        "torn.jsonl": '{"question": "a"}\n{"question": "b"}\n{"question": "c"\n',
        "number.jsonl": '{"question": "a"}\n{"question": 7}\n',
        "list.jsonl": '{"question": "a"}\n["b"]\n',
        "latin.jsonl": "",
        "empty.jsonl": "\n\n",
        "questions.jsonl": '{"prompt": "a"}\n',
        "plain_file": "",
    }
    for name, text in files.items():
        Path(name).write_text(text)
    Path("latin.jsonl").write_bytes(b'{"question": "caf\xe9"}\n')


def covey(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(result: Result, *words: str, code: int = 2) -> None:
    assert result.exit_code == code, result.output
    lines = result.stderr.splitlines()
    assert lines and all(line.startswith("error: ") for line in lines), result.stderr
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr, f"{word!r} is not in: {result.stderr}"


GRPO_MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    ("data.train=row.jsonl", ('data.train: no file "row.jsonl"', 'Did you mean "rows.jsonl"?')),
    ("data.train=nowhere/rows.jsonl", ('folder "nowhere" does not exist',)),
    ("data.train=torn.jsonl", ("torn.jsonl:3: not valid JSON",)),
    ("data.train=number.jsonl", ('number.jsonl:2: "question" is 7, not text', 'data.prompt: "{question}"')),
    ("data.train=list.jsonl", ("list.jsonl:2", "JSON object", "a list")),
    ("data.train=latin.jsonl", ("latin.jsonl:1: not UTF-8",)),
    ("data.train=empty.jsonl", ("data.train: empty.jsonl has no rows",)),
    ("data.eval=empty.jsonl", ("data.eval: empty.jsonl has no rows",)),
    ("data.prompt=questoin", ('data.prompt: no column "questoin"', 'Did you mean "question"?')),
    ("data.prompt='Q: {questoin}'", ("rows.jsonl:1", 'no column "questoin"', 'Did you mean "question"?')),
    ("data.answer=solution", ('data.answer: no column "solution"', "question, answer")),
    ("data.answer_after='####'", ("rows.jsonl:1", 'no "####" in "answer"')),
    ("data.max_prompt_tokens=3", ("rows.jsonl:1: the prompt has 4 tokens", "3 of 3", "data.overlong")),
    ("data.chat=yes", ("data.chat", '"yes"')),
    ("data.task={digits: 2}", ("data.task", "not a task")),
    ("rewards.0.use=exakt", ('"exakt"', '"exact"')),
    ("rewards.0.use=rewards.py:fein", ("rewards.py has no function fein", "fine")),
    ("rewards.0.use=reward.py:fine", ("reward.py",)),
    ("rewards.0.use=rewards.py:short", ("rewards.py:4 short()", "returned 3 values for 4 completions")),
    ("rewards.0.use=rewards.py:word", ("rewards.py:7 word()", '"good" (str)', "float or None")),
    ("rewards.0.use=rewards.py:needs", ("rewards.py:10 needs()", '"colour"', "question, answer")),
    ("rewards.0.use=rewards.py:divides", ("rewards.py:14", "divides()", "ZeroDivisionError", "row 0")),
    ("rewards=[]", ("rewards: none is given",)),
    ("rollout.group_size=1", ("rollout.group_size", "at least 2")),
    ("rollout.prompts_per_step=4", ("rollout.prompts_per_step", "takes 4", "only 3")),
    ("rollout.max_new_tokens=5000", ("rollout.max_new_tokens", "4096")),
    ("optim.learning_rte=1.0e-5", ("optim.learning_rte: unknown key", "Did you mean optim.lr?")),
    ("learning_rte=1.0e-5", ("learning_rte", "optim.lr")),
    ("optim.group_size=8", ("optim.group_size", "rollout.group_size")),
    ("optim.lr=fast", ("optim.lr", '"fast"')),
    ("optim.lr=-1", ("optim.lr", "-1")),
    ("optim.lr=.nan", ("optim.lr",)),
    ("optim.steps=0", ("optim.steps", "at least 1")),
    ("model.path=nowhere/model", ("nowhere/model is neither a local folder",)),
    ("model.adapter=plain_file", ("adapter_config.json",)),
    ("lora.targets=[c_attn]", ('"c_attn"', "q_proj")),
    ("run.name=a/b", ("run.name", "a/b")),
]


@pytest.mark.parametrize(("override", "words"), GRPO_MISTAKES, ids=[case[0] for case in GRPO_MISTAKES])
def test_grpo_names_the_mistake(override: str, words: tuple[str, ...]) -> None:
    refused(covey("grpo", "grpo.yaml", override), *words)


def test_the_recipes_of_the_tables_are_good_without_the_mistakes() -> None:
    for command in ("grpo", "sft"):
        result = covey(command, f"{command}.yaml")
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train=row.jsonl"], ("data.train", "row.jsonl")),
        (["data.train=torn.jsonl", "data.completion=question"], ("torn.jsonl:3",)),
        (["data.train=questions.jsonl"], ("learn after prompt", "data.completion")),
        (["data.max_tokens=2"], ("pairs.jsonl:1", "data.max_tokens", "3 of 3")),
        (["data.max_tokens=2", "data.overlong=drop"], ("All 3 rows", "data.max_tokens")),
        (["optim.epochs=1"], ("either steps or epochs",)),
        (["optim.steps=null"], ("either steps or epochs",)),
        (["rollout.group_size=8"], ("rollout",)),
        (["optim.learning_rte=1"], ("optim.learning_rte: unknown key", "optim.lr")),
        (["data.loss_on=answer"], ("data.loss_on", '"answer"', "completion")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_sft_names_the_mistake(overrides: list[str], words: tuple[str, ...]) -> None:
    refused(covey("sft", "sft.yaml", *overrides), *words)


@pytest.mark.parametrize("command", ["grpo", "sft"])
def test_recipes_that_cannot_be_read(command: str) -> None:
    refused(covey(command, "grop.yaml"), "grop.yaml", "grpo.yaml")
    Path("torn.yaml").write_text("model: {path: tiny\noptim: {steps: 1}\n")
    refused(covey(command, "torn.yaml"), "torn.yaml:")
    Path("text.yaml").write_text("just words\n")
    refused(covey(command, "text.yaml"), "text.yaml", "sections")
    Path("bare.yaml").write_text("optim: {steps: 1}\n")
    refused(covey(command, "bare.yaml"), "model.path", "data.train")


def test_every_mistake_of_a_recipe_is_named_at_once_with_its_line() -> None:
    Path("bad.yaml").write_text(
        "model: {path: tiny}\ndata: {train: rows.jsonl}\noptim:\n  learning_rte: 1e-5\n"
        "rollout:\n  group_size: 0\n  temperature: hot\n"
    )
    result = covey("grpo", "bad.yaml")
    refused(result)
    lines = result.stderr.splitlines()
    assert [line.split(" ")[1] for line in lines] == ["bad.yaml:4", "bad.yaml:6", "bad.yaml:7"]


def test_all_prompts_too_long() -> None:
    result = covey("grpo", "grpo.yaml", "data.max_prompt_tokens=3", "data.overlong=drop")
    refused(result, "All 3 prompts", "data.max_prompt_tokens (3)", "4 to 4 tokens")


def test_models_that_cannot_be_used(tiny_llama: Path) -> None:
    ignore = shutil.ignore_patterns("tokenizer*", "special_tokens*")
    shutil.copytree(tiny_llama, "no_tokenizer", ignore=ignore)
    refused(covey("grpo", "grpo.yaml", "model.path=no_tokenizer"), "no_tokenizer has no tokenizer")

    shutil.copytree(tiny_llama, "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    refused(covey("grpo", "grpo.yaml", "model.path=no_weights"), "no_weights", "safetensors")

    config: dict[str, Any] = json.loads((tiny_llama / "config.json").read_text())
    shutil.copytree(tiny_llama, "other")
    for kind, sentence in (
        ("t5", 'model_type "t5" is an encoder with a decoder'),
        ("unheard_of", 'does not know model_type "unheard_of"'),
        ("gpt2", "the checkpoint has no tensor transformer."),  # the weights are those of a Llama
    ):
        Path("other/config.json").write_text(json.dumps({**config, "model_type": kind}))
        refused(covey("sft", "sft.yaml", "model.path=other"), "other", sentence)

    Path("plain_folder").mkdir()
    refused(covey("sft", "sft.yaml", "model.path=plain_folder"), "plain_folder has no config.json")


def test_a_run_folder_that_cannot_be_made_is_a_failed_run() -> None:
    """Not 2: what the user wrote may be right, and the disk be full."""
    result = covey("grpo", "grpo.yaml", "run.dir=plain_file/runs")
    refused(result, "cannot write to", "plain_file", "run.dir", code=1)


def test_an_existing_run_is_neither_overwritten_nor_resumed_by_mistake() -> None:
    assert covey("grpo", "grpo.yaml", "--name", "mine").exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    refused(covey("grpo", "grpo.yaml", "--name", "mine"), "runs/mine exists already", "--resume auto")
    refused(covey("grpo", "grpo.yaml", "--resume", "yours"), "--resume yours", "no such folder", "mine")
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before


def test_a_refused_run_leaves_no_folder() -> None:
    for override in ("data.train=torn.jsonl", "rewards.0.use=exakt", "rollout.prompts_per_step=4"):
        refused(covey("grpo", "grpo.yaml", override))
    assert not Path("runs").exists()


def test_fewer_rows_than_a_step_of_sft_are_repeated_never_skipped() -> None:
    """optim.steps: full steps. optim.epochs: one short step per epoch."""
    for name, override, steps, tokens in (("a", "optim.steps=2", 2, 32), ("b", "optim.epochs=2", 2, 6)):
        arguments = [override] if name == "a" else [override, "optim.steps=null"]
        result = covey("sft", "sft.yaml", "--name", name, *arguments)
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        assert [row["tokens/trained"] for row in rows] == [tokens] * steps  # "b" and the end are trained
