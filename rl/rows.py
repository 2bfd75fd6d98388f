"""Rows of a run, with every column that a reward wants."""

from collections.abc import Sequence
from typing import Any

from covey.rewards.reward import Reward, check_columns
from covey.rl.config import DpoConfig, GrpoConfig, SftConfig
from covey.rl.data import Row, load_rows
from covey.rollout.episodes import COLUMNS as EPISODE_COLUMNS

Config = GrpoConfig | SftConfig | DpoConfig


def training_rows(config: Config, rewards: Sequence[Reward], rows: Any) -> tuple[list[Row], str]:
    """Training rows, given in Python or by the configuration, and what they are called."""
    found = load_rows(config.data.train if rows is None else rows, config.data)
    for reward in rewards:
        check_columns(reward, _columns(config, found))
    return found, found.found


def held_out_rows(config: Config, rewards: Sequence[Reward], rows: Any) -> list[Row]:
    """The same of the held-out ones; none if there are none."""
    source = config.data.eval if rows is None else rows
    if source is None:
        return []
    found = load_rows(source, config.data, held_out=True)[: config.eval.rows]
    for reward in rewards:
        check_columns(reward, _columns(config, found))
    return found


def _columns(config: Config, rows: Sequence[Row]) -> list[str]:
    """The columns of the rows, and what an environment adds to them."""
    played = isinstance(config, GrpoConfig) and config.environment.given
    return [*rows[0].columns, *(EPISODE_COLUMNS if played else ())]
