"""Models of real shapes with random weights: speed and memory do not depend on what the weights say."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from covey.policies.tiny import byte_tokenizer

SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    family: str
    vocab: int
    hidden: int
    ff: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    tied: bool


SHAPES = {
    "llama3.1-8b": Shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, 500000.0, False),
    "llama3.2-1b": Shape("llama", 128256, 2048, 8192, 16, 32, 8, 64, 500000.0, True),
    "qwen2.5-7b": Shape("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 1000000.0, False),
    "qwen2.5-1.5b": Shape("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 1000000.0, True),
    "tiny": Shape("llama", 512, 64, 128, 2, 4, 2, 16, 10000.0, True),
}


def model_folder(name: str, root: Path) -> Path:
    """The folder of a shape with bf16 weights, written on the first call."""
    folder = root / name
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shape = SHAPES[name]
    config = _config(shape)
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    _write_weights(config, folder)
    (folder / "complete").touch()
    return folder


def _config(s: Shape):
    import transformers

    common = {
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ff,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": s.tied,
        "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": s.theta},
    }
    if s.family == "llama":
        return transformers.LlamaConfig(head_dim=s.head_dim, **common)
    return transformers.Qwen2Config(use_sliding_window=False, **common)


def _write_weights(config, folder: Path) -> None:
    import transformers
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1234)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, meta in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        spread, centre = (0.05, 1.0) if "norm" in name else (0.02, 0.0)
        noise = torch.randn(meta.shape, device=device, generator=generator, dtype=torch.float32)
        tensor = (centre + spread * noise).bfloat16().cpu()
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}  # transformers wants both
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
