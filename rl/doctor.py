"""`covey doctor MODEL`: how a model would be trained here, why so, and in how much memory. Heavy imports wait."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.rl.commands import Debug, sentences
from covey.rl.config import SftConfig
from covey.rl.config_file import load_config

if TYPE_CHECKING:
    from pathlib import Path

HELP = """
Say how a model is trained: by covey's own decoder or through transformers, why, and in about how much memory.

MODEL is what model.path may be. Of a model on the hub only the configuration is downloaded.

\b
Examples:
  covey doctor Qwen/Qwen2.5-1.5B-Instruct
  covey doctor Qwen/Qwen3-30B-A3B optim.tokens_per_pass=4096
  covey doctor my-model model.method=full optim.optimizer=adamw8bit
"""

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, hub id, .gguf file or run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of a recipe: model, lora, optim.")
]


def doctor(model: Model, overrides: Overrides = None, debug: Debug = False) -> None:
    """The command."""
    with sentences(debug):
        given = {"model": {"path": model}, "data": {"train": "none"}, "optim": {"steps": 1}}
        config = load_config(given, overrides or [], SftConfig)
        for line in examine(config):
            typer.echo(line)


def examine(config: SftConfig) -> Iterator[str]:
    """Lines about the model of a configuration."""
    import torch

    from covey.policies.load import free_memory, pick_device
    from covey.policies.memory import estimate, read_sizes
    from covey.policies.open import causal_config, choose_path
    from covey.rl.checkpoint import find_adapter, find_model
    from covey.rollout.vllm_versions import TESTED, installed

    section, lora, optim = config.model, config.lora, config.optim
    folder = _with_config(find_model(section.path))
    adapter = None if section.adapter is None else find_adapter(_path(section.adapter))
    options = lora.path_options
    route = choose_path(folder, method=section.method, adapter=adapter, context=section.context, **options)
    known = causal_config(folder)
    sizes = read_sizes(known)
    yield f"model       {section.path} ({known.model_type})"
    yield f"path        {'covey' if route.path == 'decoder' else 'transformers'}: {route.why}"
    frozen = ", which stay frozen" if section.method == "qlora" else ""
    experts = f", {_count(sizes.experts)} of them in experts{frozen}" if sizes.experts else ""
    yield f"parameters  {_count(sizes.total)}{experts}"
    yield f"method      {section.method}" + (
        "" if section.method == "full" else f", rank {lora.rank} on {lora.targets}"
    )

    device = torch.device(pick_device(section.device))
    wide = section.dtype == "float32" or (section.dtype == "auto" and device.type == "cpu")
    yield f"memory      for passes of {optim.tokens_per_pass} tokens, about:"
    for memory in ("lean", "fast"):
        parts = estimate(
            sizes,
            route.path,
            section.method,
            memory,
            rank=lora.rank,
            optimizer=optim.optimizer,
            itemsize=4 if wide else 2,
            tokens=optim.tokens_per_pass,
            on_gpu=device.type == "cuda",
        )
        named = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size >= 2**20)
        yield f"  {memory}      {_gib(sum(parts.values()))} GiB: {named}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine, without a GPU"
    yield f"free        {_gib(free_memory(device))} GiB on {where}"
    version = installed()
    untested = version is not None and version.split("+")[0] not in TESTED
    yield f"vLLM        {version or 'not installed'}" + (", not tested with covey" if untested else "")


def _path(name: str) -> "Path":
    from pathlib import Path

    return Path(name).expanduser()


def _with_config(name: str) -> "Path":
    """A folder with the model's config.json. Of a model on the hub nothing else is fetched."""
    import re

    from covey.policies.locate import ModelError, locate_model

    if _path(name).exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) or name.endswith(".gguf"):
        return locate_model(name)
    from huggingface_hub import hf_hub_download

    try:
        return _path(hf_hub_download(name, "config.json")).parent
    except Exception as error:  # of many kinds: no such model, gated, no network
        raise ModelError(
            f"{name}: its config.json cannot be had from the hub ({type(error).__name__}: {error})"
        ) from error


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}" if size >= 2**30 else f"{size / 2**30:.2f}"


def _count(number: int) -> Any:
    from covey.rl.terminal import count

    return count(number)
