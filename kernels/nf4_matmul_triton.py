"""Products of few rows with NF4 matrices as Triton kernels, made for CUDA graphs: two launches, whatever is asked for.

    products   x W^T, and x A^T if there is an adapter, in parts: sums over some columns for some rows of W, in float32
    finish     adds up the parts, then z B^T and bias, and applies the activation

What there is to read is cut into equal shares. A unit is a tile of rows of W (or A) and some columns; there are as many
programs as the GPU keeps resident, and each has `per` units, one after the other. Where a tile's units belong to
several programs, each leaves a part. No atomics: two runs are bit-equal.

If memory is to be the limit, an H200 has time for four instructions per weight, other cards for ten to twenty. Hence:
- Even a single row is a case for `dot`: the tensor cores spare two instructions per weight, to unpack it and to add up.
- W is the first operand of `dot`, decoded in the registers where the tensor cores expect it. A product may sum its
  columns in any order that is the same for x and W: in that of `_columns`, all that a thread has of a row and a unit is
  in one block of scales, consecutive bytes with one scale. Of x there are runs of 16 bytes.
- Codes are looked up by warp shuffles. Lane i holds CODE[i % 16], and as an index the packed word itself will do,
  shifted, because all but the lowest five bits are ignored. `gather` is the same for other GPUs and the interpreter.
- Scales are loaded in the order in which threads hold the rows; in any other, the compiler would move all the decoded
  weights instead. The byte that a scale depends on is loaded one unit ahead.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.kernels.decode_attention_triton import _processors, _roomy
from covey.kernels.dispatch import interpreted
from covey.kernels.gated_mlp_triton import _acc, _share
from covey.kernels.lora_linear import LoraGroup
from covey.kernels.nf4 import BLOCK, NESTED_BLOCK, NF4, code_book
from covey.kernels.rmsnorm import accumulate_dtype

MOST_ROWS = 64  # of x in a program
RANKS = 16  # rows of A in a tile
FINISH = (32, 4)  # outputs in a program of `finish` at most, and its warps


class Launch(NamedTuple):
    outputs: int  # rows of W in a tile; below warps * (rows of x) warps decode the same ones, but for wgmma
    columns: int  # of a unit: 64, 128 or 256; fewer if they do not divide K
    warps: int
    stages: int
    resident: int  # programs that fit into a multiprocessor


# By rows of x, for 16-bit tensors. Not measured yet: chosen by the compiler's counts for sm_90 and sm_89 of registers,
# shared memory and instructions per weight (4.7 for 8 rows, 5.4 for 16, 6.2 to 6.7 for 32, 7 to 9 for 64).
HOPPER = {
    8: Launch(32, 256, 2, 3, 8),
    16: Launch(64, 256, 2, 3, 6),
    32: Launch(64, 128, 2, 3, 4),
    64: Launch(128, 128, 4, 3, 2),
}
OTHERS = {  # at most 96 KiB of shared memory for all of a multiprocessor's programs
    8: Launch(64, 256, 4, 2, 4),
    16: Launch(64, 256, 4, 2, 4),
    32: Launch(128, 128, 4, 2, 2),
    64: Launch(128, 128, 2, 2, 3),
}
LEAST = Launch(32, 64, 2, 1, 2)  # float32, whose products do not use the tensor cores
INTERPRETED = Launch(16, 64, 1, 1, 3)


def matmul(
    x: Tensor,
    weights: tuple[NF4, ...],
    lora: LoraGroup | None,
    scale: float,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor,
) -> None:
    """Fills out [M, N], or [M, N / 2] with an activation."""
    if not out.numel():
        return
    (m, k), device = x.shape, x.device
    rows = min(MOST_ROWS, max(8, triton.next_power_of_2(m)))
    row_tiles, launch = -(-m // rows), launch_for(device, x.dtype, rows)
    block = min(launch.columns, k & -k)  # the largest power of 2 that divides K
    steps, rank, sizes = k // block, lora.rank if lora else 0, [w.shape[0] for w in weights]
    tiles = _sums([-(-n // launch.outputs) for n in sizes])
    units = (tiles[-1] + -(-rank // RANKS)) * steps
    per = -(-units * row_tiles // (launch.resident * _processors(device)))
    most = -(-(steps - 1) // per) + 1  # programs that can have a share in one tile
    parts = torch.empty(most, sum(sizes) + rank, m, dtype=accumulate_dtype(x.dtype), device=device)
    nested, a = [w.nested for w in weights if w.nested is not None], lora.a if lora else x
    common: dict[str, Any] = {
        "WEIGHTS": len(weights), "TILES": tiles, "STARTS": _sums(sizes), "RANK": rank, "RANKS": RANKS,
        "STEPS": steps, "OUTPUTS": launch.outputs, "ROWS": rows, "ACC": _acc(x),
    }  # fmt: skip
    with torch.cuda.device_of(x):
        products_kernel[-(-units // per), row_tiles](
            tuple(w.packed for w in weights), tuple(w.absmax for w in weights), tuple(s.absmax for s in nested),
            tuple(s.code for s in nested), tuple(s.offset for s in nested), code_book(device), x, a, parts,
            m, per, units, k, x.stride(0), _alignment(x), a.stride(0), _alignment(a), len(nested) > 0, _shuffles(),
            BLOCK, NESTED_BLOCK, launch.warps, block, **common, enable_fp_fusion=False, **_options(launch),
        )  # fmt: skip
        width, (b, *ranks) = min(launch.outputs, FINISH[0]), _adapters(lora, sizes, x)
        finish_kernel[tiles[1 if activation else -1] * launch.outputs // width, row_tiles](
            parts, b, bias, out, m, per, most, *ranks, scale, activation, out.stride(0), width, **common,
            num_warps=FINISH[1],
        )  # fmt: skip


@triton.jit(do_not_specialize=["m", "per", "units"])
def products_kernel(
    packed, absmax, absmax2, d, offset,  # of every weight; the last three where scales are nested
    code_ptr, x_ptr, a_ptr, parts_ptr, m, per, units,
    K: tl.constexpr, X_ROW: tl.constexpr, X_ALIGN: tl.constexpr, A_ROW: tl.constexpr, A_ALIGN: tl.constexpr,
    NESTED: tl.constexpr, SHUFFLES: tl.constexpr, BLOCK: tl.constexpr, NESTED_BLOCK: tl.constexpr,
    WARPS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTS: tl.constexpr, TILES: tl.constexpr, STARTS: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, STEPS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """A program's units, tile by tile. Its part of a tile's sums goes to parts [part, N + R, M]."""
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[None, :]
    seen, column = row < m, _columns(COLUMNS)
    x_at = x_ptr + row * X_ROW + column[:, None]
    x_at = tl.multiple_of(tl.max_contiguous(x_at, [8, 1]), [X_ALIGN, 1])
    code = _lane_codes(code_ptr, SHUFFLES)
    begin = tl.program_id(0) * per
    end = tl.minimum(begin + per, units)
    for tile in range(begin // STEPS, tl.cdiv(end, STEPS)):
        first, last = tl.maximum(begin - tile * STEPS, 0), tl.minimum(end - tile * STEPS, STEPS)
        part = (tl.program_id(0) - tile * STEPS // per).to(tl.int64)
        part_ptr = parts_ptr + part * ((STARTS[WEIGHTS] + RANK) * m) + row
        if tile < TILES[WEIGHTS]:
            sums_ptr = part_ptr + _of(STARTS, tile, TILES, WEIGHTS) * m
            _weight_tile(
                packed, absmax, absmax2, d, offset, code, x_at, seen, sums_ptr, m, tile, first, last, K, NESTED,
                SHUFFLES, BLOCK, NESTED_BLOCK, WARPS, COLUMNS, WEIGHTS, TILES, STARTS, STEPS, OUTPUTS, ROWS, ACC,
            )  # fmt: skip
        elif RANK > 0:
            sums_ptr = part_ptr + STARTS[WEIGHTS] * m
            rank = (tile - TILES[WEIGHTS]) * RANKS + tl.arange(0, RANKS)
            a_at = a_ptr + (tl.minimum(rank, RANK - 1) * A_ROW)[:, None] + column[None, :]
            a_at = tl.multiple_of(tl.max_contiguous(a_at, [1, 8]), [1, A_ALIGN])
            z = tl.zeros([RANKS, ROWS], dtype=ACC)
            for step in range(first, last):
                x = tl.load(x_at + step * COLUMNS, mask=seen, other=0.0)
                z = tl.dot(tl.load(a_at + step * COLUMNS), x, z, input_precision="ieee", out_dtype=ACC)
            tl.store(sums_ptr + (rank * m)[:, None], z, mask=(rank < RANK)[:, None] & seen)


@triton.jit
def _weight_tile(
    packed, absmax, absmax2, d, offset, code, x_at, seen, sums_ptr, m, tile, first, last,
    K: tl.constexpr, NESTED: tl.constexpr, SHUFFLES: tl.constexpr, BLOCK: tl.constexpr, NESTED_BLOCK: tl.constexpr,
    WARPS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTS: tl.constexpr, TILES: tl.constexpr, STARTS: tl.constexpr,
    STEPS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """W x^T for a tile over the columns of the units first to last - 1; behind the last row of W it is repeated."""
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    SETS: tl.constexpr = OUTPUTS // (16 * WARPS)  # of 16 rows that a warp has
    size = _of(STARTS, tile, TILES, WEIGHTS, 1) - _of(STARTS, tile, TILES, WEIGHTS)
    at = (tile - _of(TILES, tile, TILES, WEIGHTS)) * OUTPUTS
    output = at + tl.arange(0, OUTPUTS)
    row = tl.minimum(output, size - 1).to(tl.int64)[:, None]
    bytes_at = _of(packed, tile, TILES, WEIGHTS) + row * (K // 2) + tl.arange(0, COLUMNS // 2)[None, :]
    # Four scales of a row beside each other, for the quarters of its columns. A warp has rows g and g + 8 of every 16.
    i = tl.arange(0, OUTPUTS * 4)
    held = i // (64 * WARPS) * (16 * WARPS) + i // 32 % WARPS * 16 + i // (32 * WARPS) % 2 * 8 + i // 4 % 8
    block = tl.minimum(at + held, size - 1) * (K // BLOCK) + i % 4 * BLOCKS // 4
    absmax_at = tl.max_contiguous(_of(absmax, tile, TILES, WEIGHTS) + block, 1)
    if NESTED:
        shift = tl.load(_of(offset, tile, TILES, WEIGHTS))
        index = tl.load(absmax_at + first * BLOCKS)
    acc = tl.zeros([OUTPUTS, ROWS], dtype=ACC)
    for step in range(first, last):
        pairs = tl.load(bytes_at + step * (COLUMNS // 2))
        x = tl.load(x_at + step * COLUMNS, mask=seen, other=0.0)
        if NESTED:
            absmax2_at = _of(absmax2, tile, TILES, WEIGHTS) + (block + step * BLOCKS) // NESTED_BLOCK
            scale = tl.load(_of(d, tile, TILES, WEIGHTS) + index.to(tl.int32)) * tl.load(absmax2_at) + shift
            index = tl.load(absmax_at + tl.minimum(step + 1, STEPS - 1) * BLOCKS)
        else:
            scale = tl.load(absmax_at + step * BLOCKS)
        scale = tl.permute(tl.reshape(scale, (SETS, 2, WARPS, 8, 4)), (0, 2, 1, 3, 4))
        pairs = tl.permute(tl.reshape(pairs, (OUTPUTS, 4, COLUMNS // 32, 4)), (0, 2, 1, 3))
        w = (_decoded(pairs, code, SHUFFLES) * tl.reshape(scale, (OUTPUTS, 1, 4, 1, 1))).to(x.dtype)
        acc = tl.dot(tl.reshape(w, (OUTPUTS, COLUMNS)), x, acc, input_precision="ieee", out_dtype=ACC)
    tl.store(sums_ptr + (output * m)[:, None], acc, mask=(output < size)[:, None] & seen)


@triton.jit
def _columns(COLUMNS: tl.constexpr):
    """Which columns of W and x stand where in a unit: every fourth run of 8 is of the same quarter."""
    i = tl.arange(0, COLUMNS)
    return i // 8 % 4 * (COLUMNS // 4) + i // 32 * 8 + i % 8


@triton.jit
def _of(values, tile, TILES: tl.constexpr, WEIGHTS: tl.constexpr, SHIFT: tl.constexpr = 0):
    """The value of the weight whose tile this is; with SHIFT 1 that of the next weight."""
    value = values[SHIFT]
    for i in tl.static_range(1, WEIGHTS):
        value = tl.where(tile >= TILES[i], values[i + SHIFT], value)
    return value


@triton.jit
def _lane_codes(code_ptr, SHUFFLES: tl.constexpr):
    """CODE: one of its values in every lane, or all 16."""
    if SHUFFLES:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 lane; .reg .b64 at;
            mov.u32 lane, %laneid; and.b32 lane, lane, 15; mad.wide.u32 at, lane, 4, $1; ld.global.nc.f32 $0, [at];
            }""",
            "=f,l", [code_ptr.to(tl.uint64)], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.load(code_ptr + tl.arange(0, 16))


