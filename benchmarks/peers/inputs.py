"""What every peer gets: the same weights, the same tokens, the same advantages and the same adapter."""

import json
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from covey.policies.tiny import ROWS

FIRST_ID = ROWS  # smaller ids are bytes, special tokens and padding, which some losses mask out


@dataclass(frozen=True)
class Rollouts:
    """A group: G completions of one prompt."""

    prompt: Tensor  # int64 [P]
    completions: Tensor  # int64 [G, N]
    advantages: Tensor  # float32 [G]

    @property
    def ids(self) -> Tensor:
        """Every completion behind its prompt, int64 [G, P + N]."""
        return torch.cat([self.prompt.expand(len(self.completions), -1), self.completions], dim=1)

    def to(self, device: torch.device) -> "Rollouts":
        return Rollouts(*(t.to(device) for t in (self.prompt, self.completions, self.advantages)))


def parse_work(spec: str) -> tuple[str, int, list[int]]:
    """(kind, rows, lengths of a row's parts) of sft:ROWSxTOKENS, grpo:GxPROMPT+NEW or logp:GxPROMPT+NEW."""
    match = re.fullmatch(r"(sft):(\d+)x(\d+)|(grpo|logp):(\d+)x(\d+)\+(\d+)", spec)
    if match is None:
        raise ValueError(f"{spec}: work is sft:ROWSxTOKENS, grpo:GxPROMPT+NEW or logp:GxPROMPT+NEW")
    kind, rows, *lengths = (part for part in match.groups() if part is not None)
    return kind, int(rows), [int(n) for n in lengths]


def read_work(spec: str, vocab: int) -> tuple[str, Tensor | Rollouts, int]:
    """(kind, token ids [R, T] or a group, tokens it stands for), on the CPU."""
    kind, rows, lengths = parse_work(spec)
    random, count = np.random.default_rng(0), rows * sum(lengths)
    if kind == "sft":
        return kind, torch.from_numpy(random.integers(FIRST_ID, vocab, size=(rows, *lengths))), count
    prompt, completions = (
        torch.from_numpy(random.integers(FIRST_ID, vocab, size=(rows, n))) for n in lengths
    )
    # Advantages whose mean is not 0, or the loss would be.
    return kind, Rollouts(prompt[0], completions, torch.linspace(-1.0, 1.5, rows)), count


def prompts_of(count: int, length: int, vocab: int) -> list[list[int]]:
    """Prompts to sample from: `count` of `length` tokens."""
    return np.random.default_rng(0).integers(FIRST_ID, vocab, size=(count, length)).tolist()


def ends_of(mean: int, vocab: int) -> tuple[int, ...]:
    """As many ids that end a completion as let it have `mean` tokens on average, where all are equally probable."""
    return tuple(np.random.default_rng(1).choice(vocab, size=max(1, vocab // mean), replace=False).tolist())


def adapter_value(name: str, shape: torch.Size) -> Tensor:
    """A parameter of the adapter, float32, drawn from its PEFT name: A spread as PEFT's first one, B not zero."""
    key = name[name.index("layers.") :].replace(".default", "")
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    spread = 1 / math.sqrt(3 * shape[1]) if "lora_A" in name else 0.01
    return spread * torch.randn(shape, generator=generator)


def as_downloaded(folder: Path) -> Path:
    """The folder with what a download has and covey does without: transformers wants the first, Unsloth all three."""
    import transformers

    index = folder / "model.safetensors.index.json"
    shards = json.loads(index.read_text())
    if "metadata" not in shards:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        index.write_text(json.dumps({"metadata": {"total_size": size}} | shards))
    if not (folder / "generation_config.json").exists():
        config = transformers.AutoConfig.from_pretrained(folder)
        architecture: type = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # type: ignore
        config.architectures = [architecture.__name__]
        config.save_pretrained(folder)
        transformers.GenerationConfig(eos_token_id=config.eos_token_id).save_pretrained(folder)
    return folder
