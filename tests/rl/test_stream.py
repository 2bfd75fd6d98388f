"""Data that is read while it is used: the same documents as from memory, in an order of its own, resumed exactly."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import covey
from covey.rl.cli import app
from covey.rl.config import SftDataSection
from covey.rl.data import DataError
from covey.rl.documents import Document
from covey.rl.stream import DocumentStream, RowStream

LINES = [{"prompt": f"p{i}", "completion": f" c{i}"} for i in range(57)]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LINES))
    Path("parts").mkdir()
    for part, rows in (("a", LINES[:20]), ("b", LINES[20:])):
        Path(f"parts/{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def section(**settings: Any) -> SftDataSection:
    return SftDataSection(train="rows.jsonl", streaming=True, **settings)


def prompts(stream: RowStream, epoch: int) -> list[str | None]:
    return [row.prompt for row in stream.epoch(epoch)]


@pytest.mark.parametrize("source", ["rows.jsonl", "parts", "parts/*.jsonl", LINES])
def test_every_row_once_per_epoch_through_a_window(source: Any) -> None:
    stream = RowStream(source, section(shuffle_buffer=8))
    orders = [prompts(stream, epoch) for epoch in (0, 1, 0)]
    written = [row["prompt"] for row in LINES]
    assert all(Counter(order) == Counter(written) for order in orders)
    assert orders[0] == orders[2] != orders[1] and orders[0] != written
    # The row that leaves k-th was among the first k + 8.
    assert all(written.index(str(prompt)) < place + 8 for place, prompt in enumerate(orders[0]))
    assert prompts(RowStream(source, section(shuffle=False)), 3) == written
    assert Counter(prompts(RowStream(source, section(shuffle_buffer=1000)), 0)) == Counter(written)


def test_a_parquet_file_and_a_data_set_are_read_piece_by_piece() -> None:
    from datasets import Dataset
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(LINES), "rows.parquet", row_group_size=5)
    Dataset.from_list(LINES).save_to_disk("saved")
    streamed = Dataset.from_list(LINES).to_iterable_dataset()
    for source in ("rows.parquet", "saved", streamed):
        assert prompts(RowStream(source, section(shuffle=False)), 0) == [row["prompt"] for row in LINES]
    with pytest.raises(DataError, match="an iterator ends after one epoch"):
        RowStream(iter(LINES), section())


def encode(row: Any) -> list[Document]:
    """As many documents as the row's number modulo 3: some rows are dropped, some are split."""
    return [Document(row.index, (row.index, k), (False, True)) for k in range(row.index % 3)]


@pytest.mark.parametrize("stop", [0, 1, 5, 13, 14, 30])
def test_a_restored_stream_goes_on_where_it_was(stop: int) -> None:
    def fresh() -> DocumentStream:
        return DocumentStream(RowStream("rows.jsonl", section(shuffle_buffer=7, seed=4)), encode, batch=4)

    whole = fresh()
    steps = [whole.next() for _ in range(40)]
    assert whole.epoch == 2 and all(len(step) == 4 for step in steps)
    first_epoch = [document for step in steps for document in step][:57]
    assert Counter(first_epoch) == Counter(d for i in range(57) for d in encode(type("R", (), {"index": i})))
    first = fresh()
    for _ in range(stop):
        first.next()
    second = fresh()
    second.restore(json.loads(json.dumps(first.state())))
    assert [second.next() for _ in range(40 - stop)] == steps[stop:]


def test_what_is_wrong_is_said(caplog: pytest.LogCaptureFixture) -> None:
    stream = DocumentStream(RowStream("rows.jsonl", section()), lambda row: [], batch=4)
    with pytest.raises(DataError, match=r"no row of rows\.jsonl, streamed.* has anything to train"):
        stream.next()
    other = DocumentStream(RowStream("rows.jsonl", section(seed=1)), encode, batch=4)
    with pytest.raises(DataError, match=r"made with data\.seed = 0, it is 1 now"):
        other.restore(stream.state())
    stream.restore({**stream.state(), "epoch": 0, "taken": 57, "pending": 0})
    with pytest.raises(DataError, match="fewer rows than when the checkpoint was made"):
        stream.restore({**stream.state(), "epoch": 0, "taken": 58, "pending": 0})
    Path("torn.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n{"prompt": "c"}\n')
    rows = RowStream("torn.jsonl", section(shuffle=False))
    with pytest.raises(DataError, match=r"torn\.jsonl:2: not valid JSON"):
        list(rows.epoch(0))
    kept = RowStream("torn.jsonl", section(shuffle=False, malformed="skip"))
    assert prompts(kept, 0) == ["a"]
    assert "malformed rows are skipped; the first: torn.jsonl:2" in caplog.text
    Path("empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty\.jsonl has no rows"):
        RowStream("empty.jsonl", section())
    with pytest.raises(DataError, match=r'no file "rowz\.jsonl"'):
        RowStream("rowz.jsonl", section())
    with pytest.raises(DataError, match=r"data\.streaming: task:addition is made in memory"):
        RowStream("task:addition", section())


def run(name: str, steps: int, resume: str | None = None, **data: Any) -> Any:
    return covey.sft(
        {"data": {"train": "rows.jsonl", "streaming": True, "shuffle_buffer": 9} | data},
        model={"path": "tiny", "device": "cpu"}, lora={"rank": 2},
        optim={"steps": steps, "rows_per_step": 8, "lr": 1e-3}, run={"name": name, "threads": 1},
        plain=True, resume=resume,
    )  # fmt: skip


def test_a_streamed_run_resumes_bit_by_bit_and_trains_on_what_memory_would_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = run("whole", 9)
    shown = " ".join(capsys.readouterr().out.split())
    assert "rows.jsonl, streamed" in shown and "shuffled in a window of 9 rows" in shown
    run("halves", 4)
    halves = run("halves", 9, resume="auto")
    assert list(whole.metrics.column("sft/nll")) == list(halves.metrics.column("sft/nll"))
    weights = halves.policy.weights()
    assert all(torch.equal(weight, weights[name]) for name, weight in whole.policy.weights().items())
    in_order = run("order", 3, shuffle=False)
    from_memory = run("memory", 3, shuffle=False, streaming=False)
    assert list(in_order.metrics.column("sft/nll")) == list(from_memory.metrics.column("sft/nll"))


def test_a_stream_has_no_length_and_shows_its_first_documents() -> None:
    Path("my.yaml").write_text(
        "model: {path: tiny, device: cpu}\ndata: {train: rows.jsonl, streaming: true}\noptim: {steps: 1}\n"
    )
    for words, sentence in (
        (["optim.epochs=1", "optim.steps=null"], "set optim.steps instead of epochs"),
        (["eval.share=0.1"], "data.eval instead of eval.share"),
        (["data.train=[{path: rows.jsonl}]"], "takes one source"),
    ):
        result = CliRunner().invoke(app, ["sft", "my.yaml", *words])
        assert result.exit_code == 2 and sentence in " ".join(result.output.split()), result.output
    result = CliRunner().invoke(app, ["sft", "my.yaml", "data.shuffle=false", "--dump-batch", "2"])
    assert result.exit_code == 0, result.output
    assert "--- row 1:" in result.output and "--- row 2:" not in result.output and "⟦" in result.output
