"""Microseconds to draw a token for every row on a GPU: python -m benchmarks.sample

The torch path against the Triton kernels, for B rows of V float32 logits that follow Zipf's law. Before every call the
caches are emptied and the logits written, as the head does: what fits the second-level cache is found there. `floor` is
one pass over the logits at --tbps; plain and greedy draws need that and little more. Medians of --reps.

--tune prints the times of the Triton kernels under other launch parameters instead.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covey.kernels.sample import sample

ROWS, VOCABULARIES = (1, 64, 256), (128256, 151936)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "min-p 0.1": {"temperature": 0.8, "min_p": 0.1},
    "all three": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.1},
    "greedy": {"temperature": 0.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--tbps", type=float, default=4.2, help="terabytes per second of the floor")
    parser.add_argument("--flat", action="store_true", help="normal logits instead: a nucleus of thousands")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    if args.tune:
        tune(args.reps, args.flat)
    else:
        table(args.reps, args.tbps, args.flat)


def table(reps: int, tbps: float, flat: bool) -> None:
    print(f"{'settings':<12}{'B':>5}{'V':>8}{'floor':>8}{'torch us':>10}{'triton us':>11}{'times':>7}")
    for name, settings in SETTINGS.items():
        for vocab in VOCABULARIES:
            for rows in ROWS:
                x, u = inputs(rows, vocab, flat)
                us = []
                for path in ("reference", "triton"):
                    os.environ["COVEY_KERNELS"] = path
                    us.append(median_us(partial(sample, uniform_B=u, **settings), x, reps))
                floor = x.nbytes / tbps * 1e-6
                line = f"{name:<12}{rows:>5}{vocab:>8}{floor:>8.1f}{us[0]:>10.1f}{us[1]:>11.1f}"
                print(f"{line}{us[0] / us[1]:>7.1f}")


def tune(reps: int, flat: bool) -> None:
    from covey.kernels import sample_triton

    os.environ["COVEY_KERNELS"] = "triton"
    tried = {
        ("CHUNK", "CHUNK_WARPS", "DRAW_WARPS"): [
            (2048, 2, 4), (2048, 4, 4), (4096, 4, 4), (4096, 4, 8), (4096, 8, 8), (4096, 4, 16), (8192, 8, 8),
            (8192, 8, 16), (16384, 16, 16),
        ],
        ("TILE", "TILE_WARPS", "LISTED"): [
            (2048, 4, 1024), (2048, 8, 2048), (4096, 8, 2048), (4096, 8, 4096), (4096, 16, 4096), (8192, 16, 4096),
        ],
    }  # fmt: skip
    for constants, choices in tried.items():
        before = [getattr(sample_triton, name) for name in constants]
        for name in ("plain", "greedy") if "CHUNK" in constants else ("top-k 50", "top-p 0.95", "all three"):
            for choice in choices:
                for constant, value in zip(constants, choice, strict=True):
                    setattr(sample_triton, constant, value)
                times = []
                for rows in ROWS:
                    x, u = inputs(rows, VOCABULARIES[0], flat)
                    times.append(median_us(partial(sample, uniform_B=u, **SETTINGS[name]), x, reps))
                us = "  ".join(f"B {rows}: {t:.1f} us" for rows, t in zip(ROWS, times, strict=True))
                print(f"{name:<12}{dict(zip(constants, choice, strict=True))}  {us}")
        for constant, value in zip(constants, before, strict=True):
            setattr(sample_triton, constant, value)


def inputs(rows: int, vocab: int, flat: bool) -> tuple[Tensor, Tensor]:
    if flat:
        x = 3 * torch.randn(rows, vocab, device="cuda")
    else:
        x = -1.5 * torch.arange(1, vocab + 1, device="cuda").log() + 0.3 * torch.randn(
            rows, vocab, device="cuda"
        )
        x = x[:, torch.randperm(vocab, device="cuda")]
    return x, torch.rand(rows, device="cuda", dtype=torch.float64)


def median_us(call: Callable[[Tensor], object], x: Tensor, reps: int) -> float:
    """GPU time of call(x); emptying the caches also hides the time it takes to launch."""
    logits = torch.empty_like(x)
    flush = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call(logits.copy_(x))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for start, end in pairs:
        flush.zero_()
        logits.copy_(x)
        start.record()
        call(logits)
        end.record()
        torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


if __name__ == "__main__":
    main()
