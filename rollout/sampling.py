"""Drawing tokens: temperature, top-k, top-p, and draws that depend on nothing but their coordinates.

B rows of a batch, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from covey.rollout.engine import Sampling

_MASK_64 = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TOP_P_FIRST_LOOK = 1024  # candidates looked at before the whole vocabulary is sorted


def check_sampling(sampling: Sampling) -> None:
    """ValueError for settings that cannot be meant."""
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}: set it to at least 1")
    if not sampling.temperature >= 0:
        raise ValueError(f"temperature is {sampling.temperature}: set it to 0 (greedy) or above")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p is {sampling.top_p}: set it above 0 and up to 1 (1 switches it off)")
    if sampling.top_k < 0:
        raise ValueError(f"top_k is {sampling.top_k}: set it to 0 (off) or above")
    if "" in sampling.stop:
        raise ValueError("stop holds an empty string, which every text contains: remove it")


def pick(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverting the cumulative distribution at `uniform_B`, and its log-prob.

    logits_BV: float32 or float64; uniform_B: float64 in [0, 1). Returns ids int64 [B] and logp [B] (dtype of
    the logits) under the distribution that was drawn from: softmax(logits / temperature), cut to the top_k
    most probable tokens, cut to the fewest of those whose mass reaches top_p, renormalised. Tokens that are
    equally probable at a cut are kept in the order of their ids, so top_k 1 is greedy.

    temperature 0 is greedy (truncation changes nothing); logp is then that of softmax(logits).

    logp = -log(1 + sum_{v != y} exp(z_v - z_y)) leaves the target out of the sum: near certainty the usual
    z_y - logsumexp(z) cancels and returns 0 for anything below 6e-8, this keeps all digits.
    """
    greedy = sampling.temperature == 0
    scaled_BV = logits_BV if greedy or sampling.temperature == 1 else logits_BV / sampling.temperature
    top_B1, best_B1 = scaled_BV.max(-1, keepdim=True)
    # The largest exponent is 0, so the sum lies in [1, V]; what underflows has no chance to be drawn either.
    mass_BV = (scaled_BV - top_B1).exp_()
    if greedy:
        id_B1 = best_B1
    else:
        if sampling.top_k or sampling.top_p < 1:
            mass_BV.masked_fill_(~_kept(mass_BV, sampling.top_k, sampling.top_p), 0)
        id_B1 = _invert(mass_BV, uniform_B, best_B1)
    relative_B = (scaled_BV.gather(-1, id_B1) - top_B1).squeeze(-1)
    rest_B = mass_BV.scatter_(-1, id_B1, 0).sum(-1).double()
    logp_B = -torch.logaddexp(rest_B.log() - relative_B, torch.zeros_like(rest_B))
    return id_B1.squeeze(-1), logp_B.to(logits_BV.dtype)


def _invert(mass_BV: Tensor, uniform_B: Tensor, best_B1: Tensor) -> Tensor:
    """The first token whose cumulative mass exceeds uniform * total: a token of mass 0 adds nothing and is
    never the first. Accumulated in float64: in float32 a vocabulary's tail is lost in rounding."""
    cumulative_BV = mass_BV.cumsum(-1, dtype=torch.float64)
    threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    id_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True).clamp_(max=mass_BV.shape[-1] - 1)
    # A GPU's parallel scan rounds its partial sums apart and need not ascend where mass is 0.
    return torch.where(mass_BV.gather(-1, id_B1) > 0, id_B1, best_B1)


def _kept(mass_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """bool [B, V]: the tokens that top-k and then top-p leave."""
    vocabulary = mass_BV.shape[-1]
    limit = min(top_k or vocabulary, vocabulary)
    if top_p == 1:
        sorted_BK = mass_BV.topk(limit, -1).values
        count_B1 = torch.full_like(sorted_BK[:, :1], limit, dtype=torch.int64)
    else:
        sorted_BK, count_B1 = _nucleus(mass_BV, limit, top_p)
    cut_B1 = sorted_BK.gather(-1, count_B1 - 1)
    above_BV = mass_BV > cut_B1
    tied_BV = mass_BV == cut_B1
    room_B1 = count_B1 - above_BV.sum(-1, keepdim=True)
    return above_BV | (tied_BV & (tied_BV.cumsum(-1, dtype=torch.int32) <= room_B1))


def _nucleus(mass_BV: Tensor, limit: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The largest masses in descending order, and how many of them top-p keeps: int64 [B, 1]."""
    truncated = limit < mass_BV.shape[-1]
    sorted_BK = mass_BV.topk(limit if truncated else min(limit, _TOP_P_FIRST_LOOK), -1).values
    total_B1 = (sorted_BK if truncated else mass_BV).sum(-1, keepdim=True, dtype=torch.float64)
    # Masses carry the rounding of their exponential: 0.5 + 0.3 must reach a top_p of 0.8.
    wanted_B1 = total_B1 * (top_p * (1 - 4 * torch.finfo(mass_BV.dtype).eps))
    cumulative_BK = sorted_BK.cumsum(-1, dtype=torch.float64)
    if sorted_BK.shape[-1] < limit and bool((cumulative_BK[:, -1:] < wanted_B1).any()):
        sorted_BK = mass_BV.sort(-1, descending=True).values
        cumulative_BK = sorted_BK.cumsum(-1, dtype=torch.float64)
    short_B1 = (cumulative_BK < wanted_B1).sum(-1, keepdim=True)
    return sorted_BK, (short_B1 + 1).clamp_(max=sorted_BK.shape[-1])


def uniforms(seed: int, rows: np.ndarray, samples: np.ndarray, step: int) -> np.ndarray:
    """float64 [B] in [0, 1) with 53 random bits: the draws for token `step` of sample `samples[b]` of prompt
    `rows[b]`. A function of these four integers alone, whatever the batch. Each is mixed in by a round of
    splitmix64 (Steele, Lea and Flood 2014), which is a bijection: for a given seed, prompt and sample, no two
    steps share a state."""
    state = np.full(len(rows), seed & _MASK_64, dtype=np.uint64)
    for word in (rows, samples, np.full(len(rows), step)):
        state = _splitmix64(state) ^ word.astype(np.int64).view(np.uint64)
    return (_splitmix64(state) >> np.uint64(11)) * 2.0**-53


def _splitmix64(state: np.ndarray) -> np.ndarray:
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
