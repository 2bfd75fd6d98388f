"""Reading and making NF4 in Triton; formulas and format in kernels/nf4.py, where the arguments were checked.

A unit is as many elements of one row as fill a 16-byte store: 8 of 16 bit or 4 of 32 bit. Their 4 or 2 packed bytes are
loaded as one integer. Neighbouring threads hold neighbouring units, which makes loads and stores whole cache lines.
Everything is read once, but for the small tables, which stay in the first-level cache. K and the row stride are
compile-time constants: dividing by K costs little, and the alignment of rows is known.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.kernels.dispatch import interpreted

TILE = 512  # units of a program
WARPS = 4
QUANTIZED = 2048  # elements of a program that quantises, or one block
# How a nibble becomes its code: "gather" reads a table in shared memory (16 words in 16 banks: no conflicts; shift,
# mask and load are three instructions), "load" the same table through the first-level cache (five, because addresses
# have 64 bits). Selecting among 16 constants would take 15 instructions more.
LOOKUP = "gather"


def dequantize(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    nested_block: int,
    code: Tensor,
    out: Tensor,
) -> None:
    """Writes out [N, K], K even; nested = (absmax2, D, offset)."""
    n, k = out.shape
    if not n * k:
        return
    row = out.stride(0) if n > 1 else k
    per = 16 // out.element_size()
    while per > 2 and (k % per or row % per or packed.data_ptr() % (per // 2)):
        per //= 2
    units = n * k // per
    assert units < 2**31 - TILE, "more units than an int32 counts"
    # Without enable_fp_fusion=False the compiler would contract D * absmax2 + offset to one FMA, which rounds once.
    with torch.cuda.device_of(out):
        _dequantize[(-(-units // TILE),)](
            packed, absmax, *(nested or (None, None, None)), code, out, units,
            k // per, row, per, blocksize // per, nested_block, LOOKUP, TILE,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def _dequantize(
    packed_ptr,
    absmax_ptr,
    absmax2_ptr,  # None: absmax is float32, and the next two are not used
    d_ptr,
    offset_ptr,
    code_ptr,
    out_ptr,
    units,
    UNITS_PER_ROW: tl.constexpr,
    ROW: tl.constexpr,  # stride in elements
    PER: tl.constexpr,  # elements of a unit
    UNITS_PER_BLOCK: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    LOOKUP: tl.constexpr,
    TILE: tl.constexpr,
):
    unit = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = unit < units
    if PER == 8:
        packed_ptr = packed_ptr.to(tl.pointer_type(tl.int32))
    elif PER == 4:
        packed_ptr = packed_ptr.to(tl.pointer_type(tl.int16))
    word = tl.load(packed_ptr + unit, mask=mask, other=0).to(tl.int32)
    block = unit // UNITS_PER_BLOCK
    scale = tl.load(absmax_ptr + block, mask=mask, other=0)
    if absmax2_ptr is not None:
        absmax2 = tl.load(absmax2_ptr + block // NESTED_BLOCK, mask=mask, other=0.0)
        scale = tl.load(d_ptr + scale.to(tl.int32)) * absmax2 + tl.load(offset_ptr)

    i = tl.arange(0, PER)
    q = (word[:, None] >> (4 * (i ^ 1))[None, :]) & 15  # the high nibble of a byte is its first element
    if LOOKUP == "gather":
        code = tl.load(code_ptr + tl.arange(0, 16))
        value = tl.reshape(tl.gather(code, tl.reshape(q, (TILE * PER,)), 0), (TILE, PER))
    else:
        value = tl.load(code_ptr + q)
    w = (value * scale[:, None]).to(out_ptr.dtype.element_ty)
    at = (unit // UNITS_PER_ROW).to(tl.int64) * ROW + (unit % UNITS_PER_ROW) * PER
    tl.store(out_ptr + at[:, None] + i[None, :], w, mask=mask[:, None])


def quantize(weight_NK: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """(packed uint8 [ceil(E / 2)], absmax float32 [B])."""
    size, device = weight_NK.numel(), weight_NK.device
    packed = torch.empty((size + 1) // 2, dtype=torch.uint8, device=device)
    absmax = torch.empty(-(-size // blocksize), dtype=torch.float32, device=device)
    blocks = max(1, QUANTIZED // blocksize)
    if size:
        with torch.cuda.device_of(weight_NK):
            _quantize[(-(-len(absmax) // blocks),)](
                weight_NK, packed, absmax, size, blocksize, blocks, _has_reciprocal(), num_warps=WARPS
            )
    return packed, absmax


def reciprocal(x_E: Tensor) -> Tensor:
    """1 / x as the hardware gives it, float32 [E]; about one unit in the last place from the rounded one."""
    out = torch.empty_like(x_E)
    if out.numel():
        with torch.cuda.device_of(x_E):
            _reciprocals[(-(-x_E.numel() // TILE),)](x_E, out, x_E.numel(), _has_reciprocal(), TILE)
    return out


def _has_reciprocal() -> bool:
    """True where the instruction exists that bitsandbytes' CUDA code uses."""
    return torch.version.cuda is not None and not interpreted()


@triton.jit
def _reciprocal(x, HARDWARE: tl.constexpr):
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _reciprocals(x_ptr, out_ptr, size, HARDWARE: tl.constexpr, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + i, mask=i < size, other=1.0)
    tl.store(out_ptr + i, _reciprocal(x, HARDWARE), mask=i < size)


@triton.jit
def _quantize(
    w_ptr,
    packed_ptr,
    absmax_ptr,
    size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a program
    HARDWARE: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    e = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + e, mask=e < size, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(w), 1)
    tl.store(absmax_ptr + block, absmax, mask=block * BLOCK < size)
    x = w * _reciprocal(absmax, HARDWARE)[:, None]
    # How many midpoints between two codes are below; none where all of a block is 0 and x is not a number. In float32
    # as bitsandbytes has them: four are exactly between two float32, and there its literals are not rounded to even.
    q = (x > -0.84809643).to(tl.int32)
    q += (x > -0.6106329).to(tl.int32)
    q += (x > -0.45999527).to(tl.int32)
    q += (x > -0.33967942).to(tl.int32)
    q += (x > -0.2346074).to(tl.int32)
    q += (x > -0.13791174).to(tl.int32)
    q += (x > -0.045525018).to(tl.int32)
    q += (x > 0.03979015).to(tl.int32)
    q += (x > 0.120255254).to(tl.int32)
    q += (x > 0.20352125).to(tl.int32)
    q += (x > 0.29201376).to(tl.int32)
    q += (x > 0.38931254).to(tl.int32)
    q += (x > 0.5016634).to(tl.int32)
    q += (x > 0.6427869).to(tl.int32)
    q += (x > 0.8614784).to(tl.int32)
    first, second = tl.split(tl.reshape(q, (BLOCKS, BLOCK // 2, 2)))
    byte = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(packed_ptr + byte, (first << 4 | second).to(tl.uint8), mask=byte < (size + 1) // 2)
