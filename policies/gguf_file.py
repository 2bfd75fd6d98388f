"""A GGUF file as a transformers checkpoint: the same values in safetensors, and the tokenizer."""

import mmap
import struct
from pathlib import Path
from typing import Any

# Vocabularies whose merges were learned on text with every digit by itself; llama.cpp's names for them.
# transformers splits their text like GPT-2, which joins "\n\n" or two spaces differently in front of a digit.
DIGIT_SPLITTERS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def write_converted(file: Path, folder: Path) -> None:
    """Writes config, generation config, weights and tokenizer of `file` into `folder`.

    Weights are stored in the smallest of bfloat16, float16 and float32 that changes no value. Peak memory is
    about twice the model in float32.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if string_value(file, "tokenizer.ggml.pre") in DIGIT_SPLITTERS:
        _split_digits(tokenizer)
    tokenizer.save_pretrained(folder)

    options: Any = {"gguf_file": file.name, "dtype": torch.float32, "output_loading_info": True}
    result: Any = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    loaded, found = result
    if missing := sorted(found["missing_keys"]):  # transformers draws them at random
        raise ValueError(f"it has nothing for {missing[0]}")
    # transformers takes what it read from a GGUF file for quantised and refuses to save or train it, although
    # its weights are plain tensors by now: so they move into a model of the same config without that tag.
    config: Any = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    weights = loaded.state_dict()
    dtype = smallest_exact_dtype(weights.values())
    config.dtype = dtype
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    # Of the processes of a run transformers lets the first one write, and the others return as if they had.
    plain.should_save_on_this_rank = lambda is_main_process: True
    plain.save_pretrained(folder)


def smallest_exact_dtype(weights: Any) -> Any:
    """The first of bfloat16, float16, float32 that holds all these float32 tensors without rounding."""
    import torch

    weights = list(weights)
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(weight, weight.to(dtype).float()) for weight in weights):
            return dtype
    return torch.float32


def string_value(file: Path, key: str) -> str | None:
    """A string of the file's metadata. A key is followed by its type (8: string), a length and the bytes."""
    mark = key.encode() + struct.pack("<I", 8)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(mark)
        if at < 0:
            return None
        start = at + len(mark) + 8
        (length,) = struct.unpack("<Q", data[start - 8 : start])
        return data[start : start + length].decode("utf-8", errors="replace")


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
