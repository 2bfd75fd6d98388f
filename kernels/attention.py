"""Causal attention over packed segments that may share a prefix.

Axes: T tokens, S segments, n query heads, m key-value heads (n a multiple of m), d head dimension.
A query attends to the earlier tokens of its own segment, itself included, and to all of its segment's prefix:

    s_ij = scale * q_i k_j        lse_i = log sum_j exp s_ij        p_ij = exp(s_ij - lse_i)        o_i = sum_j p_ij v_j
    dv_j = sum_i p_ij do_i        ds_ij = p_ij (do_i v_j - do_i o_i)
    dq_i = scale * sum_j ds_ij k_j        dk_j = scale * sum_i ds_ij q_i

Two ways lead to the same numbers. `flash` (CUDA, 16 bit) calls torch's FlashAttention twice, once for the causal
part of every segment and once for completions against their prefix, and merges the two by their log-sum-exps; both
backward calls get the merged o and lse, which makes their dq, dk, dv add up to the gradient of the whole. `dense`
(everywhere, any dtype) loops over blocks of small score matrices and is the reference.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from covey.kernels.rmsnorm import accumulate_dtype

FAMILY_TOKENS = 512  # a prompt and its completions up to this many tokens make one dense block with a mask


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [start, end) against the keys at `keys`; allowed [queries, keys] is True where they may look."""

    start: int
    end: int
    keys: Tensor  # int64 indices into T
    allowed: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What is derived from the segments once per batch and used by every layer."""

    blocks: tuple[Block, ...]  # dense only
    cu_own: Tensor | None = None  # flash only; int32 [S + 1]
    max_own: int = 0
    cross: "CrossPart | None" = None  # flash only; None where no segment has a prefix


@dataclass(frozen=True, slots=True)
class CrossPart:
    """Queries of segments with a prefix against that prefix, as variable-length sequences."""

    queries: Tensor  # int64 indices into T
    keys: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int


def uses_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the stock FlashAttention kernels take these tensors."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
    )


def attention_plan(segments_S4: Tensor, device: torch.device, *, flash: bool = False) -> AttentionPlan:
    """The plan for segments int32 [S, 4] on the CPU: (start, end, prefix_start, prefix_end), tiling T in order."""
    rows = segments_S4.tolist()
    assert all(a[1] == b[0] for a, b in pairwise(rows)), "segments must tile the tokens in order"
    return _flash_plan(rows, device) if flash else _dense_plan(rows, device)


def _dense_plan(rows: list[list[int]], device: torch.device) -> AttentionPlan:
    blocks, i = [], 0
    while i < len(rows):
        # A family: a segment without prefix and the segments after it whose prefix it is.
        j = i + 1
        while j < len(rows) and rows[j][2:] == rows[i][:2]:
            j += 1
        family = rows[i:j]
        if 0 < family[-1][1] - family[0][0] <= FAMILY_TOKENS:
            blocks.append(_block(family, device))
        else:
            blocks.extend(_block([row], device) for row in family if row[0] < row[1])
        i = j
    return AttentionPlan(tuple(blocks))


def _block(segments: list[list[int]], device: torch.device) -> Block:
    start, end = segments[0][0], segments[-1][1]
    prefix_start, prefix_end = segments[0][2:]
    keys = torch.cat((torch.arange(prefix_start, prefix_end), torch.arange(start, end)))
    queries = torch.arange(start, end)
    allowed = torch.zeros(end - start, len(keys), dtype=torch.bool)
    for s, e, ps, pe in segments:
        own = (keys >= s) & (keys <= queries[s - start : e - start, None])
        allowed[s - start : e - start] = own | ((keys >= ps) & (keys < pe))
    return Block(start, end, keys.to(device), allowed.to(device))


def _flash_plan(rows: list[list[int]], device: torch.device) -> AttentionPlan:
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
    return AttentionPlan((), index(cu_own), longest(cu_own), cross)


def attention(
    q_Tnd: Tensor, k_Tmd: Tensor, v_Tmd: Tensor, plan: AttentionPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """o [T, n, d] in q's dtype and lse [n, T] in float32."""
    if plan.cu_own is not None:
        return _flash(q_Tnd, k_Tmd, v_Tmd, plan, scale)
    out = torch.empty_like(q_Tnd)
    lse = q_Tnd.new_empty(q_Tnd.shape[1], q_Tnd.shape[0], dtype=accumulate_dtype(q_Tnd.dtype))
    for block in plan.blocks:
        q, k, v = _grouped(q_Tnd, k_Tmd, v_Tmd, block)
        scores, shape = _scores(q, k, block, scale)
        part = torch.logsumexp(scores, -1, keepdim=True)
        o = (scores - part).exp().view(shape) @ v
        out[block.start : block.end] = _ungroup(o, block)
        lse[:, block.start : block.end] = part.view(lse.shape[0], -1)
    return out, lse


