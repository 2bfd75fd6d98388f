"""The model families that the decoder covers, and what each takes from its Hugging Face configuration.

A family's function gets the configuration and returns the fields of ModelSpec (policies/spec.py) that are not Llama's,
and where its layers differ two lists with one entry per layer: `windows` (positions that a query sees, or None) and
`turned` (False: no rotary embedding). What all families share is read in policies/spec.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Changes = dict[str, Any]

LLAMA_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
GEMMA_NORMS = {
    "norm1": "input_layernorm",
    "post1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post2": "post_feedforward_layernorm",
}
OLMO2_NORMS = {"post1": "post_attention_layernorm", "post2": "post_feedforward_layernorm"}


@dataclass(frozen=True, slots=True)
class Family:
    models: str  # as people call them
    particular: str  # what is not as in Llama
    read: Callable[[Any], Changes]


def window_of_all(config: Any) -> list[int | None]:
    return [config.sliding_window] * config.num_hidden_layers


def window_by_type(config: Any) -> list[int | None]:
    """The window of every layer that config.layer_types calls a sliding one."""
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


def llama(config: Any) -> Changes:
    bias = config.attention_bias
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": config.mlp_bias}


def mistral(config: Any) -> Changes:
    return {"windows": window_of_all(config)}


def ministral(config: Any) -> Changes:
    return {"windows": window_by_type(config)}


def ministral3(config: Any) -> Changes:
    """Its queries grow with log(1 + floor(position / original)), which is 0 at all positions before `original`."""
    return {
        "windows": window_of_all(config),
        "longest": config.rope_parameters["original_max_position_embeddings"],
    }


def qwen2(config: Any) -> Changes:
    return {"windows": window_by_type(config), "qkv_bias": True}


def qwen3(config: Any) -> Changes:
    bias = config.attention_bias
    return {"windows": window_by_type(config), "qkv_bias": bias, "o_bias": bias, "qk_norm": "head"}


def smollm3(config: Any) -> Changes:
    turned = [bool(flag) for flag in config.no_rope_layers]  # 1 says that a layer has RoPE
    return {**llama(config), "windows": window_by_type(config), "turned": turned}


def phi3(config: Any) -> Changes:
    return {"windows": window_of_all(config), "fused": True}


def gemma(config: Any) -> Changes:
    bias, scale = config.attention_bias, config.hidden_size**0.5
    changes = {"norm_plus_one": True, "embedding_scale": scale, "qkv_bias": bias, "o_bias": bias}
    if getattr(config, "hidden_act", None) == "gelu":  # by which the first release meant the other form
        changes["activation"] = "gelu_tanh"
    return changes


def gemma2(config: Any) -> Changes:
    return {
        **gemma(config),
        "windows": window_by_type(config),
        "norms": GEMMA_NORMS,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping or 0.0,
        "logit_softcap": config.final_logit_softcapping or 0.0,
    }


def vaultgemma(config: Any) -> Changes:
    return {**gemma2(config), "norms": {name: GEMMA_NORMS[name] for name in ("norm1", "norm2")}}


def gemma3(config: Any) -> Changes:
    return {
        **gemma2(config),
        "qk_norm": "head",
        "attention_softcap": 0.0,
    }  # which its attention never applies


def olmo(config: Any) -> Changes:
    bias = config.attention_bias
    norms = {"norm_kind": "layer", "norm_parts": (), "norm_eps": 1e-5}  # no setting of its configuration
    return {**norms, "qkv_bias": bias, "o_bias": bias, "qkv_clip": config.clip_qkv or 0.0}


def olmo2(config: Any) -> Changes:
    bias = config.attention_bias
    return {"norms": OLMO2_NORMS, "qk_norm": "all", "qkv_bias": bias, "o_bias": bias}


def olmo3(config: Any) -> Changes:
    return {**olmo2(config), "windows": window_by_type(config)}


def stablelm(config: Any) -> Changes:
    norms = {"norm_kind": "layer", "norm_parts": ("weight", "bias"), "norm_eps": config.layer_norm_eps}
    return {**norms, "qkv_bias": config.use_qkv_bias}


def granite(config: Any) -> Changes:
    return {
        **llama(config),
        "attention_scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logits_scaling,
    }


def hyperclovax(config: Any) -> Changes:
    post = {"post1": "post_norm1", "post2": "post_norm2"} if config.use_post_norm else {}
    return {**granite(config), "norms": LLAMA_NORMS | post, "logit_scale": config.logits_scaling}


def seed_oss(config: Any) -> Changes:
    return {**llama(config), "o_bias": config.attention_out_bias}


def exaone4(config: Any) -> Changes:
    """With windows, the layers without one have no rotary embedding."""
    turned = [config.sliding_window is None or kind == "sliding_attention" for kind in config.layer_types]
    return {"windows": window_by_type(config), "turned": turned, "norms": OLMO2_NORMS, "qk_norm": "head"}


FAMILIES = {
    "llama": Family(
        "Llama 2, 3, 3.1, 3.2, 3.3, CodeLlama, TinyLlama, SmolLM, SmolLM2, Yi, DeepSeek LLM and Coder, "
        "DeepSeek-R1-Distill-Llama",
        "",
        llama,
    ),
    "qwen2": Family("Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen", "biases of q, k and v", qwen2),
    "qwen3": Family("Qwen3 (dense), DeepSeek-R1-0528-Qwen3", "norms of q and k", qwen3),
    "mistral": Family("Mistral 7B, Nemo, Small (since 3.1 the text part)", "a sliding window", mistral),
    "ministral": Family("Ministral 8B", "windows in some layers", ministral),
    "ministral3": Family("Ministral 3 (the text part)", "YaRN, up to its original positions", ministral3),
    "smollm3": Family("SmolLM3", "every fourth layer without positions", smollm3),
    "phi3": Family("Phi-3, Phi-3.5, Phi-4, Phi-4-mini", "fused projections, LongRoPE, partial rotary", phi3),
    "gemma": Family("Gemma, CodeGemma", "norms of 1 + w, GEGLU, scaled embeddings", gemma),
    "gemma2": Family("Gemma 2", "as Gemma, soft-caps, alternating windows, norms behind each part", gemma2),
    "gemma3_text": Family(
        "Gemma 3 (of the larger ones the text part)",
        "as Gemma 2, norms of q and k, two RoPEs, no caps",
        gemma3,
    ),
    "vaultgemma": Family("VaultGemma", "as Gemma 2, no norms behind the parts", vaultgemma),
    "olmo": Family("OLMo 1, OLMo 1.7", "layer norms without weights, q, k and v clipped", olmo),
    "olmo2": Family("OLMo 2", "norms behind each part only, norms of all of q and of k", olmo2),
    "olmo3": Family("OLMo 3", "as OLMo 2, windows in three of four layers", olmo3),
    "stablelm": Family(
        "StableLM and Zephyr 3B, StableLM 2 1.6B, Stable Code 3B",
        "layer norms with biases, partial rotary",
        stablelm,
    ),
    "granite": Family("Granite 3 (dense)", "four multipliers", granite),
    "hyperclovax": Family("HyperCLOVA X", "as Granite, norms behind each part", hyperclovax),
    "exaone4": Family(
        "EXAONE 4", "as OLMo 2, norms of q and k by head, windows, layers without positions", exaone4
    ),
    "seed_oss": Family("Seed-OSS", "biases of q, k and v", seed_oss),
    "cwm": Family("Code World Model", "windows in three of four layers", ministral),
    "internlm3": Family("InternLM3", "", llama),
    "iquestcoder": Family("IQuest-Coder", "", llama),
}


def families_table() -> str:
    """FAMILIES as a Markdown table, for README.md."""
    rows = [("`model_type`", "models", "besides Llama's layer"), ("---",) * 3]
    rows += [(f"`{name}`", family.models, family.particular) for name, family in FAMILIES.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
