"""Attention of kernels/decode_attention.py as Triton kernels, made for CUDA graphs: two launches per layer.

    attend   prompts and own tokens in one launch. A program works off its pieces of the list that
             decode_plan_triton.py makes once per step; every piece leaves o and lse (in base 2) in float32
    join     adds up a row's parts

The work is cut by what there is to read now, not by what the tables could hold: the grid has as many programs as the
GPU keeps resident, and each reads the same number of key blocks. A grid of (row, head, split) would start thousands of
programs for nothing when most rows are short or idle, and end with a few long ones. The second launch is what the cut
costs; a last program that joins would need atomics.

The query tile of a prompt holds the rows of a group times the n/m query heads of a key-value head. A single row's tile
is as large and mostly empty: memory is what bounds the time, and one way through the kernel takes fewer registers than
two, so that more programs fit. No atomics: two runs are bit-equal. Strides are compile-time constants for the
reason given in rmsnorm_triton.py.
"""
# pyright: reportCallIssue=false

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.kernels.attention_forward_triton import LOG2E, capped, load_rows, store_rows
from covey.kernels.decode_plan_triton import FIELDS, plan_kernel
from covey.kernels.decode_tables import DecodeTables
from covey.kernels.dispatch import interpreted
from covey.kernels.rope_triton import _copy, _turn
from covey.kernels.rope_triton import _launch as rope_launch

TILE_ROWS = 64  # of a query tile at most, unless n/m is more
PLAN_WARPS = 4
JOIN_WARPS = 1  # so that nobody waits at a barrier
FEW_PARTS, MANY_PARTS = 8, 16  # that `join` loads at a time
MANY_HEADS = 1024  # B * n beyond which heads have few parts, as there are enough heads to keep the GPU busy


class Launch(NamedTuple):
    keys: int  # of a block
    warps: int
    stages: int  # blocks in shared memory, and one
    resident: int  # programs that fit into a multiprocessor
    least_rows: int = 16  # of a query tile; from 64 on Hopper takes other instructions


# By padded head dimension, for 16-bit tensors: up to 32 rows in a query tile, and more. `resident` is read off the
# compiler's counts of registers and shared memory for sm_90.
HOPPER = {
    16: (Launch(128, 4, 4, 2), Launch(128, 4, 4, 2)),
    32: (Launch(128, 4, 4, 2), Launch(128, 4, 4, 2)),
    64: (Launch(64, 4, 4, 3), Launch(64, 4, 3, 3)),
    128: (Launch(32, 4, 4, 3), Launch(32, 4, 3, 3)),
    256: (Launch(16, 4, 4, 3), Launch(16, 4, 4, 2)),
}
OTHERS = {  # at most 96 KiB of shared memory for all of a multiprocessor's programs
    16: (Launch(64, 4, 3, 3), Launch(64, 4, 3, 2)),
    32: (Launch(64, 4, 3, 3), Launch(64, 4, 3, 2)),
    64: (Launch(32, 4, 3, 3), Launch(32, 4, 3, 2)),
    128: (Launch(32, 4, 3, 2), Launch(32, 4, 2, 1)),
    256: (Launch(16, 4, 3, 1), Launch(16, 4, 2, 1)),
}
LEAST = Launch(16, 4, 2, 1)  # float32, whose products do not use the tensor cores
INTERPRETED = Launch(16, 1, 1, 5)


@dataclass(frozen=True, slots=True)
class Work:
    """The list of work, room for the partial results, and what they were sized for."""

    launch: Launch
    rows: int  # of a query tile
    heads: int
    share: int  # query heads per key-value head
    pad: int  # rows of a seat, in a query tile and among the partial results: the power of 2 from `share` on
    seats: int  # of a group in one query tile
    tiles: int  # of a group
    programs: int
    window: int
    pieces: Tensor
    spans: Tensor
    joins: Tensor
    live: Tensor
    lowest: Tensor
    parts: Tensor
    lse: Tensor


