"""Which prompts a step is spent on: an order by pass rate, prompts left out, groups without spread replaced.

A group whose rewards are all equal has advantages of exactly 0: it was sampled for nothing. A prompt's pass rate is the
share of its completions with a reward of at least `passing`, in the last group that was sampled of it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.rewards.runner import ScoreTable
from covey.rl.config import CurriculumSection, DataSection, GrpoConfig
from covey.rl.data import Cursor, DataError
from covey.rl.step_metrics import Measured
from covey.rollout.engine import Group, Prompt

log = logging.getLogger(__name__)

UNKNOWN = 0.5  # the pass rate of a prompt that was never sampled, in an order by it
Sampled = tuple[list[Group], ScoreTable]


class Curriculum(Cursor):
    """A Cursor whose epochs depend on what became of the prompts before: `observe` tells it."""

    def __init__(self, prompts: Sequence[Prompt], batch: int, data: DataSection, section: CurriculumSection):
        self.section = section
        self.place = {prompt.row: place for place, prompt in enumerate(prompts)}
        self.rate = [_known_rate(prompt, section.pass_rate) for prompt in prompts]
        # Groups in a row that were solved throughout; negative: that nobody solved.
        known = {1.0: section.drop_solved, 0.0: -section.drop_unsolved}
        self.streak = [0 if rate is None else known.get(rate, 0) for rate in self.rate]
        super().__init__(len(prompts), batch, data.seed, data.shuffle)

    def observe(self, groups: Sequence[Group], reward_PG: NDArray[np.float64]) -> None:
        """Takes note of groups and their rewards. Completions that nobody scored (NaN) do not count."""
        for group, reward_G in zip(groups, reward_PG, strict=True):
            known = reward_G[~np.isnan(reward_G)]
            if not len(known):
                continue
            place, rate = self.place[group.prompt.row], float((known >= self.section.passing).mean())
            before = self.streak[place]
            self.rate[place] = rate
            self.streak[place] = max(before, 0) + 1 if rate == 1 else min(before, 0) - 1 if rate == 0 else 0

    def rows_of_epoch(self) -> list[int]:
        rows, section = super().rows_of_epoch(), self.section
        solved = {row for row in rows if 0 < section.drop_solved <= self.streak[row]}
        unsolved = {row for row in rows if 0 < section.drop_unsolved <= -self.streak[row]}
        left = [row for row in rows if row not in solved and row not in unsolved]
        if solved or unsolved:
            log.info(
                "epoch %d: %d of %d prompts are left out, %d as always and %d as never solved",
                self.epoch + 1, len(rows) - len(left), len(rows), len(solved), len(unsolved),
            )  # fmt: skip
        if len(left) < self.batch:
            log.warning(
                "only %d prompts would be left, and a step takes %d: all come back. Add prompts, or stop the run: it "
                "has learned from these what it can",
                len(left), self.batch,
            )  # fmt: skip
            self.streak, left = [0] * self.rows, rows
        if section.order == "easy_first":
            left.sort(key=lambda row: -self._rate_or_guess(row))
        return left

    def _rate_or_guess(self, row: int) -> float:
        rate = self.rate[row]
        return UNKNOWN if rate is None else rate

    def state(self) -> dict[str, Any]:
        return super().state() | {"order": self._order, "rate": list(self.rate), "streak": list(self.streak)}

    def restore(self, state: Mapping[str, Any]) -> None:
        if "order" not in state:
            raise DataError(
                "The checkpoint was made without a curriculum. Remove `curriculum:`, or start a new run."
            )
        super().restore(state)
        self._order, self.rate, self.streak = list(state["order"]), list(state["rate"]), list(state["streak"])


class Supply:
    """Further prompts for a step whose groups have no spread.

    rounds: how often a step may ask for more; 0 leaves the groups as they are.
    """

    def __init__(self, data: Sequence[Prompt], cursor: Cursor, rounds: int):
        self.data, self.cursor, self.rounds = data, cursor, rounds

    def complete(
        self, groups: list[Group], scores: ScoreTable, sample: Callable[[list[Prompt]], Sampled], step: int
    ) -> tuple[list[Group], ScoreTable, Measured]:
        """As many groups as were given: as many as possible with spread, and the first of the others.

        sample: groups of these prompts and their scores. Every round asks for as many prompts as groups are missing.
        What is measured has the mean reward of all that was sampled: that of the groups that are kept is biased.
        """
        wanted, spread, rounds = len(groups), has_spread(scores.total), 0
        self._observe(groups, scores)
        while rounds < self.rounds and (missing := wanted - int(spread.sum())) > 0:
            more = self._more(missing, {group.prompt.row for group in groups})
            if not more:
                break
            new, new_scores = sample(more)
            self._observe(new, new_scores)
            groups, scores, rounds = [*groups, *new], ScoreTable.join([scores, new_scores]), rounds + 1
            spread = has_spread(scores.total)
        if not self.rounds:
            return groups, scores, {}
        if int(spread.sum()) < wanted:
            self._give_up(step, scores, spread, wanted, rounds)
        measured = {"groups/sampled": float(len(groups)), "reward/sampled": _mean(scores.total)}
        if rounds:
            kept = np.sort(np.argsort(~spread, kind="stable")[:wanted])
            groups, scores = [groups[p] for p in kept], scores.take(kept)
        return groups, scores, measured

    def _observe(self, groups: Sequence[Group], scores: ScoreTable) -> None:
        if isinstance(self.cursor, Curriculum):
            self.cursor.observe(groups, scores.total)

    def _more(self, count: int, seen: set[int]) -> list[Prompt]:
        """Up to `count` prompts of the rows to come; the draws of one that was seen in this step would be the same."""
        prompts = [self.data[place] for place in self.cursor.next(count)]
        return list({prompt.row: prompt for prompt in prompts if prompt.row not in seen}.values())

    def _give_up(
        self, step: int, scores: ScoreTable, spread: NDArray[np.bool_], wanted: int, rounds: int
    ) -> None:
        dead = scores.total[~spread]
        why = "is the limit" if rounds == self.rounds else "would allow more, but all prompts were sampled"
        log.warning(
            "step %d: %d of %d groups have rewards that differ, after %d rounds for more (rollout.dynamic_sampling: "
            "%d %s). %d of the %d groups sampled have equal rewards, %.3g on average. The step goes on with what there "
            "is; take easier or harder prompts, a larger rollout.group_size, or curriculum.drop_solved, drop_unsolved",
            step + 1, int(spread.sum()), wanted, rounds, self.rounds, why, len(dead), len(spread), _mean(dead),
        )  # fmt: skip


def make_supply(data: Sequence[Prompt], config: GrpoConfig) -> Supply:
    """The prompts of a run in the order that it asks for."""
    batch, section = config.rollout.prompts_per_step, config.data
    cursor = Cursor(len(data), batch, section.seed, section.shuffle)
    if config.curriculum.given:
        cursor = Curriculum(data, batch, section, config.curriculum)
    return Supply(data, cursor, config.rollout.dynamic_sampling)


def has_spread(reward_PG: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether rewards of a group differ, bool [P]; NaN is no reward."""
    highest_P = np.where(np.isnan(reward_PG), -np.inf, reward_PG).max(1)
    lowest_P = np.where(np.isnan(reward_PG), np.inf, reward_PG).min(1)
    return highest_P > lowest_P


def _known_rate(prompt: Prompt, column: str | None) -> float | None:
    if column is None:
        return None
    rate = prompt.columns.get(column)
    if rate is not None and (
        isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1
    ):
        raise DataError(
            f'curriculum.pass_rate: row {prompt.row} has {rate!r} in the column "{column}"; a pass rate is a number '
            "from 0 to 1, or null where it is unknown."
        )
    return None if rate is None else float(rate)


def _mean(rewards: NDArray[np.float64]) -> float:
    known = rewards[~np.isnan(rewards)]
    return float(known.mean()) if len(known) else float("nan")
