"""From SFT to GRPO: training goes on from an adapter, and that adapter is the reference."""

import json
import signal
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import covey
from covey.policies.decoder import DecoderPolicy
from covey.rl.checkpoint import RunError, find_adapter, save_checkpoint
from covey.rl.cli import app
from covey.rl.metrics import Metrics

ROWS = [{"prompt": f"{a}{b}=", "completion": f" {a}{b}!"} for a in "abcd" for b in "vwxyz"]
MODEL = {"path": "tiny", "device": "cpu"}


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def test_the_reference_is_the_adapter_as_it_was_loaded(tmp_path: Path):
    handler = signal.getsignal(signal.SIGINT)
    first = covey.sft(
        model=MODEL, lora={"rank": 4}, data=ROWS, plain=True,
        optim={"steps": 3, "rows_per_step": 20, "lr": 1e-2}, run={"dir": str(tmp_path / "sft")},
    )  # fmt: skip
    second = covey.grpo(
        model=MODEL | {"adapter": str(first.adapter)}, data=ROWS, rewards=[digits], plain=True,
        rollout={"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6}, objective={"beta": 0.1},
        optim={"steps": 2, "lr": 1e-2}, run={"dir": str(tmp_path / "grpo")},
    )  # fmt: skip
    assert isinstance(second.policy, DecoderPolicy)
    assert second.policy.adapter.rank == 4  # the adapter's own, not the default of 16
    kl = second.metrics.column("kl/reference")
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[1] > 1e-6
    # Against the base model it would not be 0: the adapter has moved.
    moved, base = covey.load_policy("tiny", adapter=first.adapter, device="cpu"), covey.load_policy("tiny")
    assert isinstance(moved, DecoderPolicy) and isinstance(base, DecoderPolicy)
    assert not torch.equal(moved.forward_logits([97, 98]), base.forward_logits([97, 98]))
    assert signal.getsignal(signal.SIGINT) == handler  # a run gives Ctrl-C back


def test_grpo_goes_on_from_the_folder_of_an_sft_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two commands of docs/sft.md."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(
        "def digits(completion):\n    return float(any(map(str.isdigit, completion)))\n"
    )
    model = ["model.path=tiny", "model.device=cpu", "data.train=rows.jsonl"]
    recipe = Path("empty.yaml")
    recipe.write_text("{}")
    tune = "optim.epochs=1 optim.rows_per_step=5 optim.lr=1e-2 eval.share=0.2 eval.every=1 eval.patience=9"
    shown = CliRunner().invoke(app, ["sft", str(recipe), *model, *tune.split(), "--name", "sft"])
    assert shown.exit_code == 0, shown.output
    reinforce = (
        "model.adapter=runs/sft rewards.0.use=mine.py:digits rollout.prompts_per_step=4 rollout.group_size=4 "
        "rollout.max_new_tokens=6 objective.beta=0.1 optim.steps=1"
    )
    shown = CliRunner().invoke(app, ["grpo", str(recipe), *model, *reinforce.split(), "--name", "grpo"])
    assert shown.exit_code == 0, shown.output
    adapter = find_adapter(Path("runs/sft"))
    (line,) = [line for line in shown.output.splitlines() if line.startswith("start ")]
    assert line.split(maxsplit=1)[1] == f"the adapter {adapter}; it is the reference"
    metrics = Metrics.read(Path("runs/grpo/metrics.jsonl"))
    assert metrics.column("kl/reference")[0] == pytest.approx(0, abs=1e-9)


def test_the_recipes_of_sft_and_of_grpo_after_it_run_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their own keys, but for the model, its size and the data, which need a GPU and the hub."""
    monkeypatch.chdir(tmp_path)
    chats = [
        [
            {"role": "user", "content": f"{n}+1?"},
            {"role": "assistant", "content": f"<think>\n{n}+1\n</think>\n\n{n + 1}"},
        ]
        for n in range(8)
    ]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    sums = [{"question": f"{n}+1?", "answer": f"{n} and 1 make\n#### {n + 1}"} for n in range(8)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    small = {"model.path": "tiny", "model.device": "cpu", "eval.every": 1}
    covey.sft(
        "reasoning-sft", plain=True, lora={"rank": 4}, optim={"steps": 1, "rows_per_step": 4, "warmup_steps": 0},
        **small, **{"data.train": "chats.jsonl", "eval.share": 0.25, "run.name": "sft"},
    )  # fmt: skip
    capsys.readouterr()
    run = covey.grpo(
        "sft-then-grpo", plain=True, optim={"steps": 1, "warmup_steps": 0}, objective={"truncated": "keep"},
        rollout={"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 8},
        **small, **{"data.train": "sums.jsonl", "data.eval": "sums.jsonl"},
    )  # fmt: skip
    adapter = find_adapter(Path("runs/sft"))
    assert f"the adapter {adapter}; it is the reference" in " ".join(capsys.readouterr().out.split())
    assert isinstance(run.policy, DecoderPolicy) and run.policy.adapter.rank == 4
    assert run.metrics[1]["kl/reference"] == pytest.approx(0, abs=1e-9)
    assert [row["step"] for row in run.metrics if "eval/reward" in row] == [0, 1]


def test_a_path_to_go_on_from_may_be_an_adapter_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    def checkpoint(step: int, best: int | None) -> Path:
        return save_checkpoint(
            tmp_path,
            step,
            adapter_writer=lambda f: (f / "adapter_config.json").write_text("{}"),
            state={},
            best=best,
        )

    first, second = checkpoint(1, None), checkpoint(2, None)
    assert find_adapter(first) == find_adapter(first / "adapter") == first / "adapter"
    assert find_adapter(tmp_path) == second / "adapter"
    checkpoint(2, best=1)
    assert find_adapter(tmp_path) == first / "adapter"
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    with pytest.raises(RunError, match="a run without a checkpoint"):
        find_adapter(empty)
