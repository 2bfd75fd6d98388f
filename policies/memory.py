"""How large a model is and what training it takes, from its architecture alone: no weight is read.

Bytes that are counted from tensors are exact; those of activations are rough, and what the allocator loses between
tensors is left out.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from covey.kernels.head import chunk_rows

NF4_BYTES = 0.5 + 1 / 64 + 4 / 64 / 256  # a weight, its share of a scale in 8 bits, and of that one's scale
MOMENTS = {"adamw": 8.0, "adamw8bit": 2 + 8 / 256, "paged_adamw8bit": 2 + 8 / 256}  # bytes per trained weight


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parameters of a causal language model."""

    total: int
    linears: int  # in linears of layers, which an adapter may be on; without experts
    experts: int
    per_rank: int  # of an adapter of rank 1 on all those linears
    layers: int
    hidden: int
    inner: int  # width of the feed-forward layers that a token passes, all its experts together
    heads: int  # width of q, k, v and the attention's output together
    vocab: int


def read_sizes(config: Any) -> Sizes:
    """Of the architecture of a transformers configuration."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linears = [
        m
        for m in model.modules()
        if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings()
    ]
    c = config.get_text_config()
    inner = getattr(c, "intermediate_size", None) or 4 * c.hidden_size
    if experts := getattr(c, "num_experts_per_tok", None):
        inner = experts * (getattr(c, "moe_intermediate_size", None) or inner)
    count = getattr(c, "num_attention_heads", None) or 1
    dim = getattr(c, "head_dim", None) or c.hidden_size // count
    return Sizes(
        total=model.num_parameters(),
        linears=sum(m.weight.numel() for m in linears),
        experts=sum(p.numel() for name, p in model.named_parameters() if ".experts." in name),
        per_rank=sum(m.in_features + m.out_features for m in linears),
        layers=c.num_hidden_layers,
        hidden=c.hidden_size,
        inner=inner,
        heads=2 * dim * (count + (getattr(c, "num_key_value_heads", None) or count)),
        vocab=c.vocab_size,
    )


def activation_bytes(
    sizes: Sizes, tokens: int, itemsize: int, path: Literal["decoder", "transformers"]
) -> int:
    """What is kept of all layers for the backward of so many tokens.

    The decoder keeps what its formulas read, autograd what every operation reads: inputs of linears and norms, both
    factors of products, and the adapters' copies.
    """
    if path == "decoder":
        per_token = 4 * sizes.hidden + 2 * sizes.inner + sizes.heads
    else:
        per_token = 12 * sizes.hidden + 5 * sizes.inner + 2 * sizes.heads
    return tokens * sizes.layers * per_token * itemsize


def dequantised_bytes(sizes: Sizes, path: Literal["decoder", "transformers"], itemsize: int) -> int:
    """What memory "fast" keeps of 4-bit weights: the decoder all that it has read back, autograd the experts."""
    return (sizes.linears if path == "decoder" else sizes.experts) * itemsize


def estimate(
    sizes: Sizes,
    path: Literal["decoder", "transformers"],
    method: Literal["qlora", "lora", "full"],
    memory: Literal["fast", "lean"],
    *,
    rank: int,
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"],
    itemsize: int,
    tokens: int,
    on_gpu: bool,
) -> dict[str, int]:
    """Bytes on the device, by what they are for; the adapter on all linears, passes of so many tokens."""
    quantised = sizes.linears + sizes.experts if method == "qlora" else 0
    weights = quantised * NF4_BYTES + (sizes.total - quantised) * itemsize
    trained = sizes.total if method == "full" else rank * sizes.per_rank
    if method == "full" and itemsize == 4:
        weights = 0  # the masters are the weights
    kept = {"weights": int(weights)}
    dense = dequantised_bytes(sizes, path, itemsize) if method == "qlora" else 0
    kept["dequantised weights"] = dense if memory == "fast" else dense // sizes.layers
    copy = 0 if method == "full" or itemsize == 4 else itemsize
    kept["trained weights and gradients"] = trained * (4 + 4 + copy)
    kept["optimiser"] = int(trained * MOMENTS[optimizer])
    layers = activation_bytes(sizes, tokens, itemsize, path)
    if memory == "lean":
        parked = path == "decoder" and on_gpu  # in the memory of the host
        layers = layers // sizes.layers + (0 if parked else tokens * sizes.layers * sizes.hidden * itemsize)
    kept["activations"] = layers
    kept["head"] = min(tokens, chunk_rows(tokens, sizes.vocab)) * sizes.vocab * 4
    return kept
