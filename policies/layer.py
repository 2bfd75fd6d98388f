"""One decoder layer: forward, and a backward written by hand.

Axes: T tokens of a packed batch, H hidden size, n query heads, m key-value heads, d head dimension, F width of the MLP.

    h   = x + O(attention(rope(Q n1), rope(K n1), V n1))        n1 = norm(x)
    out = h + D(silu(G n2) * (U n2))                            n2 = norm(h)

Q, K, V, O, G, U, D are frozen linears with LoRA, stacked where they share an input (policies/linear.py). The backward
returns dx and adds the adapter's gradients straight into its flat gradient buffer; frozen weights get none, and below
the first layer nothing is propagated. It keeps only what it reads (the activation is computed again, it is cheap),
writes gradients over activations that are not needed any more, and in the `lean` mode it keeps the layer's input alone
(on a GPU in host memory, policies/host_store.py) and runs the layer once more, except for the last product, whose
result nothing reads.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels.attention import AttentionPlan, attention, attention_backward
from covey.kernels.gated_mlp import gated, gated_backward
from covey.kernels.lora_linear import (
    LoraGroup,
    adapter_gradients,
    attach_gradient,
    attach_input,
    input_gradient,
    linear,
)
from covey.kernels.rmsnorm import add_rmsnorm, rmsnorm, rmsnorm_backward
from covey.kernels.rope import pack_qkv_grad, rope_inplace
from covey.policies.host_store import HostStore
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
    store: HostStore | None = None  # where the layers' inputs wait meanwhile; None: where they are
    room: dict[str, Tensor] = field(default_factory=dict)  # the buffer in which the newest dx lies


@dataclass(slots=True)
class Kept:
    """Activations that the backward reads, and writes over. n1, attn and n2 as x+ of kernels/lora_linear.py."""

    n1: Tensor  # [T, H + P]
    rstd1: Tensor
    qkv: Tensor  # [T, (n + 2 m) d], q and k rotated
    attn: Tensor  # [T, n d + P]
    lse: Tensor
    h: Tensor
    n2: Tensor  # [T, H + P]
    rstd2: Tensor
    gate_up: Tensor  # [T, 2 F + P]; the last columns are room for its gradient's
    z_down: Tensor | None = None  # [T, R], the attached columns of the activation


class DecoderLayer:
    """Weights and maths of one layer."""

    def __init__(
        self,
        spec: ModelSpec,
        norm1_H: Tensor,
        norm2_H: Tensor,
        groups: dict[str, LinearGroup],
        *,
        index: int,
    ):
        self.spec = spec
        self.norm1, self.norm2 = norm1_H, norm2_H
        self.groups = groups  # qkv, o, gate_up, down
        self.index = index  # the first is 0

    def heads(self, qkv_TN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, n, d], k and v [T, m, d] as views."""
        s = self.spec
        rows = qkv_TN.view(-1, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        q, k, v = rows.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1)
        return q, k, v

    def room_for(
        self, name: str, tokens: int, like: Tensor, lora: dict[str, LoraGroup]
    ) -> tuple[Tensor, Tensor]:
        """An empty x+ of a group and its first K columns as a view; without an adapter both are [T, K]."""
        group = self.groups[name]
        return group.room(tokens, group.k, like, lora)

    def gradient_room(
        self, name: str, tokens: int, like: Tensor, lora: dict[str, LoraGroup]
    ) -> tuple[Tensor, Tensor]:
        """An empty dy+ of a group and its first N columns as a view; without an adapter both are [T, N]."""
        group = self.groups[name]
        return group.room(tokens, group.n, like, lora)

    def project(
        self, name: str, x_wide: Tensor, lora: dict[str, LoraGroup], scale: float, out: Tensor | None = None
    ) -> Tensor:
        """y [T, N] of an x+ whose first K columns are filled."""
        group = self.groups[name]
        adapter = lora.get(group.key)
        if adapter is not None:
            attach_input(x_wide, adapter, scale)
        return linear(x_wide, group.matrix(adapter), group.n, group.bias, out)

    def qkv(
        self, x_TH: Tensor, tables: Rope, lora: dict[str, LoraGroup], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (n + 2 m) d] with rope applied, n1+, rstd1."""
        n1_wide, n1 = self.room_for("qkv", len(x_TH), x_TH, lora)
        _, rstd1 = rmsnorm(x_TH, self.norm1, self.spec.norm_eps, out=n1)
        qkv = self.project("qkv", n1_wide, lora, scale)
        q, k, _ = self.heads(qkv)
        rope_inplace(q, k, *tables)
        return qkv, n1_wide, rstd1

    def attend_room(self, qkv_TN: Tensor, lora: dict[str, LoraGroup]) -> tuple[Tensor, Tensor]:
        """An empty attn+ and the attention's output [T, n, d] in it."""
        s = self.spec
        attn_wide, attn = self.room_for("o", len(qkv_TN), qkv_TN, lora)
        return attn_wide, attn.unflatten(1, (s.num_heads, s.head_dim))

    def middle(
        self, x_TH: Tensor, attn_wide: Tensor, lora: dict[str, LoraGroup], scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From the attention's output to gate_up: h, n2+, rstd2, gate_up [T, 2 F + P]."""
        tokens = len(x_TH)
        o = self.project("o", attn_wide, lora, scale)
        n2_wide, n2 = self.room_for("gate_up", tokens, x_TH, lora)
        h, _, rstd2 = add_rmsnorm(o, x_TH, self.norm2, self.spec.norm_eps, out=n2, inplace=True)
        gate_up_wide, gate_up = self.gradient_room(
            "gate_up", tokens, x_TH, lora
        )  # its gradient comes here too
        self.project("gate_up", n2_wide, lora, scale, out=gate_up)
        return h, n2_wide, rstd2, gate_up_wide

    def end(
        self, h_TH: Tensor, gate_up: Tensor, lora: dict[str, LoraGroup], scale: float
    ) -> tuple[Tensor, Tensor]:
        """out [T, H], and the attached columns of the activation."""
        act_wide, act = self.room_for("down", len(h_TH), h_TH, lora)
        gated(*self._halves(gate_up), out=act)
        out = self.project("down", act_wide, lora, scale)
        return out.add_(h_TH), act_wide[:, self.groups["down"].k :]

    def _halves(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        size = self.groups["down"].k
        return gate_up[:, :size], gate_up[:, size : 2 * size]

    def finish(self, x_TH: Tensor, attn_Tnd: Tensor, lora: dict[str, LoraGroup], scale: float) -> Tensor:
        """The rest of the layer once its attention is known, for sampling."""
        attn_wide, attn = self.room_for("o", len(x_TH), x_TH, lora)
        attn.copy_(attn_Tnd.flatten(1))
        h, _, _, gate_up = self.middle(x_TH, attn_wide, lora, scale)
        return self.end(h, gate_up, lora, scale)[0]

    def forward(self, x_TH: Tensor, now: Pass, *, end: bool = True) -> tuple[Tensor | None, Kept]:
        """out [T, H] (None without `end`: only what the backward reads is computed) and the activations."""
        lora, scale = now.lora, now.lora_scale
        qkv, n1, rstd1 = self.qkv(x_TH, now.rope, lora, scale)
        attn_wide, attn = self.attend_room(qkv, lora)
        _, lse = attention(*self.heads(qkv), now.plan, self.spec.attention_scale, out=attn)
        h, n2, rstd2, gate_up = self.middle(x_TH, attn_wide, lora, scale)
        kept = Kept(n1, rstd1, qkv, attn_wide, lse, h, n2, rstd2, gate_up)
        out = None
        if end:
            out, z_down = self.end(h, gate_up, lora, scale)
            kept.z_down = z_down.contiguous()  # a copy: the activation itself is not kept
        return out, kept

    def backward(self, dout_TH: Tensor, x_TH: Tensor, kept: Kept, now: Pass) -> Tensor | None:
        """dx [T, H], or None in the first layer."""
        groups, tokens = self.groups, len(x_TH)
        self._mlp_backward(dout_TH, kept, now)
        dn2 = self._back("gate_up", kept.gate_up, kept.n2, now)
        kept.gate_up = kept.n2 = x_TH[:0]  # the largest activations make room for what follows
        if now.store is not None:
            now.store.fetch(self.index - 1)
        dh_wide, dh = self.gradient_room("o", tokens, x_TH, now.lora)
        rmsnorm_backward(dn2, kept.h, self.norm2, kept.rstd2, residual=dout_TH, out=dh)

        shape = (self.spec.num_heads, self.spec.head_dim)
        dattn = self._back("o", dh_wide, kept.attn, now).unflatten(1, shape)
        attn = kept.attn[:, : groups["o"].k].unflatten(1, shape)
        scale = self.spec.attention_scale
        grads = attention_backward(dattn, *self.heads(kept.qkv), attn, kept.lse, now.plan, scale)
        dqkv, _ = self.gradient_room("qkv", tokens, x_TH, now.lora)
        pack_qkv_grad(*grads, dqkv, *now.rope)
        dn1 = self._back("qkv", dqkv, kept.n1, now, need_dx=self.index > 0)
        if dn1 is None:
            return None
        now.room["dx"], dx = self.gradient_room(
            "down", tokens, x_TH, now.lora
        )  # the layer below finds it there
        return rmsnorm_backward(dn1, x_TH, self.norm1, kept.rstd1, residual=dh, out=dx)

    def _mlp_backward(self, dout_TH: Tensor, kept: Kept, now: Pass) -> None:
        """The gradient of gate_up, written over it. The activation is computed again, over its own gradient."""
        down, adapter = self.groups["down"], now.lora.get(self.groups["down"].key)
        dout_wide = now.room.pop("dx", None)
        if dout_wide is None or dout_wide.data_ptr() != dout_TH.data_ptr() or len(dout_wide) != len(dout_TH):
            dout_wide, dout = self.gradient_room("down", len(dout_TH), dout_TH, now.lora)
            dout.copy_(dout_TH)
        if adapter is not None:
            attach_gradient(dout_wide, down.padding, adapter, now.lora_scale)
        dact = input_gradient(dout_wide, down.matrix(adapter), down.k)
        gate, up = self._halves(kept.gate_up)
        gated_backward(dact, gate, up, "silu", gate, up, h_out=dact)
        if adapter is not None:
            z = kept.z_down
            if z is None:  # the layer was run again without its end
                z = dact.new_empty(len(dact), adapter.rank)
                torch.addmm(z, dact, adapter.a.t(), beta=0.0, alpha=now.lora_scale, out=z)
            adapter_gradients(dact, z, dout_wide, down.padding, adapter)

    def _back(self, name: str, dy_wide: Tensor, x_wide: Tensor, now: Pass, *, need_dx: bool = True) -> Any:
        """dx [T, K] of a dy+ whose first N columns are filled, and the adapter's gradients."""
        group = self.groups[name]
        adapter = now.lora.get(group.key)
        if adapter is not None:
            attach_gradient(dy_wide, group.padding, adapter, now.lora_scale)
            adapter_gradients(x_wide[:, : group.k], x_wide[:, group.k :], dy_wide, group.padding, adapter)
        return input_gradient(dy_wide, group.matrix(adapter), group.k) if need_dx else None


class LayerFunction(torch.autograd.Function):
    """DecoderLayer as one node of autograd's graph. Its backward fills the adapter's gradient as a side effect."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, layer: DecoderLayer, now: Pass) -> Tensor:
        out, kept = layer.forward(x_TH, now)
        assert out is not None
        ctx.layer, ctx.now, ctx.kept = layer, now, kept if now.keep else None
        if now.store is None:
            ctx.save_for_backward(x_TH)
        else:
            now.store.put(layer.index, x_TH)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        store = ctx.now.store
        x = ctx.saved_tensors[0] if store is None else store.take(ctx.layer.index)
        kept, ctx.kept = ctx.kept or ctx.layer.forward(x, ctx.now, end=False)[1], None
        return ctx.layer.backward(dout_TH, x, kept, ctx.now), None, None
