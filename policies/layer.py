"""One decoder layer: forward, and a backward written by hand.

Axes: T tokens of a packed batch, H hidden size, n query heads, m key-value heads, d head dimension, F width of the MLP.

    h   = x + O(attention(rope(Q n1), rope(K n1), V n1))        n1 = norm(x)
    out = h + D(silu(G n2) * (U n2))                            n2 = norm(h)

Q, K, V, O, G, U, D are frozen linears with LoRA, stacked where they share an input (policies/linear.py). The backward
returns dx and adds the adapter's gradients straight into its flat gradient buffer; frozen weights get none, and below
the first layer nothing is propagated. It keeps only what it reads (norm outputs and the activation are computed again,
they are cheap), writes gradients over activations that are not needed any more, and in the `lean` mode it keeps the
layer's input alone and runs the layer once more, except for the last product, whose result nothing reads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels.attention import AttentionPlan, attention, attention_backward
from covey.kernels.gated_mlp import gated, gated_backward
from covey.kernels.lora_linear import LoraGroup, lora_linear, lora_linear_backward
from covey.kernels.rmsnorm import add_rmsnorm, rmsnorm, rmsnorm_apply, rmsnorm_backward
from covey.kernels.rope import pack_qkv_grad, rope_inplace
from covey.policies.linear import LinearGroup
from covey.policies.spec import ModelSpec

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers share during one pass over a batch."""

    rope: Rope  # cos and sin [T, 1, d/2]
    plan: AttentionPlan
    lora: dict[str, LoraGroup]  # by group, for example layers.0.qkv; empty: adapter off
    lora_scale: float
    keep: bool  # keep activations for the backward; otherwise the backward computes them again


@dataclass(slots=True)
class Kept:
    """Activations that the backward reads. It writes over `gate_up`."""

    rstd1: Tensor
    qkv: Tensor  # [T, (n + 2 m) d], q and k rotated
    attn: Tensor  # [T, n, d]
    lse: Tensor
    h: Tensor
    rstd2: Tensor
    gate_up: Tensor  # [T, 2 F]
    z: dict[str, Tensor | None]  # x A^T of every group


