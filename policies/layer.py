"""One decoder layer: forward, and a backward written by hand.

Axes: T tokens of a packed batch, H hidden size, n query heads, m key-value heads, d head dimension.

    h   = x + O(attention(rope(Q n1), rope(K n1), V n1))        n1 = norm(x)
    out = h + D(silu(G n2) * (U n2))                            n2 = norm(h)

Q, K, V, O, G, U, D are frozen linears with LoRA. The backward returns dx and adds the adapter's gradients straight
into its flat gradient buffer; frozen weights get none, and below the first layer nothing is propagated. Two things
differ from what autograd would do: it keeps only what it reads (norm outputs and the activation are computed again,
they are cheap), and in the `lean` mode it keeps the layer's input alone and runs the layer once more.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels.attention import AttentionPlan, attention, attention_backward
from covey.kernels.gated_mlp import swiglu, swiglu_backward
from covey.kernels.lora_linear import lora_linear, lora_linear_backward
from covey.kernels.rmsnorm import rmsnorm, rmsnorm_apply, rmsnorm_backward
from covey.kernels.rope import rope, rope_backward
from covey.policies.adapter import LoraPair
from covey.policies.spec import ModelSpec
from covey.policies.weight import DenseWeight, NF4Weight

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers share during one pass over a batch."""

    rope: Rope  # cos and sin [T, 1, d/2]
    plan: AttentionPlan
    lora: dict[str, LoraPair]  # by linear, for example layers.0.self_attn.q_proj; empty: adapter off
    lora_scale: float
    keep: bool  # keep activations for the backward; otherwise the backward computes them again


@dataclass(slots=True)
class Kept:
    """Activations that the backward reads."""

    rstd1: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attn: Tensor
    lse: Tensor
    h: Tensor
    rstd2: Tensor
    gate: Tensor
    up: Tensor
    z: dict[str, Tensor | None]  # x A^T of every linear


@dataclass(frozen=True, slots=True)
class FrozenLinear:
    key: str  # of its LoraPair
    weight: DenseWeight | NF4Weight
    bias: Tensor | None


