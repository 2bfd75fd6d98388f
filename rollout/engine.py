"""How completions come about: the things that flow, and the protocol that every engine follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

Finish = Literal["eos", "stop", "length", "abort"]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine and the trainer see it. `row` is its place in the data set, `columns` its row."""

    row: int
    ids: tuple[int, ...]
    text: str
    messages: tuple[Message, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled after a prompt; its ids are never made anew from its text.

    ids: [C] token ids, the end-of-sequence token included if it was sampled.
    logprobs: [C] log-probs of the sampling distribution (temperature and truncation applied).
    trained: [C], False for tokens that a tool or an environment wrote.
    text: the ids decoded without end-of-sequence and special tokens, cut before a stop string.
    version: number of optimiser steps behind the weights that sampled it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    trained: tuple[bool, ...]
    text: str
    finish: Finish
    version: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its G completions."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. temperature 0 is greedy. top_p 1 and top_k 0 switch the truncation off.

    min_p: tokens less than this many times as probable as the most probable one are not drawn; 0 is off.
    seed: together with Prompt.row, the sample's index in its group and the token's index it fixes every
    draw, so a completion does not depend on which others it was batched with.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0


class RolloutEngine(Protocol):
    """Samples completions. `update` comes before the next `generate`; an engine never serves stale weights."""

    def generate(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[Group]:
        """n completions for each of P prompts: P groups in the prompts' order."""
        ...

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Later samples come from these weights (names as in Policy.weights) and carry this version."""
        ...

    def sleep(self) -> None:
        """Give memory back before training."""
        ...

    def wake(self) -> None:
        """Take it again before sampling."""
        ...
