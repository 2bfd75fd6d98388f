"""From rewards to advantages: how much better than the others a completion is.

Axes: P prompts, G completions of a prompt, K reward functions. Everything is float64 on the CPU: rewards are few, and
rounding here is not harmless. In float32 eight rewards of 0.7 differ from their own mean by 6e-8, and dividing that by
a standard deviation of the same size gives eight advantages of about 0.8 where each must be 0.

A reward of NaN means that nobody had an opinion. The row is left out of every mean and std and gets advantage 0.
"""

from typing import Literal, get_args

import numpy as np

from covey.rl.objective_config import AdvantageKind

EPS = 1e-6  # as verl, SkyRL, NeMo-RL and slime have it; TRL has 1e-4
WHITEN_EPS = 1e-8  # inside the root, as REINFORCE++'s implementations have it
TIE = 1e-12  # rewards that differ by less than this share of the largest one are the same reward
LARGEST = 1e30  # anything above is a mistake, and would be infinite once it is float32

Std = Literal["unbiased", "biased"]


def compute_advantages(
    reward_PG: np.ndarray,
    kind: AdvantageKind,
    *,
    std: Std = "unbiased",
    eps: float = EPS,
    lengths_PG: np.ndarray | None = None,
    functions_KPG: np.ndarray | None = None,
    weights_K: np.ndarray | None = None,
) -> np.ndarray:
    """Advantages [P, G] float64 of rewards [P, G]; docs/objectives.md has the formulas.

    A group with fewer than two opinions, or with equal ones (max - min <= 1e-12 * max |R|), gets exact zeros, except
    with "reinforce++", which has no group: there it is the whole step that must differ. std says whether the
    variance is divided by n - 1 (unbiased) or n ("group", "batch", "gdpo"). lengths: trained tokens of each row, for
    "opo" and the two "reinforce++" (default: all equal). functions and weights: the rewards of the single functions,
    for "gdpo". Raises ValueError for groups of one, rewards that are infinite or beyond 1e30, and unknown kinds.
    """
    reward_PG = np.asarray(reward_PG, np.float64)
    _check(reward_PG, kind)
    lengths_PG = np.ones(reward_PG.shape) if lengths_PG is None else np.asarray(lengths_PG, np.float64)
    if kind == "reinforce++":
        scored_PG = ~np.isnan(reward_PG)
        return whiten(np.where(scored_PG, reward_PG, 0.0), np.where(scored_PG, lengths_PG, 0.0))
    if kind == "gdpo":
        if functions_KPG is None or weights_K is None:
            raise ValueError("advantage gdpo needs the rewards of the single functions and their weights")
        return _gdpo(np.asarray(functions_KPG, np.float64), np.asarray(weights_K, np.float64), std, eps)

    groups = _Groups(reward_PG)
    deviation_PG = groups.deviation_PG
    if kind == "none":
        return deviation_PG
    if kind == "rloo":
        return deviation_PG * groups.count_P1 / groups.others_P1
    if kind == "group":
        return deviation_PG / (groups.std(std) + eps)
    if kind == "batch":
        return deviation_PG / (_std(reward_PG[~np.isnan(reward_PG)], std) + eps)
    if kind == "maxrl":
        return np.divide(
            deviation_PG, groups.mean_P1, out=np.zeros_like(deviation_PG), where=groups.mean_P1 > 0
        )
    if kind == "opo":
        return _opo(groups, lengths_PG)
    if kind == "passk":
        return _passk(groups)
    white_PG = whiten(deviation_PG, np.where(groups.scored_PG, lengths_PG, 0.0))  # reinforce++-baseline
    return np.where(groups.live_PG, white_PG, 0.0)


class _Groups:
    """Rewards measured from their group's mean; exact zeros where a group has no spread."""

    def __init__(self, reward_PG: np.ndarray):
        self.scored_PG = ~np.isnan(reward_PG)
        self.count_P1 = self.scored_PG.sum(axis=1, keepdims=True)
        self.others_P1 = np.maximum(self.count_P1 - 1, 1)

        # Measured from the group's first opinion, so that equal rewards are exact zeros before any mean is taken.
        first_P1 = np.take_along_axis(reward_PG, self.scored_PG.argmax(axis=1)[:, None], axis=1)
        self.offset_PG = np.where(self.scored_PG, reward_PG - first_P1, 0.0)
        span_P1 = np.ptp(
            self.offset_PG, axis=1, keepdims=True
        )  # the zeros of unscored rows lie inside the range
        largest_P1 = np.where(self.scored_PG, np.abs(reward_PG), 0.0).max(axis=1, keepdims=True)
        self.live_PG = self.scored_PG & (self.count_P1 >= 2) & (span_P1 > TIE * largest_P1)

        mean_P1 = self.offset_PG.sum(axis=1, keepdims=True) / np.maximum(self.count_P1, 1)
        self.mean_P1 = np.where(self.count_P1 > 0, mean_P1 + first_P1, 0.0)
        self.deviation_PG = np.where(self.live_PG, self.offset_PG - mean_P1, 0.0)

    def std(self, kind: Std) -> np.ndarray:
        divisor_P1 = self.others_P1 if kind == "unbiased" else np.maximum(self.count_P1, 1)
        return np.sqrt((self.deviation_PG**2).sum(axis=1, keepdims=True) / divisor_P1)


