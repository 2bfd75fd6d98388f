"""Whole runs through the public interface, on models made on the spot."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import covey
from covey.rewards.reward import RewardError
from covey.rl.api import Run

ROWS = [{"prompt": f"{a}{b}=", "completion": f" {a}{b}!"} for a in "abcd" for b in "vwxyz"]
CHANGING = ("time/", "rollout/tokens_per_s", "train/tokens_per_s", "memory/")


def digits(completion: str) -> float:
    """Share of digits."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def settings(folder: Path, **changes) -> dict:
    sections = {
        "model": {"path": "tiny", "device": "cpu"},
        "lora": {"rank": 8},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6},
        "optim": {"steps": 4, "lr": 1e-2},
        "run": {"dir": str(folder), "name": "run"},
    }
    return {name: sections.get(name, {}) | changes.get(name, {}) for name in {**sections, **changes}}


def grpo(folder: Path, reward=digits, resume=None, **changes) -> Run:
    config = settings(folder, **changes)
    return covey.grpo(config, rewards=[reward], data=ROWS, resume=resume, plain=True)


def sft(folder: Path, rows=ROWS, **changes) -> Run:
    config = settings(folder, **changes)
    config.pop("rollout")
    return covey.sft(config, data=rows, plain=True)


def adapter(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.adapter / "adapter_model.safetensors")


