"""Room for the keys and values of many sequences, in one pool per layer.

Axes: N places (a token's keys and values of one layer each), m key-value heads, d head dimension.

A prompt, and the tokens of a row, lie in consecutive places. Rows get room as they grow: their places double, so that
at most half of what is taken is empty, and a token is copied about once on the average.
"""

from bisect import insort
from typing import NamedTuple

import torch
from torch import Tensor

from covey.policies.spec import ModelSpec


class Places(NamedTuple):
    """Consecutive places of a pool."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


NOWHERE = Places(0, 0)


class FreePlaces:
    """Which of N places are free: `take` finds the first run that is long enough."""

    def __init__(self, size: int):
        self.size = size
        self._runs = [Places(0, size)] if size else []  # ascending, never next to each other

    @property
    def free(self) -> int:
        return sum(run.size for run in self._runs)

    def take(self, size: int) -> Places | None:
        """`size` consecutive places, or None where there are not so many in a row."""
        if size == 0:
            return NOWHERE
        for i, run in enumerate(self._runs):
            if run.size >= size:
                rest = Places(run.start + size, run.size - size)
                self._runs[i : i + 1] = [rest] if rest.size else []
                return Places(run.start, size)
        return None

    def give(self, places: Places) -> None:
        """Takes places back."""
        if not places.size:
            return
        insort(self._runs, places)
        i = self._runs.index(places)
        for left in (i, i - 1):  # joined with the next run, then with the one before
            if 0 <= left < len(self._runs) - 1 and self._runs[left].end == self._runs[left + 1].start:
                joined = Places(self._runs[left].start, self._runs[left].size + self._runs[left + 1].size)
                self._runs[left : left + 2] = [joined]


class KVPool(FreePlaces):
    """Keys and values of all layers at N places."""

    def __init__(self, places: int, spec: ModelSpec, dtype: torch.dtype, device: torch.device):
        super().__init__(places)
        shape = spec.num_layers, places, spec.num_kv_heads, spec.head_dim
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def move(self, source: Places, to: Places) -> None:
        """Copies what lies at `source` to the first places of `to`; the two do not overlap."""
        for pool in (self.keys, self.values):
            pool[:, to.start : to.start + source.size] = pool[:, source.start : source.end]

    def layers(self) -> tuple[list[Tensor], list[Tensor]]:
        """A pool [N, m, d] of keys per layer, and one of values."""
        return list(self.keys.unbind()), list(self.values.unbind())


def place_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of one place in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
