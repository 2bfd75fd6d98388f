"""What the decoder needs to know about a model, read from a Hugging Face configuration with policies/families.py.

One layer, with everything that some family has; what a family lacks is left out:

    a   = attention(rope(norm_q(Q n1)), rope(norm_k(K n1)), V n1)              n1 = norm1(x), or x
    h   = x + residual_scale * post1(O a)
    out = h + residual_scale * post2(D (act(G n2) * (U n2)))                   n2 = norm2(h), or h

with Q n1, K n1 and V n1 clipped to [-qkv_clip, qkv_clip] where that is given, and scores s = attention_scale * q k,
capped to c tanh(s / c) where there is a soft-cap c, of the last `window` positions or of all. Before the layers
x = embedding_scale * embedding, behind them logits = logit_scale * head(norm(x)), capped too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from covey.policies.families import FAMILIES, LLAMA_NORMS
from covey.policies.locate import ModelError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
# Models that also read images, with the model_type of their text part, which is the decoder here.
WITH_IMAGES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
# Options of a configuration that change the layer into one which is not the decoder's.
OUTSIDE = {
    "use_bidirectional_attention": "covey's decoder is causal",
    "use_parallel_residual": "in covey's decoder the MLP reads what the attention adds",
    "qk_layernorm": "covey's decoder norms q and k by root mean square alone",
}


class OutsideDecoder(ModelError):
    """A model or an option that the decoder does not cover, though transformers and PEFT may."""


class Rotary(NamedTuple):
    """Frequencies of one rotary table; angles are position * inv_freq, cos and sin are multiplied by `scaling`."""

    inv_freq: (
        Tensor  # float32 [d_rot / 2]; fewer than head_dim / 2: only the first d_rot dimensions are turned
    )
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    window: int = 0  # positions that a query sees, its own included; 0: all before it
    rope: int = 0  # which of ModelSpec.ropes; without positions (NoPE) it is one whose frequencies are all 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and switches of one decoder."""

    family: str  # model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tied_head: bool
    norm_eps: float
    attention_scale: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rotary, ...]
    norms: Mapping[str, str]  # those of norm1, post1, norm2, post2 that a layer has, with their stored names
    prefix: str = "model."  # what names of weights in transformers begin with; files may have another
    norm_kind: Literal["rms", "layer"] = "rms"  # those of q and k are always by root mean square
    norm_parts: tuple[str, ...] = ("weight",)  # what is stored of each: a weight, a bias too, or nothing
    norm_plus_one: bool = False  # every norm of the model multiplies by 1 + weight
    qk_norm: Literal["", "head", "all"] = ""  # of each query and key head, or of all heads together
    qkv_bias: bool = False
    qkv_clip: float = 0.0  # 0: none
    o_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False  # the checkpoint holds Q, K and V as one matrix, and G and U
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0  # 0: none
    embedding_scale: float = 1.0  # rounded to the compute dtype
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct sliding windows, ascending; empty where every layer sees everything."""
        return tuple(sorted({layer.window for layer in self.layers if layer.window}))

    @property
    def num_parameters(self) -> int:
        """Parameters of the base model."""
        layer = sum(n * k + n * bias for n, k, bias in self.linears.values())
        norm = len(self.norm_parts) * self.hidden_size
        layer += len(self.norms) * norm + sum(self.qk_norm_sizes)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * layer + embeddings + norm

    def kept_bytes(self, itemsize: int) -> int:
        """About what a layer keeps of a token for its backward."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # q, the attention's output, k and v
        if self.qk_norm:
            heads += self.num_heads + self.num_kv_heads  # q and k before their norms
        widths = 4 + len({"post1", "post2"} & set(self.norms))  # of the hidden size
        kept = (widths * self.hidden_size + 2 * self.intermediate_size + heads * self.head_dim) * itemsize
        if self.qkv_clip:  # a byte each says whether it was clipped
            kept += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return kept

    @property
    def qk_norm_sizes(self) -> tuple[int, ...]:
        """Sizes of the weights q_norm and k_norm; empty where there are none."""
        d = self.head_dim
        sizes = {"": (), "head": (d, d), "all": (self.num_heads * d, self.num_kv_heads * d)}
        return sizes[self.qk_norm]

    @property
    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """Every linear of a layer by its checkpoint name: (outputs, inputs, has a bias)."""
        h, ff = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.fused:
            before = {"self_attn.qkv_proj": (q + 2 * kv, h, self.qkv_bias)}
            gates = {"mlp.gate_up_proj": (2 * ff, h, self.mlp_bias)}
        else:
            before = {
                f"self_attn.{x}_proj": (n, h, self.qkv_bias) for x, n in zip("qkv", (q, kv, kv), strict=True)
            }
            gates = {f"mlp.{x}_proj": (ff, h, self.mlp_bias) for x in ("gate", "up")}
        return {
            **before,
            "self_attn.o_proj": (h, q, self.o_bias),
            **gates,
            "mlp.down_proj": (h, ff, self.mlp_bias),
        }


