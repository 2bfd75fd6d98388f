"""Time and memory of the language-model head: python -m benchmarks.head

One forward of M positions with what the backward needs, in bf16: the torch path against the Triton kernel, with and
without entropies. The floor is two products of M x H x V (three with the entropy's gradient, one for log-probs alone)
at --tflops. Peak memory is what the call takes besides its inputs. Medians of --reps after two warm-ups.

--sweep times the Triton path over its launch parameters and rows per chunk instead, --only-kernel without products.
"""

import argparse
import os
import statistics
from collections.abc import Callable

import torch

from covey.kernels import head_triton
from covey.kernels.head import chunk_rows, selected_logprobs_forward

SHAPES = [(8192, 4096, 128256), (8192, 1536, 151936)]  # M, H, V of Llama-3.1-8B and Qwen2.5-1.5B
NEEDS = {  # what is asked for, and its number of products
    "logp": ({"entropy": False, "gradient": False}, 1),
    "logp + grad": ({"entropy": False, "gradient": True}, 2),
    "logp + grad, entropy": ({"entropy": True, "gradient": True}, 2),
    "logp + grad, entropy + grad": ({"entropy": True, "gradient": True, "entropy_gradient": True}, 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--tflops", type=float, default=650.0, help="rate of the floor")
    parser.add_argument("--chunk", type=int, help="rows at a time (default: kernels/head.py decides)")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only-kernel", action="store_true")
    args = parser.parse_args()
    if args.only_kernel:
        sweep_kernel(args.reps)
    elif args.sweep:
        sweep(args.reps)
    else:
        table(args.reps, args.tflops, args.chunk)


def table(reps: int, tflops: float, chunk: int | None) -> None:
    print(f"{'M x H x V':<22}{'needs':<30}{'path':<11}{'ms':>8}{'of floor':>10}{'peak MiB':>10}")
    for m, h, v in SHAPES:
        hidden, weight, target = tensors(m, h, v)
        for need, (asked, products) in NEEDS.items():
            for path in ("reference", "triton"):
                os.environ["COVEY_KERNELS"] = path

                def call(hidden=hidden, weight=weight, target=target, asked=asked):
                    return selected_logprobs_forward(hidden, weight, target, 1.0, **asked, chunk=chunk)

                ms, peak = measure(call, reps)
                floor = products * 2 * m * h * v / tflops / 1e9
                size = f"{m} x {h} x {v}"
                print(f"{size:<22}{need:<30}{path:<11}{ms:>8.2f}{floor / ms:>10.0%}{peak / 2**20:>10.0f}")


def sweep(reps: int) -> None:
    """Rows per chunk and launch parameters, all with gradient and entropy."""
    os.environ["COVEY_KERNELS"] = "triton"
    for m, h, v in SHAPES:
        hidden, weight, target = tensors(m, h, v)
        for rows in (512, 768, 1024, 1408, 2048, 4096):

            def call(hidden=hidden, weight=weight, target=target, rows=rows):
                return selected_logprobs_forward(
                    hidden, weight, target, 1.0, entropy=True, gradient=True, chunk=rows
                )

            ms, peak = measure(call, reps)
            print(f"{m} x {h} x {v}  chunk {rows:>5}: {ms:7.2f} ms, peak {peak / 2**20:5.0f} MiB")


def sweep_kernel(reps: int) -> None:
    """The kernel by itself on one chunk: bytes per second at 4 + 4 + 2 bytes a logit."""
    for _, _, v in SHAPES:
        rows = chunk_rows(8192, v)
        logits = torch.randn(rows, v, device="cuda")
        target = torch.randint(v, (rows,), device="cuda")
        for block, per_thread in ((1024, 8), (2048, 8), (4096, 8), (8192, 8), (4096, 16), (8192, 16)):
            for registers in (None, 64):
                head_triton.BLOCK, head_triton.ELEMENTS_PER_THREAD, head_triton.MAX_WARPS = (
                    block,
                    per_thread,
                    32,
                )
                head_triton.REGISTERS = {"maxnreg": registers} if registers else {}

                def call(logits=logits, target=target):
                    return head_triton.logit_gradients(
                        logits, target, 1.0, softcap=None, scale=1.0, entropy=True, gradient=True,
                        dtype=torch.bfloat16, dentropy_MV=None,
                    )  # fmt: skip

                ms, _ = measure(call, reps)
                launch = f"block {block:>5}, {block // (32 * per_thread):>2} warps, {registers} registers"
                print(f"{rows} x {v}  {launch}: {ms:.3f} ms, {rows * v * 10 / ms / 1e9:.2f} TB/s")


def tensors(m: int, h: int, v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(m, h, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(v, h, device="cuda", dtype=torch.bfloat16) / h**0.5
    return hidden, weight, torch.randint(v, (m,), device="cuda")


def measure(call: Callable[[], object], reps: int) -> tuple[float, int]:
    """Median milliseconds, and the bytes that a call takes at its peak."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(reps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
