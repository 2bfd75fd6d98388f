"""GRPO from a configuration to a trained adapter, through `covey.grpo` and the command line.

transformers and PEFT say what the right log-probs are; they share no code with the trainer or the sampler.
"""

import json
import math
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import covey
from covey.policies.locate import locate_model
from covey.rewards.reward import RewardError
from covey.rl.cli import app

WORDS = ("one", "two", "three", "four", "five", "six")
ROWS = [{"prompt": f"{word}:"} for word in WORDS]
CONFIG: dict[str, Any] = {
    "model": {"path": "tiny", "method": "lora", "dtype": "float32", "device": "cpu"},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 12},
    "optim": {"lr": 1e-2, "steps": 3},
    "run": {"name": "run", "threads": 1, "samples_every": 0, "save_every": 0, "keep": 100},
}
VARYING = ("time/", "memory/", "rollout/tokens_per_s")


def digits(completion: str) -> float:
    return sum(c in "0123456789" for c in completion) / max(1, len(completion))


def letters(completions: list[str]) -> list[float]:
    """Called once per step. Differs between nearly all completions."""
    return [len(set(text)) + sum(map(ord, text)) % 7 / 7 for text in completions]


def train(folder: Path, reward: Callable[..., Any] = letters, resume: str | None = None, **sections: Any):
    config = {name: {**CONFIG.get(name, {}), **sections.get(name, {})} for name in {*CONFIG, *sections}}
    config["run"]["dir"] = str(folder)
    return covey.grpo(config, rewards=[reward], data=ROWS, resume=resume, plain=True)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same_everywhere(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics that depend on nothing but the configuration."""
    return [{k: v for k, v in row.items() if not k.startswith(VARYING)} for row in rows]


def peft_model(folder: Path | None) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(locate_model("tiny"), dtype=torch.float32)
    return (base if folder is None else PeftModel.from_pretrained(base, folder)).eval()


def test_an_easy_reward_is_learned_and_everything_is_left_behind(tmp_path: Path) -> None:
    run = train(tmp_path, digits, rollout={"group_size": 8}, optim={"steps": 22})

    reward = run.metrics.column("reward/mean")
    assert reward[:2].mean() < 0.2 and reward[-2:].mean() > 0.9
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 23))
    assert [line["reward/mean"] for line in lines] == list(reward)

    files = sorted((run.folder / "samples").iterdir())
    assert [file.name for file in files] == [f"step-{step:06d}.parquet" for step in range(1, 23)]
    rows = parquet.read_table(files[4]).to_pylist()
    assert len(rows) == 4 * 8
    assert all(row["reward"] == row["reward/digits"] == digits(row["completion"]) for row in rows)
    assert sum(row["reward"] for row in rows) / 32 == pytest.approx(reward[4])

    assert not run.interrupted and run.adapter == run.folder / "checkpoints/step-000022/adapter"
    text = run.generate("seven:", max_new_tokens=8)
    assert digits(text) > 0.7
    prompt = torch.tensor([list(b"seven:")])
    greedy = peft_model(run.adapter).generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
    assert bytes(i for i in greedy[0, 6:].tolist() if i < 256).decode("utf-8", "replace") == text
    for name, tensor in adapter(run.adapter).items():
        torch.testing.assert_close(run.policy.weights()[name], tensor, rtol=0, atol=0)
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight" in adapter(run.adapter)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_trainer_and_sampler_agree_in_every_step(method: str, tmp_path: Path) -> None:
    """Completions come from the newest adapter, and before the first update the ratio is exactly 1."""
    for temperature in (1.0, 0.7):
        run = train(
            tmp_path,
            model={"method": method},
            rollout={"temperature": temperature},
            run={"name": f"{method}-{temperature}"},
        )
        assert list(run.metrics.column("ratio/min")) == list(run.metrics.column("ratio/max")) == [1.0] * 3
        assert list(run.metrics.column("clip/low") + run.metrics.column("clip/high")) == [0.0] * 3
        assert all(run.metrics.column("grad/norm") > 0)
        assert run.metrics.column("sampler/logp_diff_max").max() <= 1e-5


def test_the_samplers_log_probs_are_those_of_peft_with_the_adapter_of_the_step_before(tmp_path: Path) -> None:
    run = train(tmp_path, rollout={"temperature": 0.7}, run={"save_every": 1})
    assert all(
        tensor.norm() > 0
        for name, tensor in adapter(run.folder / "checkpoints/step-000001/adapter").items()
        if "lora_B" in name
    )
    samples = [parquet.read_table(file).to_pylist() for file in sorted((run.folder / "samples").iterdir())]
    assert [{row["version"] for row in rows} for rows in samples] == [{0}, {1}, {2}]
    rows = samples[1]

    def largest_difference(model: Any) -> float:
        worst = 0.0
        for row in rows:
            prompt = list(row["prompt"].encode())
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + row["ids"]])).logits[0, len(prompt) - 1 : -1]
            expected = (logits.double() / 0.7).log_softmax(-1)[range(len(row["ids"])), row["ids"]]
            worst = max(worst, (expected - torch.tensor(row["logprobs"])).abs().max().item())
        return worst

    assert largest_difference(peft_model(run.folder / "checkpoints/step-000001/adapter")) < 2e-5
    assert largest_difference(peft_model(None)) > 0.1


def test_a_constant_reward_moves_nothing(tmp_path: Path) -> None:
    def constant(completion: str) -> float:
        return 0.7

    run = train(tmp_path, constant)
    assert list(run.metrics.column("groups/no_spread")) == [1.0] * 3
    assert list(run.metrics.column("loss/total")) == [0.0] * 3
    for line in (run.folder / "metrics.jsonl").read_text().splitlines():
        assert all(value is not None and math.isfinite(value) for value in json.loads(line).values()), line
    covey.load_policy("tiny", method="lora", device="cpu").save_adapter(tmp_path / "before", "tiny")
    before, after = adapter(tmp_path / "before"), adapter(run.adapter)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_two_updates_per_rollout_and_the_reference(tmp_path: Path) -> None:
    twice = train(tmp_path, objective={"updates_per_rollout": 2}, optim={"steps": 1}, run={"name": "twice"})
    assert twice.metrics[0]["ratio/min"] < 0.999 and twice.metrics[0]["ratio/max"] > 1.001
    pulled = train(tmp_path, objective={"beta": 0.1}, run={"name": "pulled"})
    divergence = pulled.metrics.column("kl/reference")
    assert divergence[0] == pytest.approx(0.0, abs=1e-9) and all(divergence[1:] > 1e-5)
    assert list(pulled.metrics.column("ratio/max")) == [1.0] * 3


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_how_a_step_is_split_changes_no_result(aggregation: str, tmp_path: Path) -> None:
    """eps is so large that AdamW's update is the gradient: without, it would amplify rounding to lr."""
    runs = [
        train(
            tmp_path,
            rollout={"stop": list("abcdefghijklmnopqrstuvwxyz"), "max_new_tokens": 24},
            objective={"aggregation": aggregation, "beta": 0.1, "updates_per_rollout": 2},
            optim={"steps": 1, "lr": 1.0, "eps": 1.0, "tokens_per_pass": tokens},
            run={"name": f"{tokens}"},
        )
        for tokens in (16, 100_000)
    ]
    lengths = {
        len(row["ids"])
        for row in parquet.read_table(runs[0].folder / "samples/step-000001.parquet").to_pylist()
    }
    assert len(lengths) > 3
    one, other = (adapter(run.adapter) for run in runs)
    assert max(tensor.abs().max().item() for name, tensor in one.items() if "lora_B" in name) > 1e-3
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)
    for name in ("loss/total", "grad/norm", "kl/reference", "ratio/max", "entropy/mean"):
        assert runs[0].metrics[0][name] == pytest.approx(runs[1].metrics[0][name], rel=1e-5, abs=1e-7), name


