"""The elementwise kernels of a decoder layer on a GPU: python -m benchmarks.elementwise

For each operation the bytes it must move, and the median time of the torch reference and of the Triton kernel, with
the caches emptied before every call. `launch us` is what one call costs the CPU. --tune prints the times of the
Triton kernels under other launch parameters instead.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from benchmarks.shapes import SHAPES, Shape
from torch import Tensor

from covey.kernels import gated_mlp, layernorm, rmsnorm, rope

Op = tuple[str, int, Callable[[], object]]  # name, bytes moved, the call
BF16 = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["llama3.1-8b", "qwen2.5-1.5b"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16, help="LoRA columns beside a linear's input")
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    for name in args.shapes:
        ops = list(operations(SHAPES[name], args.tokens, args.rank))
        if args.tune:
            tune(name, ops, args.reps)
        else:
            compare(name, ops, list(operations(SHAPES[name], 16, args.rank)), args.reps)


def operations(s: Shape, tokens: int, rank: int) -> Iterator[Op]:
    """The layer's calls, as it makes them: outputs beside the columns of the LoRA product."""

    def rows(width: int, extra: int = 0) -> Tensor:
        return torch.randn(tokens, width + extra, device="cuda", dtype=BF16)[:, :width]

    x, r, weight = rows(s.hidden), rows(s.hidden), torch.ones(s.hidden, device="cuda", dtype=BF16)
    y, size = rows(s.hidden, rank), 2 * tokens * s.hidden
    rstd = rmsnorm.rmsnorm(x, weight, 1e-6)[1]
    yield "rmsnorm", 2 * size, lambda: rmsnorm.rmsnorm(x, weight, 1e-6, out=y)
    yield "add_rmsnorm", 4 * size, lambda: rmsnorm.add_rmsnorm(x, r, weight, 1e-6, out=y)
    yield "rmsnorm_apply", 2 * size, lambda: rmsnorm.rmsnorm_apply(x, weight, rstd, out=y)
    backward = rmsnorm.rmsnorm_backward
    yield "rmsnorm_backward + skip", 4 * size, lambda: backward(y, x, weight, rstd, residual=r, out=r)

    both = weight, weight  # as weight and as bias
    stats = layernorm.layernorm(x, *both, 1e-5)[1]
    yield "layernorm", 2 * size, lambda: layernorm.layernorm(x, *both, 1e-5, out=y)
    yield "add_layernorm", 4 * size, lambda: layernorm.add_layernorm(x, r, *both, 1e-5, out=y)
    call = partial(layernorm.layernorm_backward, y, x, weight, stats, residual=r, out=r)
    yield "layernorm_backward + skip", 4 * size, call

    n, m, d = s.heads, s.kv_heads, s.head_dim
    heads = rows((n + 2 * m) * d).view(tokens, n + 2 * m, d)
    q, k, v = heads.split((n, m, m), dim=1)
    inv_freq = s.theta ** -(torch.arange(0, d, 2, device="cuda") / d)
    cos, sin = rope.rope_tables(torch.arange(tokens, device="cuda"), inv_freq, 1.0, BF16)
    table, packed = 4 * tokens * d, rows((n + 2 * m) * d, rank)
    yield "rope_inplace", 4 * tokens * (n + m) * d + table, lambda: rope.rope_inplace(q, k, cos, sin)
    dq, dk, dv = (x.contiguous() for x in (q, k, v))
    size = 4 * tokens * (n + 2 * m) * d + table
    yield "pack_qkv_grad", size, lambda: rope.pack_qkv_grad(dq, dk, dv, packed, cos, sin)

    gate, up = rows(2 * s.ff).split(s.ff, dim=1)
    dgate, dup = rows(2 * s.ff, rank).split(s.ff, dim=1)
    dh, h, size = rows(s.ff), rows(s.ff, rank), 2 * tokens * s.ff
    back = gated_mlp.gated_backward
    for kind in ("silu", "gelu_tanh"):
        forward = partial(gated_mlp.gated, gate, up, kind, out=h)
        yield f"gated {kind}", 3 * size, forward
        yield f"gated_backward {kind} + h", 6 * size, partial(back, dh, gate, up, kind, dgate, dup, h)


def compare(name: str, ops: list[Op], small: list[Op], reps: int) -> None:
    print(f"{name:<28}{'MB':>7}{'torch us':>10}{'GB/s':>7}{'triton us':>11}{'GB/s':>7}{'launch us':>11}")
    for (label, size, call), (_, _, few) in zip(ops, small, strict=True):
        line = f"{label:<28}{size / 1e6:>7.0f}"
        for kernels, width in (("reference", 10), ("triton", 11)):
            os.environ["COVEY_KERNELS"] = kernels
            seconds = median_seconds(call, reps)
            line += f"{seconds * 1e6:>{width}.1f}{size / seconds / 1e9:>7.0f}"
        print(f"{line}{host_seconds(few) * 1e6:>11.1f}")


def tune(name: str, ops: list[Op], reps: int) -> None:
    from covey.kernels import gated_mlp_triton, rmsnorm_triton, rope_triton

    os.environ["COVEY_KERNELS"] = "triton"
    blocks = [(512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8)]
    for label, size, call in ops:
        if label.startswith("gated"):
            module, values = gated_mlp_triton, blocks
            constant = "BACKWARD" if "backward" in label else "FORWARD"
        else:
            module = rope_triton if "rope" in label or "qkv" in label else rmsnorm_triton
            constant, values = "ELEMENTS_PER_THREAD", [4, 8, 16, 32]
        before, times = getattr(module, constant), []
        for value in values:
            set_launch(module, constant, value)
            seconds = median_seconds(call, reps)
            times.append(f"{value}: {seconds * 1e6:.1f} us {size / seconds / 1e9:.0f} GB/s")
        set_launch(module, constant, before)
        print(f"{name} {label} ({constant} {before})\n  " + "\n  ".join(times))


def set_launch(module, constant: str, value: object) -> None:
    setattr(module, constant, value)
    if hasattr(module, "_launch"):
        module._launch.cache_clear()


def median_seconds(call: Callable[[], object], reps: int) -> float:
    """GPU time of a call that finds nothing in the caches; the flush also hides the time it takes to launch."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e-3


def host_seconds(call: Callable[[], object], calls: int = 200) -> float:
    """CPU time to launch a call with almost no work."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - start) / calls
    torch.cuda.synchronize()
    return seconds


if __name__ == "__main__":
    main()
