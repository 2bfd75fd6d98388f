"""How completions come about: the things that flow, and the protocol that every engine follows."""

from collections.abc import Callable, Mapping, Sequence
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
    logprobs: [C] log-probs of the sampling distribution (temperature, truncation, bias and penalties applied).
    trained: [C], False for tokens that a tool or an environment wrote.
    text: the ids decoded without end-of-sequence and special tokens, cut before a stop string.
    version: number of optimiser steps behind the weights that sampled it.
    full_logprobs: [C] log-probs under softmax(logits / temperature), without truncation, bias and penalties; None:
        nothing was cut or shifted, so these are `logprobs`.
    columns: what an environment tells of its episode (rollout/episodes.py), beside the row's columns for the rewards.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    trained: tuple[bool, ...]
    text: str
    finish: Finish
    version: int = 0
    full_logprobs: tuple[float, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its G completions."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. temperature 0 is greedy. top_p 1 and top_k 0 switch the truncation off.

    min_p: tokens less than this many times as probable as the most probable one are not drawn; 0 is off.
    repetition_penalty: positive logits of tokens in the prompt or the completion are divided by it, negative ones
        multiplied; 1 is off.
    presence_penalty, frequency_penalty: taken off the logits of tokens in the completion, once and for each time.
    logit_bias: {token id: what is added to its logit}, before any penalty.
    stop: strings that end a completion, and are cut from its text.
    ignore_eos: go on after an end-of-sequence token, as benchmarks of a fixed length do.
    seed: together with Prompt.row, the sample's index in its group and the token's index it fixes every
        draw, so a completion does not depend on which others it was batched with.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, hash=False
    )  # compared, but a dict has no hash
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0


class RolloutEngine(Protocol):
    """Samples completions. `update` comes before the next `generate`; an engine never serves stale weights."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        finished: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """n completions for each of P prompts: P groups in the prompts' order.

        finished: called with every group and its place in the result as soon as it is there, once each.
        """
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
