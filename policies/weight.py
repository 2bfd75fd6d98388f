"""Frozen weight matrices: in NF4 (Dettmers et al. 2023, QLoRA), quantised here or in the checkpoint, or plain."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton
from covey.kernels.nf4 import BLOCK, NESTED_BLOCK, NF4, Nested, dequantize_nf4, quantize_nf4
from covey.policies.locate import ModelError


class NF4Weight:
    """A matrix [N, K] in 4 bits, the very ones of bitsandbytes; kernels/nf4.py says how they are made and read."""

    def __init__(self, weight_NK: Tensor, dtype: torch.dtype):
        weight = weight_NK.to(dtype).contiguous()
        self._rounded: NF4 | None = None
        if weight.is_cuda and use_triton(weight, "quantize_nf4"):  # bitsandbytes takes seconds to import
            self.nf4 = quantize_nf4(weight)
            return
        from bitsandbytes import functional

        options = {"blocksize": BLOCK, "compress_statistics": True, "quant_type": "nf4"}
        self._take(*functional.quantize_4bit(weight, **options), dtype)

    @classmethod
    def stored(
        cls,
        parts: dict[str, Tensor],
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "NF4Weight":
        """The matrix `name` of a checkpoint that bitsandbytes quantised; `parts` as Checkpoint.four_bit_parts gives it.

        Raises ModelError if it is not NF4, or not of the shape that the configuration promises.
        """
        from bitsandbytes.functional import QuantState

        packed = parts.pop("").to(device)
        state = QuantState.from_dict(parts, device)
        found, nested = tuple(state.shape or ()), state.state2 and state.state2.blocksize
        if found != shape or state.quant_type != "nf4" or nested not in (None, NESTED_BLOCK):
            raise ModelError(
                f"{name} is stored as {state.quant_type} {found} with scales in blocks of {nested}; config.json "
                f"promises nf4 {shape}, and bitsandbytes writes blocks of {NESTED_BLOCK}"
            )
        weight = cls.__new__(cls)
        weight._take(packed, state, dtype)
        return weight

    def _take(self, packed: Tensor, state: Any, dtype: torch.dtype) -> None:
        nested = state.state2 and Nested(state.state2.absmax, state.state2.code, state.offset)
        shape = state.shape[0], state.shape[1]
        packed = packed.view(torch.uint8).view(-1)
        self.nf4 = NF4(packed, state.absmax, shape, dtype, state.blocksize, nested)
        # bitsandbytes rounds to the dtype that was quantised before it computes in a wider one.
        self._rounded = (
            replace(self.nf4, dtype=state.dtype) if state.dtype.itemsize < dtype.itemsize else None
        )

    @property
    def exact(self) -> NF4 | None:
        """The 4 bits, if reading them gives the very values of `dense`."""
        return self.nf4 if self._rounded is None else None

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
        return (
            dequantize_nf4(self.nf4)
            if self._rounded is None
            else dequantize_nf4(self._rounded).to(self.dtype)
        )

    def dense_into(self, out_NK: Tensor) -> Tensor:
        """Write the matrix into a view of a caller's buffer (adjacent columns, any row stride), and return that."""
        return dequantize_nf4(self.nf4, out_NK) if self._rounded is None else out_NK.copy_(self.dense())


class PlainWeight:
    """A matrix [N, K] that a 4-bit checkpoint holds in 16 bits, beside others of its group in NF4."""

    exact = None

    def __init__(self, weight_NK: Tensor):
        self._weight = weight_NK

    @property
    def shape(self) -> tuple[int, int]:
        return self._weight.shape[0], self._weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    def dense(self) -> Tensor:
        return self._weight

    def dense_into(self, out_NK: Tensor) -> Tensor:
        return out_NK.copy_(self._weight)
