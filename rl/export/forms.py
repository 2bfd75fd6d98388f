"""The three forms of an export, each written into an empty folder. They return what is to be known about the result."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from covey.policies.tokenizer import eos_ids
from covey.rl.export.gguf_file import check_finite, check_room, write_gguf
from covey.rl.export.gguf_model import Model
from covey.rl.export.gguf_vocabulary import name_in_file
from covey.rl.export.merge import Merged
from covey.rl.export.ollama import modelfile
from covey.rl.export.source import ADAPTER_FILES, Source, read_json
from covey.rl.model_card import shown

MORE_TEMPLATES = "additional_chat_templates"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def write_adapter(folder: Path, source: Source, tokenizer: Any) -> list[str]:
    """PEFT's files, with a base model that PEFT finds from wherever it is called."""
    assert source.adapter is not None
    config_file, weights_file = ADAPTER_FILES
    config = read_json(source.adapter / config_file)
    config["base_model_name_or_path"] = source.base_name if source.on_hub else str(source.base.resolve())
    _write_json(folder / config_file, config)
    shutil.copyfile(source.adapter / weights_file, folder / weights_file)
    write_tokenizer(folder, source.base, tokenizer)
    return []


def write_merged(
    folder: Path,
    source: Source,
    merged: Merged,
    tokenizer: Any,
    *,
    dtype: torch.dtype | None,
    shard_bytes: int,
    say: Callable[[str], object],
) -> list[str]:
    """transformers' files. dtype: None is the base's own where that has 16 bits, else bfloat16."""
    from huggingface_hub import split_torch_state_dict_into_shards

    halves = (torch.float16, torch.bfloat16)
    dtype = dtype or (merged.dtype if merged.dtype in halves else torch.bfloat16)
    plan = split_torch_state_dict_into_shards(
        {name: torch.empty(merged.shape(name), dtype=dtype, device="meta") for name in merged.names},
        max_shard_size=shard_bytes,
    )
    check_room(folder, plan.metadata["total_size"])
    for number, (file, names) in enumerate(plan.filename_to_tensors.items(), 1):
        if plan.is_sharded:
            say(f"writing {file} ({number} of {len(plan.filename_to_tensors)})")
        _save(folder / file, names, merged, dtype)
    if plan.is_sharded:
        _write_json(folder / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
    _write_configs(folder, source, tokenizer, dtype, untied=merged.untied)
    write_tokenizer(folder, source.base, tokenizer)
    untied = "The base shares its embedding with its head; here they are two, since the adapter trained one of them."
    return [untied] if merged.untied else []


def _write_configs(folder: Path, source: Source, tokenizer: Any, dtype: torch.dtype, *, untied: bool) -> None:
    config = read_json(source.base / "config.json")
    for key in ("quantization_config", "torch_dtype", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if untied:
        config["tie_word_embeddings"] = False
    _write_json(folder / "config.json", config)
    generation_file = source.base / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    ends = eos_ids(source.base, tokenizer)  # all of them end a completion in a run, so they do here
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    _write_json(folder / "generation_config.json", generation)


def write_gguf_folder(
    folder: Path,
    file: str,
    source: Source,
    merged: Merged,
    config: Any,
    tokenizer: Any,
    *,
    quant: str,
    licence: str | None,
) -> list[str]:
    """A GGUF file with the tokenizer and the chat template in it, and a Modelfile for Ollama. config: transformers'."""
    model = Model(config, source.base)
    ends = eos_ids(source.base, tokenizer)
    name, base = name_in_file(source.name, tokenizer), shown(source.base_name)
    facts = {"name": name, "license": licence, "base_model": base}
    notes = write_gguf(folder / file, merged, model, tokenizer, ends, quant=quant, facts=facts)
    adds_bos = tokenizer.backend_tokenizer.encode("a").ids[0] == tokenizer.bos_token_id
    text = modelfile(file, tokenizer, ends, adds_bos=adds_bos, system=source.system)
    (folder / "Modelfile").write_text(text, "utf-8")
    return model.notes + notes


def write_tokenizer(folder: Path, base: Path, tokenizer: Any) -> None:
    """The base model's tokenizer files as they are, with the chat template of `tokenizer`."""
    for name in TOKENIZER_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    if (base / MORE_TEMPLATES).is_dir():
        shutil.copytree(base / MORE_TEMPLATES, folder / MORE_TEMPLATES)
    if isinstance(tokenizer.chat_template, str):
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, "utf-8")
        if (file := folder / "tokenizer_config.json").is_file():
            config = read_json(file)
            config.pop("chat_template", None)
            _write_json(file, config)


def _save(file: Path, names: Sequence[str], merged: Merged, dtype: torch.dtype) -> None:
    shard: dict[str, torch.Tensor] = {}
    for name in names:
        weight = merged.read(name)
        check_finite(name, weight, dtype)
        shard[name] = weight.to(dtype).contiguous()
    save_file(shard, file, metadata={"format": "pt"})


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
