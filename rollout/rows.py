"""Completions in the making, and the prompts that they belong to."""

from dataclasses import dataclass, field

from covey.rollout.engine import Finish, Prompt
from covey.rollout.kv_pool import NOWHERE, Places


@dataclass(slots=True, eq=False)
class Family:
    """A prompt whose completions are being sampled."""

    index: int  # among the prompts of the call
    prompt: Prompt
    rows: list["Row"] = field(default_factory=list)
    prefix: Places = NOWHERE  # where all its tokens but the last are
    running: int = 0  # rows in slots


@dataclass(slots=True, eq=False)
class Row:
    """A completion in the making."""

    family: Family
    sample: int
    draws: int  # state of its draws
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    own: Places = NOWHERE
    text: str = ""
    finish: Finish | None = None