class DecoderLayer:
    """Weights and maths of one layer."""

    def __init__(
        self,
        spec: ModelSpec,
        norm1_H: Tensor,
        norm2_H: Tensor,
        linears: dict[str, FrozenLinear],
        *,
        first: bool,
    ):
        self.spec = spec
        self.norm1, self.norm2 = norm1_H, norm2_H
        self.linears = linears  # by short name: q_proj ... down_proj
        self.first = first

    def qkv(self, x_TH: Tensor, tables: Rope, lora: dict[str, LoraPair], scale: float) -> tuple[Tensor, ...]:
        """q [T, n, d], k and v [T, m, d] with rope applied, then rstd1 and the three z."""
        s = self.spec
        n1, rstd1 = rmsnorm(x_TH, self.norm1, s.norm_eps)
        q, zq = self._apply("q_proj", n1, lora, scale)
        k, zk = self._apply("k_proj", n1, lora, scale)
        v, zv = self._apply("v_proj", n1, lora, scale)
        q = rope(q.view(-1, s.num_heads, s.head_dim), *tables)
        k = rope(k.view(-1, s.num_kv_heads, s.head_dim), *tables)
        return q, k, v.view(-1, s.num_kv_heads, s.head_dim), rstd1, zq, zk, zv  # type: ignore[return-value]

    def finish(
        self, x_TH: Tensor, attn_Tnd: Tensor, lora: dict[str, LoraPair], scale: float
    ) -> tuple[Tensor, dict[str, Any]]:
        """out [T, H], and what the backward wants of the second half of the layer."""
        o, zo = self._apply("o_proj", attn_Tnd.flatten(1), lora, scale)
        h = x_TH + o
        n2, rstd2 = rmsnorm(h, self.norm2, self.spec.norm_eps)
        gate, zg = self._apply("gate_proj", n2, lora, scale)
        up, zu = self._apply("up_proj", n2, lora, scale)
        down, zd = self._apply("down_proj", swiglu(gate, up), lora, scale)
        z = {"o_proj": zo, "gate_proj": zg, "up_proj": zu, "down_proj": zd}
        return h + down, {"h": h, "rstd2": rstd2, "gate": gate, "up": up, "z": z}

    def forward(self, x_TH: Tensor, now: Pass) -> tuple[Tensor, Kept]:
        q, k, v, rstd1, zq, zk, zv = self.qkv(x_TH, now.rope, now.lora, now.lora_scale)
        attn, lse = attention(q, k, v, now.plan, self.spec.attention_scale)
        out, rest = self.finish(x_TH, attn, now.lora, now.lora_scale)
        rest["z"].update(q_proj=zq, k_proj=zk, v_proj=zv)
        return out, Kept(rstd1=rstd1, q=q, k=k, v=v, attn=attn, lse=lse, **rest)

    def backward(self, dout_TH: Tensor, x_TH: Tensor, kept: Kept, now: Pass) -> Tensor | None:
        """dx [T, H], or None in the first layer."""
        dact = self._back("down_proj", dout_TH, swiglu(kept.gate, kept.up), kept, now)
        dgate, dup = swiglu_backward(dact, kept.gate, kept.up)
        n2 = rmsnorm_apply(kept.h, self.norm2, kept.rstd2)
        dn2 = self._back("gate_proj", dgate, n2, kept, now) + self._back("up_proj", dup, n2, kept, now)
        dh = dout_TH + rmsnorm_backward(dn2, kept.h, self.norm2, kept.rstd2)

        dattn = self._back("o_proj", dh, kept.attn.flatten(1), kept, now).view_as(kept.attn)
        scale = self.spec.attention_scale
        dq, dk, dv = attention_backward(dattn, kept.q, kept.k, kept.v, kept.attn, kept.lse, now.plan, scale)
        grads = {"q_proj": rope_backward(dq, *now.rope), "k_proj": rope_backward(dk, *now.rope), "v_proj": dv}
        n1 = rmsnorm_apply(x_TH, self.norm1, kept.rstd1)
        parts = [
            self._back(name, dy.flatten(1), n1, kept, now, need_dx=not self.first)
            for name, dy in grads.items()
        ]
        if self.first:
            return None
        return dh + rmsnorm_backward(parts[0] + parts[1] + parts[2], x_TH, self.norm1, kept.rstd1)

    def _apply(
        self, name: str, x_TK: Tensor, lora: dict[str, LoraPair], scale: float
    ) -> tuple[Tensor, Tensor | None]:
        linear = self.linears[name]
        pair = lora.get(linear.key)
        a, b = (pair.a, pair.b) if pair else (None, None)
        return lora_linear(x_TK, linear.weight.dense(), linear.bias, a, b, scale)

    def _back(
        self, name: str, dy_TN: Tensor, x_TK: Tensor, kept: Kept, now: Pass, *, need_dx: bool = True
    ) -> Any:
        linear = self.linears[name]
        pair = now.lora.get(linear.key)
        if pair is None and not need_dx:
            return None
        lora = (
            (pair.a, pair.b, now.lora_scale, pair.grad_a, pair.grad_b)
            if pair
            else (None, None, 0.0, None, None)
        )
        return lora_linear_backward(dy_TN, x_TK, kept.z[name], linear.weight.dense(), *lora, need_dx=need_dx)


class LayerFunction(torch.autograd.Function):
    """DecoderLayer as one node of autograd's graph. Its backward fills the adapter's gradient as a side effect."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, layer: DecoderLayer, now: Pass) -> Tensor:
        out, kept = layer.forward(x_TH, now)
        ctx.save_for_backward(x_TH)
        ctx.layer, ctx.now, ctx.kept = layer, now, kept if now.keep else None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        kept = ctx.kept or ctx.layer.forward(x, ctx.now)[1]
        ctx.kept = None
        return ctx.layer.backward(dout_TH, x, kept, ctx.now), None, None
