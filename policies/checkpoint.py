"""Reading weights from safetensors, one tensor at a time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from covey.policies.locate import ModelError


class Checkpoint:
    """The tensors of a checkpoint folder by name. Files are memory-mapped: reading one tensor costs that tensor."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files = _index(folder)
        self._open: dict[str, safe_open] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor `name`, checked against the shape that the configuration promises."""
        if name not in self._files:
            raise ModelError(f"{self.folder}: the checkpoint has no tensor {name}; is it complete?")
        tensor = self._handle(self._files[name]).get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.folder / self._files[name]}: {name} has shape {tuple(tensor.shape)}, "
                f"config.json promises {shape}"
            )
        return tensor.to(device=device, dtype=dtype)

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            self._open[file] = _open(self.folder / file)
        return self._open[file]


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """A Checkpoint whose files are let go at the end."""
    checkpoint = Checkpoint(folder)
    try:
        yield checkpoint
    finally:
        checkpoint._open.clear()


def _index(folder: Path) -> dict[str, str]:
    """File name of every tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted({f for f in files.values() if not (folder / f).exists()})
        if missing:
            raise ModelError(
                f"{folder}: {missing[0]} is missing ({len(missing)} of the shards that {index.name} names)"
            )
        return files
    single = folder / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{folder}: no model.safetensors; covey reads weights in safetensors format only")
    return dict.fromkeys(_open(single).keys(), single.name)


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelError(
            f"{file}: not a complete safetensors file ({error}); copy or download it again"
        ) from error
