"""What a trainable language model offers to the algorithm: `Policy`, and the `Batch` that it scores.

Axes: T tokens of a packed batch, S segments, M scored positions, H hidden size, V vocabulary.
Log-probs are natural logarithms in float32 (float64 where the model is).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of many segments, one after another without padding, and the positions that are scored.

    A segment is a run of tokens that attends causally to itself and, if it has one, fully to its prefix
    segment. A prompt is one segment; its G completions are G segments whose prefix is the prompt and whose
    positions go on from the prompt's end, so that the prompt is computed once. A segment stands after its
    prefix. `source` and `target` say what is scored: the hidden state at `source` predicts the token `target`.

    >>> # one prompt [7, 8] with the completions [1] and [2, 3]
    >>> # input_ids  7 8 | 1 | 2 3        segments (0, 2, 0, 0) (2, 3, 0, 2) (3, 5, 0, 2)
    >>> # positions  0 1 | 2 | 2 3
    >>> # source 1 1 3, target 1 2 3, row 0 1 1

    `weight` carries the denominator of the loss: it is computed once per optimiser step over everything that
    the step trains on, so an objective only sums and no way of splitting a step can change its gradient.
    """

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int32 [T]
    segments: Tensor  # int32 [S, 4] on the CPU: start, end, prefix_start, prefix_end (0, 0: no prefix)
    source: Tensor  # int64 [M], index into T
    target: Tensor  # int64 [M], token id
    row: Tensor  # int32 [M], which completion or document of the step a scored token belongs to
    advantage: Tensor  # float32 [M]
    weight: Tensor  # float32 [M]
    sampler: Tensor | None = None  # float32 [M], log-probs that the sampler reported
    old: Tensor | None = None  # float32 [M], log-probs under the policy that the step started from
    reference: Tensor | None = None  # float32 [M], log-probs under the reference policy
    temperature: float = 1.0  # log-probs are those of softmax(logits / temperature)


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs of a batch's targets."""

    logp: Tensor  # float32 [M], differentiable
    # float32 [M], of the whole distribution at each scored position; differentiable if that was asked for
    entropy: Tensor | None = None


class Policy(Protocol):
    """A language model with trainable weights."""

    def logprobs(self, batch: Batch, *, entropy: bool = False, entropy_gradient: bool = False) -> Scored:
        """Log-probs (and entropies) at the scored positions of `batch`; `backward()` fills the gradients.

        `entropy_gradient` makes the entropies differentiable too, where gradients are enabled at all; without it
        they are detached and cost no more than their value.
        """
        ...

    def reference(self) -> AbstractContextManager[None]:
        """While entered, `logprobs` is that of the frozen reference policy, without gradient."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """What is trained, by its name in PEFT's (or transformers') checkpoint format; views, not copies."""
        ...
