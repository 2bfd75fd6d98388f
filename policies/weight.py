"""Frozen weight matrices: as they are, or in NF4 with double quantisation (Dettmers et al. 2023, QLoRA)."""

import torch
from torch import Tensor

BLOCK = 64  # weights that share one scale; the scales are quantised again to 8 bit in blocks of 256


class DenseWeight:
    """A matrix [N, K] in the compute dtype."""

    def __init__(self, weight_NK: Tensor):
        self._weight = weight_NK

    def dense(self) -> Tensor:
        return self._weight


class NF4Weight:
    """A matrix [N, K] in 4 bits, quantised and read back by bitsandbytes.

    resident: keep the dequantised matrix as well. It is the same function, faster and larger: 4.5 bits a weight
    become 36 in float32. Where a matrix is used for few tokens at a time (a CPU, short prompts) reading it
    back costs more than the product itself.
    """

    def __init__(self, weight_NK: Tensor, dtype: torch.dtype, *, resident: bool = False):
        from bitsandbytes import functional

        self._packed, self._state = functional.quantize_4bit(
            weight_NK.to(dtype).contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        self._resident = self._read() if resident else None

    def _read(self) -> Tensor:
        from bitsandbytes import functional

        return functional.dequantize_4bit(self._packed, self._state)

    def dense(self) -> Tensor:
        """The dequantised matrix [N, K] in the compute dtype."""
        return self._read() if self._resident is None else self._resident
