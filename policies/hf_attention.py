"""Packed batches in transformers' models: kernels/attention.py as one of transformers' attention functions.

A model that calls its attention through transformers' `AttentionInterface` hands over queries, keys and values of one
row of T tokens, and every argument of its forward pass besides: `covey_plan` says which tokens see which.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from covey.kernels.attention import AttentionPlan, attention, attention_backward

NAME = "covey"
# What models hand on to their attention beside queries, keys and values, and what changes nothing here: positions are
# in the queries and keys already, masks are the plan's.
HARMLESS = {
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


class UnsupportedAttention(RuntimeError):
    """The model's attention is more than queries, keys, values, a window and a soft-cap."""


class PackedAttention(torch.autograd.Function):
    """q [T, n, d], k and v [T, m, d] to o [T, n, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        o, lse = attention(q, k, v, plan, scale, window=window, softcap=softcap)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.plan, ctx.scale, ctx.options = plan, scale, {"window": window, "softcap": softcap}
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = attention_backward(do, q, k, v, o, lse, ctx.plan, ctx.scale, **ctx.options)
        return dq, dk, dv, None, None, None, None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    covey_plan: AttentionPlan | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' calling convention: query [1, n, T, d], key [1, m, T, d], value [1, m, T, e] to [1, T, n, e].

    Raises UnsupportedAttention for arguments that it does not know, for they may change the result.
    """
    if covey_plan is None:
        raise UnsupportedAttention("the model keeps arguments from its attention")
    unknown = [name for name, given in others.items() if given is not None and name not in HARMLESS]
    if unknown or dropout or attention_mask is not None:
        raise UnsupportedAttention(", ".join(unknown) or "a mask or dropout")
    dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim > dim:
        raise UnsupportedAttention("values wider than keys")
    q, k, v = query[0], key[0], pad(value[0], (0, dim - value_dim))
    scale = dim**-0.5 if scaling is None else scaling
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    out = PackedAttention.apply(q, k, v, covey_plan, scale, sliding_window or 0, softcap or 0.0)
    return out[None, ..., :value_dim], None


def register() -> None:
    """Make it known to transformers as the attention implementation NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
