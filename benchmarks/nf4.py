"""Reading NF4 weights, bitsandbytes against kernels/nf4.py: python -m benchmarks.nf4

Microseconds and TB/s (packed bytes and scales in, bf16 out) with cold caches: every launch reads and writes other
memory than the ones before it. The last column writes rows of K + 16, as beside a LoRA. `--tune` tries launch
parameters instead.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
from bitsandbytes import functional as bnb
from torch import Tensor

from covey.kernels import nf4_triton
from covey.kernels.nf4 import BLOCK, NESTED_BLOCK, NF4, Nested, dequantize_nf4

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
COLD = 512 << 20  # bytes between two uses of the same memory
LAUNCHES = 24  # between two events


def microseconds(run: Callable[[int], object], reps: int) -> float:
    """Median time of run(i), from CUDA events around LAUNCHES calls that were queued while the GPU was kept busy."""
    for i in range(LAUNCHES):
        run(i)
    times = []
    for _ in range(reps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)
        start.record()
        for i in range(LAUNCHES):
            run(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / LAUNCHES * 1e3)
    return statistics.median(times)


class Case:
    """Copies of one quantised matrix and of its output buffer, enough of them to leave the caches behind."""

    def __init__(self, n: int, k: int):
        self.moved = n * k * 2.5 + n * k / BLOCK + 4 * n * k / (BLOCK * NESTED_BLOCK)
        w = torch.randn(n, k, device="cuda").mul_(0.02).bfloat16()
        packed, state = bnb.quantize_4bit(w, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
        assert state.state2 is not None and state.offset is not None
        nested = Nested(state.state2.absmax, state.state2.code, state.offset)
        copies = 1 + int(COLD // packed.nbytes)
        self.state = state
        self.weights = [
            NF4(packed.view(-1).clone(), state.absmax.clone(), (n, k), w.dtype, BLOCK, nested)
            for _ in range(copies)
        ]
        self.wide = [
            torch.empty(n, k + 16, dtype=w.dtype, device="cuda") for _ in range(1 + COLD // w.nbytes)
        ]
        self.outs = [torch.empty_like(w) for _ in self.wide]

    def ours(self, i: int, outs: list[Tensor]) -> None:
        weight = self.weights[i % len(self.weights)]
        dequantize_nf4(weight, outs[i % len(outs)][:, : weight.shape[1]])

    def theirs(self, i: int) -> None:
        packed = self.weights[i % len(self.weights)].packed.view(-1, 1)
        bnb.dequantize_4bit(packed, self.state, out=self.outs[i % len(self.outs)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reps", type=int, default=11)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if args.tune:
        return tune(args.reps)
    print(f"{'shape':<16}{'bitsandbytes':>20}{'ours':>20}{'ours, strided':>20}")
    for n, k in SHAPES:
        case = Case(n, k)
        times = (
            microseconds(case.theirs, args.reps),
            microseconds(lambda i, c=case: c.ours(i, c.outs), args.reps),
            microseconds(lambda i, c=case: c.ours(i, c.wide), args.reps),
        )
        cells = (f"{t:>11.1f} us {case.moved / t / 1e6:5.2f}" for t in times)
        print(f"{f'{n} x {k}':<16}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
        del case


def tune(reps: int) -> None:
    cases = [Case(n, k) for n, k in SHAPES]
    print("TB/s".ljust(24) + "".join(f"{f'{n} x {k}':>16}" for n, k in SHAPES))
    for lookup, (tile, warps) in itertools.product(
        ("gather", "load"), ((128, 4), (256, 4), (512, 4), (512, 8), (1024, 4), (1024, 8), (2048, 8))
    ):
        nf4_triton.LOOKUP, nf4_triton.TILE, nf4_triton.WARPS = lookup, tile, warps
        rates = [c.moved / microseconds(lambda i, c=c: c.ours(i, c.wide), reps) / 1e6 for c in cases]
        print(f"{lookup:<8}{tile:>8}{warps:>8}" + "".join(f"{rate:>16.2f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
