"""One pass over the logits of a row for its statistics, one for its gradients; formulas in kernels/head.py.

A program does one row. First it reads the row upwards and keeps, for each of its BLOCK lanes, the largest z, the sum of
exp(z - max) and (for the entropy) of exp(z - max) (z - max), rescaled when a larger z comes: one exponential per logit
and no communication until the lanes are merged at the end. The target is left out and added as a scalar. Then it
reads the row downwards, beginning with what the cache still holds, and writes the gradients. Each loop loads a block
ahead. That is 4 + 4 bytes read and 2 written per logit.

d logp / dz takes the place of the logits. Where it is half as wide, it fills the upper half of the row's bytes: block b
lands on blocks above b, which have been read, or on the block in registers. A barrier per block keeps slower warps'
reads before faster warps' writes.

Rows are read and written up to their stride, padding included, so that vector accesses need no mask of single
elements when V is odd.
"""

# Launch options and static_range are unknown to a type checker that sees a plain function.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # logits of a row at a time
ELEMENTS_PER_THREAD = 8  # of a block: one store of 16 bytes, two loads
MAX_WARPS = 8
# Four programs of 8 warps fit a multiprocessor with so many registers per thread; the option is NVIDIA's only.
REGISTERS = {"maxnreg": 64} if torch.version.cuda else {}

LOWEST = tl.constexpr(-1e38)  # below every logit but -inf, and nothing like inf - inf comes of it
VANISHED = tl.constexpr(-1e4)  # its exponential is 0 in float64 too; times 0 it is 0, not NaN


