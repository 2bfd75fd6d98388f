"""Attention of a decoding step on a pool of keys and values in which a group's prompt is stored, and read, once.

Axes: B rows (completions), Q groups of at most G rows, N token places of the pool, n query heads, m key-value heads,
d head dimension. A row's newest token attends to its group's prompt and to the row's own tokens, itself included:

    z_j = scale * q k_j        s_j = z_j, or c tanh(z_j / c) with a soft-cap c        p = prefix_length + own_length - 1
    lse = log sum_j exp s_j        o = sum_j exp(s_j - lse) v_j        over all j, or those at positions > p - window

Any split of the keys into parts with their own (lse_i, o_i) leads to the same: lse = log sum_i exp lse_i and
o = sum_i exp(lse_i - lse) o_i. So the prompt's part is computed for all rows of a group at once.

Where everything lies stands in tables on the device (`DecodeTables`), so that a CUDA graph can be replayed while their
contents change. A step is, all of it capturable and without a wait for the device:

    plan.refresh()                                        once: shares the work out, one launch
    rope_store(q, k, v, cos, sin, k_pool, v_pool, plan.place_B)      per layer: one launch
    decode_attention(q, k_pool, v_pool, tables, scale, plan=plan)    per layer: two launches
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from covey.kernels.decode_tables import DecodeTables
from covey.kernels.dispatch import use_triton
from covey.kernels.rmsnorm import accumulate_dtype
from covey.kernels.rope import rope_reference

if TYPE_CHECKING:
    from covey.kernels.decode_attention_triton import Work

FARTHEST = 1 << 24  # elements between places, so that offsets within a block of 128 keys fit into 32 bits
GATHERED = 1 << 22  # numbers that the reference gathers from a pool at a time
WIDEST_HEAD, WIDEST_SHARE = 256, 64  # of the kernels: head dimension, and query heads per key-value head


class DecodePlan:
    """How a step's work is shared out among the GPU's processors, for one geometry of heads and one window.

    `refresh` works it out from the tables, on the device. All layers of a step may use it, one after the other on one
    stream: they share its buffer for partial results. It also tells where the newest tokens are:

    place_B: int64, where `rope_store` puts them; -1 for idle rows
    position_B: int64, for the rotation, counted through the prompt; 0 for idle rows
    """

    def __init__(
        self,
        tables: DecodeTables,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        window: int = 0,
    ):
        """ValueError for a window below 0 or query heads that are no multiple of the key-value heads."""
        if window < 0 or q_heads % kv_heads:
            raise ValueError(f"window {window}, {q_heads} query heads, {kv_heads} key-value heads")
        self.tables, self.geometry = tables, (q_heads, kv_heads, head_dim, dtype)
        self.window = _window(tables, window)
        device = tables.own_length.device
        self.place_B, self.position_B = torch.zeros(
            2, len(tables.own_length), dtype=torch.int64, device=device
        )
        self.work: Work | None = None
        wide = head_dim > WIDEST_HEAD or q_heads // kv_heads > WIDEST_SHARE
        unfit = f"heads of {head_dim}, {q_heads // kv_heads} of them per key-value head" if wide else ""
        if use_triton(torch.empty(0, dtype=dtype, device=device), "decode_attention", unless=unfit):
            from covey.kernels import decode_attention_triton

            self.work = decode_attention_triton.new_work(tables, *self.geometry, self.window)

    def refresh(self) -> None:
        """To be called when the tables have changed, before the first layer. No wait for the device."""
        tables = self.tables
        if self.work is not None:
            from covey.kernels import decode_attention_triton

            return decode_attention_triton.refresh(self.work, tables, self.place_B, self.position_B)
        last_B = tables.own_length - 1
        self.place_B.copy_((tables.own_start + last_B).masked_fill(last_B < 0, -1))
        self.position_B.copy_((tables.prefix_of_rows()[1] + last_B).masked_fill(last_B < 0, 0))


def decode_attention(
    q_Bnd: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: DecodeTables,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    plan: DecodePlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What every row's query attends to: [B, n, d] in q's dtype, zeros for idle rows.

    k_pool, v_pool: [N, m, d] of q's dtype, places and heads of any stride, contiguous in d. Places that no table points
    at may hold anything. window: how many positions a query sees, 0 for all. softcap: c, 0 for none. plan: refreshed
    since the tables changed; without one it is worked out here, by one more launch. out: where the result goes, it does
    not overlap with the inputs. Raises ValueError for tensors that do not agree.
    """
    _check(q_Bnd, k_pool, v_pool, tables, window, softcap, out)
    geometry = (q_Bnd.shape[1], k_pool.shape[1], k_pool.shape[2], q_Bnd.dtype)
    if plan is None:
        plan = DecodePlan(tables, *geometry, window)
        plan.refresh()
    elif plan.tables is not tables or plan.geometry != geometry or plan.window != _window(tables, window):
        raise ValueError(
            f"the plan is for {plan.geometry}, window {plan.window}; not {geometry}, window {window}"
        )
    if plan.work is None:
        o = decode_attention_reference(q_Bnd, k_pool, v_pool, tables, scale, plan.window, softcap)
        return o if out is None else out.copy_(o)
    from covey.kernels import decode_attention_triton

    out = q_Bnd.new_empty(q_Bnd.shape) if out is None else out
    q_Bnd = q_Bnd if q_Bnd.stride(2) == 1 else q_Bnd.contiguous()
    decode_attention_triton.attend(plan.work, q_Bnd, k_pool, v_pool, scale, softcap, out)
    return out


