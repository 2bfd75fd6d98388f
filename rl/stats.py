"""What is measured of scored tokens: sums and maxima that add up over the passes and ranks of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covey.rl.distributed import gather_objects, world_size


@dataclass(frozen=True, slots=True)
class Stats:
    """Sums and maxima over scored tokens (0-dim tensors), which add up over the parts of a step."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: "Stats") -> "Stats":
        sums, maxima = dict(self.sums), dict(self.maxima)
        for name, value in other.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return Stats(sums, maxima)

    def finish(self) -> dict[str, float]:
        """Metrics by name (area/name): losses and counts as they are, the rest per token if there is any."""
        sums = {name: value.item() for name, value in self.sums.items()}
        metrics = {name: sums.pop(name) for name in list(sums) if name.startswith("loss/")}
        metrics["tokens/trained"] = tokens = sums.pop("tokens", 0.0)
        if not tokens:
            return metrics
        if weight_square := sums.pop("weight_square", 0.0):
            # Effective sample size (sum w)^2 / (n sum w^2): 1 if all weights are equal.
            metrics["sampler/ess"] = sums["sampler/weight"] ** 2 / (tokens * weight_square)
        metrics |= {name: value / tokens for name, value in sums.items()}
        metrics |= {name: value.item() for name, value in self.maxima.items()}
        if "ratio/min" in metrics:
            metrics["ratio/min"] *= -1  # kept as the largest negative one
        return metrics


def collect(sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> Stats:
    """Stats of columns [M]."""
    return Stats(
        {name: value_M.sum() for name, value_M in sums.items()},
        {name: value_M.max() for name, value_M in maxima.items() if len(value_M)},
    )


def token_stats(name: str, loss: Tensor, count: int, entropy_M: Tensor | None) -> Stats:
    """The loss under its name, the number of tokens, and their mean entropy if it is known."""
    sums = {name: loss.detach(), "tokens": torch.full_like(loss.detach(), count, dtype=torch.float64)}
    if entropy_M is not None:
        sums["entropy/mean"] = entropy_M.detach().sum(dtype=torch.float64)
    return Stats(sums)


def over_ranks(stats: Stats) -> Stats:
    """The statistics of all ranks together, as numbers on the CPU."""
    if world_size() == 1:
        return stats
    mine = [{name: value.item() for name, value in part.items()} for part in (stats.sums, stats.maxima)]
    total = Stats()
    for sums, maxima in gather_objects(mine):
        total += Stats(
            *({n: torch.tensor(v, dtype=torch.float64) for n, v in d.items()} for d in (sums, maxima))
        )
    return total


def merge_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """One metric each of several optimiser steps: means, but extremes of extremes, sums of counts, the last rate."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        if name.endswith("max"):
            merged[name] = max(values)
        elif name.endswith("min"):
            merged[name] = min(values)
        elif name == "tokens/trained":
            merged[name] = sum(values)
        else:
            last = name in ("optim/lr", "grad/skipped", "entropy/bonus")
            merged[name] = values[-1] if last else sum(values) / len(values)
    return merged