def _std(values: np.ndarray, kind: Std) -> float:
    """Standard deviation of all values; 0 for fewer than two."""
    return float(np.std(values - values[0], ddof=1 if kind == "unbiased" else 0)) if len(values) > 1 else 0.0


def _opo(groups: _Groups, lengths_PG: np.ndarray) -> np.ndarray:
    """R minus the group's mean weighted by length, the baseline of least variance if longer rows vary more."""
    weight_PG = np.where(groups.scored_PG, lengths_PG, 0.0)
    total_P1 = np.maximum(weight_PG.sum(axis=1, keepdims=True), 1.0)
    mean_P1 = (weight_PG * groups.offset_PG).sum(axis=1, keepdims=True) / total_P1
    return np.where(groups.live_PG, groups.offset_PG - mean_P1, 0.0)


def _passk(groups: _Groups) -> np.ndarray:
    """The best of the group gets its lead over the second best, everybody else 0; two equal best get 0."""
    offset_PG = np.where(groups.live_PG, groups.offset_PG, -np.inf)
    ranked_PG = np.sort(offset_PG, axis=1)
    lead_P1 = np.zeros((len(offset_PG), 1))
    live_P = groups.live_PG.any(axis=1)
    lead_P1[live_P, 0] = ranked_PG[live_P, -1] - ranked_PG[live_P, -2]
    best_PG = (offset_PG == ranked_PG[:, -1:]) & groups.live_PG
    return np.where(best_PG, lead_P1, 0.0)


def _gdpo(functions_KPG: np.ndarray, weights_K: np.ndarray, std: Std, eps: float) -> np.ndarray:
    """Each function normalised within its groups, added up with the weights, scaled by the std over all rows.

    Every function's part sums to 0 in each group, so the mean over all rows is 0 and needs no subtraction.
    """
    total_PG = np.zeros(functions_KPG.shape[1:])
    for reward_PG, weight in zip(functions_KPG, weights_K, strict=True):
        groups = _Groups(reward_PG)
        total_PG += weight * groups.deviation_PG / (groups.std(std) + eps)
    scored_PG = ~np.isnan(functions_KPG).all(axis=0)
    return total_PG / (_std(total_PG[scored_PG], std) + eps) if scored_PG.any() else total_PG


def whiten(value: np.ndarray, count: np.ndarray) -> np.ndarray:
    """(value - mean) / sqrt(var + 1e-8) over sum(count) tokens, `count` of which have each value; var is unbiased.

    Values that nobody counts, and all of them if they are equal, become exactly 0.
    """
    counted = count > 0
    total = count.sum()
    if not counted.any():
        return np.zeros_like(value)
    known = value[counted]
    offset = np.where(counted, value - known[0], 0.0)
    if total < 2 or np.ptp(offset[counted]) <= TIE * np.abs(known).max():
        return np.zeros_like(value)
    deviation = offset - (count * offset).sum() / total
    variance = (count * deviation**2).sum() / (total - 1)
    return np.where(counted, deviation / np.sqrt(variance + WHITEN_EPS), 0.0)


def _check(reward_PG: np.ndarray, kind: str) -> None:
    if kind not in get_args(AdvantageKind):
        raise ValueError(f"unknown kind of advantage {kind!r}: one of {', '.join(get_args(AdvantageKind))}")
    if reward_PG.ndim != 2:
        raise ValueError(f"rewards must be [prompts, completions], not of shape {reward_PG.shape}")
    if reward_PG.shape[1] < 2 and kind != "reinforce++":
        raise ValueError("an advantage compares completions of one prompt: a group needs at least 2")
    wrong = np.argwhere(np.abs(reward_PG) > LARGEST)  # NaN is not greater than anything
    if len(wrong):
        p, g = wrong[0]
        raise ValueError(
            f"the reward of completion {g} of prompt {p} is {reward_PG[p, g]}; a reward must be finite "
            f"(at most {LARGEST:g}), and None or NaN where a function has no opinion"
        )
