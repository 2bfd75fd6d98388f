"""Runs the rewards over the groups of a step. P prompts, G completions per prompt, N = P * G rows."""

import logging
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from covey.rewards.calls import CompletionLike, GroupLike, PromptLike, Row, make_rows
from covey.rewards.lanes import Caller, Outcome
from covey.rewards.reward import Reward, RewardError

__all__ = ["CompletionLike", "GroupLike", "Pending", "PromptLike", "ScoreTable", "Scorer"]
logger = logging.getLogger(__name__)
_Scored = tuple[float, dict[str, Any], float]  # score (NaN: no opinion), notes, seconds


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """The scores of a step.

    total: float64 [P, G], the weighted sum over the functions that gave a number; NaN where none did.
    per_function: name -> float64 [P, G], unweighted; NaN is no opinion.
    notes: [P][G] dicts, keys "function.note".
    failures: calls that raised or took too long, by "function/errors" and "function/timeouts"; only of functions
        whose on_error or on_timeout lets the run go on.
    seconds: name -> float64 [P, G], of the call that scored the completion.
    """

    total: np.ndarray
    per_function: dict[str, np.ndarray]
    notes: list[list[dict[str, Any]]]
    failures: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, np.ndarray] = field(default_factory=dict)

    def means(self) -> dict[str, float]:
        """Mean of each function over the completions that it had an opinion on; NaN if it had none."""
        known = {name: score[~np.isnan(score)] for name, score in self.per_function.items()}
        return {name: float(score.mean()) if score.size else math.nan for name, score in known.items()}

    def take(self, kept: Sequence[int] | np.ndarray) -> "ScoreTable":
        """The scores of these groups."""
        return ScoreTable(
            self.total[kept],
            {name: values[kept] for name, values in self.per_function.items()},
            [self.notes[p] for p in kept],
            self.failures,
            {name: values[kept] for name, values in self.seconds.items()},
        )

    @classmethod
    def join(cls, tables: Sequence["ScoreTable"]) -> "ScoreTable":
        """Of the groups of all tables, one table after the other; those without groups do not count."""
        tables = [table for table in tables if len(table.total)] or list(tables[:1])

        def joined(name: str) -> dict[str, np.ndarray]:
            return {
                key: np.concatenate([getattr(table, name)[key] for table in tables])
                for key in getattr(tables[0], name)
            }

        return cls(
            np.concatenate([table.total for table in tables]),
            joined("per_function"),
            [notes for table in tables for notes in table.notes],
            {key: sum(table.failures[key] for table in tables) for key in tables[0].failures},
            joined("seconds"),
        )


@dataclass(frozen=True, slots=True)
class Pending:
    """A group that is being scored. calls: of each function, in the order of the rewards; none of batch ones."""

    rows: list[Row]
    calls: "list[list[Future[Outcome]]]"


