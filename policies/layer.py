"""One decoder layer: forward, and a backward written by hand.

Axes: T tokens of a packed batch, H hidden size, n query heads, m key-value heads, d head dimension, F width of the MLP.

    h   = x + r post1(O attention(rope(norm_q(Q n1)), rope(norm_k(K n1)), V n1))        n1 = norm1(x)
    out = h + r post2(D(act(G n2) * (U n2)))                                            n2 = norm2(h)

policies/spec.py says which of these norms a model has: most have norm1 and norm2, and r = 1. Q, K, V, O, G, U, D are
frozen linears with LoRA, stacked where they share an input (policies/linear.py). The backward returns dx and adds the
adapter's gradients straight into its flat gradient buffer; frozen weights get none, and below the first layer nothing
is propagated. It keeps only what it reads (the activation is computed again, it is cheap), writes gradients over
activations that are not needed any more, and in the `lean` mode it keeps the layer's input alone (on a GPU in host
memory, policies/host_store.py) and runs the layer once more, except for the last product if nothing reads its result.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels.attention import AttentionPlan, attention, attention_backward, lse_room
from covey.kernels.gated_mlp import gated, gated_backward
from covey.kernels.lora_linear import (
    LoraGroup,
    adapter_gradients,
    attach_gradient,
    attach_input,
    input_gradient,
    linear,
)
from covey.kernels.qk_norm import pack_qk_norm_grad, qk_norm_rope
from covey.kernels.rope import columns_of_heads, pack_qkv_grad, rope_inplace
from covey.policies.host_store import HostStore
from covey.policies.linear import LinearGroup
from covey.policies.norm import Norm, RMSNorm
from covey.policies.recording import Recording
from covey.policies.spec import ModelSpec

Rope = tuple[Tensor, Tensor]  # cos and sin [T, 1, d_rot / 2]
Heads = tuple[Tensor, Tensor, Tensor]  # q [T, n, d], k and v [T, m, d]
Leaving = tuple[Tensor, Tensor]  # what a sublayer computed before its norm, and that norm's statistics


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers share during one pass over a batch."""

    ropes: tuple[Rope, ...]  # by LayerSpec.rope
    plan: AttentionPlan
    lora: dict[str, LoraGroup]  # by group, for example layers.0.qkv; empty: adapter off
    lora_scale: float
    keep: bool  # keep activations for the backward; otherwise the backward computes them again
    store: HostStore | None = None  # where the layers' inputs wait meanwhile; None: where they are
    room: dict[str, Tensor] = field(default_factory=dict)  # the buffer in which the newest dx lies
    recording: Recording | None = None  # of which this pass becomes a part

    def attend(self, run: Callable[..., Any], *tensors: Tensor) -> Any:
        """run(plan, *tensors), what depends on how the batch is divided into segments; None while it is recorded."""
        if self.recording is None:
            return run(self.plan, *tensors)
        return self.recording.leave_out(run, *tensors)


@dataclass(slots=True)
class Kept:
    """Activations that the backward reads, and writes over. n1, attn and n2 as x+ of kernels/lora_linear.py."""

    n1: Tensor  # [T, H + P]
    stats1: Tensor | None  # what norm1's backward reads beside its input
    qkv: Tensor  # [T, (n + 2 m) d]; q and k rotated, or with norms as they were before those
    heads: Heads
    stats_qk: tuple[Tensor, ...]  # of the norms of q and k
    attn: Tensor  # [T, n d + P]
    lse: Tensor
    leaving1: Leaving | None
    h: Tensor
    n2: Tensor  # [T, H + P]
    stats2: Tensor | None
    gate_up: Tensor  # [T, 2 F + P]; the last columns are room for its gradient's
    z_down: Tensor | None = None  # [T, R], the attached columns of the activation
    leaving2: Leaving | None = None
    unclipped: Tensor | None = None  # bool [T, (n + 2 m) d], where clipping left qkv as it was


