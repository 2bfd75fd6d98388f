"""DPO from a configuration to a trained adapter, through `covey.dpo` and `covey dpo`; PEFT says what the loss is."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import covey
from covey.policies.decoder import DecoderPolicy
from covey.policies.locate import locate_model
from covey.rl.cli import app
from covey.rl.config import DpoConfig, GrpoConfig
from covey.rl.config_file import ConfigError, load_config

END = 258  # <|im_end|>, which ends every text that is learned
ROWS = [{"prompt": f"{a}:", "chosen": 2 * a, "rejected": f"{a}!"} for a in "abcdefgh"]
CONFIG: dict[str, Any] = {
    "model": {"path": "tiny", "method": "lora", "dtype": "float32", "device": "cpu"},
    "optim": {"lr": 1e-2, "rows_per_step": 4},
    "run": {"name": "run", "threads": 1, "save_every": 0, "keep": 100},
}
VARYING = ("time/", "memory/", "train/tokens_per_s")


def train(
    folder: Path,
    rows: Any,
    resume: str | None = None,
    eval_data: Any = None,
    rewards: Any = (),
    **sections: Any,
):
    config = {name: {**CONFIG.get(name, {}), **sections.get(name, {})} for name in {*CONFIG, *sections}}
    config["run"]["dir"] = str(folder)
    return covey.dpo(config, data=rows, eval_data=eval_data, rewards=rewards, resume=resume, plain=True)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def summed_logp(model: Any, prompt: str, completion: str) -> float:
    """Over the completion's bytes and the end, by transformers in float64."""
    start, ids = len(prompt.encode()), [*(prompt + completion).encode(), END]
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(logp[at - 1, ids[at]].item() for at in range(start, len(ids)))


def test_the_loss_of_every_step_is_that_of_transformers_and_peft(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    rows = ROWS[:3]
    run = train(tmp_path, rows, optim={"steps": 3, "rows_per_step": 3}, run={"save_every": 1})
    base = AutoModelForCausalLM.from_pretrained(locate_model("tiny"), dtype=torch.float32)
    old = [[summed_logp(base, row["prompt"], row[side]) for side in ("chosen", "rejected")] for row in rows]
    assert run.metrics[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)
    for done in (1, 2):
        model: Any = AutoModelForCausalLM.from_pretrained(locate_model("tiny"), dtype=torch.float32)
        model = PeftModel.from_pretrained(model, run.folder / f"checkpoints/step-{done:06d}/adapter")
        new = [
            [summed_logp(model, row["prompt"], row[side]) for side in ("chosen", "rejected")] for row in rows
        ]
        d = [[n - o for n, o in zip(ns, os, strict=True)] for ns, os in zip(new, old, strict=True)]
        losses = [math.log(1 + math.exp(-0.1 * (chosen - rejected))) for chosen, rejected in d]
        metrics = run.metrics[done]
        assert metrics["dpo/loss"] == metrics["loss/total"] == pytest.approx(sum(losses) / 3, rel=1e-5)
        assert metrics["dpo/margin"] == pytest.approx(sum(0.1 * (c - r) for c, r in d) / 3, rel=1e-3)
        assert metrics["dpo/chosen"] == pytest.approx(sum(0.1 * c for c, _ in d) / 3, rel=1e-3)
        assert metrics["logp/chosen"] == pytest.approx(
            sum(c for c, _ in new) / 9, rel=1e-5
        )  # 2 bytes and the end
        assert metrics["tokens/trained"] == 18 and metrics["tokens/computed"] == 3 * (2 + 2 + 2)


@pytest.mark.parametrize(
    "objective",
    [{}, {"label_smoothing": 0.1}, {"loss": "ipo", "beta": 0.3}, {"loss": "hinge"}, {"sft_weight": 1.0}],
    ids=lambda o: " ".join(map(str, o.values())) or "default",
)
def test_a_few_pairs_are_learned(objective: dict[str, Any], tmp_path: Path) -> None:
    run = train(tmp_path, ROWS, objective=objective, optim={"steps": 20}, eval_data=ROWS)
    margin = run.metrics.column("dpo/margin")
    assert (
        abs(margin[1]) < 1e-6 and margin[1] < margin[5] < margin[-5:].mean()
    )  # row 0 is the evaluation before
    assert (run.metrics.column("dpo/accuracy")[-5:] == 1).all()
    before, after = run.metrics[0], run.metrics[20]
    assert after["eval/accuracy"] == 1.0 and after["eval/margin"] > 0.5 > before["eval/margin"]
    assert after["eval/loss"] < before["eval/loss"]
    if objective.get(
        "sft_weight"
    ):  # the chosen completions become likelier themselves, not only likelier than others
        logp = run.metrics.column("logp/chosen")
        assert logp[-1] > logp[1] + 3
        assert run.metrics[1]["loss/sft"] == pytest.approx(-logp[1], rel=1e-6)  # all of equal length
        assert run.metrics[1]["loss/total"] == pytest.approx(math.log(2) - logp[1], rel=1e-6)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_how_a_step_is_split_changes_no_result(method: str, tmp_path: Path) -> None:
    """eps is so large that AdamW's update is the gradient: without, it would amplify rounding to lr."""
    uneven = [{"prompt": "1>" * n, "chosen": "x" * n, "rejected": "yz" * (5 - n)} for n in range(1, 5)]
    runs = [
        train(
            tmp_path,
            uneven,
            model={"method": method},
            objective={"beta": 1.0},
            optim={"steps": 2, "lr": 1.0, "eps": 1.0, "tokens_per_pass": tokens},
            run={"name": f"{tokens}"},
        )
        for tokens in (100_000, 20, 1)
    ]
    whole = adapter(runs[0].adapter)
    assert max(tensor.abs().max().item() for name, tensor in whole.items() if "lora_B" in name) > 1e-3
    for run in runs[1:]:
        for name, tensor in adapter(run.adapter).items():
            torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-6)
        for name in ("loss/total", "dpo/margin", "grad/norm"):
            assert run.metrics.column(name) == pytest.approx(
                runs[0].metrics.column(name), rel=1e-4, abs=1e-6
            ), name


