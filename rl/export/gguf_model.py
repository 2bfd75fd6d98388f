"""What llama.cpp calls a model: its architecture, the metadata that describe it, its tensors' names and layouts.

Only what llama.cpp computes exactly as transformers does is let through; anything else is refused or noted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from covey.rl.export.source import ExportError


@dataclass(frozen=True, slots=True)
class Architecture:
    """name: llama.cpp's. interleaved: its RoPE turns neighbouring dimensions, so that rows of Q and K change places.

    plus_one: transformers multiplies by 1 + w in its norms, llama.cpp by w. windows: every so many layers one without a
    sliding window. bias: may have biases that its Q, K and V are not bound to have.
    """

    name: str
    interleaved: bool = False
    plus_one: bool = False
    windows: int = 0
    bias: bool = False
    activation: tuple[str, ...] = ("silu",)


GELU = ("gelu_pytorch_tanh", "gelu")  # the first Gemma says gelu and means the other
ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True, bias=True),
    "mistral": Architecture("llama", interleaved=True),
    "granite": Architecture("granite", interleaved=True, bias=True),
    "smollm3": Architecture("smollm3", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "phi3": Architecture("phi3"),
    "olmo2": Architecture("olmo2"),
    "gemma": Architecture("gemma", plus_one=True, activation=GELU),
    "gemma2": Architecture("gemma2", plus_one=True, windows=2, activation=GELU),
    "gemma3_text": Architecture("gemma3", plus_one=True, windows=6, activation=GELU),
}


class Model:
    """The model whose configuration is `config` (transformers'), as llama.cpp sees it.

    notes: sentences about what the file cannot say. Raises ExportError for what it cannot hold.
    """

    def __init__(self, config: Any, folder: Path):
        self.config, self.folder = config, folder
        self.notes: list[str] = []
        kind = ARCHITECTURES.get(config.model_type)
        if kind is None:
            raise self._refusal(
                f'model_type "{config.model_type}" ({", ".join(ARCHITECTURES)} can be written)'
            )
        self.kind = kind
        self.heads, self.layers = config.num_attention_heads, config.num_hidden_layers
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self._check()
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.name)
        self._names = gguf.get_tensor_name_map(arch, self.layers)

    def _refusal(self, what: str) -> ExportError:
        return ExportError(
            f"{self.folder / 'config.json'}: {what}: not known to be right in GGUF. Export --to merged and try "
            "llama.cpp's convert_hf_to_gguf.py on that"
        )

    def _check(self) -> None:
        config, kind = self.config, self.kind
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        if activation not in kind.activation:
            raise self._refusal(f'activation "{activation}"')
        for key in ("attention_bias", "mlp_bias"):
            if getattr(config, key, False) and not kind.bias:
                raise self._refusal(f"{key} true")
        if kind.name == "smollm3" and list(config.no_rope_layers) != [
            (i + 1) % 4 > 0 for i in range(self.layers)
        ]:
            raise self._refusal("no_rope_layers other than every 4th")
        if kind.windows:
            pattern = ["full" if (i + 1) % kind.windows == 0 else "sliding" for i in range(self.layers)]
            if [layer.removesuffix("_attention") for layer in config.layer_types] != pattern:
                raise self._refusal(f"layer_types other than a full one every {kind.windows} layers")
            # llama.cpp divides by sqrt(head_dim), except in the 27B models, which it knows by their layers.
            usual = self.layers not in (46, 62) and config.query_pre_attn_scalar == self.head_dim
            special = (
                self.layers in (46, 62) and config.query_pre_attn_scalar * self.heads == config.hidden_size
            )
            if not (usual or special):
                raise self._refusal(f"query_pre_attn_scalar {config.query_pre_attn_scalar}")
        elif window := self._window():
            self.notes.append(
                f"llama.cpp has no sliding window for this model, so beyond {window} tokens of context it differs"
            )

    def _window(self) -> int | None:
        """A sliding window that some layer has, if it is shorter than the model's context."""
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        used = window and (kinds is None or "sliding_attention" in kinds)
        return window if used and window < self.config.max_position_embeddings else None

    def describe(self, writer: gguf.GGUFWriter) -> dict[str, Tensor]:
        """Adds the model's metadata, and returns tensors that llama.cpp wants beside the model's own (float32)."""
        config, kind = self.config, self.kind
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if kind.windows:
            writer.add_sliding_window(config.sliding_window)
        if kind.name == "gemma2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        if kind.name == "granite":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
        return self._rope(writer)

    def _rope(self, writer: gguf.GGUFWriter) -> dict[str, Tensor]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        rope = self.config.rope_parameters
        if "full_attention" in rope:
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
            rope = rope["full_attention"]
        kind, factor = rope.get("rope_type", "default"), rope.get("factor")
        turned = int(self.head_dim * rope.get("partial_rotary_factor", 1.0))
        if self.kind.interleaved and turned != self.head_dim:
            raise self._refusal("partial_rotary_factor")
        writer.add_rope_dimension_count(turned)
        writer.add_rope_freq_base(rope["rope_theta"])
        if kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        elif kind == "yarn":
            plain = {
                "beta_fast": 32,
                "beta_slow": 1,
                "attention_factor": None,
                "mscale": None,
                "truncate": True,
            }
            if odd := [key for key, value in plain.items() if (rope.get(key) or value) != value]:
                raise self._refusal(f"rope_parameters with {odd[0]}")
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(factor)
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        elif kind == "llama3" and self.kind.interleaved and self.kind.name != "smollm3":
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self.config, torch.device("cpu"))
            exponent = torch.arange(0, turned, 2).double() / turned
            return {"rope_freqs.weight": (rope["rope_theta"] ** -exponent / scaled.double()).float()}
        elif kind == "longrope" and self.kind.name == "phi3":
            original = rope["original_max_position_embeddings"]
            _, attention = ROPE_INIT_FUNCTIONS["longrope"](self.config, torch.device("cpu"), seq_len=original)
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(attention)
            return {
                f"rope_factors_{k}.weight": torch.tensor(rope[f"{k}_factor"]).float()
                for k in ("long", "short")
            }
        elif kind == "dynamic":
            self.notes.append(
                "llama.cpp has no dynamic RoPE: beyond the model's own context length it differs"
            )
        elif kind != "default":
            raise self._refusal(f'rope_type "{kind}"')
        return {}

    def name(self, name: str) -> str:
        """llama.cpp's name of a tensor."""
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise self._refusal(f"the tensor {name}")
        return found

    def convert(self, name: str, weight: Tensor) -> Tensor:
        """A tensor as llama.cpp wants it."""
        if self.kind.plus_one and name.endswith("norm.weight"):
            return weight + 1
        part = name.rsplit(".", 2)[-2]
        if self.kind.interleaved and part in ("q_proj", "k_proj"):
            heads = self.heads if part == "q_proj" else self.kv_heads
            halves = weight.view(heads, 2, self.head_dim // 2, *weight.shape[1:])
            return halves.transpose(1, 2).reshape(weight.shape)
        return weight


def wanted(names: list[str]) -> Iterator[str]:
    """Tensors that are part of a model: old checkpoints also hold what can be computed from the configuration."""
    return (name for name in names if not name.endswith((".rotary_emb.inv_freq", ".masked_bias")))
