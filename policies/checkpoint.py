"""Reading weights from safetensors, one tensor at a time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from covey.policies.locate import ModelError

# What bitsandbytes stores beside a matrix in 4 bits.
FOUR_BIT_PARTS = (
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    "quant_state.bitsandbytes__nf4",
    "quant_state.bitsandbytes__fp4",
)


# Elements that are copied to a GPU at a time: few enough to stay in the CPU's caches on their way.
CHUNK = 1 << 24

# What the names of a decoder's tensors begin with: alone, or as the text part of a model that reads images.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


class Checkpoint:
    """The tensors of a checkpoint folder by name. Files are memory-mapped: reading one tensor costs that tensor.

    prefix: what the decoder's names begin with. head: the name of the head. quantised: bitsandbytes stored some of the
    matrices in 4 bits.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files = _index(folder)
        self._open: dict[str, safe_open] = {}
        self.quantised = any(".quant_state.bitsandbytes__" in name for name in self._files)
        self.prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in self), PREFIXES[0])
        self.head = next((name for name in HEADS if name in self), HEADS[0])

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def in_four_bits(self, name: str) -> bool:
        """True if bitsandbytes stored the matrix `name` in 4 bits."""
        return f"{name}.absmax" in self._files

    def four_bit_parts(self, name: str) -> dict[str, Tensor]:
        """The packed matrix, as "", and what is stored beside it, by the names of FOUR_BIT_PARTS."""
        parts = {part: f"{name}.{part}" for part in FOUR_BIT_PARTS if f"{name}.{part}" in self._files}
        return {part: self._tensor(at) for part, at in {"": name, **parts}.items()}

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor `name`, checked against the shape that the configuration promises."""
        tensor = self._tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.folder / self._files[name]}: {name} has shape {tuple(tensor.shape)}, "
                f"config.json promises {shape}"
            )
        return _upload(tensor, dtype, device) if device.type == "cuda" else tensor.to(device, dtype)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._files:
            raise ModelError(f"{self.folder}: the checkpoint has no tensor {name}; is it complete?")
        return self._handle(self._files[name]).get_tensor(name)

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


def _upload(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mapped tensor on a GPU, on its way when this returns.

    All of torch's threads read the file into page-locked memory, and nobody waits for the copies from there: the driver
    would read pages of the file with one thread, and the next ones only when these have arrived.
    """
    out = torch.empty(tensor.shape, dtype=dtype, device=device)
    for there, here in zip(out.view(-1).split(CHUNK), tensor.view(-1).split(CHUNK), strict=True):
        there.copy_(here.to(dtype).pin_memory(), non_blocking=True)
    return out


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