class DecoderLayer:
    """Weights and maths of one layer."""

    def __init__(
        self,
        spec: ModelSpec,
        norms: dict[str, Norm],
        qk_norms: tuple[RMSNorm, ...],
        groups: dict[str, LinearGroup],
        *,
        index: int,
    ):
        """norms: by the names in spec.norms. qk_norms: of q and of k, or empty."""
        self.spec, self.at = spec, spec.layers[index]
        self.norm1, self.post1 = norms.get("norm1"), norms.get("post1")
        self.norm2, self.post2 = norms.get("norm2"), norms.get("post2")
        self.qk_norms = qk_norms
        self.groups = groups  # qkv, o, gate_up, down
        self.index = index  # the first is 0
        self.sight: dict[str, Any] = {"window": self.at.window, "softcap": spec.attention_softcap}
        # What a sublayer computes is added to x as it is, so the gradient of x is also that of the sublayer's linear.
        self.direct = self.post1 is None and self.post2 is None and spec.residual_scale == 1

    # Pieces that are shared by training and sampling

    def heads(self, qkv_TN: Tensor) -> Heads:
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
        self, x_TH: Tensor, lora: dict[str, LoraGroup], scale: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """qkv [T, (n + 2 m) d] as the linears give it, n1+, stats1."""
        n1_wide, n1 = self.room_for("qkv", len(x_TH), x_TH, lora)
        stats1 = None
        if self.norm1 is None:
            n1.copy_(x_TH)
        else:
            _, stats1 = self.norm1(x_TH, out=n1)
        return self.project("qkv", n1_wide, lora, scale), n1_wide, stats1

    def place(self, qkv_TN: Tensor, rope: Rope) -> tuple[Heads, tuple[Tensor, ...]]:
        """The heads clipped, normed and rotated, and the norms' statistics. Without norms all is done in place."""
        s = self.spec
        if s.qkv_clip:
            qkv_TN.clamp_(-s.qkv_clip, s.qkv_clip)
        q, k, v = self.heads(qkv_TN)
        if not self.qk_norms:
            rope_inplace(q, k, *rope)
            return (q, k, v), ()
        q_norm, k_norm = self.qk_norms
        if s.qk_norm == "head":
            weights, plus_one = (q_norm.weight, k_norm.weight), s.norm_plus_one
            q, k, rstd = qk_norm_rope(q, k, *weights, s.norm_eps, *rope, plus_one=plus_one)
            return (q, k, v), (rstd,)
        (q_TN, q_stats), (k_TN, k_stats) = q_norm(q.flatten(1)), k_norm(k.flatten(1))
        q, k = q_TN.view(q.shape), k_TN.view(k.shape)
        rope_inplace(q, k, *rope)
        return (q, k, v), (q_stats, k_stats)

    def attend_room(self, qkv_TN: Tensor, lora: dict[str, LoraGroup]) -> tuple[Tensor, Tensor]:
        """An empty attn+ and the attention's output [T, n, d] in it."""
        s = self.spec
        attn_wide, attn = self.room_for("o", len(qkv_TN), qkv_TN, lora)
        return attn_wide, attn.unflatten(1, (s.num_heads, s.head_dim))

    def middle(
        self, x_TH: Tensor, attn_wide: Tensor, lora: dict[str, LoraGroup], scale: float
    ) -> tuple[Leaving | None, Tensor, Tensor, Tensor | None, Tensor]:
        """From the attention's output to gate_up: what post1 read, h, n2+, stats2, gate_up [T, 2 F + P]."""
        tokens = len(x_TH)
        o, leaving = self.leave(self.project("o", attn_wide, lora, scale), self.post1)
        n2_wide, n2 = self.room_for("gate_up", tokens, x_TH, lora)
        stats2 = None
        if self.norm2 is None:
            h = o.add_(x_TH)
            n2.copy_(h)
        else:
            h, stats2 = self.norm2.of_sum(o, x_TH, out=n2)
        # Its gradient comes here too.
        gate_up_wide, gate_up = self.gradient_room("gate_up", tokens, x_TH, lora)
        self.project("gate_up", n2_wide, lora, scale, out=gate_up)
        return leaving, h, n2_wide, stats2, gate_up_wide

    def end(
        self, h_TH: Tensor, gate_up: Tensor, lora: dict[str, LoraGroup], scale: float
    ) -> tuple[Tensor, Tensor, Leaving | None]:
        """out [T, H], the attached columns of the activation, what post2 read."""
        act_wide, act = self.room_for("down", len(h_TH), h_TH, lora)
        gated(*self.halves(gate_up), self.spec.activation, out=act)
        down, leaving = self.leave(self.project("down", act_wide, lora, scale), self.post2)
        return down.add_(h_TH), act_wide[:, self.groups["down"].k :], leaving

    def finish(self, x_TH: Tensor, attn_Tnd: Tensor, lora: dict[str, LoraGroup], scale: float) -> Tensor:
        """The rest of the layer once its attention is known, for sampling."""
        attn_wide, attn = self.room_for("o", len(x_TH), x_TH, lora)
        attn.copy_(attn_Tnd.flatten(1))
        _, h, _, _, gate_up = self.middle(x_TH, attn_wide, lora, scale)
        return self.end(h, gate_up, lora, scale)[0]

    def leave(self, y_TH: Tensor, post: Norm | None) -> tuple[Tensor, Leaving | None]:
        """What a sublayer that computed y adds to x, and what its backward reads."""
        leaving = None
        if post is not None:
            normed, stats = post(y_TH)
            y_TH, leaving = normed, (y_TH, stats)
        if self.spec.residual_scale != 1:
            y_TH.mul_(self.spec.residual_scale)
        return y_TH, leaving

    def halves(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        size = self.groups["down"].k
        return gate_up[:, :size], gate_up[:, size : 2 * size]

    # Training

    def forward(self, x_TH: Tensor, now: Pass, *, end: bool = True) -> tuple[Tensor | None, Kept]:
        """out [T, H] (None without `end`: only what the backward reads is computed) and the activations."""
        lora, scale, s = now.lora, now.lora_scale, self.spec
        qkv, n1, stats1 = self.qkv(x_TH, lora, scale)
        unclipped = qkv.abs() <= s.qkv_clip if s.qkv_clip else None
        heads, stats_qk = self.place(qkv, now.ropes[self.at.rope])
        attn_wide, attn = self.attend_room(qkv, lora)
        lse = lse_room(heads[0])
        now.attend(self._attention, *heads, attn, lse)
        leaving1, h, n2, stats2, gate_up = self.middle(x_TH, attn_wide, lora, scale)
        kept = Kept(n1, stats1, qkv, heads, stats_qk, attn_wide, lse, leaving1, h, n2, stats2, gate_up)
        kept.unclipped = unclipped
        out = None
        if end or self.post2 is not None:
            out, z_down, kept.leaving2 = self.end(h, gate_up, lora, scale)
            kept.z_down = z_down.contiguous()  # a copy: the activation itself is not kept
        return out, kept

    def _attention(self, plan: AttentionPlan, *tensors: Tensor) -> None:
        """tensors: q, k, v, and where o and lse go."""
        q, k, v, o, lse = tensors
        attention(q, k, v, plan, self.spec.attention_scale, out=o, lse=lse, **self.sight)

    def _attention_gradients(self, plan: AttentionPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
        """tensors: do, q, k, v, o, lse, and where dq, dk, dv go if anywhere special."""
        (do, q, k, v, o, lse, *places), scale = tensors, self.spec.attention_scale
        out: Any = tuple(places) or None
        return attention_backward(do, q, k, v, o, lse, plan, scale, out=out, **self.sight)

    def backward(self, dout_TH: Tensor, x_TH: Tensor, kept: Kept, now: Pass) -> Tensor | None:
        """dx [T, H], or None in the first layer."""
        tokens = len(x_TH)
        self._mlp_backward(dout_TH, kept, now)
        dn2 = self._back("gate_up", kept.gate_up, kept.n2, now)
        kept.gate_up = kept.n2 = x_TH[:0]  # the largest activations make room for what follows
        kept.leaving2 = None
        if now.store is not None:
            now.store.fetch(self.index - 1)
        do_wide, do = self.gradient_room("o", tokens, x_TH, now.lora)
        dh = do if self.direct else torch.empty_like(x_TH)
        self._enter_backward(dn2, kept.h, self.norm2, kept.stats2, dout_TH, dh)
        if not self.direct:
            self._leave_backward(dh, kept.leaving1, self.post1, do)
        dqkv = self._attention_backward(do_wide, kept, now)
        dn1 = self._back("qkv", dqkv, kept.n1, now, need_dx=self.index > 0)
        if dn1 is None:
            return None
        if self.direct:  # the layer below finds it in its room
            now.room["dx"], dx = self.gradient_room("down", tokens, x_TH, now.lora)
        else:
            dx = torch.empty_like(x_TH)
        return self._enter_backward(dn1, x_TH, self.norm1, kept.stats1, dh, dx)

    def _attention_backward(self, do_wide: Tensor, kept: Kept, now: Pass) -> Tensor:
        """dqkv+ [T, (n + 2 m) d + P], its first columns filled."""
        s, rope = self.spec, now.ropes[self.at.rope]
        shape = (s.num_heads, s.head_dim)
        dattn = self._back("o", do_wide, kept.attn, now).unflatten(1, shape)
        attn = kept.attn[:, : self.groups["o"].k].unflatten(1, shape)
        places: Any = () if now.recording is None else tuple(map(torch.empty_like, kept.heads))
        inputs = dattn, *kept.heads, attn, kept.lse
        dq, dk, dv = now.attend(self._attention_gradients, *inputs, *places) or places
        dqkv_wide, dqkv = self.gradient_room("qkv", len(dattn), kept.h, now.lora)
        q, k, _ = self.heads(kept.qkv)
        if s.qk_norm == "head":
            (q_norm, k_norm), (rstd,) = self.qk_norms, kept.stats_qk
            weights = q_norm.weight, k_norm.weight
            pack_qk_norm_grad(dq, dk, dv, q, k, *weights, rstd, dqkv_wide, *rope, s.norm_plus_one)
        else:
            pack_qkv_grad(dq, dk, dv, dqkv_wide, *rope)
        if s.qk_norm == "all":
            columns = columns_of_heads(dqkv_wide, q.shape, s.num_kv_heads)
            for place, x, norm, stats in zip(columns, (q, k), self.qk_norms, kept.stats_qk, strict=False):
                dy = place.flatten(1)
                norm.backward(dy, x.flatten(1), stats, out=dy)
        if kept.unclipped is not None:
            dqkv.mul_(kept.unclipped)
        return dqkv_wide

    def _mlp_backward(self, dout_TH: Tensor, kept: Kept, now: Pass) -> None:
        """The gradient of gate_up, written over it. The activation is computed again, over its own gradient."""
        down, adapter = self.groups["down"], now.lora.get(self.groups["down"].key)
        ddown_wide = self._down_gradient(dout_TH, kept, now)
        if adapter is not None:
            attach_gradient(ddown_wide, down.padding, adapter, now.lora_scale)
        dact = input_gradient(ddown_wide, down.matrix(adapter), down.k)
        gate, up = self.halves(kept.gate_up)
        gated_backward(dact, gate, up, self.spec.activation, gate, up, h_out=dact)
        if adapter is not None:
            z = kept.z_down
            if z is None:  # the layer was run again without its end
                z = dact.new_empty(len(dact), adapter.rank)
                torch.addmm(z, dact, adapter.a.t(), beta=0.0, alpha=now.lora_scale, out=z)
            adapter_gradients(dact, z, ddown_wide, down.padding, adapter)

    def _down_gradient(self, dout_TH: Tensor, kept: Kept, now: Pass) -> Tensor:
        """dy+ of the last linear with its first columns filled; dout itself if it lies in such a room already."""
        wide = now.room.pop("dx", None)
        if wide is not None and wide.data_ptr() == dout_TH.data_ptr() and len(wide) == len(dout_TH):
            return wide
        wide, ddown = self.gradient_room("down", len(dout_TH), dout_TH, now.lora)
        if self.direct:
            ddown.copy_(dout_TH)
        else:
            self._leave_backward(dout_TH, kept.leaving2, self.post2, ddown)
        return wide

    def _enter_backward(
        self,
        dn_TH: Tensor,
        x_TH: Tensor,
        norm: Norm | None,
        stats: Tensor | None,
        skip_TH: Tensor,
        out: Tensor,
    ) -> Tensor:
        """The gradient of a sublayer's input: that of its norm, or of x itself, and that along the skip connection."""
        if norm is None or stats is None:
            return torch.add(dn_TH, skip_TH, out=out)
        return norm.backward(dn_TH, x_TH, stats, residual=skip_TH, out=out)

    def _leave_backward(self, dz_TH: Tensor, leaving: Leaving | None, post: Norm | None, out: Tensor) -> None:
        """The gradient of y from that of what `leave` made of it; dz is left as it is."""
        scale = self.spec.residual_scale
        if post is None or leaving is None:
            torch.mul(dz_TH, scale, out=out)
            return
        y, stats = leaving
        dz = dz_TH if scale == 1 else dz_TH * scale
        post.backward(dz, y, stats, out=out)

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