class DecoderLayer:
    """Weights and maths of one layer."""

    def __init__(
        self,
        spec: ModelSpec,
        norm1_H: Tensor,
        norm2_H: Tensor,
        groups: dict[str, LinearGroup],
        *,
        first: bool,
    ):
        self.spec = spec
        self.norm1, self.norm2 = norm1_H, norm2_H
        self.groups = groups  # qkv, o, gate_up, down
        self.first = first

    def heads(self, qkv_TN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, n, d], k and v [T, m, d] as views."""
        s = self.spec
        rows = qkv_TN.view(-1, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        q, k, v = rows.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1)
        return q, k, v

    def qkv(
        self, x_TH: Tensor, tables: Rope, lora: dict[str, LoraGroup], scale: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """qkv [T, (n + 2 m) d] with rope applied, rstd1, z."""
        n1, rstd1 = rmsnorm(x_TH, self.norm1, self.spec.norm_eps)
        qkv, z = self._apply("qkv", n1, lora, scale)
        q, k, _ = self.heads(qkv)
        rope_inplace(q, k, *tables)
        return qkv, rstd1, z

    def middle(
        self, x_TH: Tensor, attn_Tnd: Tensor, lora: dict[str, LoraGroup], scale: float
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor | None]]:
        """From the attention's output to gate_up [T, 2 F]: h, rstd2, gate_up, and z by group."""
        o, zo = self._apply("o", attn_Tnd.flatten(1), lora, scale)
        h, n2, rstd2 = add_rmsnorm(o, x_TH, self.norm2, self.spec.norm_eps, inplace=True)
        gate_up, zg = self._apply("gate_up", n2, lora, scale)
        return h, rstd2, gate_up, {"o": zo, "gate_up": zg}

    def end(
        self, h_TH: Tensor, gate_up: Tensor, lora: dict[str, LoraGroup], scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """out [T, H], and z of the down projection."""
        gate, up = gate_up.chunk(2, dim=1)
        down, z = self._apply("down", gated(gate, up), lora, scale)
        return down.add_(h_TH), z

    def finish(self, x_TH: Tensor, attn_Tnd: Tensor, lora: dict[str, LoraGroup], scale: float) -> Tensor:
        """The rest of the layer once its attention is known, for sampling."""
        h, _, gate_up, _ = self.middle(x_TH, attn_Tnd, lora, scale)
        return self.end(h, gate_up, lora, scale)[0]

    def forward(self, x_TH: Tensor, now: Pass, *, end: bool = True) -> tuple[Tensor | None, Kept]:
        """out [T, H] (None without `end`: only what the backward reads is computed) and the activations."""
        lora, scale = now.lora, now.lora_scale
        qkv, rstd1, zq = self.qkv(x_TH, now.rope, lora, scale)
        attn, lse = attention(*self.heads(qkv), now.plan, self.spec.attention_scale)
        h, rstd2, gate_up, z = self.middle(x_TH, attn, lora, scale)
        z["qkv"] = zq
        out = None
        if end:
            out, z["down"] = self.end(h, gate_up, lora, scale)
        return out, Kept(rstd1, qkv, attn, lse, h, rstd2, gate_up, z)

    def backward(self, dout_TH: Tensor, x_TH: Tensor, kept: Kept, now: Pass) -> Tensor | None:
        """dx [T, H], or None in the first layer."""
        dgate_up = self._mlp_backward(dout_TH, kept, now)
        n2 = rmsnorm_apply(kept.h, self.norm2, kept.rstd2)
        dn2 = self._back("gate_up", dgate_up, n2, kept, now)
        dh = rmsnorm_backward(dn2, kept.h, self.norm2, kept.rstd2, residual=dout_TH, out=dn2)

        dattn = self._back("o", dh, kept.attn.flatten(1), kept, now).view_as(kept.attn)
        heads = self.heads(kept.qkv)
        scale = self.spec.attention_scale
        grads = attention_backward(dattn, *heads, kept.attn, kept.lse, now.plan, scale)
        dqkv = torch.empty_like(kept.qkv)
        pack_qkv_grad(*grads, dqkv, *now.rope)
        n1 = rmsnorm_apply(x_TH, self.norm1, kept.rstd1)
        dn1 = self._back("qkv", dqkv, n1, kept, now, need_dx=not self.first)
        if dn1 is None:
            return None
        return rmsnorm_backward(dn1, x_TH, self.norm1, kept.rstd1, residual=dh, out=dn1)

    def _mlp_backward(self, dout_TH: Tensor, kept: Kept, now: Pass) -> Tensor:
        """d gate_up [T, 2 F], written over gate_up."""
        group, lora = self.groups["down"], now.lora.get(self.groups["down"].key)
        gate, up = kept.gate_up.chunk(2, dim=1)
        act, z = gated(gate, up), kept.z.get("down")
        if lora is not None and z is None:  # the layer was run again without its end
            z = act @ lora.a.t()
        dact = lora_linear_backward(dout_TH, act, z, group.matrix(), lora, now.lora_scale)
        assert dact is not None
        gated_backward(dact, gate, up, "silu", gate, up)
        return kept.gate_up

    def _apply(
        self, name: str, x_TK: Tensor, lora: dict[str, LoraGroup], scale: float
    ) -> tuple[Tensor, Tensor | None]:
        group = self.groups[name]
        return lora_linear(x_TK, group.matrix(), group.bias, lora.get(group.key), scale)

    def _back(
        self, name: str, dy_TN: Tensor, x_TK: Tensor, kept: Kept, now: Pass, *, need_dx: bool = True
    ) -> Any:
        group = self.groups[name]
        matrix = group.matrix() if need_dx else None
        return lora_linear_backward(
            dy_TN, x_TK, kept.z[name], matrix, now.lora.get(group.key), now.lora_scale
        )


class LayerFunction(torch.autograd.Function):
    """DecoderLayer as one node of autograd's graph. Its backward fills the adapter's gradient as a side effect."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, layer: DecoderLayer, now: Pass) -> Tensor:
        out, kept = layer.forward(x_TH, now)
        assert out is not None
        ctx.save_for_backward(x_TH)
        ctx.layer, ctx.now, ctx.kept = layer, now, kept if now.keep else None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        kept, ctx.kept = ctx.kept or ctx.layer.forward(x, ctx.now, end=False)[1], None
        return ctx.layer.backward(dout_TH, x, kept, ctx.now), None, None
