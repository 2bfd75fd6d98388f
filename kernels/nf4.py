"""NF4, the 4-bit format of QLoRA (Dettmers et al. 2023), bit for bit as bitsandbytes stores and reads it.

Axes: N rows, K columns, E = N K elements in row order, B = ceil(E / blocksize) blocks of consecutive elements. Blocks
take no notice of rows; where K is a multiple of the blocksize they tile them.

    w[e] = CODE[q[e]] * absmax[e // blocksize]           q[e] in 0..15: byte e // 2, high nibble for even e, low for odd
    absmax[b] = D[a[b]] * absmax2[b // 256] + offset     if the scales are nested: a in 0..255, D = dynamic_code()

CODE holds 16 quantiles of a normal distribution, scaled to [-1, 1], with 0 among them. All arithmetic is float32:
D * absmax2 is rounded before offset is added (no fused multiply-add), the product with CODE is rounded again, and
only then cast to the output's dtype. One difference is left: bitsandbytes' CUDA build flushes results below 2^-126 to
zero; its CPU code and this do not. Blocks of 64 with nested scales take 4 + 8/64 + 32/(64 * 256) = 4.127 bits a weight.

Quantising takes the nearest code, q = #(midpoints of CODE < w r), r = 1 / absmax. bitsandbytes' own results differ
between devices: its CUDA code has an approximate r, as the hardware gives it, and finds D by a search that halves an
interval; its CPU code has the rounded r and another search. `quantize_nf4` is its CUDA code bit for bit on a GPU, and
elsewhere the nearest code of both tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton

BLOCK = 64  # the usual blocksize
NESTED_BLOCK = 256  # scales that share one absmax2
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Blocks that the reference reads at a time: on a CPU what fits the cache, on a GPU what bounds the memory it takes.
CHUNK = {"cpu": 1 << 14}
CHUNK_ELSEWHERE = 1 << 18


class Nested(NamedTuple):
    """How uint8 scales become float32 ones."""

    absmax: Tensor  # float32 [ceil(B / 256)]
    code: Tensor  # float32 [256], D
    offset: Tensor  # float32 []


@dataclass(frozen=True, slots=True)
class NF4:
    """A matrix [N, K] in 4 bits. All tensors are contiguous and on one device."""

    packed: Tensor  # uint8 [ceil(E / 2)]
    absmax: Tensor  # float32 [B], or uint8 [B] where nested
    shape: tuple[int, int]
    dtype: torch.dtype  # of the matrix that was quantised
    blocksize: int = BLOCK
    nested: Nested | None = None

    def __post_init__(self) -> None:
        size = self.shape[0] * self.shape[1]
        assert self.blocksize in (32, 64, 128, 256, 512, 1024, 2048, 4096), f"blocksize {self.blocksize}"
        assert self.packed.dtype == torch.uint8 and self.packed.shape == ((size + 1) // 2,)
        assert self.absmax.dtype == (torch.float32 if self.nested is None else torch.uint8)
        assert self.absmax.shape == (-(-size // self.blocksize),)
        assert self.packed.is_contiguous() and self.absmax.is_contiguous()


def dequantize_nf4(weight: NF4, out: Tensor | None = None) -> Tensor:
    """Write the matrix into `out` and return it.

    out: [N, K] in bfloat16, float16 or float32 with adjacent columns and any row stride >= K, for example a part of a
    larger buffer, of which nothing else is touched; by default a new tensor in the weight's dtype.
    Raises ValueError if out has another shape, dtype, device or layout.
    """
    out = _output(weight, out)
    odd = "an odd number of columns" if weight.shape[1] % 2 else ""
    if use_triton(out, "nf4", unless=odd):
        from covey.kernels import nf4_triton

        scales = weight.absmax, weight.nested, weight.blocksize, NESTED_BLOCK
        nf4_triton.dequantize(weight.packed, *scales, code_book(out.device), out)
        return out
    return dequantize_nf4_reference(weight, out)


def dequantize_nf4_reference(weight: NF4, out: Tensor | None = None) -> Tensor:
    """The same in torch operations."""
    out = _output(weight, out)
    size, block = out.numel(), weight.blocksize
    contiguous = out.is_contiguous()
    flat = out.view(-1) if contiguous else torch.empty(size, dtype=out.dtype, device=out.device)
    absmax, pairs = absmax_reference(weight), _pairs(out.device)
    step = CHUNK.get(out.device.type, CHUNK_ELSEWHERE)
    for first in range(0, len(absmax), step):
        scale = absmax[first : first + step]
        start, end = first * block, min(size, (first + step) * block)
        q = weight.packed[start // 2 : (end + 1) // 2].int()
        code = torch.view_as_real(pairs.index_select(0, q)).view(-1)
        whole = (end - start) // block  # blocks; the last one of all may be shorter
        middle = start + whole * block
        into = flat[start:middle].view(whole, block)
        torch.mul(code[: whole * block].view(whole, block), scale[:whole, None], out=into)
        torch.mul(code[whole * block : end - start], scale[whole:], out=flat[middle:end])
    return out if contiguous else out.copy_(flat.view(out.shape))


def absmax_reference(weight: NF4) -> Tensor:
    """Scales of the blocks, float32 [B]."""
    nested = weight.nested
    if nested is None:
        return weight.absmax
    absmax2 = nested.absmax.repeat_interleave(NESTED_BLOCK)[: len(weight.absmax)]
    return nested.code[weight.absmax.int()] * absmax2 + nested.offset


def quantize_nf4(weight_NK: Tensor, blocksize: int = BLOCK, *, nested: bool = True) -> NF4:
    """The matrix in 4 bits. weight: bfloat16, float16 or float32, contiguous."""
    assert weight_NK.dtype in DTYPES and weight_NK.is_contiguous()
    if not use_triton(weight_NK, "quantize_nf4"):
        return quantize_nf4_reference(weight_NK, blocksize, nested=nested)
    from covey.kernels import nf4_triton

    def search(x_E: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        blocks = _blocks(x_E, NESTED_BLOCK)
        absmax = blocks.abs().amax(1)
        scaled = blocks * nf4_triton.reciprocal(absmax)[:, None]
        return _searched(scaled.view(-1)[: x_E.numel()], code), absmax

    packed, absmax = nf4_triton.quantize(weight_NK, blocksize)
    return _quantised(weight_NK, packed, absmax, blocksize, search if nested else None)


def quantize_nf4_reference(weight_NK: Tensor, blocksize: int = BLOCK, *, nested: bool = True) -> NF4:
    """Quantise to the nearest code; exactly between two, to the smaller one."""
    code = code_book(weight_NK.device)
    q, absmax = _nearest(weight_NK.float().reshape(-1), code, blocksize)
    q = torch.nn.functional.pad(q, (0, q.numel() % 2), value=CODE.index(0.0))
    packed = q[::2] << 4 | q[1::2]
    search = partial(_nearest, blocksize=NESTED_BLOCK)
    return _quantised(weight_NK, packed, absmax, blocksize, search if nested else None)


def _quantised(
    weight_NK: Tensor, packed: Tensor, absmax: Tensor, blocksize: int, nest: Callable[..., Any] | None
) -> NF4:
    """nest(x_E, code): indices of codes, and the scales of their blocks; None: scales stay as they are."""
    shape = weight_NK.shape[0], weight_NK.shape[1]
    if nest is None:
        return NF4(packed, absmax, shape, weight_NK.dtype, blocksize)
    offset, dynamic = absmax.mean(), dynamic_code(weight_NK.device)
    a, absmax2 = nest(absmax - offset, dynamic)
    return NF4(packed, a, shape, weight_NK.dtype, blocksize, Nested(absmax2, dynamic, offset))


def _blocks(x_E: Tensor, blocksize: int) -> Tensor:
    """[B, blocksize], filled up with 0."""
    return torch.nn.functional.pad(x_E, (0, -x_E.numel() % blocksize)).view(-1, blocksize)


def _nearest(x_E: Tensor, code: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """(index of the code nearest to x / absmax, uint8 [E]; absmax of each block, float32)."""
    size = x_E.numel()
    blocks = _blocks(x_E, blocksize)
    absmax = blocks.abs().amax(1)
    scaled = blocks * (1 / absmax.clamp(min=1e-38))[:, None]
    q = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2)
    return q.to(torch.uint8).view(-1)[:size], absmax


def _searched(x_E: Tensor, code: Tensor) -> Tensor:
    """Index of the nearest of 256 codes, uint8 [E]; exactly between two, the one where the search for it ends.

    The interval around x starts as (-1, 1) and is halved seven times.
    """
    at = torch.full_like(x_E, 127, dtype=torch.int64)
    below, above = torch.zeros_like(at), torch.full_like(at, 255)
    for step in (64, 32, 16, 8, 4, 2, 1):
        up = x_E > code[at]
        below, above = torch.where(up, at, below), torch.where(up, above, at)
        at = torch.where(up, at + step, at - step)
    up = x_E > code[at]
    other = torch.where(up, above, below)
    middle = (code[other] + code[at]) * 0.5
    return torch.where(torch.where(up, x_E > middle, x_E < middle), other, at).to(torch.uint8)


def dynamic_code(device: torch.device) -> Tensor:
    """The signed 8-bit dynamic type, ascending float32 [256] (Dettmers 2016, arXiv:1511.04561).

    Decade 10^(i - 6), i = 0..6, holds the centres of 2^i equal parts of [0.1, 1]; both signs, 0 and 1 make 256.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        centres = (10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += centres + [-c for c in centres]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def code_book(device: torch.device) -> Tensor:
    """CODE as float32 [16]."""
    return torch.tensor(CODE, dtype=torch.float32, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256], both codes of every byte as one complex number: a table look-up per byte instead of two."""
    code = code_book(device)
    return torch.complex(code.repeat_interleave(16), code.repeat(16))


def _output(weight: NF4, out: Tensor | None) -> Tensor:
    n, k = weight.shape
    if out is None:
        return torch.empty(n, k, dtype=weight.dtype, device=weight.packed.device)
    if out.shape != (n, k) or out.device != weight.packed.device:
        raise ValueError(f"out: {tuple(out.shape)} on {out.device}, not {(n, k)} on {weight.packed.device}")
    if out.dtype not in DTYPES:
        raise ValueError(f"out: {out.dtype} is not one of bfloat16, float16, float32")
    if (k > 1 and out.stride(1) != 1) or (n > 1 and out.stride(0) < k):
        raise ValueError(f"out: strides {out.stride()}, expected (at least {k}, 1)")
    return out
