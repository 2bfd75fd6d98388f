"""The frozen linears of a decoder layer, stacked where they share an input.

A layer has four groups: qkv, o, gate_up and down. N outputs of a group together, K inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.policies.weight import NF4Weight

GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


class Workspace:
    """Room for one matrix, used for a moment at a time by every group that has to be read back from 4 bits.

    A view from `matrix` is valid until the next call. One stream at a time.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def matrix(self, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._buffer is None or self._buffer.numel() < n * k:
            self._buffer = None  # give the old room back before taking more
            self._buffer = torch.empty(n * k, dtype=dtype, device=device)
        return self._buffer[: n * k].view(n, k)


class LinearGroup:
    """Linears with the same input: y = x W^T + b, W [N, K] the rows of all of them.

    Held as one matrix, or, with `quantised`, in NF4 linear by linear and read back before each use.
    """

    def __init__(
        self,
        key: str,
        sizes: Sequence[int],
        bias_N: Tensor | None,
        *,
        dense_NK: Tensor | None,
        quantised: Sequence[NF4Weight] = (),
        workspace: Workspace | None = None,
    ):
        self.key, self.sizes, self.bias = key, tuple(sizes), bias_N
        self._dense, self._quantised, self._workspace = dense_NK, tuple(quantised), workspace or Workspace()
        assert dense_NK is not None or self._quantised, "a group has one matrix or quantised ones"

    def matrix(self) -> Tensor:
        """W [N, K] in the compute dtype; if it had to be read back, only until any group is asked again."""
        if self._dense is not None:
            return self._dense
        first = self._quantised[0]
        n, k = sum(self.sizes), first.shape[1]
        out = self._workspace.matrix(n, k, first.dtype, first.device)
        for weight, rows in zip(self._quantised, out.split(self.sizes), strict=True):
            weight.dense_into(rows)
        return out