def attention_backward(
    do_Tnd: Tensor,
    q_Tnd: Tensor,
    k_Tmd: Tensor,
    v_Tmd: Tensor,
    o_Tnd: Tensor,
    lse_nT: Tensor,
    plan: AttentionPlan,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [T, n, d], dk [T, m, d], dv [T, m, d]) in the inputs' dtypes."""
    if plan.cu_own is not None:
        return _flash_backward(do_Tnd, q_Tnd, k_Tmd, v_Tmd, o_Tnd, lse_nT, plan, scale)
    acc = accumulate_dtype(q_Tnd.dtype)
    dq = torch.empty_like(q_Tnd)
    dk, dv = (torch.zeros_like(x, dtype=acc) for x in (k_Tmd, v_Tmd))
    m = k_Tmd.shape[1]
    for block in plan.blocks:
        q, k, v = _grouped(q_Tnd, k_Tmd, v_Tmd, block)
        do = _group(do_Tnd[block.start : block.end].to(acc), m)
        o = _group(o_Tnd[block.start : block.end].to(acc), m)
        scores, shape = _scores(q, k, block, scale)
        p = (scores - lse_nT[:, block.start : block.end].reshape(*scores.shape[:-1], 1)).exp().view(shape)
        ds = p * (do @ v.transpose(1, 2) - (do * o).sum(-1, keepdim=True)) * scale
        dq[block.start : block.end] = _ungroup(ds @ k, block)
        dk.index_add_(0, block.keys, (ds.transpose(1, 2) @ q).transpose(0, 1))
        dv.index_add_(0, block.keys, (p.transpose(1, 2) @ do).transpose(0, 1))
    return dq, dk.to(k_Tmd.dtype), dv.to(v_Tmd.dtype)


def _group(x_Lnd: Tensor, m: int) -> Tensor:
    """[L, n, d] -> [m, n/m * L, d]: the queries that share a key-value head become rows of one matrix."""
    length, n, d = x_Lnd.shape
    return x_Lnd.view(length, m, n // m, d).permute(1, 2, 0, 3).reshape(m, n // m * length, d)


def _ungroup(x: Tensor, block: Block) -> Tensor:
    m, rows, d = x.shape
    length = block.end - block.start
    return x.view(m, rows // length, length, d).permute(2, 0, 1, 3).reshape(length, -1, d)


def _grouped(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulate_dtype(q.dtype)
    q_block = _group(q[block.start : block.end].to(acc), k.shape[1])
    return q_block, k[block.keys].to(acc).transpose(0, 1), v[block.keys].to(acc).transpose(0, 1)


def _scores(q: Tensor, k: Tensor, block: Block, scale: float) -> tuple[Tensor, torch.Size]:
    """Masked scores [m, n/m, L, keys] and the shape [m, n/m * L, keys] that the products need."""
    flat = q @ k.transpose(1, 2) * scale
    length = block.end - block.start
    scores = flat.view(flat.shape[0], flat.shape[1] // length, length, flat.shape[2])
    return scores.masked_fill(~block.allowed, float("-inf")), flat.shape


def _flash(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._flash_attention_forward
    own, n = plan.cu_own, plan.max_own
    out, lse, *_ = flash(q, k, v, own, own, n, n, 0.0, True, False, scale=scale)
    if plan.cross is None:
        return out, lse
    c = plan.cross
    args = c.cu_queries, c.cu_keys, c.max_queries, c.max_keys, 0.0, False, False
    part, part_lse, *_ = flash(q[c.queries], k[c.keys], v[c.keys], *args, scale=scale)
    own_lse = lse[:, c.queries]
    merged = torch.logaddexp(own_lse, part_lse)
    weight = (own_lse - merged).exp().t()[..., None], (part_lse - merged).exp().t()[..., None]
    out[c.queries] = (out[c.queries] * weight[0] + part * weight[1]).to(out.dtype)
    lse[:, c.queries] = merged
    return out, lse


def _flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, plan: AttentionPlan, scale: float
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
