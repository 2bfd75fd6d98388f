"""What the decoder needs to know about an architecture, read from a Hugging Face configuration."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.policies.locate import ModelError

FAMILIES = ("llama", "qwen2")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and switches of one decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied_head: bool
    max_positions: int
    inv_freq: Tensor  # float32 [head_dim / 2]
    rope_scaling: float  # multiplies cos and sin

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def num_parameters(self) -> int:
        """Parameters of the base model."""
        layer = sum(n * k + n * bias for n, k, bias in self.linears.values()) + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @property
    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """Every linear of a layer by its checkpoint name: (outputs, inputs, has a bias)."""
        h, ff = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, h, self.qkv_bias),
            "self_attn.k_proj": (kv, h, self.qkv_bias),
            "self_attn.v_proj": (kv, h, self.qkv_bias),
            "self_attn.o_proj": (h, q, self.o_bias),
            "mlp.gate_proj": (ff, h, self.mlp_bias),
            "mlp.up_proj": (ff, h, self.mlp_bias),
            "mlp.down_proj": (h, ff, self.mlp_bias),
        }


def read_spec(folder: Path) -> ModelSpec:
    """The spec of the checkpoint in `folder`. Raises ModelError for architectures that are not supported yet."""
    file = folder / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f'{file}: model_type "{family}" is not supported yet; covey trains {", ".join(FAMILIES)} models'
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f'{file}: hidden_act "{raw["hidden_act"]}" is not supported yet; only "silu" is')
    if raw.get("quantization_config"):
        raise ModelError(
            f"{file}: this checkpoint is stored quantised, which cannot be read yet; "
            "use the 16-bit original (covey quantises it on the way in)"
        )

    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if family == "qwen2" and config.use_sliding_window:
        raise ModelError(
            f"{file}: use_sliding_window is not supported yet; set it to false if your texts are short"
        )
    inv_freq, rope_scaling = _rope(config, file)
    bias = bool(getattr(config, "attention_bias", False))
    return ModelSpec(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        tied_head=bool(config.tie_word_embeddings),
        max_positions=config.max_position_embeddings,
        inv_freq=inv_freq,
        rope_scaling=rope_scaling,
    )


def _rope(config: Any, file: Path) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2] and the factor on cos and sin."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ModelError(f'{file}: rope_type "{kind}" is not supported yet; {", ".join(ROPE_TYPES)} are')
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return torch.exp(-math.log(rope["rope_theta"]) * exponent.double()).float(), 1.0

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq.float(), float(scaling)
