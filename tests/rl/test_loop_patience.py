"""Early stopping: a trainer whose evaluations are written down, and SFT that is stopped, resumed and overfits."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import covey
from covey.rl.checkpoint import find_adapter, list_checkpoints
from covey.rl.config import RunSection, SftEvalSection
from covey.rl.display import Display, RunInfo
from covey.rl.loop import Results, RunLoop
from covey.rl.run_folder import RunFolder

INFO: dict[str, Any] = {
    "trainable": 1,
    "parameters": 1,
    "objective": "-",
    "rows": 1,
    "model": "-",
    "method": "-",
}


class Scripted:
    """Its evaluation after step k is nll[k]; its adapter is the number of the step."""

    def __init__(self, nll: Sequence[float], fail_at: int = -1) -> None:
        self.nll, self.steps, self.now, self.fail_at = nll, len(nll) - 1, 0, fail_at

    def step(self, index: int) -> Results:
        if index == self.fail_at:
            raise RuntimeError("power cut")
        self.now = index + 1
        return {"sft/nll": 1.0}, []

    def evaluate(self) -> Results:
        return {"eval/nll": self.nll[self.now]}, []

    def save_adapter(self, folder: Path) -> None:
        (folder / "adapter_config.json").write_text(str(self.now))

    def load_adapter(self, adapter: Path, step: int) -> None:
        self.now = int((adapter / "adapter_config.json").read_text())
        assert self.now == step

    def state(self) -> dict[str, Any]:
        return {"updates": self.now}

    def restore(self, adapter: Path, state: Mapping[str, Any], step: int) -> None:
        assert state == {"updates": step}
        self.load_adapter(adapter, step)


def loop(
    trainer: Scripted,
    folder: Path,
    resume: Path | None = None,
    save_every: int = 0,
    keep: int = 1,
    **keys: Any,
) -> RunLoop:
    section = SftEvalSection(**{"every": 1, "patience": 2, **keys})
    display = Display(plain=True)
    display.start(
        RunInfo(command="sft", name="-", folder=str(folder), device="-", steps=trainer.steps, **INFO)
    )
    for part in ("samples", "checkpoints"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    made = RunLoop(
        trainer, RunFolder(folder, resume), section, RunSection(save_every=save_every, keep=keep), display
    )
    made()
    return made


def saved(folder: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(folder)]


@pytest.mark.parametrize(
    ("nll", "patience", "min_delta", "stopped", "best"),
    [
        ([9, 5, 4, 6, 4, 1], 2, 0.0, 4, 2),  # 4 again is not better than 4
        ([9, 5, 4, 6, 3, 1], 2, 0.0, 5, 5),  # the count begins anew at 3
        ([9, 5, 4.5, 4.2, 1], 2, 1.0, 3, 1),  # less than min_delta below 5
        ([9, 5, 4.5, 3.5, 3.4, 3.3], 2, 1.0, 5, 3),  # 3.5 is, compared with the best and not with the last
        ([1, 2, 3, 0], 2, 0.0, 2, 0),  # before the run it was best
        ([9, math.nan, 8, math.nan, math.nan], 2, 0.0, 4, 2),
        ([9, 5, 6, 7, 8], 9, 0.0, 4, 1),  # the run is over first
    ],
)
def test_when_a_run_stops_and_what_it_reports(
    nll: list[float], patience: int, min_delta: float, stopped: int, best: int, tmp_path: Path, capsys: Any
) -> None:
    trainer = Scripted(nll)
    made = loop(trainer, tmp_path, patience=patience, min_delta=min_delta)
    assert (made.done, made.interrupted) == (stopped, False)
    assert (made.adapter / "adapter_config.json").read_text() == str(best)
    assert trainer.now == best  # the policy in memory is the reported one
    assert find_adapter(tmp_path) == made.adapter
    assert saved(tmp_path) == sorted({best, stopped})  # keep is 1, and the best one
    printed = capsys.readouterr().out
    assert (f"eval/nll {nll[best]:.4f} after step {best}" if best else "training has not helped") in printed
    assert ("stopped early" in printed) == (stopped < len(nll) - 1 or stopped - best >= patience)


def test_without_patience_the_last_adapter_counts_and_nothing_is_compared(tmp_path: Path) -> None:
    made = loop(Scripted([1, 2, 3, 4]), tmp_path, patience=None)
    assert made.done == 3 and saved(tmp_path) == [3] and find_adapter(tmp_path) == made.adapter
    assert json.loads((made.adapter.parent / "checkpoint.json").read_text())["best"] is None
    assert "patience" not in json.loads((made.adapter.parent / "state.json").read_text())


@pytest.mark.parametrize("cut", range(1, 8))
@pytest.mark.parametrize("save_every", [1, 2, 3])
def test_a_run_that_was_cut_off_anywhere_ends_like_a_whole_one(
    cut: int, save_every: int, tmp_path: Path
) -> None:
    nll = [9, 5, 6, 4, 4.5, 3, 3.5, 3.2, 1]
    whole = loop(Scripted(nll), tmp_path / "whole", save_every=save_every, keep=2)
    assert (whole.done, whole.patience.best) == (7, 5)
    folder = tmp_path / "cut"
    if cut < 7:
        with pytest.raises(RuntimeError, match="power cut"):
            loop(Scripted(nll, fail_at=cut), folder, save_every=save_every, keep=2)
    else:
        loop(Scripted(nll), folder, save_every=save_every, keep=2)
    for _, checkpoint in list_checkpoints(
        folder
    ):  # from every checkpoint that is left, and not only the newest
        copy = tmp_path / f"from-{checkpoint.name}"
        shutil.copytree(folder, copy)
        resumed = loop(
            Scripted(nll), copy, copy / "checkpoints" / checkpoint.name, save_every=save_every, keep=2
        )
        assert resumed.patience.state() == whole.patience.state()
        assert resumed.done == 7 and resumed.adapter.parent.name == "step-000005"
        assert list(resumed.metrics.column("eval/nll")) == list(whole.metrics.column("eval/nll"))
        assert resumed.adapter.is_dir()


def test_more_patience_lets_a_stopped_run_go_on(tmp_path: Path) -> None:
    nll = [9, 5, 6, 7, 8, 1]
    assert loop(Scripted(nll), tmp_path).done == 3
    newest = list_checkpoints(tmp_path)[-1][1]
    assert loop(Scripted(nll), tmp_path, newest).done == 3  # still out of patience
    made = loop(Scripted(nll), tmp_path, newest, patience=4)
    assert (made.done, made.patience.best) == (5, 5)


def test_sft_that_overfits_stops_and_returns_the_best_policy(tmp_path: Path) -> None:
    """The held-out answer to the same prompt is another one: learning the training answer by heart makes it worse."""
    run = covey.sft(
        model={"path": "tiny", "method": "lora", "dtype": "float32", "device": "cpu"},
        data=[{"prompt": "a>", "completion": "bbbb"}],
        eval_data=[{"prompt": "a>", "completion": "bbcc"}],
        optim={"steps": 60, "lr": 1e-2, "rows_per_step": 1},
        eval={"every": 2, "patience": 3},
        run={"dir": str(tmp_path), "name": "run", "keep": 1, "save_every": 0, "threads": 1},
        plain=True,
    )
    steps = [row["step"] for row in run.metrics if "eval/nll" in row]
    curve = [row["eval/nll"] for row in run.metrics if "eval/nll" in row]
    best = steps[curve.index(min(curve))]
    assert 0 < best < steps[-1] < 60 and steps[-1] == best + 6 and not run.interrupted
    assert run.adapter == tmp_path / "run" / "checkpoints" / f"step-{best:06d}" / "adapter"
    assert find_adapter(run.folder) == run.adapter
    run.policy.save_adapter(tmp_path / "again")
    reported = load_file(run.adapter / "adapter_model.safetensors")
    for name, tensor in load_file(tmp_path / "again" / "adapter_model.safetensors").items():
        assert torch.equal(tensor, reported[name])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"patience": 2}, r"eval\.patience: counts evaluations, so set eval\.every"),
        ({"min_delta": 0.1}, r"eval\.min_delta: has no meaning without eval\.patience"),
        ({"patience": 2, "every": 1}, r"eval\.patience needs held-out rows: set data\.eval or eval\.share"),
    ],
)
def test_settings_that_cannot_work_are_refused(section: dict[str, Any], message: str) -> None:
    rows = [{"prompt": "a", "completion": "b"}]
    with pytest.raises(ValueError, match=message):
        covey.sft(model={"path": "tiny"}, data=rows, optim={"steps": 1}, eval=section, plain=True)
