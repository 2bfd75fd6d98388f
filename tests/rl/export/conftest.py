"""Models and adapters to export: random ones, with everything far from trivial values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.policies.tiny import CHAT_TEMPLATE

IDS = [5, 17, 3, 88, 42, 42, 7, 61, 30, 2, 9, 71]  # some tokens of every model here


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[..., Path]:
    """write(folder) writes a byte-level BPE tokenizer as GPT-2's, with merges: 259 tokens and 3 added ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def write(folder: Path, **settings: Any) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
        vocabulary = {token: i for i, token in enumerate([*alphabet, "th", "the", "Ġthe"])}
        core = Tokenizer(models.BPE(vocabulary, merges))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        core.add_tokens(["<think>"])
        PreTrainedTokenizerFast(
            tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE, **settings
        ).save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def write_model(write_tokenizer: Callable[..., Path]) -> Callable[..., Path]:
    """write(folder, config, dtype) writes a random checkpoint of a transformers configuration, with that tokenizer."""
    from transformers import AutoModelForCausalLM

    def write(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> Path:
        centre = 0.0 if config.model_type.startswith("gemma") else 1.0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if "norm" in name:
                        weight.copy_(centre + 0.2 * torch.randn_like(weight))
                    elif name.endswith("bias"):
                        weight.copy_(0.2 * torch.randn_like(weight))
        model.to(dtype).save_pretrained(folder)
        return write_tokenizer(folder)

    return write


def _sizes(**changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": 270,  # 8 rows more than the tokenizer has tokens
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 260,
        "pad_token_id": None,
        "dtype": "float32",
    }
    return sizes | changes


@pytest.fixture(scope="session")
def sizes() -> Callable[..., dict[str, Any]]:
    """sizes(key=value) gives the keyword arguments of a small model's configuration."""
    return _sizes


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    """A random Llama with its own head, and the tokenizer above."""
    from transformers import LlamaConfig

    config = LlamaConfig(**_sizes(tie_word_embeddings=False))
    return write_model(tmp_path_factory.mktemp("llama"), config)


@pytest.fixture(scope="session")
def tied_qwen2(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    """A random Qwen2 with biases, whose head is its embedding, and the tokenizer above."""
    from transformers import Qwen2Config

    config = Qwen2Config(**_sizes(tie_word_embeddings=True))
    return write_model(tmp_path_factory.mktemp("tied_qwen2"), config)


@pytest.fixture(scope="session")
def train() -> Callable[..., tuple[Any, Path]]:
    """train(base, folder, method=...) gives a policy in fp32 with a random adapter, and the folder that is saved in."""
    from covey.policies.load import load_policy

    def make(base: Path, folder: Path, **settings: Any) -> tuple[Any, Path]:
        policy = load_policy(base, rank=4, alpha=12.0, dtype="float32", device="cpu", **settings)
        generator = torch.Generator().manual_seed(1)
        flat = policy.parameters()[0]
        with torch.no_grad():
            flat.copy_(0.1 * torch.randn(flat.shape, generator=generator))
        policy.save_adapter(folder, str(base))
        return policy, folder

    return make


@pytest.fixture(scope="session")
def logits() -> Callable[..., torch.Tensor]:
    """logits(model or folder) of IDS, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    def compute(model: Any, ids: list[int] | None = None) -> torch.Tensor:
        if isinstance(model, str | Path):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            return model(torch.tensor([ids or IDS])).logits[0]

    return compute


@pytest.fixture(scope="session")
def ids() -> list[int]:
    return IDS
