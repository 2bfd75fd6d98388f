import errno
import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from covey.rl.checkpoint import RunError
from covey.rl.metrics import JsonlLogger, Metrics, Sample, sample_rows, write_samples
from covey.rollout.engine import Completion, Group, Prompt


def _lines(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_a_step_and_on_the_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log(0, {"eval/accuracy": 0.25})
    assert path.read_text() == '{"step": 0, "eval/accuracy": 0.25}\n'
    logger.log(1, {"reward/mean": 0.1 + 0.2, "tokens": 12})
    assert path.read_text().splitlines()[1] == '{"step": 1, "reward/mean": 0.30000000000000004, "tokens": 12}'
    logger.close()


def test_numbers_for_the_same_step_join_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log(1, {"a": 123456789.0, "b": 2.0})
    logger.log(1, {"c": 3.0, "a": 1.0})  # the line may also become shorter
    logger.log(1, {"a": 4.0})
    logger.log(2, {"a": 5.0})
    logger.close()
    assert _lines(path) == [{"step": 1, "a": 4.0, "b": 2.0, "c": 3.0}, {"step": 2, "a": 5.0}]


def test_what_is_not_finite_is_null_and_scalars_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    values = {
        "nan": math.nan,
        "inf": -math.inf,
        "numpy": np.float32(0.5),
        "count": np.int64(3),
        "torch": torch.tensor(0.25),
    }
    logger.log(1, values)  # type: ignore[arg-type]
    logger.close()
    expected = {"step": 1, "nan": None, "inf": None, "numpy": 0.5, "count": 3, "torch": 0.25}
    assert _lines(path) == [expected]
    assert np.isnan(Metrics.read(path).column("nan")[0])


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlLogger(path)
    for step in range(1, 8):
        first.log(step, {"x": float(step)})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 8, "x"')  # cut off by a crash

    second = JsonlLogger(path, resume_step=5)
    assert [row["step"] for row in _lines(path)] == [1, 2, 3, 4, 5]
    second.log(5, {"eval/reward": 0.5})  # joins the line that was kept
    second.log(6, {"x": 60.0})
    second.close()
    rows = _lines(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[4] == {"step": 5, "x": 5.0, "eval/reward": 0.5} and rows[5]["x"] == 60.0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_starts_again_starts_its_file_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    JsonlLogger(path).close()
    assert path.read_text() == ""


def test_steps_do_not_go_back(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(3, {})
    with pytest.raises(AssertionError, match="step 2 is logged after step 3"):
        logger.log(2, {})


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write .*no such file"):
        JsonlLogger(tmp_path / "missing" / "metrics.jsonl")


def test_table() -> None:
    table = Metrics()
    table.log(0, {"eval/accuracy": 0.25})
    table.log(1, {"reward/mean": 1.0})
    table.log(2, {"reward/mean": math.nan})
    table.log(2, {"eval/accuracy": 0.5})
    table.close()
    assert len(table) == 3 and table.names == ["step", "eval/accuracy", "reward/mean"]
    np.testing.assert_array_equal(table.column("reward/mean"), [np.nan, 1.0, np.nan])
    np.testing.assert_array_equal(table.column("step"), [0, 1, 2])
    assert table[-1] == {"step": 2, "reward/mean": None, "eval/accuracy": 0.5}
    assert [row["step"] for row in table] == [0, 1, 2]
    with pytest.raises(KeyError, match="no metric 'reward/maen'; did you mean reward/mean"):
        table.column("reward/maen")
    frame = table.to_pandas()
    assert frame["step"].tolist() == [0, 1, 2] and frame["eval/accuracy"].tolist()[::2] == [0.25, 0.5]
    assert repr(table) == "Metrics(3 steps: step, eval/accuracy, reward/mean)"
    assert Metrics().to_pandas().shape == (0, 1)


def test_a_file_and_a_table_agree(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger, table = JsonlLogger(path), Metrics()
    for sink in (logger, table):
        sink.log(1, {"x": 1 / 3})
        sink.log(2, {"x": math.nan, "y": 2})
        sink.close()
    assert Metrics.read(path).rows == table.rows
    assert Metrics.read(tmp_path / "none.jsonl").rows == []


def _groups() -> list[Group]:
    def completion(text: str, ids: tuple[int, ...]) -> Completion:
        return Completion(ids, tuple(-0.5 * i for i in ids), (True,) * len(ids), text, "eos", version=4)

    return [
        Group(Prompt(7, (1,), "7?"), (completion("a", (1, 2)), completion("b", ()))),
        Group(Prompt(9, (2,), "9?"), (completion("c", (3,)), completion("\ud800 [/red]", (4,)))),
    ]


def test_samples_as_parquet(tmp_path: Path) -> None:
    reward_PG = np.array([[1.0, 0.5], [math.nan, 0.0]])
    rewards = {"math": np.array([[1.0, 0.0], [math.nan, 0.0]]), "short": np.array([[0.0, 0.5], [0.1, 0.0]])}
    rows = sample_rows(_groups(), reward_PG, rewards, np.array([[1.0, -1.0], [0.0, 0.0]]))
    path = tmp_path / "samples" / "step-000003.parquet"
    write_samples(path, rows)

    table = parquet.read_table(path).to_pydict()
    assert table["row"] == [7, 7, 9, 9]
    assert table["prompt"] == ["7?", "7?", "9?", "9?"]
    assert table["completion"] == ["a", "b", "c", "? [/red]"]  # a lone surrogate is no text
    assert table["ids"] == [[1, 2], [], [3], [4]]
    assert table["logprobs"] == [[-0.5, -1.0], [], [-1.5], [-2.0]]
    assert table["reward"] == [1.0, 0.5, None, 0.0]
    assert table["reward/math"] == [1.0, 0.0, None, 0.0]
    assert table["reward/short"] == [0.0, 0.5, 0.1, 0.0]
    assert table["advantage"] == [1.0, -1.0, 0.0, 0.0]
    assert table["finish"] == ["eos"] * 4 and table["version"] == [4] * 4
    assert [p.name for p in path.parent.iterdir()] == ["step-000003.parquet"]


def test_samples_with_notes_and_without_rows(tmp_path: Path) -> None:
    row = Sample(0, "p", "c", [1], [-1.0], "length", 0, 0.5, notes={"math": "no number", "tries": 2})
    write_samples(tmp_path / "a.parquet", [row])
    table = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    assert json.loads(table["notes"][0]) == {"math": "no number", "tries": 2}
    assert table["advantage"] == [None]
    write_samples(tmp_path / "b.parquet", [])
    assert parquet.read_table(tmp_path / "b.parquet").num_rows == 0


def test_samples_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match="no space left on device"):
        write_samples(tmp_path / "a.parquet", [])
    assert list(tmp_path.iterdir()) == []
