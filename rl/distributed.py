"""What the ranks of a run must know of each other; with one process everything here does nothing.

Each rank holds its own prompts of a step. Statistics over the step (rewards, denominators, entropies) are computed from
the gathered numbers on every rank alike, and gradients, which carry the step's denominator already, are summed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_objects(item: Any) -> list[Any]:
    """`item` of every rank, in the order of the ranks."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def gather_rows(array: np.ndarray) -> tuple[np.ndarray, slice]:
    """The arrays of all ranks one after another along axis 0, and where this rank's lies in it."""
    if world_size() == 1:
        return array, slice(0, len(array))
    arrays = gather_objects(array)
    start = sum(len(other) for other in arrays[: dist.get_rank()])
    return np.concatenate(arrays), slice(start, start + len(array))


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Adds the gradients of all ranks, in place. The losses' weights hold the denominator of all ranks."""
    if world_size() > 1:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
