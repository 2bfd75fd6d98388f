"""The tensors of safetensors files by name, one at a time."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from covey.rl.export.source import ADAPTER_FILES, ExportError, read_json

STATE = ".quant_state.bitsandbytes__"


class Tensors:
    """Tensors by name. Files are memory-mapped: reading one tensor costs that tensor.

    A weight that bitsandbytes holds in 4 bits is one tensor here, with its own shape; what belongs to it (X.absmax,
    X.quant_map, ...) is not listed.
    """

    def __init__(self, files: dict[str, Path]):
        self._files = files
        self._open = {file: _open(file) for file in dict.fromkeys(files.values())}
        for file, opened in self._open.items():
            there = set(opened.keys())
            if lost := [name for name, place in files.items() if place == file and name not in there]:
                raise ExportError(
                    f"{file} has no tensor {lost[0]}, though the index says so; copy the files again"
                )
        self._parts = {name.split(STATE)[0]: [] for name in files if STATE in name}
        for name in files:
            root = next((n for n in _roots(name) if n in self._parts), None)
            if root is not None:
                self._parts[root].append(name)
        inside = {name for parts in self._parts.values() for name in parts}
        self.names = [name for name in files if name not in inside]

    @classmethod
    def of_model(cls, folder: Path) -> "Tensors":
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            names = read_json(index)["weight_map"]
            if missing := sorted({file for file in names.values() if not (folder / file).is_file()}):
                raise ExportError(
                    f"{folder / missing[0]} is missing, one of the files that {index.name} names"
                )
            return cls({name: folder / file for name, file in names.items()})
        if not single.is_file():
            raise ExportError(f"{folder}: no model.safetensors; only weights in that format can be exported")
        return cls(dict.fromkeys(_open(single).keys(), single))

    @classmethod
    def of_adapter(cls, folder: Path) -> "Tensors":
        file = folder / ADAPTER_FILES[1]
        return cls(dict.fromkeys(_open(file).keys(), file))

    @property
    def in_4_bits(self) -> bool:
        return bool(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._parts:
            return tuple(self._header(name)["shape"])
        return tuple(self._open[self._files[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """What `read` returns; not for tensors without dimensions."""
        if name in self._parts:
            return getattr(torch, self._header(name)["dtype"])
        return self._open[self._files[name]].get_slice(name)[:0].dtype

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored; one in 4 bits is dequantised."""
        tensor = self._raw(name)
        if name not in self._parts:
            return tensor
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(tensor, self._state(name))

    def _raw(self, name: str) -> Tensor:
        return self._open[self._files[name]].get_tensor(name)

    def _header(self, name: str) -> dict[str, Any]:
        """What bitsandbytes noted about a weight in 4 bits, which it keeps as JSON in a tensor of bytes."""
        part = next(part for part in self._parts[name] if STATE in part)
        return json.loads(bytes(self._raw(part).tolist()))

    def _state(self, name: str) -> Any:
        from bitsandbytes.functional import QuantState

        parts = {part: self._raw(part) for part in self._parts[name]}
        return QuantState.from_dict(parts, device=torch.device("cpu"))


def _roots(name: str) -> list[str]:
    """What `name` may be a part of: a.b.weight.quant_state.x of a.b.weight.quant_state, a.b.weight and a.b."""
    words = name.split(".")
    return [".".join(words[:end]) for end in range(len(words) - 1, 0, -1)]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ExportError(
            f"{file} is not a complete safetensors file ({error}); copy or download it again"
        ) from error
