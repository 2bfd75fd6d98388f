"""One token more for every row: the decoder's step while sampling, made so that a CUDA graph can hold it.

Axes: B rows, H hidden size, N places of the pools, n query heads, m key-value heads, d head dimension, V vocabulary.

The maths are those of policies/layer.py. What differs: keys and values are read from a pool, nothing is kept for a
backward, and the sum along the skip connection is made together with the norm that comes next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from covey.kernels.decode_attention import DecodePlan, decode_attention, rope_store, store
from covey.kernels.decode_tables import DecodeTables
from covey.kernels.dispatch import use_triton
from covey.kernels.gated_mlp import gated
from covey.kernels.nf4_matmul import nf4_matmul
from covey.policies.layer import DecoderLayer, Rope
from covey.policies.norm import Norm

if TYPE_CHECKING:
    from covey.policies.decoder import DecoderPolicy


# Rows up to which products straight from 4 bits measured faster (H200, 1.5B and 8B): than reading the weights back for
# them, and than products with weights that are held in 16 bits.
FEW_ROWS, FEWEST_ROWS = 32, 8


@dataclass(frozen=True, slots=True)
class Step:
    """What a decoding step of B rows works on. Everything lies where it is from step to step."""

    ids: Tensor  # int64 [B], the newest tokens
    tables: DecodeTables
    plans: Mapping[int, DecodePlan]  # by window
    keys: Sequence[Tensor]  # a pool [N, m, d] per layer
    values: Sequence[Tensor]

    @classmethod
    def of(
        cls,
        policy: "DecoderPolicy",
        ids: Tensor,
        tables: DecodeTables,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> "Step":
        s = policy.spec
        geometry = s.num_heads, s.num_kv_heads, s.head_dim, policy.dtype
        plans = {w: DecodePlan(tables, *geometry, w) for w in {layer.window for layer in s.layers}}
        return cls(ids, tables, plans, keys, values)


def decode_logits(policy: "DecoderPolicy", step: Step) -> Tensor:
    """Logits [B, V] in float32 after every row's newest token, whose keys and values are put into the pools.

    The policy is as its last `refresh` left it. Rows that are idle by the tables get logits that mean nothing. No wait
    for the device.
    """
    for plan in step.plans.values():
        plan.refresh()
    some_plan = next(iter(step.plans.values()))  # where the newest tokens go is the same in all of them
    ropes = policy.rope(some_plan.position_B)
    x, y = policy.embed(step.ids), None
    for layer in policy.layers:
        x, attn_wide = _attend(policy, layer, x, y, ropes[layer.at.rope], step, some_plan.place_B)
        x, y = _feed_forward(policy, layer, x, attn_wide)
    assert y is not None, "a decoder has layers"
    return policy.logits(y.add_(x))


def holding_pays(policy: "DecoderPolicy", rows: int) -> bool:
    """True if steps of that many rows are faster with weights that are read back once and held."""
    in_four_bits = all(group.nf4 for layer in policy.layers for group in layer.groups.values())
    probe = policy.embedding[:0]
    return rows > FEWEST_ROWS or not in_four_bits or not (probe.is_cuda and use_triton(probe, "nf4_matmul"))


def _attend(
    policy: "DecoderPolicy",
    layer: DecoderLayer,
    x_BH: Tensor,
    y_BH: Tensor | None,
    rope: Rope,
    step: Step,
    place_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """x + y and attn+ of a layer; y is what the layer before adds to x."""
    s, lora = layer.spec, policy.active
    n1_wide, n1 = layer.room_for("qkv", len(x_BH), x_BH, lora)
    x_BH = _enter(x_BH, y_BH, layer.norm1, n1)
    qkv = _project(policy, layer, "qkv", n1_wide)
    keys, values = step.keys[layer.index], step.values[layer.index]
    if not layer.qk_norms and not s.qkv_clip:
        q, k, v = layer.heads(qkv)
        rope_store(q, k, v, *rope, keys, values, place_B)
    else:
        (q, k, v), _ = layer.place(qkv, rope)
        store(k, v, keys, values, place_B)
    attn_wide, attn = layer.attend_room(qkv, lora)
    window = layer.at.window
    decode_attention(
        q, keys, values, step.tables, s.attention_scale,
        window=window, softcap=s.attention_softcap, plan=step.plans[window], out=attn,
    )  # fmt: skip
    return x_BH, attn_wide


def _feed_forward(
    policy: "DecoderPolicy", layer: DecoderLayer, x_BH: Tensor, attn_wide: Tensor
) -> tuple[Tensor, Tensor]:
    """x and what is still to be added to it."""
    lora = policy.active
    o = layer.leave(_project(policy, layer, "o", attn_wide), layer.post1)[0]
    n2_wide, n2 = layer.room_for("gate_up", len(x_BH), x_BH, lora)
    x_BH = _enter(x_BH, o, layer.norm2, n2)
    gate_up = _project(policy, layer, "gate_up", n2_wide)
    act_wide, act = layer.room_for("down", len(x_BH), x_BH, lora)
    gated(*layer.halves(gate_up), layer.spec.activation, out=act)
    return x_BH, layer.leave(_project(policy, layer, "down", act_wide), layer.post2)[0]


def _project(policy: "DecoderPolicy", layer: DecoderLayer, name: str, x_wide: Tensor) -> Tensor:
    """y [B, N] of an x+ whose first K columns are filled; straight from 4 bits where the weights are not held."""
    group, scale = layer.groups[name], policy.adapter.scale
    if not group.nf4 or len(x_wide) > FEW_ROWS or not use_triton(x_wide, "nf4_matmul"):
        return layer.project(name, x_wide, policy.active, scale)
    return nf4_matmul(x_wide[:, : group.k], group.nf4, policy.active.get(group.key), scale, group.bias)


def _enter(x_BH: Tensor, y_BH: Tensor | None, norm: Norm | None, out: Tensor) -> Tensor:
    """x + y, and its norm into `out`; y is written over."""
    if norm is None:
        x_BH = x_BH if y_BH is None else y_BH.add_(x_BH)
        out.copy_(x_BH)
    elif y_BH is None:
        norm(x_BH, out=out)
    else:
        x_BH, _ = norm.of_sum(y_BH, x_BH, out=out)
    return x_BH