def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "optim": {"steps": 4, "schedule": "linear", "warmup_steps": 1},
        "objective": {"entropy_target": 5.5, "entropy_step": 0.01, "epochs": 2, "updates_per_rollout": 2},
    }
    whole = train(tmp_path / "whole", **settings, run={"save_every": 2})
    copied = tmp_path / "copied" / "run"
    shutil.copytree(whole.folder, copied)
    resumed = train(copied.parent, resume=str(copied / "checkpoints/step-000002"), **settings)

    calls = []

    def stopping(completions: list[str]) -> list[float]:
        calls.append(0)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return letters(completions)

    stopping.__name__ = letters.__name__  # the metrics are named after it
    stopped = train(tmp_path / "stopped", stopping, **settings)
    assert stopped.interrupted and len(stopped.metrics) == 2
    assert stopped.adapter == stopped.folder / "checkpoints/step-000002/adapter"
    continued = train(tmp_path / "stopped", stopping, resume="auto", **settings)

    for run in (resumed, continued):
        assert run.adapter.parent.name == "step-000004" and not run.interrupted
        assert all(
            torch.equal(tensor, adapter(whole.adapter)[name]) for name, tensor in adapter(run.adapter).items()
        )
        assert same_everywhere(run.metrics.rows) == same_everywhere(whole.metrics.rows)
        assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        assert same_everywhere(lines) == same_everywhere(whole.metrics.rows)


def test_a_reward_that_fails_costs_only_its_step(tmp_path: Path) -> None:
    calls = []

    def fragile(completions: list[str]) -> list[float]:
        calls.append(0)
        if len(calls) == 3:
            raise KeyError("colour")
        return letters(completions)

    with pytest.raises(RewardError, match=r"test_grpo_run\.py:\d+.*fragile\(\) raised KeyError: 'colour'"):
        train(tmp_path, fragile, optim={"steps": 5})
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000002"]
    continued = train(tmp_path, fragile, resume="auto", optim={"steps": 5})
    assert [row["step"] for row in continued.metrics] == [1, 2, 3, 4, 5]
    unbroken = train(tmp_path, letters, optim={"steps": 5}, run={"name": "unbroken"})
    assert all(
        torch.equal(tensor, adapter(unbroken.adapter)[name])
        for name, tensor in adapter(continued.adapter).items()
    )


def test_ctrl_c_on_the_command_line_saves_and_prints_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stop.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "calls = Path(__file__).with_name('calls')\n"
        "def stop(completions):\n"
        "    calls.write_text((calls.read_text() if calls.exists() else '') + '.')\n"
        "    if calls.stat().st_size == 2:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return [float(len(set(text))) for text in completions]\n"
    )
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe = {**CONFIG, "data": {"train": "rows.jsonl"}, "rewards": [{"use": "stop.py:stop"}]}
    Path("recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML

    first = CliRunner().invoke(app, ["grpo", "recipe.yaml", "optim.steps=4"])
    assert first.exit_code == 130, first.output
    assert [path.name for path in Path("runs/run/checkpoints").iterdir()] == ["step-000002"]
    line = next(line for line in first.output.splitlines() if "Go on with: " in line)
    command = shlex.split(line.split("Go on with: ")[1])
    assert command == ["covey", "grpo", "recipe.yaml", "optim.steps=4", "--resume", "runs/run"]

    second = CliRunner().invoke(app, command[1:])
    assert second.exit_code == 0, second.output
    rows = [json.loads(text) for text in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