@triton.jit
def _decoded(pairs, code, SHUFFLES: tl.constexpr):
    """Codes of the high and the low nibble of every byte, in a dimension of their own."""
    if SHUFFLES:
        high, low = tl.inline_asm_elementwise(
            """{
            .reg .b32 t<7>;
            shr.b32 t0, $8, 4;  shr.b32 t1, $8, 8;  shr.b32 t2, $8, 12; shr.b32 t3, $8, 16;
            shr.b32 t4, $8, 20; shr.b32 t5, $8, 24; shr.b32 t6, $8, 28;
            shfl.sync.idx.b32 $0, $9, t0, 31, -1; shfl.sync.idx.b32 $4, $9, $8, 31, -1;
            shfl.sync.idx.b32 $1, $9, t2, 31, -1; shfl.sync.idx.b32 $5, $9, t1, 31, -1;
            shfl.sync.idx.b32 $2, $9, t4, 31, -1; shfl.sync.idx.b32 $6, $9, t3, 31, -1;
            shfl.sync.idx.b32 $3, $9, t6, 31, -1; shfl.sync.idx.b32 $7, $9, t5, 31, -1;
            }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,f,f,f,f", [pairs, code], dtype=(tl.float32, tl.float32), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        flat = tl.reshape(pairs, (pairs.numel,)).to(tl.int32)
        high = tl.reshape(tl.gather(code, flat >> 4, 0), pairs.shape)
        low = tl.reshape(tl.gather(code, flat & 15, 0), pairs.shape)
    return tl.join(high, low)


@triton.jit(do_not_specialize=["m", "per", "most"])
def finish_kernel(
    parts_ptr, b, bias_ptr, out_ptr, m, per, most,
    B_ROWS: tl.constexpr, FIRST_RANKS: tl.constexpr, COUNTS: tl.constexpr, BLOCK_R: tl.constexpr, SCALE: tl.constexpr,
    ACTIVATION: tl.constexpr, OUT_ROW: tl.constexpr, WIDTH: tl.constexpr,
    WEIGHTS: tl.constexpr, TILES: tl.constexpr, STARTS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    STEPS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """WIDTH outputs of ROWS rows, of one weight or, with an activation, of gate and up."""
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[None, :]
    piece = tl.program_id(0)  # of WIDTH outputs
    tile = piece // (OUTPUTS // WIDTH)
    piece -= _of(TILES, tile, TILES, WEIGHTS) * (OUTPUTS // WIDTH)
    output = (piece * WIDTH + tl.arange(0, WIDTH))[:, None]
    exists = output < _of(STARTS, tile, TILES, WEIGHTS, 1) - _of(STARTS, tile, TILES, WEIGHTS)
    inside = exists & (row < m)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = _of(STARTS, tile, TILES, WEIGHTS) + output
    between = (STARTS[WEIGHTS] + RANK) * m.to(tl.int64)
    result = None
    for side in tl.static_range(1 if ACTIVATION is None else 2):
        tile += side * TILES[1]
        at = n + side * STARTS[1]
        y = _sum_parts(parts_ptr + at * m + row, between, inside, tile, per, most, STEPS, ACC)
        if RANK > 0:
            i = tl.arange(0, BLOCK_R)
            mine = i < _of(COUNTS, tile, TILES, WEIGHTS)
            rank = (_of(FIRST_RANKS, tile, TILES, WEIGHTS) + i)[:, None]
            z_ptr = parts_ptr + (STARTS[WEIGHTS] + rank) * m + row
            seen = mine[:, None] & (row < m)
            z = _sum_parts(z_ptr, between, seen, TILES[WEIGHTS] + rank // RANKS, per, most, STEPS, ACC)
            b_ptr = _of(b, tile, TILES, WEIGHTS) + output * _of(B_ROWS, tile, TILES, WEIGHTS) + i[None, :]
            b_tile = tl.load(b_ptr, mask=exists & mine[None, :], other=0.0)
            y = tl.dot(b_tile, (z * SCALE).to(dtype), y, input_precision="ieee", out_dtype=ACC)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + at, mask=exists, other=0.0).to(ACC)
        y = y.to(dtype).to(ACC)
        if side == 0:
            result = y
        else:
            share, _ = _share(result, ACTIVATION)
            result = (result * share).to(dtype).to(ACC) * y
    tl.store(out_ptr + row.to(tl.int64) * OUT_ROW + n, result.to(dtype), mask=inside)


@triton.jit
def _sum_parts(pointer, between, inside, tile, per, most, STEPS: tl.constexpr, ACC: tl.constexpr):
    """The sum of all programs' parts of a tile (or of tiles, by rows); four are loaded at a time."""
    count = (tile * STEPS + STEPS - 1) // per + 1 - tile * STEPS // per
    total = tl.zeros(inside.shape, dtype=ACC)
    for first in range(0, most, 4):
        for part in tl.static_range(4):
            seen = inside & (first + part < count)
            total += tl.load(pointer + (first + part) * between, mask=seen, other=0.0)
    return total


@cache
def launch_for(device: torch.device, dtype: torch.dtype, rows: int) -> Launch:
    if interpreted():
        return INTERPRETED
    if not _roomy(device, dtype):
        return LEAST
    hopper = torch.version.cuda and torch.cuda.get_device_capability(device) == (9, 0)
    return (HOPPER if hopper else OTHERS)[rows]


def _options(launch: Launch) -> dict[str, int]:
    """How `products` is compiled: on NVIDIA with no more registers than its resident programs have for each thread."""
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    if _shuffles():
        options["maxnreg"] = min(255, 65536 // (32 * launch.warps * launch.resident) // 8 * 8)
    return options


@cache
def _shuffles() -> bool:
    """True where Triton compiles for NVIDIA."""
    return torch.version.cuda is not None and not interpreted()


def _adapters(lora: LoraGroup | None, sizes: list[int], nothing: Tensor) -> list[Any]:
    """Of every weight B, the stride of its rows, its first rank, its number of ranks; a power of 2 for the last."""
    parts = {part.outputs.start: part for part in lora.parts} if lora else {}
    found = [parts.get(start) for start in _sums(sizes)[:-1]]
    each = [(p.b, p.b.stride(0), p.ranks.start, p.b.shape[1]) if p else (nothing, 0, 0, 0) for p in found]
    return [*zip(*each, strict=True), max(16, triton.next_power_of_2(max(count for *_, count in each)))]


def _sums(values: list[int]) -> tuple[int, ...]:
    """0, then the sums of the first one, two, ... values."""
    return tuple(sum(values[:i]) for i in range(len(values) + 1))


def _alignment(x: Tensor) -> int:
    """Bytes, up to 16, of which the address of every row is a multiple."""
    whole = x.data_ptr() % 16 == 0 and (len(x) == 1 or x.stride(0) * x.element_size() % 16 == 0)
    return 16 if whole else x.element_size()
