"""What is measured of a step beside the loss: rewards, lengths, times, memory."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from covey.rewards.runner import ScoreTable
from covey.rollout.engine import Completion, Group
from covey.rollout.episodes import LIMITS

Measured = dict[str, float]  # metrics of a step, by name (area/name)


def rollout_metrics(
    groups: Sequence[Group], scores: ScoreTable, advantage_PG: NDArray[np.float64], seconds: float
) -> Measured:
    """Rewards, lengths and what share of the completions can teach something."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(completion.ids) for completion in completions])
    scored = scores.total[~np.isnan(scores.total)]
    return {
        "reward/mean": float(scored.mean()) if len(scored) else float("nan"),
        "reward/std": float(scored.std()) if len(scored) else float("nan"),
        **{f"reward/{name}": value for name, value in scores.means().items()},
        **{f"reward/{name}": float(count) for name, count in scores.failures.items()},
        "reward/unscored": float(np.isnan(scores.total).mean()),
        "groups/no_spread": float((advantage_PG == 0).all(1).mean()),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([completion.finish == "length" for completion in completions])),
        "rollout/tokens_per_s": float(lengths.sum()) / max(seconds, 1e-9),
        **_episode_metrics(completions),
    }


def _episode_metrics(completions: Sequence[Completion]) -> Measured:
    """Means of the numbers that an environment tells of its episodes, and what share of them each limit cut off."""
    known: dict[str, list[float]] = {}
    for completion in completions:
        for name, value in completion.columns.items():
            if isinstance(value, int | float) and name != "environment_reward":  # it is among the rewards
                known.setdefault(f"environment/{name}", []).append(float(value))
        if "cut_off_by" in completion.columns:
            for limit in LIMITS:
                cut_off = completion.columns["cut_off_by"] == limit
                known.setdefault(f"environment/cut_off_by_{limit}", []).append(float(cut_off))
    return {name: sum(values) / len(values) for name, values in known.items()}


class Clock:
    """Seconds of the phases of a step, the device's work included."""

    def __init__(self, device: torch.device):
        self._device = device
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> Measured:
        times = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        times["time/step_s"] = sum(self.seconds.values())
        if self._device.type == "cuda":
            times["memory/peak_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return times
