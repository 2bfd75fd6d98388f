"""The frozen linears of a decoder layer, stacked where they share an input.

A layer has four groups: qkv, o, gate_up and down. N outputs of a group together, K inputs, P columns and rows for the
adapters (kernels/lora_linear.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.kernels.lora_linear import LoraGroup, adapter_places, row_stride, wide
from covey.kernels.nf4 import NF4
from covey.policies.weight import NF4Weight, PlainWeight

GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj", "gate_up_proj"),
    "down": ("down_proj",),
}


class Workspace:
    """Room for one matrix, used for a moment at a time by every group that has to be read back from 4 bits.

    A view from `matrix` is valid until the next call. One stream at a time.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def matrix(self, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        stride = row_stride(k)
        if self._buffer is None or self._buffer.numel() < n * stride:
            self._buffer = None  # give the old room back before taking more
            self._buffer = torch.empty(n * stride, dtype=dtype, device=device)
        return self._buffer[: n * stride].view(n, stride)[:, :k]


class LinearGroup:
    """Linears with the same input: y = x W^T + b, W [N, K] the rows of all of them.

    Held as one matrix W+ [N + P, K + P], or, with `quantised`, in NF4 linear by linear and read back before each use.
    """

    def __init__(
        self,
        key: str,
        sizes: Sequence[int],
        inputs: int,
        padding: int,
        bias_N: Tensor | None,
        *,
        matrix: Tensor | None,
        quantised: Sequence[NF4Weight | PlainWeight] = (),
        workspace: Workspace | None = None,
    ):
        self.key, self.sizes, self.bias = key, tuple(sizes), bias_N
        self.n, self.k, self.padding = sum(sizes), inputs, padding
        self.held = matrix
        self._for_good = matrix is not None
        self._quantised, self._workspace = tuple(quantised), workspace or Workspace()
        assert matrix is not None or self._quantised, "a group has one matrix or quantised ones"

    def matrix(self, lora: LoraGroup | None) -> Tensor:
        """W+ with this adapter; valid until any group is asked again if it had to be read back.

        A matrix that is held has the adapter that was last copied to `places`.
        """
        if self.held is not None:
            return self.held
        first = self._quantised[0]
        shape = self.n + self.padding, self.k + self.padding
        out = self._read_back(self._workspace.matrix(*shape, first.dtype, first.device))
        if lora is not None:
            out[: self.n, self.k :] = 0
            if lora.rank < self.padding:
                out[self.n :] = 0
            for where, what in adapter_places(out, lora):
                where.copy_(what)
        return out

    def reserve(self) -> None:
        """Takes the room for reading back now, so that it is not mistaken for free."""
        if self.held is None:
            first = self._quantised[0]
            self._workspace.matrix(self.n + self.padding, self.k + self.padding, first.dtype, first.device)

    @property
    def nf4(self) -> tuple[NF4, ...]:
        """The weights in 4 bits, linear by linear; none while W+ is held, or where 4 bits are not all there is."""
        exact = [] if self.held is not None else [weight.exact for weight in self._quantised]
        return tuple(nf4 for nf4 in exact if nf4 is not None) if None not in exact else ()

    def _read_back(self, out: Tensor) -> Tensor:
        """Writes W into its place in W+."""
        for weight, rows in zip(self._quantised, out[: self.n, : self.k].split(self.sizes), strict=True):
            weight.dense_into(rows)
        return out

    @property
    def elements(self) -> int:
        """Of W+ in memory, what lies between its rows included."""
        return (self.n + self.padding) * row_stride(self.k + self.padding)

    def hold(self) -> None:
        """Keeps W+ until `release`, with room for the adapter but not yet the adapter itself."""
        if self.held is None:
            first = self._quantised[0]
            shape = self.n + self.padding, row_stride(self.k + self.padding)
            rows = torch.zeros(shape, dtype=first.dtype, device=first.device)
            self.held = self._read_back(rows[:, : self.k + self.padding])

    def release(self) -> None:
        """The end of `hold`. A matrix that was given is held for good."""
        if not self._for_good:
            self.held = None

    def room(
        self, tokens: int, columns: int, like: Tensor, lora: dict[str, LoraGroup]
    ) -> tuple[Tensor, Tensor]:
        """An empty [tokens, columns + P] and its first columns as a view; without an adapter P is left out."""
        whole = wide(tokens, columns, self.padding if self.key in lora else 0, like)
        return whole, whole[:, :columns]

    def dense(self) -> Tensor:
        """W [N, K] alone, for who wants to look at it."""
        return self.matrix(None)[: self.n, : self.k]