def logit_gradients(
    logits_MV: Tensor,
    target_M: Tensor,
    temperature: float,
    *,
    softcap: float | None,
    scale: float,
    entropy: bool,
    gradient: bool,
    dtype: torch.dtype,
    dentropy_MV: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(logp [M], entropy [M], dz [M, V] in `dtype`, a view of logits_MV's memory); None for what is not asked for.

    logits_MV: float32 or float64 with contiguous rows; they are overwritten, and so are the paddings between rows
    and behind the last. dentropy_MV: filled with d entropy / d logits, in `dtype` and with the same stride.
    """
    (rows, vocab), row = logits_MV.shape, logits_MV.stride(0)
    assert logits_MV.stride(1) == 1 and row >= vocab and target_M.is_contiguous()
    logp = logits_MV.new_empty(rows)
    entropies = logits_MV.new_empty(rows) if entropy else None
    dz = in_place(logits_MV, dtype) if gradient else None
    if dentropy_MV is not None:
        assert dentropy_MV.shape == logits_MV.shape and dentropy_MV.dtype == dtype
        assert dentropy_MV.stride() == logits_MV.stride()
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab))
        with torch.cuda.device_of(logits_MV):
            _rows[(rows,)](
                logits_MV, target_M, logp, entropies, dz, dentropy_MV,
                1.0 / temperature, float(scale), float(softcap or 0.0),
                vocab, row, dz.stride(0) if dz is not None else 0, softcap is not None,
                entropy or dentropy_MV is not None, block,
                num_warps=max(1, min(MAX_WARPS, block // (32 * ELEMENTS_PER_THREAD))), **REGISTERS,
            )  # fmt: skip
    return logp, entropies, dz


def in_place(logits_MV: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for [M, V] numbers of `dtype` in the logits' own memory: the same places, or each row's upper half."""
    if dtype == logits_MV.dtype:
        return logits_MV
    (rows, vocab), row = logits_MV.shape, logits_MV.stride(0)
    assert 2 * dtype.itemsize == logits_MV.dtype.itemsize, (
        "gradients are as wide as the logits or half as wide"
    )
    return logits_MV.as_strided((rows, row), (row, 1)).view(dtype)[:, row : row + vocab]


@triton.jit
def _rows(
    logits_ptr,
    target_ptr,
    logp_ptr,
    entropy_ptr,  # None: not asked for, as the next two
    dz_ptr,
    dentropy_ptr,
    inverse_temperature,
    scale,
    softcap,
    V: tl.constexpr,
    ROW: tl.constexpr,  # stride, and how far a row may be read
    DZ_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MEAN: tl.constexpr,  # whether sum p z is needed
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * ROW
    y = tl.load(target_ptr + row).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    FULL: tl.constexpr = V // BLOCK * BLOCK
    LAST: tl.constexpr = (V - 1) // BLOCK * BLOCK

    # Upwards, each lane for itself.
    x = tl.load(logits_ptr + lane, mask=lane < ROW, other=0.0)
    top = tl.zeros_like(x) + LOWEST
    mass = tl.zeros_like(x)
    moment = tl.zeros_like(x)
    for start in range(0, FULL, BLOCK):
        ahead = tl.load(logits_ptr + start + BLOCK + lane, mask=start + BLOCK + lane < ROW, other=0.0)
        z = _transform(x, scale, softcap, inverse_temperature, SOFTCAP)
        z = tl.where(start + lane == y, float("-inf"), z)
        top, mass, moment = _absorb(z, top, mass, moment, MEAN)
        x = ahead
    if FULL < V:
        z = _transform(x, scale, softcap, inverse_temperature, SOFTCAP)
        z = tl.where((FULL + lane == y) | (FULL + lane >= V), float("-inf"), z)
        top, mass, moment = _absorb(z, top, mass, moment, MEAN)

    # Merge the lanes, then the target; `others` is 1 - p_y without cancellation.
    best = tl.max(top, 0)
    moved = _floor(top - best)
    weight = tl.exp(moved)
    if MEAN:
        moment = tl.sum(weight * (moment + mass * moved), 0)
    mass = tl.sum(weight * mass, 0)
    # A target outside of the vocabulary gives NaN, not a read elsewhere.
    x_y = tl.load(logits_ptr + y, mask=(y >= 0) & (y < V), other=float("nan"))
    z_y = _transform(x_y, scale, softcap, inverse_temperature, SOFTCAP)
    leads = z_y >= best
    best_z = tl.where(leads, z_y, best)
    moved = _floor(best - best_z)
    others = tl.exp(moved) * mass
    # Exactly 0 where the target leads: as one multiply-add x_y / tau - best_z would leave the rounding of z_y.
    ahead_y = tl.where(leads, 0.0, z_y - best_z)
    behind = _floor(ahead_y)
    total = others + tl.exp(behind)
    log_total = tl.where(leads, _log1p(others), tl.log(total))
    tl.store(logp_ptr + row, ahead_y - log_total)
    inverse_total = 1.0 / total
    mean = inverse_total
    if MEAN:
        mean = (tl.exp(moved) * (moment + mass * moved) + tl.exp(behind) * behind) * inverse_total
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, log_total - mean)

    # Downwards.
    if dz_ptr is not None or dentropy_ptr is not None:
        x = tl.load(logits_ptr + LAST + lane, mask=LAST + lane < ROW, other=0.0)
        for i in range(0, LAST + BLOCK, BLOCK):
            col = LAST - i + lane
            ahead = tl.load(logits_ptr + col - BLOCK, mask=col - BLOCK >= 0, other=0.0)
            below = _transform(x, scale, softcap, inverse_temperature, SOFTCAP) - best_z
            p = tl.exp(below) * inverse_total
            if dentropy_ptr is not None:
                dentropy = tl.where(p == 0.0, 0.0, p * (mean - below)) * (scale * inverse_temperature)
                if SOFTCAP:
                    dentropy *= _tanh_slope(x * scale / softcap)
                dentropy = dentropy.to(dentropy_ptr.dtype.element_ty)
                tl.store(dentropy_ptr + row * ROW + col, dentropy, mask=col < ROW)
            if dz_ptr is not None:
                dz = tl.where(col == y, others * inverse_total, -p) * (scale * inverse_temperature)
                if SOFTCAP:
                    dz *= _tanh_slope(x * scale / softcap)
                tl.debug_barrier()
                tl.store(dz_ptr + row * DZ_ROW + col, dz.to(dz_ptr.dtype.element_ty), mask=col < ROW)
            x = ahead


@triton.jit
def _absorb(z, top, mass, moment, MEAN: tl.constexpr):
    """One more z for the maximum, the sum of exp(z - max) and that of exp(z - max) (z - max). NaN stays NaN."""
    higher = z > top
    moved = _floor(tl.where(higher, top - z, z - top))
    e = tl.exp(moved)
    if MEAN:
        moment = tl.where(higher, e * (moment + mass * moved), moment + e * moved)
    mass = tl.where(higher, mass * e + 1.0, mass + e)
    return tl.where(higher, z, top), mass, moment


@triton.jit
def _transform(x, scale, softcap, inverse_temperature, SOFTCAP: tl.constexpr):
    """z = cap(scale x) / temperature."""
    z = x * scale
    if SOFTCAP:
        shrunk = tl.exp(-2.0 * tl.abs(z / softcap))
        tanh = (1.0 - shrunk) / (1.0 + shrunk)
        z = softcap * tl.where(z < 0.0, -tanh, tanh)
    return z * inverse_temperature


@triton.jit
def _tanh_slope(x):
    """1 - tanh(x)^2 = 1 / cosh(x)^2."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * shrunk / ((1.0 + shrunk) * (1.0 + shrunk))


@triton.jit
def _floor(x):
    return tl.where(x < VANISHED, VANISHED, x)


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0; below 1 by the series of 2 artanh(x / (2 + x)), whose ratio is below 1/9."""
    s = x / (2.0 + x)
    series = s * 0.0
    for k in tl.static_range(17):
        series = series * s * s + 1.0 / (33 - 2 * k)
    return tl.where(x < 1.0, 2.0 * s * series, tl.log(1.0 + x))