def lines(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_grpo_raises_a_learnable_reward(tmp_path):
    """The random model writes digits in 1 of 25 characters; rewarded for them it writes little else."""
    run = grpo(tmp_path, rollout={"group_size": 8}, optim={"steps": 30})
    reward = run.metrics.column("reward/mean")
    assert reward[0] < 0.2
    assert reward[-3:].mean() > 0.9
    assert [row["step"] for row in lines(run)] == list(range(1, 31))
    assert digits(run.generate("av=", max_new_tokens=8)) > 0.7
    import pyarrow.parquet

    samples = pyarrow.parquet.read_table(run.folder / "samples" / "step-000030.parquet").to_pylist()
    assert len(samples) == 4 * 8
    assert all(math.isclose(row["reward"], digits(row["completion"])) for row in samples)
    names = adapter(run)
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight" in names
    assert len(names) == 2 * 7 * 2


def test_sft_memorises_twenty_rows(tmp_path):
    run = sft(tmp_path, optim={"steps": 60, "rows_per_step": 20})
    # The head is frozen: a hidden state of norm 8 against rows of norm about 1.2 leads by at most 9.6 nats, which
    # leaves the other 263 ids 0.02 nats at best.
    assert 0.02 < run.metrics.column("sft/nll")[-1] < 0.1
    for row in ROWS:
        assert run.generate(row["prompt"], max_new_tokens=8) == row["completion"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_at_every_step(tmp_path, temperature):
    """B17, B18, B15: the ratio of the first update is 1 exactly, and samples come from the present adapter."""
    run = grpo(tmp_path, rollout={"temperature": temperature}, optim={"steps": 6})
    assert (run.metrics.column("ratio/min") == 1).all() and (run.metrics.column("ratio/max") == 1).all()
    assert run.metrics.column("sampler/logp_diff_max").max() < 1e-5
    assert run.metrics.column("grad/norm").min() > 0
    start = covey.load_policy("tiny", rank=8, device="cpu").weights()
    moved = [name for name, tensor in adapter(run).items() if not torch.equal(tensor, start[name])]
    assert len(moved) == len(start)  # every A and every B has learned


def test_equal_rewards_leave_the_weights_alone(tmp_path):
    """B04: a reward of 0.7 for everything."""
    run = grpo(tmp_path, lambda completion: 0.7)
    start = covey.load_policy("tiny", rank=8, device="cpu").weights()
    assert all(torch.equal(tensor, start[name]) for name, tensor in adapter(run).items())
    assert (run.metrics.column("groups/no_spread") == 1).all()
    assert all(value is not None for row in lines(run) for value in row.values())


def test_later_updates_on_the_same_rollouts_are_off_policy(tmp_path):
    run = grpo(tmp_path, objective={"updates_per_rollout": 2, "beta": 0.1}, optim={"steps": 2})
    assert run.metrics.column("ratio/max").min() > 1.0001
    assert (
        run.metrics.column("kl/reference")[0] > 0
    )  # that of the second update: one step away from the base model


def test_the_reference_of_a_new_adapter_is_where_it_starts(tmp_path):
    run = grpo(tmp_path, objective={"beta": 0.1}, optim={"steps": 2})
    kl = run.metrics.column("kl/reference")
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[1] > 1e-6


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_how_a_step_is_split_changes_nothing(tmp_path, aggregation):
    """B01: passes of 16 tokens and of 100,000 give the same gradient, so the same metrics at the next step."""
    runs = [
        grpo(
            tmp_path / str(tokens),
            objective={"aggregation": aggregation},
            optim={"steps": 1, "tokens_per_pass": tokens, "eps": 1e-2},
        )
        for tokens in (16, 100_000)
    ]
    one, other = (adapter(run) for run in runs)
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in one)
    assert runs[0].metrics[-1]["grad/norm"] == pytest.approx(runs[1].metrics[-1]["grad/norm"], rel=1e-5)


def test_unequal_documents_split_in_any_way(tmp_path):
    """B01: rows of 1, 3, 9 and 27 supervised tokens."""
    rows = [{"prompt": "p:", "completion": "x" * (n - 1)} for n in (2, 3, 9, 27)]  # and the end of the text
    runs = [
        sft(
            tmp_path / str(t), rows, optim={"steps": 1, "rows_per_step": 4, "tokens_per_pass": t, "eps": 1e-2}
        )
        for t in (1, 12, 1000)
    ]
    assert [run.metrics[-1]["tokens/trained"] for run in runs] == [2 + 3 + 9 + 27] * 3
    first = adapter(runs[0])
    for run in runs[1:]:
        assert all(torch.allclose(first[name], t, rtol=0, atol=1e-6) for name, t in adapter(run).items())
        assert run.metrics[-1]["sft/nll"] == pytest.approx(runs[0].metrics[-1]["sft/nll"], rel=1e-6)


def test_a_resumed_run_is_the_uninterrupted_run(tmp_path):
    whole = grpo(tmp_path / "whole", optim={"steps": 5}, run={"save_every": 2, "keep": 9})
    copy = tmp_path / "copy" / "run"
    shutil.copytree(whole.folder, copy)
    resumed = grpo(
        tmp_path / "copy",
        optim={"steps": 5},
        run={"save_every": 2, "keep": 9},
        resume=str(copy / "checkpoints" / "step-000002"),
    )
    assert all(torch.equal(tensor, adapter(whole)[name]) for name, tensor in adapter(resumed).items())
    for mine, theirs in zip(lines(resumed), lines(whole), strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith(CHANGING)} == {
            k: v for k, v in theirs.items() if not k.startswith(CHANGING)
        }


def test_a_failing_reward_loses_no_step(tmp_path):
    calls = []

    def fails_in_step_three(completions):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("no")
        return [float(len(text)) for text in completions]

    with pytest.raises(RewardError, match=r"fails_in_step_three.*ZeroDivisionError"):
        grpo(tmp_path, fails_in_step_three)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    run = grpo(tmp_path, fails_in_step_three, resume="auto")
    assert [row["step"] for row in lines(run)] == [1, 2, 3, 4]


def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    calls = []

    def interrupts_in_step_two(completions):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return [float(len(text)) for text in completions]

    run = grpo(tmp_path, interrupts_in_step_two)
    assert run.interrupted
    assert run.adapter.parent.name == "step-000002" and run.adapter.is_dir()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_training_goes_on_from_an_adapter_which_is_the_reference(tmp_path):
    first = sft(tmp_path, optim={"steps": 3, "rows_per_step": 20})
    model = {"path": "tiny", "device": "cpu", "adapter": str(first.adapter)}
    second = grpo(tmp_path / "more", model=model, objective={"beta": 0.1}, optim={"steps": 1})
    assert second.metrics[-1]["kl/reference"] == pytest.approx(0, abs=1e-9)
    assert second.policy.adapter.rank == 8
