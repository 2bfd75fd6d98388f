"""Which completions of a run a report shows: the whole range of rewards in a few steps, and held-out rows before and
after."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey.rl.run_folder import RunFolder

STEPS = 4  # shown of a run
LONGEST = 4000  # characters of a text


@dataclass(frozen=True, slots=True)
class Text:
    """A completion with its scores as text."""

    row: int
    prompt: str
    completion: str
    reward: float
    scores: dict[str, str]  # reward functions, advantage, why it ended
    notes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Shown:
    """Some completions of a step, from the best to the worst."""

    step: int
    count: int  # of all completions of the step
    texts: Sequence[Text]


@dataclass(frozen=True, slots=True)
class Compared:
    """Held-out rows in the first and the last evaluation: those that gained most first, those that lost most last."""

    before: int  # steps
    after: int
    pairs: Sequence[tuple[Text, Text]]
    gained: int
    lost: int


def shown_steps(folder: RunFolder, samples: int) -> list[Shown]:
    """The first and the last step whose completions were kept, and some between them."""
    found = folder.kept_samples("step")
    if not found or samples < 1:
        return []
    shown = []
    for step, path in (found[place] for place in _spread(len(found), STEPS)):
        rows = _read(path)
        order = sorted(range(len(rows)), key=lambda i: _rank(rows[i]["reward"]), reverse=True)
        texts = [_text(rows[order[place]]) for place in _spread(len(order), samples)]
        shown.append(Shown(step, len(rows), texts))
    return shown


def compared_evaluations(folder: RunFolder, samples: int) -> Compared | None:
    """None if there are no two evaluations of the same rows."""
    found = folder.kept_samples("eval")
    if len(found) < 2 or samples < 1:
        return None
    (before, first), (after, last) = found[0], found[-1]
    old, new = _read(first), _read(last)
    if [(row["row"], row["prompt"]) for row in old] != [(row["row"], row["prompt"]) for row in new]:
        return None
    gains = np.array([_rank(b["reward"]) - _rank(a["reward"]) for a, b in zip(old, new, strict=True)])
    gains = np.where(np.isfinite(gains), gains, 0.0)
    order = np.argsort(-gains, kind="stable")
    picked = order[_spread(len(order), samples)]
    pairs = [(_text(old[place]), _text(new[place])) for place in picked]
    return Compared(before, after, pairs, int((gains > 0).sum()), int((gains < 0).sum()))


def _spread(count: int, wanted: int) -> list[int]:
    """Of `count` places the first, the last and some between: `wanted`, or all if there are fewer."""
    return np.unique(np.linspace(0, count - 1, wanted).round().astype(int)).tolist()


def _read(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as parquet

    names = [name for name in parquet.read_schema(path).names if name not in ("ids", "logprobs")]
    return parquet.read_table(path, columns=names).to_pylist()


def _rank(reward: float | None) -> float:
    """Where nothing had an opinion, behind everything else."""
    return -math.inf if reward is None else reward


def _text(row: dict[str, Any]) -> Text:
    reward = math.nan if row["reward"] is None else row["reward"]
    scores = {
        name.removeprefix("reward/"): value for name, value in row.items() if name.startswith("reward/")
    }
    if row["advantage"]:  # of an evaluation, and of a group without spread, it is 0
        scores["advantage"] = row["advantage"]
    shown = {name: f"{value:.3g}" for name, value in scores.items() if value is not None}
    notes = json.loads(row["notes"] or "{}")
    return Text(
        row["row"],
        _cut(row["prompt"]),
        _cut(row["completion"]),
        reward,
        shown | {"ended by": row["finish"]},
        {name: _cut(note if isinstance(note, str) else json.dumps(note)) for name, note in notes.items()},
    )


def _cut(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - LONGEST:,} characters …]\n{text[-half:]}"
