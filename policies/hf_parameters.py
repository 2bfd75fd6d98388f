"""The trained parameters of a torch module in few flat buffers: a master copy for the optimiser, and its gradient.

Every trained weight of 16 bits takes 2 bytes for the module itself, 4 for the master copy in float32 and 4 for its
gradient, so that passes add up in float32 too. Weights of 32 bits or more are views into the master copy.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from covey.policies.locate import ModelError

LIMIT = 1 << 30  # elements of a buffer, unless one weight has more: bitsandbytes counts them in 32 bits


@dataclass(frozen=True, slots=True)
class _Buffer:
    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    master: Tensor  # flat, a leaf with its gradient
    gradient: Tensor
    shadow: Tensor | None  # what the module computes with, where that is not the master itself

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view per parameter, of its shape."""
        pieces = flat.split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


class FlatParameters:
    """Takes over these parameters of a module, by name; from then on the masters are what is trained."""

    def __init__(self, parameters: Mapping[str, Parameter], *, limit: int = LIMIT):
        groups: list[dict[str, Parameter]] = []
        room, dtype = 0, None
        for name, parameter in parameters.items():
            if parameter.numel() > room or parameter.dtype != dtype:
                groups.append({})
                room, dtype = limit, parameter.dtype
            groups[-1][name] = parameter
            room -= parameter.numel()
        self._buffers = [_flatten(group) for group in groups]
        self.masters = [buffer.master for buffer in self._buffers]
        self._swapped = False

    @property
    def has_shadow(self) -> bool:
        """Whether the module computes with a rounded copy of the masters."""
        return any(buffer.shadow is not None for buffer in self._buffers)

    def weights(self) -> dict[str, Tensor]:
        """The masters by name, as views."""
        return {
            name: view
            for buffer in self._buffers
            for name, view in zip(buffer.names, buffer.views(buffer.master.detach()), strict=True)
        }

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights with these names in. Raises ModelError if names or shapes differ."""
        mine = self.weights()
        if odd := sorted(set(weights) ^ set(mine)):
            raise ModelError(f"the weights do not fit this model: {odd[0]} is on one side only")
        for name, tensor in weights.items():
            if tensor.shape != mine[name].shape:
                raise ModelError(
                    f"the weights do not fit this model: {name} is {tuple(tensor.shape)}, "
                    f"expected {tuple(mine[name].shape)}"
                )
            mine[name].copy_(tensor)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring what is computed with up to date, and attach gradients again that an optimiser has dropped."""
        for buffer in self._buffers:
            if buffer.master.grad is None:  # as after a torch optimiser's zero_grad()
                buffer.gradient.zero_()
                buffer.master.grad = buffer.gradient
            if buffer.shadow is not None and not self._swapped:
                buffer.shadow.copy_(buffer.master)

    def zero_grad(self) -> None:
        for buffer in self._buffers:
            buffer.gradient.zero_()
            buffer.master.grad = buffer.gradient

    def snapshot(self) -> list[Tensor]:
        """Copies of what is computed with; of shadows on a GPU in the memory of the host."""
        self.refresh()
        return [
            buffer.master.detach().clone() if buffer.shadow is None else _on_the_host(buffer.shadow)
            for buffer in self._buffers
        ]

    @contextmanager
    def swapped(self, snapshot: Sequence[Tensor]) -> Iterator[None]:
        """While entered, the module computes with a snapshot, without gradient."""
        self._swapped = True
        for buffer, values in zip(self._buffers, snapshot, strict=True):
            if buffer.shadow is None:
                _point(buffer, values)
            else:
                buffer.shadow.copy_(values)
        try:
            yield
        finally:
            self._swapped = False
            for buffer in self._buffers:
                if buffer.shadow is None:
                    _point(buffer, buffer.master.detach())
            self.refresh()


@torch.no_grad()
def _flatten(parameters: Mapping[str, Parameter]) -> _Buffer:
    """Move the parameters' values into a buffer; each is let go as soon as it is copied."""
    held = tuple(parameters.values())
    dtype, device, size = held[0].dtype, held[0].device, sum(p.numel() for p in held)
    wide = torch.promote_types(dtype, torch.float32)
    master = torch.empty(size, dtype=wide, device=device)
    shadow = None if dtype == wide else torch.empty(size, dtype=dtype, device=device)
    gradient = torch.zeros_like(master)
    buffer = _Buffer(tuple(parameters), held, master.requires_grad_(), gradient, shadow)
    master.grad = gradient
    used = master.detach() if shadow is None else shadow
    places = zip(held, buffer.views(master.detach()), buffer.views(used), buffer.views(gradient), strict=True)
    for parameter, master_view, used_view, gradient_view in places:
        master_view.copy_(parameter)
        used_view.copy_(parameter)
        parameter.data = used_view
        if shadow is None:
            parameter.grad = gradient_view  # autograd adds to a gradient that is there
        else:
            parameter.register_post_accumulate_grad_hook(_adder(gradient_view))
    return buffer


def _adder(gradient_view: Tensor):
    """A hook that adds a parameter's finished gradient to the flat one."""

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient_view.add_(parameter.grad)
            parameter.grad = None

    return add


def _point(buffer: _Buffer, flat: Tensor) -> None:
    for parameter, view in zip(buffer.parameters, buffer.views(flat), strict=True):
        parameter.data = view


def _on_the_host(values: Tensor) -> Tensor:
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return copy.copy_(values)
