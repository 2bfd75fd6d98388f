"""Drawing tokens: settings, the draw (kernels/sample.py), and draws that depend on nothing but their coordinates.

B rows of a batch, V vocabulary.
"""

import numpy as np
from torch import Tensor

from covey.kernels.sample import sample
from covey.rollout.engine import Sampling

_MASK_64 = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


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
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p is {sampling.min_p}: set it between 0 (off) and 1")
    if "" in sampling.stop:
        raise ValueError("stop holds an empty string, which every text contains: remove it")


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
