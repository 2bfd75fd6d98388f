"""Drawing tokens: settings, the draw with what it counts, and draws that depend on nothing but their coordinates.

B rows of a batch, S rows that enter or move, V vocabulary.
"""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from covey.kernels.sample import log_prob, sample
from covey.kernels.sample_inputs import PROMPT, draw, penalize, splitmix64
from covey.rollout.engine import Prompt, Sampling


def check_sampling(sampling: Sampling) -> None:
    """ValueError for settings that cannot be meant."""
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}: set it to at least 1")
    if not 0 <= sampling.temperature < math.inf:
        raise ValueError(f"temperature is {sampling.temperature}: set it to 0 (greedy) or above")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p is {sampling.top_p}: set it above 0 and up to 1 (1 switches it off)")
    if sampling.top_k < 0:
        raise ValueError(f"top_k is {sampling.top_k}: set it to 0 (off) or above")
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p is {sampling.min_p}: set it between 0 (off) and 1")
    if not 0 < sampling.repetition_penalty < math.inf:
        raise ValueError(
            f"repetition_penalty is {sampling.repetition_penalty}: set it above 0 (1 switches it off)"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            raise ValueError(f"{name} is {getattr(sampling, name)}: set it to a number (0 switches it off)")
    for token, bias in sampling.logit_bias.items():
        if token < 0 or not math.isfinite(bias):
            raise ValueError(f"logit_bias has {token}: {bias}; give token ids, from 0 on, and finite numbers")
    if "" in sampling.stop:
        raise ValueError("stop holds an empty string, which every text contains: remove it")


def check_request(prompts: Sequence[Prompt], n: int, sampling: Sampling, positions: int) -> None:
    """ValueError for what cannot be sampled by a model with so many positions."""
    check_sampling(sampling)
    if n < 1:
        raise ValueError(f"n is {n}: ask for at least one completion per prompt")
    for prompt in prompts:
        if not prompt.ids:
            raise ValueError(f"the prompt of row {prompt.row} is empty: there is nothing to go on from")
        if len(prompt.ids) + sampling.max_new_tokens > positions:
            raise ValueError(
                f"the prompt of row {prompt.row} has {len(prompt.ids)} tokens; with max_new_tokens "
                f"{sampling.max_new_tokens} that is more than the {positions} positions that there are: "
                "leave the row out, shorten it or lower max_new_tokens"
            )


class Sampler:
    """Draws the next tokens of the rows of a running batch, of which row b is in slot b.

    slots: how many rows there can be. vocab, dtype, device: those of the logits. How often each token stands in each
    row is counted, int32 [slots, V], if a penalty asks for it. Nothing here waits for the device, except that the torch
    path of kernels/sample.py does so for top_p.

    ValueError for settings that cannot be meant, and for a logit_bias of a token that the vocabulary lacks.
    """

    def __init__(
        self,
        sampling: Sampling,
        slots: int,
        vocab: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        check_sampling(sampling)
        s = self.sampling = sampling
        # Greedy draws ignore a truncation.
        truncated = s.temperature > 0 and (0 < s.top_k < vocab or s.top_p < 1 or s.min_p > 0)
        penalized = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        self.whole = not (truncated or penalized or s.logit_bias)
        self.bias_V = _bias(s, vocab).to(device, dtype) if s.logit_bias else None
        self.count_SV = torch.zeros(slots, vocab, dtype=torch.int32, device=device) if penalized else None

    def admit(
        self, slot_S: Tensor, prompt_ids: Sequence[Sequence[int]], own_ids: Sequence[Sequence[int]]
    ) -> None:
        """Rows enter these slots (int64 on the device, all different), which forget what they counted.

        prompt_ids: their prompts. own_ids: the tokens that they already have, after an eviction.
        """
        if self.count_SV is None:
            return
        self.count_SV.index_fill_(0, slot_S, 0)
        flat = self.count_SV.view(-1)
        flat.index_fill_(0, self._places(slot_S, prompt_ids), PROMPT)
        own = self._places(slot_S, own_ids)
        flat.scatter_add_(0, own, torch.ones_like(own, dtype=torch.int32))

    def move(self, to: Tensor, source: Tensor) -> None:
        """The row in slot source[i] is now in slot to[i]: int64 on the device."""
        if self.count_SV is not None:
            self.count_SV.index_copy_(0, to, self.count_SV[source])

    def pick(
        self, logits_BV: Tensor, uniform_B: Tensor, alive_B: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(ids int64 [B], logp [B], full logp [B]) for the rows in slots 0 to B - 1.

        logits_BV: float32 or float64; they are only read. uniform_B: float64 in [0, 1). alive_B: bool, rows whose
        token counts. The two log-probs are those of Completion.logprobs and full_logprobs; the latter is None if they
        are the same.
        """
        s, rows, z_BV = self.sampling, len(logits_BV), logits_BV
        count_BV = None if self.count_SV is None else self.count_SV[:rows]
        if self.bias_V is not None or count_BV is not None:
            z_BV = penalize(
                logits_BV,
                self.bias_V,
                count_BV,
                repetition=s.repetition_penalty,
                presence=s.presence_penalty,
                frequency=s.frequency_penalty,
            )
        id_B, logp_B = pick(z_BV, s, uniform_B)
        if count_BV is not None:
            count_BV.scatter_add_(1, id_B[:, None], alive_B[:, None].to(torch.int32))
        return id_B, logp_B, None if self.whole else log_prob(logits_BV, id_B, s.temperature)

    def _places(self, slot_S: Tensor, ids_S: Sequence[Sequence[int]]) -> Tensor:
        """Where these rows' tokens are counted, in the flattened table: int64 [T] on the device."""
        assert self.count_SV is not None
        row_T = np.repeat(np.arange(len(ids_S)), [len(ids) for ids in ids_S])
        both = torch.from_numpy(np.stack([row_T, np.fromiter(chain.from_iterable(ids_S), np.int64)]))
        if slot_S.is_cuda:
            both = both.pin_memory()
        row, token = both.to(slot_S.device, non_blocking=True)
        return slot_S[row] * self.count_SV.shape[1] + token


def _bias(sampling: Sampling, vocab: int) -> Tensor:
    """float64 [V]."""
    bias_V = torch.zeros(vocab, dtype=torch.float64)
    for token, bias in sampling.logit_bias.items():
        if token >= vocab:
            raise ValueError(
                f"logit_bias has token {token}, but the vocabulary ends at {vocab - 1}: remove it"
            )
        bias_V[token] = bias
    return bias_V


def pick(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverting the cumulative distribution at `uniform_B`, and its log-prob.

    logits_BV: float32 or float64; uniform_B: float64 in [0, 1). Returns ids int64 [B] and logp [B] (dtype of
    the logits) under the distribution that was drawn from: softmax(logits / temperature), cut to the top_k
    most probable tokens, cut to the fewest of those whose mass reaches top_p, cut to those at least min_p times as
    probable as the first, renormalised. Tokens with equal logits are kept in the order of their ids, so top_k 1 is
    greedy. logp is NaN where logits are NaN or infinite (-inf only where all of them are).

    temperature 0 is greedy (truncation changes nothing); logp is then that of softmax(logits).
    """
    return sample(
        logits_BV,
        uniform_B,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )


def draw_states(seed: int, rows: Sequence[int] | np.ndarray, samples: Sequence[int] | np.ndarray) -> Tensor:
    """int64 [B] on the CPU: what `draw` (kernels/sample_inputs.py) makes the draws of sample `samples[b]` of prompt
    `rows[b]` from. A function of these three integers alone, whatever the batch. Each is mixed in by a round of
    splitmix64, which is a bijection: no two samples of a prompt share a state."""
    state = torch.full((len(rows),), (seed + 2**63) % 2**64 - 2**63)
    for word in (rows, samples):
        state = splitmix64(state) ^ torch.as_tensor(word, dtype=torch.int64)
    return splitmix64(state)


def uniforms(seed: int, rows: np.ndarray, samples: np.ndarray, step: int) -> np.ndarray:
    """float64 [B] in [0, 1): the draws for token `step` of these samples, on the CPU."""
    return draw(draw_states(seed, rows, samples), torch.full((len(rows),), step)).numpy()
