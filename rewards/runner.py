"""Runs the rewards over the groups of a step. P prompts, G completions per prompt, N = P * G rows."""

import asyncio
import contextlib
import functools
import math
import os
import random
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from covey.rewards.reward import Reward, RewardError, failing_line

T = TypeVar("T")
Scores = list[tuple[float, dict[str, Any]]]  # [N] score (NaN: no opinion) and notes


class PromptLike(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def messages(self) -> Sequence[Mapping[str, Any]] | None: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...


class CompletionLike(Protocol):
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def finish(self) -> str: ...


class GroupLike(Protocol):
    @property
    def prompt(self) -> PromptLike: ...
    @property
    def completions(self) -> Sequence[CompletionLike]: ...


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """The scores of a step.

    total: float64 [P, G], the weighted sum over the functions that gave a number; NaN where none did.
    per_function: name -> float64 [P, G], unweighted; NaN is no opinion.
    notes: [P][G] dicts, keys "function.note".
    """

    total: np.ndarray
    per_function: dict[str, np.ndarray]
    notes: list[list[dict[str, Any]]]

    def means(self) -> dict[str, float]:
        """Mean of each function over the completions that it had an opinion on; NaN if it had none."""
        known = {name: score[~np.isnan(score)] for name, score in self.per_function.items()}
        return {name: float(score.mean()) if score.size else math.nan for name, score in known.items()}


@dataclass(frozen=True, slots=True)
class _Row:
    index: int
    place: str  # "row 3 (prompt 0, completion 3)"
    prompt: PromptLike
    completion: CompletionLike


class Scorer:
    """Scores groups with several rewards. Async ones share an event loop, the others a pool of threads."""

    def __init__(self, rewards: Sequence[Reward]):
        self.rewards = tuple(rewards)
        names = [reward.name for reward in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise RewardError(f'Two rewards are called "{name}"; give one of them another `name`.')

    def __call__(self, groups: Sequence[GroupLike]) -> ScoreTable:
        """Scores of P groups of G completions each. Raises RewardError, see docs/rewards.md."""
        P, G = len(groups), len(groups[0].completions) if groups else 0
        if any(len(group.completions) != G for group in groups):
            sizes = sorted({len(group.completions) for group in groups})
            raise RewardError(f"The groups have different numbers of completions: {sizes}.")
        rows = [
            _Row(p * G + g, f"row {p * G + g} (prompt {p}, completion {g})", group.prompt, completion)
            for p, group in enumerate(groups)
            for g, completion in enumerate(group.completions)
        ]
        with _rng_untouched():
            results = self._run(rows) if rows else [[] for _ in self.rewards]
        per_function = {
            reward.name: np.array([score for score, _ in result], dtype=np.float64).reshape(P, G)
            for reward, result in zip(self.rewards, results, strict=True)
        }
        notes: list[list[dict[str, Any]]] = [[{} for _ in range(G)] for _ in range(P)]
        for reward, result in zip(self.rewards, results, strict=True):
            for row, (_, more) in zip(rows, result, strict=True):
                notes[row.index // G][row.index % G].update(
                    {f"{reward.name}.{k}": v for k, v in more.items()}
                )
        return ScoreTable(self._total(per_function, (P, G)), per_function, notes)

    def _total(self, per_function: dict[str, np.ndarray], shape: tuple[int, int]) -> np.ndarray:
        total, opinions = np.zeros(shape), np.zeros(shape, dtype=bool)
        for reward in self.rewards:
            if reward.weight != 0.0:  # weight 0 only logs: it must not turn "nobody had an opinion" into 0
                score = per_function[reward.name]
                known = ~np.isnan(score)
                total[known] += reward.weight * score[known]
                opinions |= known
        return np.where(opinions, total, np.nan)

    def _run(self, rows: list[_Row]) -> list[Scores]:
        """[reward][N]. Async rewards start first and wait for their servers while the others compute."""
        waiting = {i: _in_loop(_score_async(r, rows)) for i, r in enumerate(self.rewards) if r.is_async}
        try:
            return [
                waiting[i].result() if reward.is_async else _score_sync(reward, rows)
                for i, reward in enumerate(self.rewards)
            ]
        finally:
            for future in waiting.values():
                future.cancel()  # no effect on the finished ones


def _score_sync(reward: Reward, rows: list[_Row]) -> Scores:
    if reward.style == "completions":
        arguments = _batch_arguments(reward, rows)
        with _blame(reward, rows[0]):
            returned = reward.function(**arguments)
        return _batch_scores(reward, rows, returned)

    def one(row: _Row) -> tuple[float, dict[str, Any]]:
        arguments = _row_arguments(reward, row)
        with _blame(reward, row):
            returned = reward.function(**arguments)
        return _score(reward, row.place, returned)

    pool = ThreadPoolExecutor(max_workers=min(32, len(rows), 4 * (os.cpu_count() or 1)))
    try:
        return list(pool.map(one, rows))  # in order, so the first bad row is the one that is reported
    finally:
        pool.shutdown(cancel_futures=True)


async def _score_async(reward: Reward, rows: list[_Row]) -> Scores:
    if reward.style == "completions":
        arguments = _batch_arguments(reward, rows)
        with _blame(reward, rows[0]):
            returned = await reward.function(**arguments)
        return _batch_scores(reward, rows, returned)

    async def one(row: _Row) -> tuple[float, dict[str, Any]]:
        arguments = _row_arguments(reward, row)
        with _blame(reward, row):
            returned = await reward.function(**arguments)
        return _score(reward, row.place, returned)

    return list(await asyncio.gather(*(one(row) for row in rows)))


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop in a thread of its own. It outlives a step, because clients of servers are tied to their loop,
    and it works where the caller already runs in a loop, as in a notebook."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="covey-rewards", daemon=True).start()
    return loop


def _in_loop(coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop())


def _row_arguments(reward: Reward, row: _Row) -> dict[str, Any]:
    engine = {
        "completion": row.completion.text,
        "prompt": row.prompt.text,
        "messages": row.prompt.messages,
        "completion_ids": list(row.completion.ids),
        "finish": row.completion.finish,
    }
    return _columns(reward, row) | dict(reward.args) | {name: engine[name] for name in reward.engine}


def _batch_arguments(reward: Reward, rows: list[_Row]) -> dict[str, Any]:
    engine = {
        "completions": [row.completion.text for row in rows],
        "prompts": [row.prompt.text for row in rows],
        "messages": [row.prompt.messages for row in rows],
        "completion_ids": [list(row.completion.ids) for row in rows],
        "finish": [row.completion.finish for row in rows],
    }
    given = engine if reward.all_columns else {name: engine[name] for name in reward.engine}
    cells = [_columns(reward, row) for row in rows]
    # A column that some rows lack cannot be a list of N values: None stands for the missing ones.
    columns = {
        name: [cell.get(name) for cell in cells] for name in dict.fromkeys(k for c in cells for k in c)
    }
    return columns | dict(reward.args) | given


def _columns(reward: Reward, row: _Row) -> dict[str, Any]:
    """The cells of a row that the reward asks for; what `args` sets is left to `args`."""
    columns = row.prompt.columns
    for name in reward.required:
        if name not in columns:
            listed = ", ".join(columns) or "there are none"
            raise RewardError(f'{reward.where} needs "{name}"; {row.place} has only the columns {listed}.')
    if reward.all_columns:
        return {name: value for name, value in columns.items() if name not in reward.engine}
    return {name: columns[name] for name in (*reward.required, *reward.optional) if name in columns}


def _batch_scores(reward: Reward, rows: list[_Row], returned: Any) -> Scores:
    if hasattr(returned, "tolist"):  # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        raise RewardError(
            f"{reward.where} returned {_shown(returned)} for {len(rows)} completions; "
            "return a list with one float or None for each."
        )
    if len(returned) != len(rows):
        raise RewardError(
            f"{reward.where} returned {len(returned)} values for {len(rows)} completions; "
            "return one float or None for each."
        )
    return [_score(reward, row.place, value) for row, value in zip(rows, returned, strict=True)]


def _score(reward: Reward, place: str, returned: Any) -> tuple[float, dict[str, Any]]:
    """Score (NaN: no opinion) and notes of what a reward returned for one completion."""
    value, notes = returned, {}
    if isinstance(returned, Mapping):
        if "score" not in returned:
            keys = ", ".join(map(str, returned)) or "none"
            raise RewardError(
                f'{reward.where} returned a dict without "score" for {place} (keys: {keys}); '
                'return {"score": x, ...notes}.'
            )
        value, notes = returned["score"], {str(k): v for k, v in returned.items() if k != "score"}
    if value is None:
        return math.nan, notes
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise RewardError(f"{reward.where} returned {_shown(value)} for {place}; return a float or None.")
    try:
        score = float(value)
    except OverflowError:  # an int beyond the range of floats
        score = math.inf
    if math.isinf(score):
        raise RewardError(
            f"{reward.where} returned {score} for {place}; return a finite number, or None for no opinion."
        )
    return score, notes


def _shown(value: Any) -> str:
    text = repr(value).replace('"', "'") if not isinstance(value, str) else f'"{value}"'
    return f"{text[:60]} ({type(value).__name__})"


@contextlib.contextmanager
def _blame(reward: Reward, row: _Row) -> Iterator[None]:
    """Turn an exception inside a reward into a RewardError that says where it was and on what."""
    try:
        yield
    except Exception as error:  # whatever a user's function raises
        which = row.place if reward.style == "completion" else f"{row.place} and the following"
        raise RewardError(
            f"{failing_line(error, reward.file)}: {reward.where} raised {type(error).__name__}: {error} "
            f"for {which}, completion {row.completion.text[:80]!r}."
        ) from error


@contextlib.contextmanager
def _rng_untouched() -> Iterator[None]:
    """A reward that draws random numbers, or seeds, must not change what the run draws next."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