def new_work(tables: DecodeTables, n: int, m: int, d: int, dtype: torch.dtype, window: int) -> Work:
    device, rows, (groups, chairs) = (
        tables.own_length.device,
        len(tables.own_length),
        tables.rows_of_group.shape,
    )
    pad = _power_of_2(n // m)
    at_most = max(1, (TILE_ROWS if _roomy(device, dtype) else 16) // pad)
    tiles = -(-chairs // at_most)
    seats = -(-chairs // tiles)
    tile_rows = max(16, _power_of_2(seats) * pad)
    launch = launch_for(device, dtype, _padded(d), tile_rows)
    programs = launch.resident * _processors(device)
    prefix_slots, own_slots = groups * tiles * m + programs, rows * m + programs
    results = (prefix_slots * seats + own_slots) * pad
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return Work(
        launch, max(tile_rows, launch.least_rows), m, n // m, pad, seats, tiles, programs, window,
        numbers(groups * tiles * m + rows * m + programs, FIELDS), numbers(programs, 2), numbers(rows * m, 4),
        numbers(groups * tiles * seats), numbers(groups * tiles * seats),
        torch.empty(results, d, dtype=wide, device=device), torch.empty(results, dtype=wide, device=device),
    )  # fmt: skip


def refresh(work: Work, tables: DecodeTables, place: Tensor, position: Tensor) -> None:
    """Fills the list from the tables, and place and position [B]."""
    rows, (groups, chairs) = len(tables.own_length), tables.rows_of_group.shape
    sizes = rows, groups * work.tiles, work.seats, chairs, work.heads, work.programs
    plan_kernel[(groups * work.tiles + rows,)](
        tables.own_start, tables.own_length, tables.prefix_start, tables.prefix_length,
        tables.rows_of_group, tables.group_of_row,
        work.pieces, work.spans, work.joins, work.live, work.lowest, place, position,
        rows, groups, chairs, work.heads, work.pad, work.seats, work.tiles, work.programs, work.window, FIELDS,
        work.launch.keys, *(_power_of_2(size) for size in sizes), num_warps=PLAN_WARPS,
    )  # fmt: skip


def attend(
    work: Work, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, softcap: float, out: Tensor
) -> None:
    """Fills out [B, n, d]."""
    (rows, n, d), (launch, share, pad, seats) = q.shape, (work.launch, work.share, work.pad, work.seats)
    acc = tl.float64 if q.dtype == torch.float64 else tl.float32
    attend_kernel[(work.programs,)](
        q, k_pool, v_pool, work.pieces, work.spans, work.live, work.lowest, work.parts, work.lse,
        *_strides(q, k_pool, v_pool), scale, softcap, work.window > 0, share, pad, seats, d, acc, FIELDS,
        work.rows, launch.keys, _padded(d), **_options(launch),
    )  # fmt: skip
    join_kernel[(rows * n,)](
        work.parts, work.lse, work.joins, out, *_strides(out), work.heads, share, pad, seats * pad, d, acc,
        FEW_PARTS if rows * n > MANY_HEADS else MANY_PARTS, _padded(d), num_warps=JOIN_WARPS,
    )  # fmt: skip


def rope_store(
    q: Tensor | None, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None,
    k_pool: Tensor, v_pool: Tensor, place: Tensor,
) -> None:  # fmt: skip
    """Rotates q where it is and k on its way into the pool; without q, cos and sin it copies."""
    rows, m, d = k.shape
    n = 0 if q is None else q.shape[1]
    half = 0 if cos is None else cos.shape[-1]
    block_half, block_rest, block_d, block_n, block_m, warps = rope_launch(n, m, d, half)
    rope_store_kernel[(rows,)](
        q, k, v, cos, sin, k_pool, v_pool, place, *((0, 0) if q is None else _strides(q)),
        *_strides(k, v, k_pool, v_pool), place.stride(0), n, m, d, half,
        tl.float64 if k.dtype == torch.float64 else tl.float32,
        block_n, block_m, block_half, block_rest, block_d, num_warps=warps,
    )  # fmt: skip


@triton.jit
def attend_kernel(
    q_ptr, k_ptr, v_ptr, pieces_ptr, spans_ptr, live_ptr, lowest_ptr, parts_ptr, lse_ptr,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr,
    SHARE: tl.constexpr, PAD: tl.constexpr, SEATS: tl.constexpr, DIM: tl.constexpr, ACC: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program's pieces: one query tile against consecutive keys each, o and lse to rows of the partial results."""
    span = spans_ptr + 2 * tl.program_id(0)
    tile = tl.arange(0, BLOCK_M)
    for slot in range(tl.load(span), tl.load(span + 1)):
        piece = pieces_ptr + slot * FIELDS
        owner, head, keys = tl.load(piece), tl.load(piece + 1), tl.load(piece + 3)
        place, result = tl.load(piece + 2).to(tl.int64), tl.load(piece + 4).to(tl.int64)
        # A prompt's tile has a group's rows, the tile of a row has the row in its first seat.
        seat, sub = tile // PAD, tile % PAD
        at = (-1 - owner) * SEATS + seat
        shared = (owner < 0) & (seat < SEATS) & (sub < SHARE)
        asker = tl.load(live_ptr + at, mask=shared, other=-1)
        asker = tl.where((owner >= 0) & (tile < SHARE), owner, asker)
        hidden = tl.zeros_like(tile)  # how many of the piece's keys are not seen
        if WINDOWED:
            hidden = tl.load(lowest_ptr + at, mask=shared, other=0) - tl.load(piece + 5)
        o, lse = _attend(
            q_ptr + head * (SHARE * Q_HEAD), asker.to(tl.int64) * Q_ROW + sub * Q_HEAD, asker >= 0,
            k_ptr + head * K_HEAD, v_ptr + head * V_HEAD, place, keys, hidden,
            K_ROW, V_ROW, SCALE, SOFTCAP, WINDOWED, DIM, ACC, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        store_rows(parts_ptr + result * DIM, tile * DIM, asker >= 0, o, DIM, BLOCK_D)
        tl.store(lse_ptr + result + tile, lse, mask=asker >= 0)


@triton.jit
def _attend(
    q_ptr, q_offset, inside, k_ptr, v_ptr, place, keys, hidden,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr,
    DIM: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """o and lse (in base 2) of a query tile against `keys` keys from `place` on."""
    column = tl.arange(0, BLOCK_N)
    factor: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2E
    q = load_rows(q_ptr, q_offset, inside, DIM, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=ACC)
    top = tl.full([BLOCK_M], float("-inf"), dtype=ACC)
    weights = tl.zeros([BLOCK_M, BLOCK_N], dtype=ACC)  # summed up in the end: that costs a barrier or three
    for i in range(0, tl.cdiv(keys, BLOCK_N)):
        key = i * BLOCK_N + column
        exists = key < keys  # what lies behind the last key may be NaN: it is read as zero
        first = place + i * BLOCK_N
        k = load_rows(k_ptr + first * K_ROW, column * K_ROW, exists, DIM, BLOCK_D, True)
        s = capped(tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC), SCALE, SOFTCAP)
        seen = exists[None, :]
        if WINDOWED:
            seen = seen & (key[None, :] >= hidden[:, None])
        s = tl.where(seen, s * factor, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        shift = new_top
        if WINDOWED:  # a row may have seen no key yet
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(top - shift)
        weights = weights * rescale[:, None] + p
        acc = acc * rescale[:, None]
        v = load_rows(v_ptr + first * V_ROW, column * V_ROW, exists, DIM, BLOCK_D, True)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee", out_dtype=ACC)
        top = new_top
    total = tl.sum(weights, axis=1)
    if WINDOWED:
        total = tl.where(total > 0.0, total, 1.0)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def join_kernel(
    parts_ptr, lse_ptr, joins_ptr, o_ptr, O_ROW: tl.constexpr, O_HEAD: tl.constexpr, HEADS: tl.constexpr,
    SHARE: tl.constexpr, OWN_STEP: tl.constexpr, PROMPT_STEP: tl.constexpr, DIM: tl.constexpr, ACC: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = sum_i exp2(lse_i - lse) o_i for one query head of one row."""
    row, query_head = tl.program_id(0) // (HEADS * SHARE), tl.program_id(0) % (HEADS * SHARE)
    join = joins_ptr + (row * HEADS + query_head // SHARE) * 4
    own, own_count = tl.load(join), tl.load(join + 1)
    prompt, count = tl.load(join + 2), own_count + tl.load(join + 3)
    dim = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], dtype=ACC)
    total = tl.full([], 0.0, dtype=ACC)
    top = tl.full([], float("-inf"), dtype=ACC)
    for first in range(0, count, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        at = tl.where(part < own_count, own + part * OWN_STEP, prompt + (part - own_count) * PROMPT_STEP)
        at = at.to(tl.int64) + query_head % SHARE
        o = load_rows(parts_ptr, at * DIM, part < count, DIM, BLOCK_D, True)
        lse = tl.load(lse_ptr + at, mask=part < count, other=float("-inf"))
        new_top = tl.maximum(
            top, tl.max(lse, axis=0)
        )  # finite: a row sees itself, among its own parts, which are first
        weight = tl.exp2(lse - new_top)
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weight, axis=0)
        acc = acc * rescale + tl.sum(o * weight[:, None], axis=0)
        top = new_top
    total = tl.where(total > 0.0, total, 1.0)  # of an idle row, whose output is zero
    o_ptr += row.to(tl.int64) * O_ROW + query_head * O_HEAD
    tl.store(o_ptr + dim, (acc / total).to(o_ptr.dtype.element_ty), mask=dim < DIM)


@triton.jit
def rope_store_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_pool_ptr, v_pool_ptr, place_ptr,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, K_PLACE: tl.constexpr, K_POOL_HEAD: tl.constexpr,
    V_PLACE: tl.constexpr, V_POOL_HEAD: tl.constexpr, PLACE: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(place_ptr + row * PLACE).to(tl.int64)
    if place >= 0:
        k, k_pool = k_ptr + row * K_ROW, k_pool_ptr + place * K_PLACE
        if HALF > 0:
            pair = tl.arange(0, BLOCK_HALF)
            cos = tl.load(cos_ptr + row * HALF + pair, mask=pair < HALF, other=0.0).to(ACC)[None, :]
            sin = tl.load(sin_ptr + row * HALF + pair, mask=pair < HALF, other=0.0).to(ACC)[None, :]
            q = q_ptr + row * Q_ROW
            _turn(q, q, cos, sin, N, HALF, Q_HEAD, Q_HEAD, ACC, BLOCK_N, BLOCK_HALF)
            _turn(k, k_pool, cos, sin, M, HALF, K_HEAD, K_POOL_HEAD, ACC, BLOCK_M, BLOCK_HALF)
        if 2 * HALF < D:
            _copy(k + 2 * HALF, k_pool + 2 * HALF, M, D - 2 * HALF, K_HEAD, K_POOL_HEAD, BLOCK_M, BLOCK_REST)
        _copy(v_ptr + row * V_ROW, v_pool_ptr + place * V_PLACE, M, D, V_HEAD, V_POOL_HEAD, BLOCK_M, BLOCK_D)


@cache
def launch_for(device: torch.device, dtype: torch.dtype, padded_dim: int, tile_rows: int) -> Launch:
    if interpreted():
        return INTERPRETED
    if not _roomy(device, dtype):
        return LEAST
    hopper = torch.version.cuda and torch.cuda.get_device_capability(device) == (9, 0)
    return (HOPPER if hopper else OTHERS)[padded_dim][tile_rows > 32]


@cache
def _roomy(device: torch.device, dtype: torch.dtype) -> bool:
    """True if large tiles fit into shared memory."""
    if interpreted() or dtype.itemsize > 2:
        return interpreted()
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return room >= 96 * 1024


def _options(launch: Launch) -> dict[str, int]:
    """How the kernel is compiled: on NVIDIA with no more registers than its resident programs have for each thread."""
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    if torch.version.cuda and launch.resident > 1:
        options["maxnreg"] = min(255, 65536 // (32 * launch.warps * launch.resident) // 8 * 8)
    return options


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _padded(dim: int) -> int:
    return max(16, _power_of_2(dim))


def _power_of_2(size: int) -> int:
    """The least power of 2 that is not below size."""
    return 1 << (size - 1).bit_length()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]
