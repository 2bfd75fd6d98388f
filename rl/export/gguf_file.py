"""Writing a GGUF file, tensor by tensor, in llama.cpp's simple quantisations; its K-quants are made by llama.cpp."""

import importlib.util
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant
from gguf import LlamaFileType

from covey.rl.checkpoint import RunError
from covey.rl.export.gguf_model import Model, wanted
from covey.rl.export.gguf_vocabulary import add_vocabulary
from covey.rl.export.merge import EMBEDDING, HEAD, Merged
from covey.rl.export.source import ExportError

PLAIN = ("f32", "f16", "bf16")
SIMPLE = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # the gguf package quantises these
K_QUANTS = (
    "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
WITH_MODULE = """
import ctypes, os, sys, llama_cpp
source, target, number = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = int(number)
paths = os.fsencode(source), os.fsencode(target)
sys.exit(llama_cpp.llama_model_quantize(*paths, ctypes.byref(params)))
"""
QUANTS = (*PLAIN, *SIMPLE, *K_QUANTS)


def check_quant(quant: str) -> None:
    """Raises ExportError for a name that is none, or that needs a llama.cpp which is not there."""
    if quant not in QUANTS:
        raise ExportError(f'quant: "{quant}" is not one of {", ".join(QUANTS)}')
    if quant in K_QUANTS:
        _quantiser()


def write_gguf(
    file: Path,
    merged: Merged,
    model: Model,
    tokenizer: Any,
    eos: Sequence[int],
    *,
    quant: str,
    facts: dict[str, str | None],
) -> list[str]:
    """Writes one file, and returns sentences about tensors that are not in `quant`. Peak memory is a few tensors.

    facts: name, license and base_model for the file's own description.
    """
    if quant in K_QUANTS:
        whole = file.with_name("unquantised.gguf")
        write_gguf(whole, merged, model, tokenizer, eos, quant="f16", facts=facts)
        _quantise(whole, file, quant)
        whole.unlink()
        return _kept(file)

    tied = HEAD not in merged.names
    writer = gguf.GGUFWriter(file, model.kind.name)
    writer.add_type("model")
    writer.add_file_type(LlamaFileType["ALL_F32" if quant == "f32" else f"MOSTLY_{quant.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _describe(writer, facts)
    extra = model.describe(writer)
    add_vocabulary(writer, tokenizer, model.config.vocab_size, eos)
    plan = []
    for name in wanted(merged.names):
        shape, head = merged.shape(name), name == (EMBEDDING if tied else HEAD)
        kind = _kind(shape, Quant[quant.upper()], head=head)
        stored = shape if kind in (Quant.F32, Quant.F16) else gguf.quant_shape_to_byte_shape(shape, kind)
        dtype = np.dtype({Quant.F32: np.float32, Quant.F16: np.float16}.get(kind, np.uint8))
        nbytes = int(np.prod(stored)) * dtype.itemsize
        writer.add_tensor_info(model.name(name), stored, dtype, nbytes, raw_dtype=kind)
        plan.append((name, kind, nbytes))
    for name, tensor in extra.items():
        writer.add_tensor_info(name, tuple(tensor.shape), np.dtype(np.float32), tensor.numel() * 4)
    check_room(file.parent, sum(nbytes for _, _, nbytes in plan))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, kind, _ in plan:
            weight = model.convert(name, merged.read(name))
            check_finite(name, weight, torch.float16 if kind == Quant.F16 else torch.float32)
            writer.write_tensor_data(gguf.quantize(weight.contiguous().numpy(), kind))
        for tensor in extra.values():
            writer.write_tensor_data(tensor.numpy())
    finally:
        writer.close()
    narrow = sum(kind == Quant.F16 for _, kind, _ in plan) if quant in SIMPLE else 0
    return [f"{narrow} tensors have rows that are no multiple of 32 and stay in F16"] * bool(narrow)


def _kind(shape: tuple[int, ...], quant: Quant, *, head: bool) -> Quant:
    """Norms and biases stay as they are, the head gets 8 bits at least, and a row has to be whole blocks."""
    if len(shape) == 1:
        return Quant.F32
    if quant.name.lower() in SIMPLE:
        quant = Quant.Q8_0 if head else quant
        return quant if shape[-1] % 32 == 0 else Quant.F16
    return quant


def _describe(writer: gguf.GGUFWriter, facts: dict[str, str | None]) -> None:
    if name := facts.get("name"):
        writer.add_name(name)
    if licence := facts.get("license"):
        writer.add_license(licence)
    if base := facts.get("base_model"):
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, base.rsplit("/", 1)[-1])
        if "/" in base:
            writer.add_base_model_organization(0, base.split("/", 1)[0])
            writer.add_base_model_repo_url(0, f"https://huggingface.co/{base}")


def check_finite(name: str, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuses a tensor that is not finite, or not once it is in `dtype`."""
    low, high = torch.aminmax(weight) if weight.numel() else (torch.zeros(()),) * 2
    if not torch.isfinite(high - low):
        raise ExportError(
            f"{name} is not finite once the adapter is merged: the run has diverged; take an earlier step"
        )
    if max(high, -low) > torch.finfo(dtype).max:
        raise ExportError(f"{name} has values too large for float16; export in bfloat16 or float32")


def check_room(folder: Path, nbytes: int) -> None:
    """Refuses an export that cannot fit on the disk."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise RunError(
            f"the export needs {nbytes / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB left; free some space or "
            "choose another folder with --out"
        )


def _kept(file: Path) -> list[str]:
    """What llama.cpp could not put into K-quants, because these want rows of a multiple of 256."""
    odd = [t for t in gguf.GGUFReader(file).tensors if len(t.shape) > 1 and t.shape[0] % 256]
    kinds = ", ".join(f"{n} in {kind}" for kind, n in Counter(t.tensor_type.name for t in odd).items())
    return [f"{len(odd)} tensors have rows that are no multiple of 256, so llama.cpp put {kinds}"] * bool(odd)


def _quantiser() -> list[str]:
    """The command that quantises with llama.cpp; IN, OUT and the type's number come behind it.

    The module is run in a process of its own as well: it talks a lot, and ends its process when it is not content.
    """
    if importlib.util.find_spec("llama_cpp") is not None:
        return [sys.executable, "-c", WITH_MODULE]
    if program := shutil.which("llama-quantize"):
        return [program]
    raise ExportError(
        "K-quants are made by llama.cpp, and there is neither its module (pip install llama-cpp-python) nor the "
        "program llama-quantize; install one, or take q8_0 or q5_1"
    )


def _quantise(source: Path, target: Path, quant: str) -> None:
    number = LlamaFileType[f"MOSTLY_{quant.upper()}"].value
    command = [*_quantiser(), str(source), str(target), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode or not target.is_file():
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RunError(
            f"llama.cpp could not quantise to {quant}: {said[-1] if said else 'it does not say why'}"
        )
