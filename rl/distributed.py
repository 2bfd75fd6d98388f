"""What the ranks of a run must know of each other; with one process everything here does nothing.

Each rank has its share of a step's prompts. Statistics over the step (rewards, denominators, entropies) are computed
from the gathered numbers on every rank alike, and gradients, which carry the step's denominator already, are summed. So
all ranks hold the same weights at any time; the first one writes down what there is to write.
"""

import atexit
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")
Arguments = ParamSpec("Arguments")
MEETING = timedelta(minutes=10)  # for all to be there
# A rank waits for the slowest, whose completions may be long and whose rewards slow.
PATIENCE = timedelta(hours=12)


class RanksError(RuntimeError):
    """The processes of a run are not all there, or do not do the same; the message says what to do."""


def join_ranks() -> None:
    """Meets the other processes of the run, if `torchrun` has started several; once in a process.

    On a machine with GPUs each takes the one with its number there. Raises RanksError if there are too few.
    """
    started = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    if not started or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        return
    number, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if 0 < gpus <= number:
        raise RanksError(
            f"torchrun has started more processes than this machine has GPUs ({gpus}): lower --nproc-per-node"
        )
    if gpus:
        torch.cuda.set_device(number)
    store, rank, world = next(dist.rendezvous("env://", timeout=MEETING))
    backends = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backends, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    atexit.register(dist.destroy_process_group)


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return world_size() == 1 or dist.get_rank() == 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_objects(item: Any) -> list[Any]:
    """`item` of every rank, in the order of the ranks."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    with _together():
        dist.all_gather_object(items, item)
    return items


def from_first(make: Callable[[], Item]) -> Item:
    """What the first rank makes, on every rank."""
    if world_size() == 1:
        return make()
    items = [make() if is_first() else None]
    with _together():
        dist.broadcast_object_list(items, src=0)
    return items[0]  # type: ignore[return-value]


def by_first(function: Callable[Arguments, Item]) -> Callable[Arguments, Item]:
    """The function as the first rank calls it, whatever rank it is called on."""

    @functools.wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Item:
        return from_first(lambda: function(*args, **kwargs))

    return called


def check_same(item: Any, what: str) -> None:
    """Raises RanksError if the ranks have not all got the same `item`; what: its name."""
    items = gather_objects(item)
    if other := next((rank for rank, theirs in enumerate(items) if theirs != items[0]), 0):
        raise RanksError(
            f"process {other} has other {what} than process 0. All must have the same in the same order: sort what has "
            "no order, and give random generators the same seed in every process"
        )


def share(items: Sequence[Item], size: Callable[[Item], float] | None = None) -> list[Item]:
    """This rank's part of what all ranks have, in the order that it has there.

    The parts are one after the other and of equal number; with `size` they are of about equal sums of it.
    """
    if world_size() == 1:
        return list(items)
    if size is None:
        places = np.array_split(np.arange(len(items)), world_size())[dist.get_rank()].tolist()
    else:
        places = balanced([size(item) for item in items], world_size())[dist.get_rank()]
    return [items[i] for i in places]


def balanced(sizes: Sequence[float], count: int) -> list[list[int]]:
    """Places of `sizes` in `count` parts of about equal sums: the largest first, each into the part that is smallest so
    far (Graham 1969; no part is above 4/3 of what is possible)."""
    parts, sums = [[] for _ in range(count)], [0.0] * count
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = sums.index(min(sums))
        parts[least].append(place)
        sums[least] += sizes[place]
    return [sorted(part) for part in parts]


def sum_over_ranks(values: Iterable[float]) -> float:
    """Of the values of all ranks."""
    return sum(gather_objects(sum(values)))


def gather_rows(array: np.ndarray) -> tuple[np.ndarray, slice]:
    """The arrays of all ranks one after another along axis 0, and where this rank's lies in it."""
    if world_size() == 1:
        return array, slice(0, len(array))
    arrays = gather_objects(array)
    start = sum(len(other) for other in arrays[: dist.get_rank()])
    return np.concatenate(arrays), slice(start, start + len(array))


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Adds the gradients of all ranks, in place. The losses' weights hold the denominator of all ranks.

    To be called when the step's numbers have been gathered: gloo, which gathers them, notices a rank that has failed,
    where NCCL would wait for it.
    """
    if world_size() > 1:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


@contextmanager
def _together() -> Iterator[None]:
    """Around what goes through gloo, which says in its own words that it has lost a rank."""
    try:
        yield
    except RuntimeError as error:
        raise RanksError(
            "another process of this run has ended, or cannot be reached; if it failed, its own message says why"
        ) from error
