"""Attention of kernels/attention.py as plain torch: loops over blocks of small score matrices.

Everywhere, any dtype (arithmetic in float32 or wider), every option: the reference of the other ways.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.kernels.rmsnorm import accumulate_dtype


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [start, end) against the keys at `keys`; allowed [queries, keys] is True where they may look."""

    start: int
    end: int
    keys: Tensor  # int64 indices into T
    allowed: Tensor
    query_at: Tensor  # int64 positions, counted through the prefix
    key_at: Tensor


def dense_plan(rows: list[list[int]], device: torch.device, family_tokens: int) -> tuple[Block, ...]:
    """A prompt and its completions make one block up to family_tokens tokens, otherwise every segment does."""
    blocks: list[Block] = []
    for family in _families(rows):
        if 0 < family[-1][1] - family[0][0] <= family_tokens:
            blocks.append(_block(family, device))
        else:
            blocks.extend(_block([row], device) for row in family if row[0] < row[1])
    return tuple(blocks)


def _families(rows: list[list[int]]) -> Iterator[list[list[int]]]:
    """Segments without prefix, each with the segments after it whose prefix it is."""
    i = 0
    while i < len(rows):
        j = i + 1
        if rows[i][2] == rows[i][3]:
            while j < len(rows) and rows[j][2:] == rows[i][:2]:
                j += 1
        yield rows[i:j]
        i = j


def _block(segments: list[list[int]], device: torch.device) -> Block:
    start, end = segments[0][0], segments[-1][1]
    prefix_start, prefix_end = segments[0][2:]
    keys = torch.cat((torch.arange(prefix_start, prefix_end), torch.arange(start, end)))
    queries = torch.arange(start, end)
    allowed = torch.zeros(end - start, len(keys), dtype=torch.bool)
    query_at = torch.zeros_like(queries)
    for s, e, ps, pe in segments:
        own = (keys >= s) & (keys <= queries[s - start : e - start, None])
        allowed[s - start : e - start] = own | ((keys >= ps) & (keys < pe))
        query_at[s - start : e - start] = torch.arange(pe - ps, pe - ps + e - s)
    key_at = torch.cat((torch.arange(prefix_end - prefix_start), query_at))
    return Block(start, end, keys.to(device), allowed.to(device), query_at.to(device), key_at.to(device))


def attention_reference(
    q_Tnd: Tensor,
    k_Tmd: Tensor,
    v_Tmd: Tensor,
    blocks: tuple[Block, ...],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    out = q_Tnd.new_empty(q_Tnd.shape)
    lse = q_Tnd.new_empty(q_Tnd.shape[1], q_Tnd.shape[0], dtype=accumulate_dtype(q_Tnd.dtype))
    for block in blocks:
        q, k, v = _grouped(q_Tnd, k_Tmd, v_Tmd, block)
        scores, _ = _scores(q, k, block, scale, window, softcap)
        part = torch.logsumexp(scores, -1, keepdim=True)
        o = (scores - part).exp().view(q.shape[0], q.shape[1], -1) @ v
        out[block.start : block.end] = _ungroup(o, block)
        lse[:, block.start : block.end] = part.view(lse.shape[0], -1)
    return out, lse


def attention_backward_reference(
    do_Tnd: Tensor,
    q_Tnd: Tensor,
    k_Tmd: Tensor,
    v_Tmd: Tensor,
    o_Tnd: Tensor,
    lse_nT: Tensor,
    blocks: tuple[Block, ...],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulate_dtype(q_Tnd.dtype)
    dq = q_Tnd.new_empty(q_Tnd.shape)
    dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (k_Tmd, v_Tmd))
    m = k_Tmd.shape[1]
    for block in blocks:
        q, k, v = _grouped(q_Tnd, k_Tmd, v_Tmd, block)
        do = _group(do_Tnd[block.start : block.end].to(acc), m)
        o = _group(o_Tnd[block.start : block.end].to(acc), m)
        scores, slope = _scores(q, k, block, scale, window, softcap)
        lse = lse_nT[:, block.start : block.end].reshape(*scores.shape[:-1], 1)
        p = (scores - lse).exp().view(q.shape[0], q.shape[1], -1)
        ds = p * (do @ v.transpose(1, 2) - (do * o).sum(-1, keepdim=True)) * scale
        if slope is not None:
            ds *= slope
        dq[block.start : block.end] = _ungroup(ds @ k, block)
        dk.index_add_(0, block.keys, (ds.transpose(1, 2) @ q).transpose(0, 1))
        dv.index_add_(0, block.keys, (p.transpose(1, 2) @ do).transpose(0, 1))
    return dq, dk.to(k_Tmd.dtype), dv.to(v_Tmd.dtype)


def _group(x_Lnd: Tensor, m: int) -> Tensor:
    """[L, n, d] -> [m, n/m * L, d]: the queries that share a key-value head become rows of one matrix."""
    length, n, d = x_Lnd.shape
    return x_Lnd.reshape(length, m, n // m, d).permute(1, 2, 0, 3).reshape(m, n // m * length, d)


def _ungroup(x: Tensor, block: Block) -> Tensor:
    m, rows, d = x.shape
    length = block.end - block.start
    return x.view(m, rows // length, length, d).permute(2, 0, 1, 3).reshape(length, -1, d)


def _grouped(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulate_dtype(q.dtype)
    q_block = _group(q[block.start : block.end].to(acc), k.shape[1])
    return q_block, k[block.keys].to(acc).transpose(0, 1), v[block.keys].to(acc).transpose(0, 1)


def _scores(
    q: Tensor, k: Tensor, block: Block, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Masked scores [m, n/m, L, keys], and ds/dz [m, n/m * L, keys] where a soft-cap bends s = c tanh(z / c)."""
    flat, slope = q @ k.transpose(1, 2) * scale, None
    if softcap:
        bent = (flat / softcap).tanh()
        flat, slope = bent * softcap, 1 - bent * bent
    allowed = block.allowed
    if window:
        allowed = allowed & (block.query_at[:, None] - block.key_at < window)
    length = block.end - block.start
    scores = flat.view(flat.shape[0], flat.shape[1] // length, length, flat.shape[2])
    return scores.masked_fill(~allowed, float("-inf")), slope
