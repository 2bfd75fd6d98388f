"""From rewards to advantages: how much better than its group a completion is.

Axes: P prompts, G completions of a prompt. Everything is float64 on the CPU: rewards are few, and rounding
here is not harmless. In float32 eight rewards of 0.7 differ from their own mean by 6e-8, and dividing that by
a standard deviation of the same size gives eight advantages of about 0.8 where each must be 0.
"""

from typing import Literal

import numpy as np

AdvantageKind = Literal["group", "none", "rloo"]

EPS = 1e-6  # as verl, SkyRL, NeMo-RL and slime have it; TRL has 1e-4
TIE = 1e-12  # rewards that differ by less than this share of the largest one are the same reward
LARGEST = 1e30  # anything above is a mistake, and would be infinite once it is float32

FORMULAS: dict[AdvantageKind, str] = {
    "group": "(R - mean of the group) / (std of the group + eps), std unbiased (GRPO, arXiv 2402.03300)",
    "none": "R - mean of the group, not divided by the std (Dr. GRPO, arXiv 2503.20783)",
    "rloo": "R - mean of the other rewards of the group (RLOO, arXiv 2402.14740)",
}


def group_advantages(
    reward_PG: np.ndarray,
    kind: AdvantageKind,
    *,
    std: Literal["unbiased", "biased"] = "unbiased",
    eps: float = EPS,
) -> np.ndarray:
    """Advantages [P, G] float64 of rewards [P, G]; FORMULAS names the kinds.

    A reward of NaN means that nobody had an opinion: the row is left out of its group's mean and std and gets
    advantage 0 (its tokens must not be trained on either: give `pack` the mask `~np.isnan(reward_PG)`). A
    group with fewer than two opinions, or with equal ones (max - min <= 1e-12 * max |R|), gets exact zeros.
    std says whether the group's variance is divided by n - 1 (unbiased) or n; only kind "group" uses it.
    Raises ValueError for groups of one and for rewards that are infinite or beyond 1e30.
    """
    reward_PG = np.asarray(reward_PG, np.float64)
    _check(reward_PG)
    scored_PG = ~np.isnan(reward_PG)
    count_P1 = scored_PG.sum(axis=1, keepdims=True)

    # Measured from the group's first opinion, so that equal rewards are exact zeros before any mean is taken.
    first_P1 = np.take_along_axis(reward_PG, scored_PG.argmax(axis=1)[:, None], axis=1)
    offset_PG = np.where(scored_PG, reward_PG - first_P1, 0.0)
    span_P1 = np.ptp(offset_PG, axis=1, keepdims=True)  # the zeros of unscored rows lie inside the range
    largest_P1 = np.where(scored_PG, np.abs(reward_PG), 0.0).max(axis=1, keepdims=True)
    live_PG = scored_PG & (count_P1 >= 2) & (span_P1 > TIE * largest_P1)

    mean_P1 = offset_PG.sum(axis=1, keepdims=True) / np.maximum(count_P1, 1)
    deviation_PG = np.where(live_PG, offset_PG - mean_P1, 0.0)
    if kind == "none":
        return deviation_PG
    others_P1 = np.maximum(count_P1 - 1, 1)
    if kind == "rloo":
        return deviation_PG * count_P1 / others_P1
    if kind == "group":
        divisor_P1 = others_P1 if std == "unbiased" else np.maximum(count_P1, 1)
        std_P1 = np.sqrt((deviation_PG**2).sum(axis=1, keepdims=True) / divisor_P1)
        return deviation_PG / (std_P1 + eps)
    raise ValueError(f"unknown kind of advantage {kind!r}: one of {', '.join(FORMULAS)}")


def _check(reward_PG: np.ndarray) -> None:
    if reward_PG.ndim != 2:
        raise ValueError(f"rewards must be [prompts, completions], not of shape {reward_PG.shape}")
    if reward_PG.shape[1] < 2:
        raise ValueError("an advantage compares completions of one prompt: a group needs at least 2")
    wrong = np.argwhere(np.abs(reward_PG) > LARGEST)  # NaN is not greater than anything
    if len(wrong):
        p, g = wrong[0]
        raise ValueError(
            f"the reward of completion {g} of prompt {p} is {reward_PG[p, g]}; a reward must be finite "
            f"(at most {LARGEST:g}), and None or NaN where a function has no opinion"
        )
