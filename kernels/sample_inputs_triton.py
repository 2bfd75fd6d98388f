"""kernels/sample_inputs.py in Triton: a launch each."""

# Launch options are unknown to a type checker that sees a plain function.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.kernels.sample_inputs import PROMPT

BLOCK = 2048  # logits of a program
ROWS = 1024  # rows whose random numbers one program makes

OWN = tl.constexpr(PROMPT - 1)  # the bits of a count that are the completion's


def penalize(
    logits_BV: Tensor,
    bias_V: Tensor | None,
    count_BV: Tensor | None,
    out_BV: Tensor,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Fills out_BV, which is contiguous."""
    rows, vocab = logits_BV.shape
    if not rows:
        return
    block = min(BLOCK, triton.next_power_of_2(vocab))
    with torch.cuda.device_of(logits_BV):
        _penalize[(rows, triton.cdiv(vocab, block))](
            logits_BV, bias_V, count_BV, out_BV, float(repetition), float(presence), float(frequency),
            vocab, logits_BV.stride(0), 0 if count_BV is None else count_BV.stride(0), block,
        )  # fmt: skip


@triton.jit
def _penalize(
    logits_ptr,
    bias_ptr,  # None: no bias
    count_ptr,  # None: no penalties
    out_ptr,
    repetition,
    presence,
    frequency,
    V: tl.constexpr,
    ROW: tl.constexpr,  # stride
    COUNT_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    z = tl.load(logits_ptr + row * ROW + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + at, mask=inside, other=0.0)
    if count_ptr is not None:
        n = tl.load(count_ptr + row * COUNT_ROW + at, mask=inside, other=0)
        own = n & OWN
        repeated = tl.where(z > 0, z / repetition, z * repetition)
        z = tl.where(n > 0, repeated, z) - frequency * own.to(z.dtype) - presence * (own > 0).to(z.dtype)
    tl.store(out_ptr + row * V + at, z, mask=inside)


def draw(state_B: Tensor, step_B: Tensor, out_B: Tensor) -> None:
    """Fills out_B."""
    rows = len(state_B)
    if rows:
        with torch.cuda.device_of(state_B):
            _draw[(triton.cdiv(rows, ROWS),)](state_B, step_B, out_B, rows, ROWS)


@triton.jit
def _draw(state_ptr, step_ptr, out_ptr, B, ROWS: tl.constexpr):
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    state = tl.load(state_ptr + b, mask=b < B, other=0)
    step = tl.load(step_ptr + b, mask=b < B, other=0).to(tl.int64)
    x = (state ^ step).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    tl.store(out_ptr + b, (x >> 11).to(tl.float64) * 2.0**-53, mask=b < B)