def test_an_epoch_shows_every_pair_once_and_its_last_step_is_short(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}:", "chosen": "x" * (n + 1), "rejected": "y"} for n in range(10)]
    run = train(tmp_path, rows, optim={"epochs": 2.0})
    trained = run.metrics.column("tokens/trained")
    assert len(trained) == 6 and trained[:3].sum() == trained[3:].sum() == sum(n + 2 + 2 for n in range(10))


def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optim": {"steps": 5, "schedule": "linear", "warmup_steps": 1}}
    whole = train(tmp_path / "whole", ROWS, **settings, run={"save_every": 2})
    copied = tmp_path / "copied" / "run"
    shutil.copytree(whole.folder, copied)
    resumed = train(copied.parent, ROWS, resume=str(copied / "checkpoints/step-000002"), **settings)

    final = adapter(whole.adapter)
    assert all(torch.equal(tensor, final[name]) for name, tensor in adapter(resumed.adapter).items())
    kept = [
        [{k: v for k, v in row.items() if not k.startswith(VARYING)} for row in run.metrics]
        for run in (resumed, whole)
    ]
    assert kept[0] == kept[1] and [row["step"] for row in kept[0]] == [1, 2, 3, 4, 5]


def test_after_sft_its_adapter_is_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learned = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in ROWS]
    first = covey.sft(
        {**CONFIG, "run": {**CONFIG["run"], "dir": str(tmp_path / "sft")}},
        data=learned,
        plain=True,
        lora={"rank": 4},
        optim={"steps": 5, "rows_per_step": 8, "lr": 1e-2},
    )
    capsys.readouterr()
    run = train(tmp_path / "dpo", ROWS, model={"adapter": str(first.adapter)}, optim={"steps": 2})
    # Against the base model it would not be: the adapter has moved.
    assert run.metrics[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert run.metrics[1]["dpo/loss"] < 0.69
    printed = capsys.readouterr().out
    assert f"reference  the adapter {first.adapter} as it was loaded" in printed
    assert isinstance(run.policy, DecoderPolicy) and run.policy.adapter.rank == 4
    train(tmp_path / "base", ROWS, optim={"steps": 1})
    assert "reference  the model without its adapter" in capsys.readouterr().out


def test_evaluations_can_be_scored_by_rewards(tmp_path: Path) -> None:
    def doubles(completion: str, letter: str) -> float:
        return float(completion.startswith(2 * letter))

    rows = [{**row, "letter": row["prompt"][0]} for row in ROWS]
    settings = {"optim": {"steps": 40}, "objective": {"sft_weight": 1.0}, "eval": {"max_new_tokens": 4}}
    run = train(tmp_path, rows, eval_data=rows, rewards=[doubles], **settings)
    assert [row["step"] for row in run.metrics] == list(range(41))
    assert (run.metrics[0]["eval/doubles"], run.metrics[40]["eval/doubles"]) == (0.0, 1.0)
    assert run.metrics[40]["eval/accuracy"] == 1.0 and run.metrics[40]["eval/rows"] == 8
    assert run.generate("c:", max_new_tokens=4) == "cc"


# --------------------------------------------------------------------------------------- the command line


RECIPE = """\
model: {path: tiny, device: cpu}
data: {train: pairs.jsonl}
optim: {steps: 1}
run: {threads: 1}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "dpo.yaml": RECIPE,
        "pairs.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS[:3]),
        "equal.jsonl": json.dumps(ROWS[0]) + "\n" + '{"prompt": "a", "chosen": "b", "rejected": "b"}\n',
        "questions.jsonl": '{"prompt": "a"}\n',
        "rewards.py": "def accuracy(completion):\n    return 1.0\n\ndef needs(completion, colour):\n    return 1.0\n",
    }
    for name, text in files.items():
        Path(name).write_text(text)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train=pair.jsonl", ('data.train: no file "pair.jsonl"', 'Did you mean "pairs.jsonl"?')),
        ("data.train=questions.jsonl", ("No column is called chosen (prompt)", "data.chosen")),
        ("data.train=equal.jsonl", ("equal.jsonl:2: both completions are the same; 1 of 2", "data.unusable: drop")),
        ("data.train=task:additoin", ("task:additoin", 'Did you mean "addition"?')),
        ("data.chosen=chossen", ('data.chosen: no column "chossen"', 'Did you mean "chosen"?')),
        ("data.max_tokens=2", ("pairs.jsonl:1: has 5 tokens", "data.max_tokens (2)", "3 of 3 pairs")),
        ("data.completion=chosen", ("data.completion", "data.chosen and data.rejected")),
        ("data.loss_on=all", ("data.loss_on: belongs to covey sft; covey dpo has no such key",)),
        ("rollout.group_size=8", ("rollout: belongs to covey grpo; covey dpo has no such key",)),
        ("objective.beta=0", ("objective.beta: must be above 0, got 0",)),
        ("objective.loss=dpo", ('objective.loss: expected "sigmoid", "ipo" or "hinge", got "dpo"',)),
        ("objective.label_smoothing=0.5", ("objective.label_smoothing: must be below 0.5, got 0.5",)),
        ("optim.epochs=1", ("optim: give either steps or epochs",)),
        ("rewards.0.use=rewards.py:accuracy", ("eval/accuracy is a metric of the pairs", "another name")),
        ("rewards.0.use=rewards.py:needs", ('"colour"', "prompt, chosen, rejected")),
    ],
)  # fmt: skip
def test_a_mistake_is_a_sentence_and_leaves_nothing_behind(
    project: None, override: str, words: tuple[str, ...]
) -> None:
    result = command("dpo", "dpo.yaml", override)
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    for word in words:
        assert word in result.stderr, f"{word!r} is not in: {result.stderr}"
    assert not Path("runs").exists()


@pytest.mark.parametrize("loss", ["ipo", "hinge"])
def test_label_smoothing_belongs_to_one_loss(loss: str) -> None:
    with pytest.raises(ConfigError, match=rf"objective\.label_smoothing: has no meaning for loss {loss}"):
        overrides = [f"objective.loss={loss}", "objective.label_smoothing=0.1"]
        load_config(
            {"model": {"path": "tiny"}, "data": {"train": "a.jsonl"}, "optim": {"steps": 1}},
            overrides,
            DpoConfig,
        )


def test_keys_of_the_pairs_given_to_another_command() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.rejected: belongs to covey dpo; covey grpo has no such key"
    ):
        load_config(
            {"model": {"path": "tiny"}, "data": {"train": "a.jsonl", "rejected": "b"}}, [], GrpoConfig
        )


def test_the_shipped_recipe_runs_as_it_is_on_a_small_model(project: None) -> None:
    small = ["model.path=tiny", "optim.steps=2", "optim.warmup_steps=0", "eval.rows=5", "run.threads=1"]
    result = command("dpo", "quickstart-dpo", *small, "--name", "small")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in Path("runs/small/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"eval/loss", "eval/accuracy", "eval/margin", "eval/right"} <= set(rows[0])
    assert (
        "2 steps of 16 pairs" in result.output
        and 'rejected from "rejected", 1254 pairs; 5 held out' in result.output
    )


def test_a_dry_run_prints_a_plan_and_a_recipe(project: None) -> None:
    overrides = ["objective.sft_weight=0.5", "model.adapter=runs/a/adapter"]
    result = command("dpo", "dpo.yaml", *overrides, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "# step     16 pairs of up to 2048 tokens a side" in result.output
    assert (
        "# loss     sigmoid, beta 0.1, plus 0.5 x SFT on the chosen; the reference is runs/a/adapter"
        in result.output
    )
    assert "# run      1 steps, learning rate 5e-06 (constant)" in result.output
    Path("resolved.yaml").write_text(result.output)
    assert load_config("resolved.yaml", [], DpoConfig) == load_config("dpo.yaml", overrides, DpoConfig)
    assert not Path("runs").exists()


def test_help_names_the_command() -> None:
    assert "covey dpo my.yaml" in command("--help").output
    text = command("dpo", "--help").output
    assert "covey dpo quickstart-dpo" in text and "--resume PATH|auto" in text