def decode_attention_reference(
    q_Bnd: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: DecodeTables,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """The same over the places that some row sees, so many rows at a time as GATHERED allows for."""
    acc, (rows, n, d), m = accumulate_dtype(q_Bnd.dtype), q_Bnd.shape, k_pool.shape[1]
    place_BL, hidden_BL = tables.candidates(window)
    seen_L = ~hidden_BL.all(0)
    place_BL, hidden_BL = place_BL[:, seen_L], hidden_BL[:, seen_L]
    out = q_Bnd.new_empty(rows, n, d)
    at_once = max(1, GATHERED // max(1, place_BL.shape[1] * m * d))
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        hidden_bL = hidden_BL[part]
        k_bmLd, v_bmLd = (
            pool[place_BL[part]].to(acc).masked_fill(hidden_bL[:, :, None, None], 0.0).transpose(1, 2)
            for pool in (k_pool, v_pool)
        )
        q_bmrd = q_Bnd[part].to(acc).reshape(-1, m, n // m, d)
        scores_bmrL = q_bmrd @ k_bmLd.transpose(2, 3) * scale
        if softcap:
            scores_bmrL = softcap * torch.tanh(scores_bmrL / softcap)
        hidden_b11L = hidden_bL[:, None, None]
        weights_bmrL = torch.softmax(scores_bmrL.masked_fill(hidden_b11L, -torch.inf), -1)
        weights_bmrL = weights_bmrL.masked_fill(hidden_b11L, 0.0)  # they are NaN where a row sees nothing
        out[part] = (weights_bmrL @ v_bmLd).view(-1, n, d)
    return out


def rope_store(
    q_Bnd: Tensor,
    k_Bmd: Tensor,
    v_Bmd: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    place_B: Tensor,
) -> None:
    """Rotates q in place and writes the rotated keys and the values at place_B [B] of the pools, in one launch.

    q, k, v may be views into one packed buffer; k and v are left as they are. cos, sin: [B, 1, d_rot / 2] from
    `rope_tables`. Of a row with a place below 0 nothing is read or written; no two rows have the same place.
    Raises ValueError for tensors that do not agree.
    """
    half, d = cos.shape[-1], q_Bnd.shape[2]
    _check_store(k_Bmd, v_Bmd, k_pool, v_pool, place_B)
    if q_Bnd.shape[::2] != k_Bmd.shape[::2] or q_Bnd.dtype != k_Bmd.dtype:
        raise ValueError(f"queries {tuple(q_Bnd.shape)} beside keys {tuple(k_Bmd.shape)}")
    if cos.shape != (len(q_Bnd), 1, half) or sin.shape != cos.shape or 2 * half > d:
        raise ValueError(
            f"tables {tuple(cos.shape)}, {tuple(sin.shape)} for {len(q_Bnd)} rows and heads of {d}"
        )
    straight = (
        all(x.stride(2) == 1 for x in (q_Bnd, k_Bmd, v_Bmd)) and cos.is_contiguous() and sin.is_contiguous()
    )
    if use_triton(q_Bnd, "rope_store", unless="" if straight else "heads or tables that are not contiguous"):
        from covey.kernels import decode_attention_triton

        return decode_attention_triton.rope_store(q_Bnd, k_Bmd, v_Bmd, cos, sin, k_pool, v_pool, place_B)
    idle_B11 = (place_B < 0)[:, None, None]
    q_Bnd.copy_(torch.where(idle_B11, q_Bnd, rope_reference(q_Bnd, cos, sin)))
    _store_reference(rope_reference(k_Bmd, cos, sin), v_Bmd, k_pool, v_pool, place_B)


def store(k_Tmd: Tensor, v_Tmd: Tensor, k_pool: Tensor, v_pool: Tensor, place_T: Tensor) -> None:
    """Writes keys and values as they are at place_T [T] of the pools, in one launch; the rest as in `rope_store`."""
    _check_store(k_Tmd, v_Tmd, k_pool, v_pool, place_T)
    straight = k_Tmd.stride(2) == v_Tmd.stride(2) == 1
    if use_triton(k_Tmd, "store", unless="" if straight else "heads that are not contiguous"):
        from covey.kernels import decode_attention_triton

        return decode_attention_triton.rope_store(None, k_Tmd, v_Tmd, None, None, k_pool, v_pool, place_T)
    _store_reference(k_Tmd, v_Tmd, k_pool, v_pool, place_T)


def _store_reference(k_Tmd: Tensor, v_Tmd: Tensor, k_pool: Tensor, v_pool: Tensor, place_T: Tensor) -> None:
    """Not for a graph: how many rows are stored decides about shapes."""
    kept_T = place_T >= 0
    k_pool[place_T[kept_T]], v_pool[place_T[kept_T]] = k_Tmd[kept_T], v_Tmd[kept_T]


def _window(tables: DecodeTables, window: int) -> int:
    """0 for a window that can hide nothing."""
    return window if window < tables.max_prefix + tables.max_own else 0


def _check(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: DecodeTables,
    window: int,
    softcap: float,
    out: Tensor | None,
) -> None:
    if window < 0 or softcap < 0:
        raise ValueError(f"window {window} and softcap {softcap} are 0 (none) or more")
    _check_pools(k_pool, v_pool)
    if q.dim() != 3 or q.shape[0] != len(tables.own_length) or q.shape[2] != k_pool.shape[2]:
        raise ValueError(
            f"queries {tuple(q.shape)} for {len(tables.own_length)} rows and keys of {k_pool.shape[2]}"
        )
    if q.shape[1] % k_pool.shape[1] or q.dtype != k_pool.dtype:
        raise ValueError(f"queries {q.dtype} {tuple(q.shape)} on a pool {k_pool.dtype} {tuple(k_pool.shape)}")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, strides {out.stride()}; not like q, contiguous in d"
        )


def _check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    if k_pool.dim() != 3 or k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(
            f"pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)} are not [N, m, d] both, of one dtype"
        )
    if k_pool.stride(2) != 1 or v_pool.stride(2) != 1:
        raise ValueError("the pools are not contiguous in the head dimension")
    if max(k_pool.stride(0), v_pool.stride(0)) >= FARTHEST:
        raise ValueError(
            f"places {k_pool.stride(0)} and {v_pool.stride(0)} elements apart: less than {FARTHEST}"
        )


def _check_store(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, place: Tensor) -> None:
    _check_pools(k_pool, v_pool)
    if k.shape != v.shape or k.shape[1:] != k_pool.shape[1:] or {k.dtype, v.dtype} != {k_pool.dtype}:
        raise ValueError(
            f"keys {tuple(k.shape)} and values {tuple(v.shape)} for a pool {tuple(k_pool.shape)}"
        )
    if place.shape != k.shape[:1] or place.is_floating_point():
        raise ValueError(f"places {place.dtype} {tuple(place.shape)} for {len(k)} tokens")
