"""What a pass is recorded into: CUDA graphs, and between them steps that differ from batch to batch."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.kernels.attention import AttentionPlan


@contextmanager
def uncollected() -> Iterator[None]:
    """Without searching for garbage: another policy's CUDA graph, found there, cannot be freed during a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Graph:
    """A CUDA graph that is recorded on the current stream, in the memory of others."""

    def __init__(self, memory: Any):
        self._memory, self._graph = memory, torch.cuda.CUDAGraph()
        self.replay = self._graph.replay

    def begin(self) -> None:
        # Other threads may use the GPU meanwhile, such as a reward model's.
        self._graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()


class Recording:
    """The steps of a pass: graphs, and between them what is left out of the graphs."""

    def __init__(self, new_graph: Callable[[], Graph]):
        self.steps: list[Callable[[AttentionPlan], object]] = []
        self._new_graph = new_graph
        self._graph: Graph | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        finally:
            self._end()

    def leave_out(self, run: Callable[..., object], *tensors: Tensor) -> None:
        """run(plan, *tensors) becomes a step; it has to write its results into the tensors."""
        self._end()
        places = [unowned(x) for x in tensors]
        self.steps.append(lambda plan: run(plan, *places))
        self._begin()

    def replay(self, plan: AttentionPlan) -> None:
        for step in self.steps:
            step(plan)

    def _begin(self) -> None:
        self._graph = self._new_graph()
        self._graph.begin()

    def _end(self) -> None:
        assert self._graph is not None
        self._graph.end()
        replay = self._graph.replay
        self.steps.append(lambda plan: replay())


class _Bytes:
    """Memory at an address, as torch.as_tensor reads it."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def unowned(x: Tensor) -> Tensor:
    """The same place in memory, which whoever recorded with it may use again for something else."""
    if not x.is_cuda:
        return x
    elements = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    there = torch.as_tensor(_Bytes(x.data_ptr(), elements * x.element_size()), device=x.device)
    return there.view(x.dtype).as_strided(x.shape, x.stride())