class Scorer:
    """Scores groups with several rewards: `scorer(groups)`, or `submit` as groups finish and `gather` at the end."""

    def __init__(self, rewards: Sequence[Reward]):
        self.rewards = tuple(rewards)
        names = [reward.name for reward in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise RewardError(f'Two rewards are called "{name}"; give one of them another `name`.')
        self._callers = [Caller(reward) for reward in self.rewards]
        self._submitted = 0  # groups since the last gather
        self._put_back: Callable[[], None] = _nothing
        self._seen: Counter[str] = Counter()  # failures of the run, by the keys of ScoreTable.failures

    def __call__(self, groups: Sequence[GroupLike]) -> ScoreTable:
        """Scores of P groups of G completions each. Raises RewardError, see docs/rewards.md."""
        return self.gather([self.submit(group, p) for p, group in enumerate(groups)])

    def submit(self, group: GroupLike, p: int | None = None) -> Pending:
        """Begin to score a group, while others may still be sampled. Returns at once.

        p: the group's place in the step, for messages; default: how many were submitted since the last `gather`.
        Functions for a whole step are called in `gather`.
        """
        if not self._submitted:
            self._put_back = _remember_process_state()
        rows = make_rows(group, self._submitted if p is None else p)
        self._submitted += 1
        return Pending(rows, [[] if c.reward.batch else c.start(rows) for c in self._callers])

    def gather(self, pending: Sequence[Pending]) -> ScoreTable:
        """The scores of submitted groups, in the order given; waits for them. Raises RewardError.

        What the rewards have done to the global random generators and the working directory since the first
        `submit` is undone.
        """
        P, G = len(pending), len(pending[0].rows) if pending else 0
        rows = [row for group in pending for row in group.rows]
        calls = [[call for group in pending for call in group.calls[i]] for i in range(len(self.rewards))]
        try:
            if any(len(group.rows) != G for group in pending):
                sizes = sorted({len(group.rows) for group in pending})
                raise RewardError(f"The groups have different numbers of completions: {sizes}.")
            for i, caller in enumerate(self._callers):
                if caller.reward.batch and rows:
                    calls[i] = caller.start(rows)
            failures = Counter(_failure_keys(self.rewards))
            scored = [self._collect(i, futures, len(rows), failures) for i, futures in enumerate(calls)]
        finally:
            for future in (future for futures in calls for future in futures):
                future.cancel()  # no effect on the finished ones
            self._put_back()
            self._submitted, self._put_back = 0, _nothing
        return self._table(scored, (P, G), dict(failures))

    def _collect(
        self, i: int, futures: "list[Future[Outcome]]", rows: int, failures: Counter[str]
    ) -> list[_Scored]:
        """[N] of the i-th reward, in order, so that the first bad row is the one that is reported."""
        reward, scored = self.rewards[i], []
        for future in futures:
            outcome = future.result()
            scores = outcome.scores
            if outcome.status != "ok":
                score = self._instead(reward, outcome, failures)
                scores = [(score, {})] * (rows if reward.batch else 1)
            scored += [(score, notes, outcome.seconds) for score, notes in scores]
        return scored

    def _instead(self, reward: Reward, outcome: Outcome, failures: Counter[str]) -> float:
        """The score for a call that did not give one, as the reward's policy says."""
        policy = reward.on_timeout if outcome.status == "timeout" else reward.on_error
        if outcome.status == "wrong" or policy == "stop":
            raise RewardError(outcome.message) from outcome.cause
        key = f"{reward.name}/{'timeouts' if outcome.status == 'timeout' else 'errors'}"
        failures[key] += 1
        self._seen[key] += 1
        if self._seen[key] == 1:
            logger.warning("%s The run goes on; %s counts these.\n%s", outcome.message, key, outcome.trace)
        elif math.log10(self._seen[key]).is_integer():
            logger.warning("%s: %d by now.", key, self._seen[key])
        return math.nan if policy == "none" else float(policy)

    def _table(
        self, scored: Sequence[Sequence[_Scored]], shape: tuple[int, int], failures: dict[str, int]
    ) -> ScoreTable:
        P, G = shape
        per_function: dict[str, np.ndarray] = {}
        seconds: dict[str, np.ndarray] = {}
        notes: list[list[dict[str, Any]]] = [[{} for _ in range(G)] for _ in range(P)]
        for reward, results in zip(self.rewards, scored, strict=True):
            per_function[reward.name] = np.array([score for score, _, _ in results], np.float64).reshape(
                shape
            )
            seconds[reward.name] = np.array([time for _, _, time in results], np.float64).reshape(shape)
            for n, (_, more, _) in enumerate(results):
                notes[n // G][n % G].update({f"{reward.name}.{key}": note for key, note in more.items()})
        return ScoreTable(self._total(per_function, shape), per_function, notes, failures, seconds)

    def _total(self, per_function: dict[str, np.ndarray], shape: tuple[int, int]) -> np.ndarray:
        total, opinions = np.zeros(shape), np.zeros(shape, dtype=bool)
        for reward in self.rewards:
            if reward.weight != 0.0:  # weight 0 only logs: it must not turn "nobody had an opinion" into 0
                score = per_function[reward.name]
                known = ~np.isnan(score)
                total[known] += reward.weight * score[known]
                opinions |= known
        return np.where(opinions, total, np.nan)


def _failure_keys(rewards: Sequence[Reward]) -> dict[str, int]:
    """Zero for all that may be counted, so that a metric is there from the first step."""
    errors = {f"{reward.name}/errors": 0 for reward in rewards if reward.on_error != "stop"}
    return errors | {f"{reward.name}/timeouts": 0 for reward in rewards if reward.on_timeout != "stop"}


def _nothing() -> None: ...


def _remember_process_state() -> Callable[[], None]:
    """What puts back the global random generators and the working directory: a reward that draws random numbers,
    seeds or changes the folder must not change what the run does next."""
    python, numpy, folder = random.getstate(), np.random.get_state(), os.getcwd()
    torch = sys.modules.get("torch")  # a reward can only have drawn from what has been imported
    cpu = torch.get_rng_state() if torch else None
    gpus = torch.cuda.get_rng_state_all() if torch and torch.cuda.is_initialized() else None

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        os.chdir(folder)
        if torch is not None:
            torch.set_rng_state(cpu)
        if torch is not None and gpus is not None:
            torch.cuda.set_rng_state_all(gpus)

    return put_back
