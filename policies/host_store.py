"""Layer inputs parked in pinned host memory between the forward and the backward of a pass (lean memory, GPUs).

They are all that the lean mode keeps, and grow with tokens times layers. The copies run on a stream of their own beside
the layers' products and take a fraction of their time, so 64k tokens train where 8k did, at the same speed.
"""

import torch
from torch import Tensor


class HostStore:
    """The inputs of one pass, one slot per layer. torch's pinned allocator gives the same buffers to the next pass."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream
        self._parked: dict[int, Tensor] = {}
        self._arriving: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def put(self, slot: int, x: Tensor) -> None:
        """Park x, which may be freed at once."""
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self._stream)
        self._parked[slot] = host

    def take(self, slot: int) -> Tensor:
        """The tensor of a slot on the device again, once."""
        self.fetch(slot)
        x, arrived = self._arriving.pop(slot)
        current = torch.cuda.current_stream(x.device)
        current.wait_event(arrived)
        x.record_stream(current)
        return x

    def fetch(self, slot: int) -> None:
        """Start bringing a slot back, so that `take` need not wait. A slot that holds nothing is no error."""
        if slot not in self._parked:
            return
        with torch.cuda.stream(self._stream):
            x = self._parked.pop(slot).to(self._stream.device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
            self._arriving[slot] = x, arrived
