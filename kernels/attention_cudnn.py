"""Attention of kernels/attention.py by cuDNN: the fastest on Hopper, for batches that are a few regular calls.

Neighbouring segments of equal length are one causal call [B, n, S, d]; the completions of a prompt against it are one
call without mask, merged as in attention_flash. cuDNN builds a plan for every new shape (about 150 ms, forward and
backward each), so this pays for shapes that come again and again. torch also lets cuDNN take packed sequences, but
builds their plan anew in every call.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from covey.kernels.attention_flash import merged

MAX_CALLS = 8


@dataclass(frozen=True, slots=True)
class Call:
    """`batch` sequences one after the other, of `queries` tokens from `start` and `keys` tokens from `key_start`."""

    batch: int
    start: int
    queries: int
    key_start: int
    keys: int

    def q_rows(self) -> slice:
        return slice(self.start, self.start + self.batch * self.queries)

    def k_rows(self) -> slice:
        return slice(self.key_start, self.key_start + self.batch * self.keys)


@dataclass(frozen=True, slots=True)
class CudnnPlan:
    own: tuple[Call, ...]  # causal; every token is a query of one of them
    cross: tuple[Call, ...]


def cudnn_plan(rows: list[list[int]]) -> CudnnPlan:
    """Raises ValueError for segments that need more than MAX_CALLS calls."""
    own: list[Call] = []
    cross: list[Call] = []
    for start, end, prefix, prefix_end in (row for row in rows if row[0] < row[1]):
        length = end - start
        if own and own[-1].queries == length:
            own[-1] = Call(own[-1].batch + 1, own[-1].start, length, own[-1].start, length)
        else:
            own.append(Call(1, start, length, start, length))
        if prefix == prefix_end:
            continue
        last = cross[-1] if cross else Call(1, -1, 0, -1, 0)
        if last.start + last.queries == start and (last.key_start, last.keys) == (
            prefix,
            prefix_end - prefix,
        ):
            cross[-1] = Call(1, last.start, last.queries + length, prefix, prefix_end - prefix)
        else:
            cross.append(Call(1, start, length, prefix, prefix_end - prefix))
    if len(own) + len(cross) > MAX_CALLS:
        raise ValueError(
            f"these segments are {len(own) + len(cross)} calls of cuDNN; kind 'cudnn' is for at most {MAX_CALLS}: "
            "choose another kind"
        )
    return CudnnPlan(tuple(own), tuple(cross))


def cudnn_attention(
    q_Tnd: Tensor, k_Tmd: Tensor, v_Tmd: Tensor, plan: CudnnPlan, scale: float
) -> tuple[Tensor, Tensor]:
    parts = [_forward(q_Tnd, k_Tmd, v_Tmd, call, True, scale) for call in plan.own]
    out, lse = (
        parts[0] if len(parts) == 1 else (torch.cat(x, i) for i, x in enumerate(zip(*parts, strict=True)))
    )
    for call in plan.cross:
        part, part_lse = _forward(q_Tnd, k_Tmd, v_Tmd, call, False, scale)
        at = call.q_rows()
        out[at], lse[:, at] = merged(out[at], lse[:, at], part, part_lse)
    return out, lse


def cudnn_attention_backward(
    do_Tnd: Tensor,
    q_Tnd: Tensor,
    k_Tmd: Tensor,
    v_Tmd: Tensor,
    o_Tnd: Tensor,
    lse_nT: Tensor,
    plan: CudnnPlan,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # torch lays the gradients out as if the inputs were dense, so they have to be.
    do, q, k, v, o = (x.contiguous() for x in (do_Tnd, q_Tnd, k_Tmd, v_Tmd, o_Tnd))
    inputs = do, q, k, v, o, lse_nT
    parts = [_backward(*inputs, call, True, scale) for call in plan.own]
    dq, dk, dv = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
    for call in plan.cross:
        dq_part, dk_part, dv_part = _backward(*inputs, call, False, scale)
        dq[call.q_rows()] += dq_part
        dk[call.k_rows()] += dk_part
        dv[call.k_rows()] += dv_part
    return dq, dk, dv


def _batched(x_Lhd: Tensor, batch: int) -> Tensor:
    """[B L, h, d] -> [B, h, L, d], a view."""
    return x_Lhd.view(batch, -1, *x_Lhd.shape[1:]).transpose(1, 2)


def _packed(x_BhLd: Tensor) -> Tensor:
    """[B, h, L, d] -> [B L, h, d]; a view of what cuDNN returns, which is laid out like the queries."""
    return x_BhLd.transpose(1, 2).flatten(0, 1)


def _heads(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, ...]:
    at, key_at = call.q_rows(), call.k_rows()
    return tuple(_batched(x, call.batch) for x in (q[at], k[key_at], v[key_at]))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *_heads(q, k, v, call), None, True, 0.0, causal, False, scale=scale
    )
    return _packed(o), lse.view(call.batch, q.shape[1], -1).transpose(0, 1).flatten(1)


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    call: Call,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    at = call.q_rows()
    stats = lse[:, at].view(q.shape[1], call.batch, -1).transpose(0, 1).contiguous().unsqueeze(-1)
    state = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is off
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _batched(do[at], call.batch), *_heads(q, k, v, call), _batched(o[at], call.batch), stats, state, state,
        None, None, None, call.queries, call.keys, 0.0, causal, scale=scale,
    )  # fmt: skip
    return tuple(_packed(x) for x in grads)
