"""Frozen weight matrices in NF4 with double quantisation (Dettmers et al. 2023, QLoRA)."""

import torch
from torch import Tensor

from covey.kernels.nf4 import BLOCK, NF4, Nested, dequantize_nf4


class NF4Weight:
    """A matrix [N, K] in 4 bits, quantised by bitsandbytes; kernels/nf4.py says how it is read."""

    def __init__(self, weight_NK: Tensor, dtype: torch.dtype):
        from bitsandbytes import functional

        packed, state = functional.quantize_4bit(
            weight_NK.to(dtype).contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        assert state.state2 is not None and state.offset is not None, "scales are quantised"
        nested = Nested(state.state2.absmax, state.state2.code, state.offset)
        shape = weight_NK.shape[0], weight_NK.shape[1]
        self.nf4 = NF4(packed.view(-1), state.absmax, shape, dtype, BLOCK, nested)

    @property
    def shape(self) -> tuple[int, int]:
        return self.nf4.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.nf4.dtype

    @property
    def device(self) -> torch.device:
        return self.nf4.packed.device

    def dense(self) -> Tensor:
        """The dequantised matrix [N, K] in the compute dtype."""
        return dequantize_nf4(self.nf4)

    def dense_into(self, out_NK: Tensor) -> Tensor:
        """Write the matrix into a view of a caller's buffer (adjacent columns, any row stride), and return that."""
        return dequantize_nf4(self.nf4, out_NK)
