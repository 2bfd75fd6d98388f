"""Whole models of transformers on disk: what full finetuning saves, with everything that makes the folder a model."""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARD = "5GB"
COPIED = {".json", ".jinja", ".txt", ".model", ".tiktoken"}  # kinds of files that a tokenizer may have
WRITTEN = {"config.json", "generation_config.json", "model.safetensors.index.json"}


def save_whole(model: Any, source: Path, folder: Path) -> None:
    """Write a model as transformers does (safetensors in shards) and the tokenizer files of the folder it came from.

    The weights are copied to the host first, all of them: in the model they are views into one buffer, which
    safetensors would take for tied weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copies: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = tensor.data_ptr(), tuple(tensor.shape)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True).contiguous()
        state[name] = copies[key]  # tied weights stay tied
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=state, max_shard_size=SHARD)
    for file in source.iterdir():
        if file.is_file() and file.suffix in COPIED and file.name not in WRITTEN:
            shutil.copyfile(file, folder / file.name)


def load_whole(folder: Path) -> dict[str, Tensor]:
    """The weights of such a folder by the names that they have in the model, on the CPU in the dtype of the files."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", device_map={"": torch.device("cpu")}
        )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without progress bars, reports and warnings: what can be wrong is an error of ours."""
    from transformers.utils import logging as theirs

    shown, verbosity = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(verbosity)
        if shown:
            theirs.enable_progress_bar()
