"""Attention of kernels/attention.py as Triton kernels: how they are launched. The maths is written there.

A tile has rows of (token, query head): the G = n/m query heads that share a key-value head lie one after the other in
it, so that a short segment fills a tile and dk, dv sum over their query heads inside a program. Keys that all rows see
are worked off without masks, in one loop over the prefix and the own segment; the loop after it masks the end of the
prefix and the diagonal. Per program:

    forward          one query tile: o and lse, by the running maximum and sum of every row in base 2
    query gradient   one query tile: dq; before that the row sums of do o, which it leaves for the next kernel
    key gradient     one key tile and some of the queries that see it: dk, dv, or parts of them in float32
    sum of parts     some keys: dk, dv from the parts, where many queries were shared out

No atomics: two runs are bit-equal. The work lists are made by attention_tiles.py. Strides are compile-time constants
for the reason given in rmsnorm_triton.py.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from covey.kernels.attention_backward_triton import (
    key_gradient_kernel,
    query_gradient_kernel,
    sum_parts_kernel,
)
from covey.kernels.attention_forward_triton import forward_kernel
from covey.kernels.attention_tiles import TileLists
from covey.kernels.dispatch import interpreted

SUM_ROWS = 32  # keys of one program of the last kernel


class Tile(NamedTuple):
    rows: int  # of a query tile: tokens times G
    keys: int
    warps: int
    stages: int  # how many blocks are on their way at a time
    ahead: bool = False  # forward only: `_attend_ahead`


class Launch(NamedTuple):
    forward: Tile
    query_gradient: Tile
    key_gradient: Tile


# By padded head dimension, for 16-bit tensors. 128 on Hopper was measured (H200: 4 x 2048, and 8 x 1024 behind a prompt
# of 512); the others were read off the compiler's register and spill counts for sm_90 and sm_80.
HOPPER = {
    16: Launch(Tile(128, 128, 8, 2, True), Tile(128, 128, 8, 2), Tile(64, 128, 8, 3)),
    32: Launch(Tile(128, 128, 8, 2, True), Tile(128, 128, 8, 2), Tile(64, 128, 8, 3)),
    64: Launch(Tile(128, 128, 8, 2, True), Tile(128, 128, 8, 2), Tile(64, 128, 8, 3)),
    128: Launch(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    256: Launch(Tile(128, 64, 8, 2, True), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2)),
}
OTHERS = {  # at most 96 KiB of shared memory
    16: Launch(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    32: Launch(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    64: Launch(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Launch(Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 64, 8, 2)),
    256: Launch(Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
}
LEAST = Tile(32, 32, 4, 1)  # little shared memory; float32, whose products do not use the tensor cores
INTERPRETED = Tile(16, 16, 1, 1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, lists: TileLists,
    scale: float, window: int, softcap: float, o: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Fills o [T, n, d] and lse [n, T]."""
    (tokens, n, _), heads = q.shape, k.shape[1]
    tile = _launch(q, k).forward
    work = lists.queries(tile.rows * heads // n, window)
    ahead = tile.ahead and _describable(k) and _describable(v)
    described = (_descriptor(k, tile), _descriptor(v, tile)) if ahead else (None, None)
    forward_kernel[(work.shape[0] * heads,)](
        q, k, v, *described, o, lse, work, tokens, window,
        *_strides(q, k, v, o), **_common(q, k, scale, window, softcap, tile),
    )  # fmt: skip


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, lists: TileLists,
    scale: float, window: int, softcap: float, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Fills dq [T, n, d], dk and dv [T, m, d]."""
    (tokens, heads), group = k.shape[:2], q.shape[1] // k.shape[1]
    _, tile, key_tile = _launch(q, k)
    rows = lse.new_empty(
        (2, heads, tokens, group)
    )  # lse in base 2 and the row sums of do o, in the order of rows
    work = lists.queries(tile.rows // group, window)
    query_gradient_kernel[(work.shape[0] * heads,)](
        q, k, v, o, do, lse, rows, dq, work, tokens, window,
        *_strides(q, k, v, o, do, dq), **_common(q, k, scale, window, softcap, tile),
    )  # fmt: skip
    keys = lists.keys(key_tile.keys, key_tile.rows // group, heads, _processors(q.device), window)
    common = _common(q, k, scale, window, softcap, key_tile)
    parts = rows.new_empty((keys.places, heads, 2, key_tile.keys, common["BLOCK_D"]))
    key_gradient_kernel[(keys.items.shape[0] * heads,)](
        q, k, v, do, rows, dk, dv, parts, keys.items, keys.runs, tokens, window,
        *_strides(q, k, v, do, dk, dv), **common,
    )  # fmt: skip
    if keys.places:
        blocks = triton.cdiv(key_tile.keys, SUM_ROWS)
        sum_parts_kernel[(keys.sums.shape[0] * heads * blocks,)](
            parts, dk, dv, keys.sums, *_strides(dk, dv),
            heads, k.shape[2], blocks, SUM_ROWS, key_tile.keys, common["BLOCK_D"], num_warps=4,
        )  # fmt: skip


def _launch(q: Tensor, k: Tensor) -> Launch:
    return launch_for(q.device, q.dtype, q.shape[2], q.shape[1] // k.shape[1])


@cache
def launch_for(device: torch.device, dtype: torch.dtype, dim: int, group: int) -> Launch:
    """The tiles for heads of this dimension and groups of this many query heads."""
    least = triton.next_power_of_2(group)
    if interpreted():
        return Launch(*[INTERPRETED._replace(rows=16 * least)] * 3)
    if dtype.itemsize > 2 or _shared_memory(device) < 96 * 1024:
        launch = Launch(LEAST, LEAST, LEAST)
    elif torch.version.cuda and torch.cuda.get_device_capability(device) == (9, 0):
        launch = HOPPER[_padded(dim)]
    else:
        launch = OTHERS[_padded(dim)]
    return Launch(*(tile._replace(rows=max(tile.rows, least)) for tile in launch))


def _shared_memory(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _describable(x_Tmd: Tensor) -> bool:
    """True if the bulk copy engine takes this tensor: all addresses are multiples of 16 bytes."""
    size = x_Tmd.element_size()
    return not (x_Tmd.data_ptr() % 16 or x_Tmd.stride(0) * size % 16 or x_Tmd.stride(1) * size % 16)


def _descriptor(x_Tmd: Tensor, tile: Tile) -> TensorDescriptor:
    """Blocks of a head's keys; what is beyond T or d reads as 0."""
    tokens, heads, dim = x_Tmd.shape
    strides = [x_Tmd.stride(1), x_Tmd.stride(0), 1]
    return TensorDescriptor(x_Tmd, [heads, tokens, dim], strides, [1, tile.keys, _padded(dim)])


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _common(q: Tensor, k: Tensor, scale: float, window: int, softcap: float, tile: Tile) -> dict[str, Any]:
    """The keyword arguments that the three big kernels share."""
    return {
        "SCALE": scale,
        "SOFTCAP": softcap,
        "WINDOWED": window > 0,
        "HEADS": k.shape[1],
        "GROUP": q.shape[1] // k.shape[1],
        "DIM": q.shape[2],
        "ACC": tl.float64 if q.dtype == torch.float64 else tl.float32,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "BLOCK_D": _padded(q.shape[2]),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