def read_spec(folder: Path, context: int | None = None) -> ModelSpec:
    """The spec of the checkpoint in `folder`.

    context: the longest sequence that is wanted. Only models whose frequencies depend on it (LongRoPE, dynamic NTK)
    ask: they get those for `context` tokens, and without it those of their first training, with max_positions as short.
    Raises OutsideDecoder for what the decoder does not cover, ModelError for what is wrong.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file}: not a JSON file ({error}); copy or download it again") from error
    kind = raw.get("model_type")
    with_images = kind in WITH_IMAGES
    if with_images:
        kind = (raw.get("text_config") or {}).get("model_type", WITH_IMAGES[kind])
    if kind not in FAMILIES:
        raise OutsideDecoder(
            f'{file}: model_type "{kind}" is not one that covey\'s decoder covers (docs/models.md)'
        )
    _check_quantisation(raw.get("quantization_config"), file)
    whole = _load_config(folder, file)
    config = whole.text_config if with_images else whole
    for option, why in OUTSIDE.items():
        if getattr(config, option, False):
            raise OutsideDecoder(f"{file}: {option} is set; {why}")
    changes = FAMILIES[kind].read(config)
    count = config.num_hidden_layers
    windows = changes.pop("windows", [None] * count)
    turned = changes.pop("turned", [True] * count)
    longest = changes.pop("longest", None)
    ropes, which, limit = _ropes(config, turned, context, file)
    limit = min(limit, longest or limit)
    if context is not None and context > limit:
        raise ModelError(f"{file}: {context} tokens of context are wanted, the model has {limit} positions")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if "activation" not in changes and activation not in ACTIVATIONS:
        raise OutsideDecoder(f'{file}: activation "{activation}" is none of {", ".join(ACTIVATIONS)}')
    defaults = {
        "norm_eps": getattr(config, "rms_norm_eps", None),  # families with other norms say theirs
        "norms": LLAMA_NORMS,
        "activation": ACTIVATIONS.get(activation),
        "attention_scale": _head_dim(config) ** -0.5,
    }
    return ModelSpec(
        family=kind,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        max_positions=limit,
        tied_head=bool(whole.tie_word_embeddings),
        layers=tuple(LayerSpec(w or 0, r) for w, r in zip(windows, which, strict=True)),
        ropes=ropes,
        prefix="model.language_model." if with_images else "model.",
        **{**defaults, **changes},
    )


def _load_config(folder: Path, file: Path) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:  # checks of many kinds
        raise ModelError(
            f"{file}: transformers {transformers.__version__} does not take it ({error})"
        ) from error


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check_quantisation(settings: dict[str, Any] | None, file: Path) -> None:
    """Raises OutsideDecoder for weights that are stored in another form than plain or bitsandbytes' NF4."""
    if not settings:
        return
    method = settings.get("quant_method", "an unnamed method")
    if method == "bitsandbytes":
        kind = settings.get("bnb_4bit_quant_type", "fp4")  # its default
        if settings.get("load_in_4bit") and kind == "nf4":
            return
        method = f"bitsandbytes ({kind if settings.get('load_in_4bit') else '8 bits'})"
    raise OutsideDecoder(
        f"{file}: the weights are stored quantised by {method}, and covey's decoder reads bitsandbytes' NF4 alone; "
        "use such a checkpoint or the 16-bit original (which is quantised on the way in)"
    )


def _ropes(
    config: Any, turned: list[bool], context: int | None, file: Path
) -> tuple[tuple[Rotary, ...], list[int], int]:
    """The distinct rotary tables, which of them each layer uses, and how many positions they serve."""
    by_type = any(isinstance(value, dict) for value in config.rope_parameters.values())
    types = config.layer_types if by_type else [None] * len(turned)
    wanted = [(kind, is_turned) for kind, is_turned in zip(types, turned, strict=True)]
    wanted = [pair if pair[1] else (None, False) for pair in wanted]
    distinct = list(dict.fromkeys(wanted))
    still = Rotary(torch.zeros(_head_dim(config) // 2))
    limit = config.max_position_embeddings
    tables = [_rope(config, kind, context, file) if on else (still, limit) for kind, on in distinct]
    return (
        tuple(table for table, _ in tables),
        [distinct.index(pair) for pair in wanted],
        min(limit for _, limit in tables),
    )


def _rope(config: Any, layer_type: str | None, context: int | None, file: Path) -> tuple[Rotary, int]:
    """One rotary table, and how many positions it serves."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind, limit = settings.get("rope_type", "default"), config.max_position_embeddings
    if kind == "default":
        size = int(_head_dim(config) * settings.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
        return Rotary(1.0 / settings["rope_theta"] ** exponent), limit
    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
        raise OutsideDecoder(f'{file}: rope_type "{kind}" is unknown; {known} are')
    original = settings.get("original_max_position_embeddings", limit)
    if kind == "longrope" and (context or 0) <= original:
        limit = context = min(original, limit)
    if kind == "dynamic":
        limit = context = max(limit, context or 0)
    which = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=context, **which)
    return Rotary(inv_freq.float(), float(scaling)), limit
