"""Numbers and samples of a run: written as it goes, and read back as tables.

Keys are `area/name` (`reward/mean`, `time/rollout_s`); a value that is not finite is null in metrics.jsonl.
"""

import difflib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from covey.rl.checkpoint import RunError

if TYPE_CHECKING:
    import pandas

    from covey.rollout.engine import Completion, Group

log = logging.getLogger(__name__)


class Logger(Protocol):
    """Takes the numbers of a run: a file, a table, a tracker."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """metrics.jsonl: one line a step, on the disk as soon as it is logged.

    resume_step: the step of the checkpoint a run goes on from; later lines are dropped, so that the file has
        each step once. None empties the file.
    Numbers logged for the last step again (an evaluation after it) join its line.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        kept = [] if resume_step is None else [row for row in _read_lines(path) if row["step"] <= resume_step]
        self._path = path
        self._last: dict[str, Any] = {"step": -1}
        self._start = 0  # where the last line begins
        try:
            write_whole(path, b"".join(_line(row) for row in kept))
            self._file = path.open("r+b", buffering=0)  # nothing is left to write, and to fail, in close()
        except OSError as error:
            raise _unwritable(path, error) from error
        self._end = self._file.seek(0, 2)
        if kept:
            self._last, self._start = kept[-1], self._end - len(_line(kept[-1]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert step >= self._last["step"], f"step {step} is logged after step {self._last['step']}"
        if step > self._last["step"]:
            self._last, self._start = {"step": step}, self._end
        self._last |= {name: _plain(value) for name, value in metrics.items()}
        line = _line(self._last)
        self._end = self._start + len(line)
        try:
            self._file.seek(self._start)
            while line:
                line = line[self._file.write(line) :]
            self._file.truncate()
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def close(self) -> None:
        self._file.close()


class Metrics:
    """The numbers of a run as a table with a row per step; it is a Logger itself.

    >>> run.metrics.column("reward/mean")  # one number per row, NaN where a step has none
    >>> run.metrics[-1]["reward/mean"], run.metrics.to_pandas()
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.rows: list[dict[str, Any]] = [dict(row) for row in rows]

    @classmethod
    def read(cls, path: Path) -> "Metrics":
        """From a metrics.jsonl."""
        return cls(_read_lines(path))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append({"step": step})
        self.rows[-1] |= {name: _plain(value) for name, value in metrics.items()}

    def close(self) -> None:
        """Nothing to do: the rows stay."""

    @property
    def names(self) -> list[str]:
        """The columns, in the order in which they came up."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def column(self, name: str) -> NDArray[np.float64]:
        """float64 [rows]. Raises KeyError for a name that no step has."""
        if name not in self.names:
            close = difflib.get_close_matches(name, self.names, n=3) or self.names
            raise KeyError(f"no metric {name!r}; did you mean {', '.join(close)}?")
        values = [row.get(name) for row in self.rows]
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    def to_pandas(self) -> "pandas.DataFrame":
        import pandas

        columns: dict[str, Any] = {name: self.column(name) for name in self.names}
        return pandas.DataFrame(columns | {"step": [row["step"] for row in self.rows]})

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def __repr__(self) -> str:
        return f"Metrics({len(self)} steps: {', '.join(self.names)})"


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion and what became of it; one row of samples/step-000123.parquet.

    reward: the weighted sum, NaN if no reward function had an opinion. rewards: each function's own value.
    """

    row: int  # the prompt's place in the data set
    prompt: str
    completion: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str
    version: int
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    advantage: float = math.nan
    notes: Mapping[str, Any] = field(default_factory=dict)


def sample_rows(
    groups: Sequence["Group"],
    reward_PG: NDArray[np.float64],
    rewards: Mapping[str, NDArray[np.float64]],
    advantage_PG: NDArray[np.float64],
) -> list[Sample]:
    """The P * G completions of a step as rows. `rewards`: a [P, G] array by reward function."""
    return [
        Sample(
            row=group.prompt.row,
            prompt=group.prompt.text,
            completion=_whole_text(completion),
            ids=completion.ids,
            logprobs=completion.logprobs,
            finish=completion.finish,
            version=completion.version,
            reward=float(reward_PG[p, g]),
            rewards={name: float(values[p, g]) for name, values in rewards.items()},
            advantage=float(advantage_PG[p, g]),
            notes={name: note for name, note in completion.columns.items() if name != "transcript"},
        )
        for p, group in enumerate(groups)
        for g, completion in enumerate(group.completions)
    ]


def _whole_text(completion: "Completion") -> str:
    """The completion as people want to read it: of an episode all that was said."""
    messages = completion.columns.get("transcript")
    if messages is None:
        return completion.text
    said = [m["content"] if m["role"] == "assistant" else f"[{m['role']}] {m['content']}" for m in messages]
    return "\n".join(said)


def write_samples(path: Path, rows: Sequence[Sample]) -> None:
    """A parquet file with a row per completion and a column `reward/NAME` per reward function; NaN is null.

    Raises RunError if the file cannot be written; a file that is there is complete.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    names = list(dict.fromkeys(name for row in rows for name in row.rewards))
    columns: dict[str, pa.Array] = {
        "row": pa.array([row.row for row in rows], pa.int64()),
        "prompt": pa.array([_utf8(row.prompt) for row in rows], pa.string()),
        "completion": pa.array([_utf8(row.completion) for row in rows], pa.string()),
        "reward": pa.array([_plain(row.reward) for row in rows], pa.float64()),
        **{
            f"reward/{name}": pa.array([_plain(row.rewards.get(name)) for row in rows], pa.float64())
            for name in names
        },
        "advantage": pa.array([_plain(row.advantage) for row in rows], pa.float64()),
        "finish": pa.array([row.finish for row in rows], pa.string()),
        "ids": pa.array([list(row.ids) for row in rows], pa.list_(pa.int32())),
        "logprobs": pa.array([list(row.logprobs) for row in rows], pa.list_(pa.float32())),
        "version": pa.array([row.version for row in rows], pa.int64()),
        "notes": pa.array([_utf8(json.dumps(dict(row.notes), default=str)) for row in rows], pa.string()),
    }
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink, compression="zstd")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, sink.getvalue().to_pybytes())
    except OSError as error:
        raise _unwritable(path, error) from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without a line that a crash cut off."""
    if not path.exists():
        return []
    rows, damaged = [], 0
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
            rows.append({"step": int(row["step"])} | row)
        except (ValueError, KeyError, TypeError):
            damaged += 1
    if damaged:
        log.warning("%s: %d line(s) cannot be read (cut off by a crash?) and are left out", path, damaged)
    return rows


def write_whole(path: Path, data: bytes) -> None:
    """Under a temporary name, then renamed: never half a file."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> float | int | None:
    """A JSON number; NumPy's and torch's scalars become Python's, what is not finite becomes None."""
    if value is None or isinstance(value, bool | int):
        return value
    return float(value) if math.isfinite(value) else None


def _utf8(text: str) -> str:
    """Without lone surrogates, which no file format takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"cannot write {path}: {(error.strerror or str(error)).lower()}. Free some space, then --resume auto"
    )
