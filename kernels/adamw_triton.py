"""kernels/adamw.py in Triton; its formulas and names.

All sums run in an order that depends on the sizes alone, so that two runs agree bit for bit. Settings that stay the
same for a whole run are compile-time constants and thereby exact; Triton passes a Python float as float32, which is why
lr comes in two parts.
"""
# pyright: reportCallIssue=false

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTIAL_SUMS = 1024  # at most, of all buffers together; the second launch reads them in one program
SQUARES = (2048, 4)  # elements that a program reads at a time, warps: 16 elements per thread
# Elements of a program, warps: 4 elements per thread, so that the stores to a 16-bit shadow keep the layout of the
# float32 loads. With 8 the compiler exchanges them through shared memory.
UPDATE = (512, 4)


def adamw(
    buffers: Sequence[Any],  # adamw.Buffer
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
    zero_grad: bool,
) -> Tensor:
    device = buffers[0].param.device
    lr_high = struct.unpack("f", struct.pack("f", lr))[0]
    logs = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
    scalars = torch.empty((len(buffers), 5), dtype=torch.float64, device=device)
    with torch.cuda.device_of(scalars):
        sums = _square_sums([b.grad for b in buffers])
        for b, row in zip(buffers, scalars, strict=True):
            _scalars[(1,)](
                sums, b.step, row, sums.numel(), lr_high, lr - lr_high,
                *logs, weight_decay, max_grad_norm, triton.next_power_of_2(sums.numel()), num_warps=1,
            )  # fmt: skip
        block, warps = UPDATE
        for b, row in zip(buffers, scalars, strict=True):
            size = b.param.numel()
            if size:
                _update[(-(-size // block),)](
                    b.param, b.grad, b.exp_avg, b.exp_avg_sq, b.shadow, row, size,
                    beta1, beta2, eps, zero_grad, _acc(b.param), block, num_warps=warps,
                )  # fmt: skip
    return scalars[0, 0]


def _square_sums(grads: list[Tensor]) -> Tensor:
    """Sums of squares of pieces of all gradients, float64 [at most PARTIAL_SUMS]."""
    block, warps = SQUARES
    share = max(1, PARTIAL_SUMS // len(grads))
    counts = [max(1, min(share, -(-g.numel() // block))) for g in grads]
    sums = torch.empty(sum(counts), dtype=torch.float64, device=grads[0].device)
    for grad, count, part in zip(grads, counts, sums.split(counts), strict=True):
        rounds = -(-grad.numel() // (block * count))
        _squares[(count,)](grad, part, grad.numel(), rounds, block, num_warps=warps)
    return sums


@triton.jit
def _squares(g_ptr, sums_ptr, size, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program.to(tl.int64) * (ROUNDS * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(ROUNDS):
        g = tl.load(g_ptr + at + i * BLOCK, mask=at + i * BLOCK < size, other=0.0).to(tl.float64)
        total += g * g
    tl.store(sums_ptr + program, tl.sum(total, axis=0))


@triton.jit
def _scalars(
    sums_ptr,
    step_ptr,
    scalars_ptr,  # norm, clip, lr / (1 - b1^t), 1 / sqrt(1 - b2^t), lr wd
    count,
    lr_high,
    lr_low,
    LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    norm = tl.sqrt(tl.sum(tl.load(sums_ptr + i, mask=i < count, other=0.0), axis=0))
    t = tl.load(step_ptr).to(tl.float64) + 1.0
    lr = t * 0.0 + lr_high + lr_low  # in t's dtype
    bias1 = 1.0 - tl.exp(t * LOG_BETA1)
    bias2 = 1.0 - tl.exp(t * LOG_BETA2)
    tl.store(scalars_ptr, norm)
    if MAX_NORM > 0:
        tl.store(scalars_ptr + 1, MAX_NORM / tl.maximum(norm, MAX_NORM))
    else:
        tl.store(scalars_ptr + 1, 1.0)
    tl.store(scalars_ptr + 2, lr / bias1)
    tl.store(scalars_ptr + 3, 1.0 / tl.sqrt(bias2))
    tl.store(scalars_ptr + 4, lr * WEIGHT_DECAY)
    tl.store(step_ptr, t.to(step_ptr.dtype.element_ty), mask=norm < float("inf"))


@triton.jit
def _update(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    shadow_ptr,  # None: there is none
    scalars_ptr,
    size,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    ZERO_GRAD: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    p = tl.load(p_ptr + at, mask=inside, other=0.0)
    g = tl.load(g_ptr + at, mask=inside, other=0.0)
    m = tl.load(m_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)
    end = tl.where(tl.load(scalars_ptr) < float("inf"), size, 0)  # not for NaN either
    clip = tl.load(scalars_ptr + 1)
    rate = tl.load(scalars_ptr + 2).to(ACC)
    root = tl.load(scalars_ptr + 3).to(ACC)
    decay = tl.load(scalars_ptr + 4).to(ACC)
    g = g * clip.to(ACC)
    m = BETA1 * m + (1.0 - BETA1) * g
    v = BETA2 * v + (1.0 - BETA2) * (g * g)
    p = p - decay * p - rate * m / (tl.sqrt(v) * root + EPS)
    kept = at < end
    tl.store(p_ptr + at, p, mask=kept)
    tl.store(m_ptr + at, m, mask=kept)
    tl.store(v_ptr + at, v, mask=kept)
    if shadow_ptr is not None:
        tl.store(shadow_ptr + at, p.to(shadow_ptr.dtype.element_ty), mask=kept)
    if ZERO_GRAD:
        tl.store(g_ptr + at, tl.zeros((BLOCK,), ACC), mask=inside)
    else:
        tl.store(g_ptr + at, g, mask=at < tl.where(clip < 1.0, end, 0))


def _acc(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
