"""Attention of kernels/attention.py by torch's FlashAttention (CUDA, 16 bit).

It is called twice, once for the causal part of every segment and once for completions against their prefix, and the
two are merged by their log-sum-exps. Both backward calls get the merged o and lse, which makes their dq, dk, dv add
up to the gradient of the whole.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CrossPart:
    """Queries of segments with a prefix against that prefix, as variable-length sequences."""

    queries: Tensor  # int64 indices into T
    keys: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True, slots=True)
class FlashPlan:
    cu_own: Tensor  # int32 [S + 1]
    max_own: int
    cross: CrossPart | None  # None where no segment has a prefix


def uses_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the stock FlashAttention kernels take these tensors."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
    )


def flash_plan(rows: list[list[int]], device: torch.device) -> FlashPlan:
    cu_own = [row[0] for row in rows] + [rows[-1][1] if rows else 0]
    queries, keys, cu_q, cu_k = [], [], [0], [0]
    last = None
    for s, e, ps, pe in rows:
        if pe == ps or e == s:
            continue
        if last == (ps, pe):  # siblings are one query sequence: the prefix is read once for all of them
            cu_q[-1] += e - s
        else:
            keys.append(torch.arange(ps, pe))
            cu_q.append(cu_q[-1] + e - s)
            cu_k.append(cu_k[-1] + pe - ps)
            last = (ps, pe)
        queries.append(torch.arange(s, e))

    def longest(cu: list[int]) -> int:
        return max((b - a for a, b in pairwise(cu)), default=0)

    def index(x: list[int]) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    cross = None
    if queries:
        cross = CrossPart(
            torch.cat(queries).to(device),
            torch.cat(keys).to(device),
            index(cu_q),
            index(cu_k),
            longest(cu_q),
            longest(cu_k),
        )
    return FlashPlan(index(cu_own), longest(cu_own), cross)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, plan: FlashPlan, scale: float) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._flash_attention_forward
    own, n = plan.cu_own, plan.max_own
    out, lse, *_ = flash(q, k, v, own, own, n, n, 0.0, True, False, scale=scale)
    if plan.cross is None:
        return out, lse
    c = plan.cross
    args = c.cu_queries, c.cu_keys, c.max_queries, c.max_keys, 0.0, False, False
    part, part_lse, *_ = flash(q[c.queries], k[c.keys], v[c.keys], *args, scale=scale)
    own_lse = lse[:, c.queries]
    out[c.queries], lse[:, c.queries] = merged(out[c.queries], own_lse, part, part_lse)
    return out, lse


def flash_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, plan: FlashPlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    flash = torch.ops.aten._flash_attention_backward
    # Dropout is off, so the kernel never reads its random state; it only wants tensors of the right kind.
    state = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.zeros((), dtype=torch.uint64, device=q.device),
    )
    own, n = plan.cu_own, plan.max_own
    dq, dk, dv = flash(do, q, k, v, o, lse, own, own, n, n, 0.0, True, *state, scale=scale)
    if plan.cross is None:
        return dq, dk, dv
    c = plan.cross
    args = c.cu_queries, c.cu_keys, c.max_queries, c.max_keys, 0.0, False, *state
    inputs = do[c.queries], q[c.queries], k[c.keys], v[c.keys], o[c.queries], lse[:, c.queries].contiguous()
    dq_cross, dk_cross, dv_cross = flash(*inputs, *args, scale=scale)
    dq.index_add_(0, c.queries, dq_cross)
    dk.index_add_(0, c.keys, dk_cross)
    dv.index_add_(0, c.keys, dv_cross)
    return dq, dk, dv


def merged(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(o [L, n, d], lse [n, L]) over the keys of both, from what each part gave for the same queries."""
    total = torch.logaddexp(lse, other_lse)
    weight = (lse - total).exp().t()[..., None], (other_lse - total).exp().t()[..., None]
    return (o * weight[0] + other * weight[1]).to(o.dtype), total
