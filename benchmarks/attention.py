"""Time and error of the attention kernels on a GPU: python -m benchmarks.attention

One line per layout and kind (kernels/attention.py): median milliseconds and TFLOP/s of the forward and the backward,
and the largest errors of o, dq, dk, dv against the dense reference in float32. A layout is ROWSxTOKENS (documents) or
PROMPT+ROWSxTOKENS (one prompt with its completions). Only pairs of a query and a key that it sees count as work:
4 d operations per pair and query head in the forward, 10 d in the backward.

--sweep times the Triton kernels with other tiles, one kernel at a time: rows, keys, warps, stages, ahead (see
attention_triton.Tile).
"""

import argparse
import re
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from covey.kernels import attention_triton
from covey.kernels.attention import Kind, attention, attention_backward, attention_plan
from covey.kernels.attention_triton import Launch, Tile

LAYOUTS = ["4x2048", "1x8192", "512+8x1024", "512+8x8192"]
KINDS: list[Kind] = ["flash", "cudnn", "triton"]
TILES = {
    "forward": [
        Tile(128, 64, 8, 3, True),
        Tile(128, 64, 8, 2, True),
        Tile(128, 64, 8, 4, True),
        Tile(128, 128, 8, 2, True),
        Tile(128, 64, 8, 3),
        Tile(128, 128, 8, 2),
        Tile(64, 64, 4, 3),
        Tile(64, 64, 4, 2, True),
    ],
    "query_gradient": [
        Tile(128, 64, 8, 2),
        Tile(128, 64, 8, 3),
        Tile(128, 32, 8, 3),
        Tile(128, 128, 8, 1),
        Tile(64, 64, 4, 2),
        Tile(64, 128, 8, 2),
    ],
    "key_gradient": [
        Tile(64, 128, 8, 2),
        Tile(64, 128, 8, 3),
        Tile(32, 128, 8, 2),
        Tile(32, 128, 8, 3),
        Tile(64, 64, 4, 2),
        Tile(32, 64, 4, 3),
    ],
}


class Case:
    """Tensors of a layout, as views into packed buffers like those of a layer."""

    def __init__(self, layout: str, heads: tuple[int, int, int], window: int, softcap: float):
        n, m, d = heads
        self.segments = segments(layout)
        self.scale, self.options = d**-0.5, {"window": window, "softcap": softcap}
        tokens = int(self.segments[-1, 1])
        random = torch.Generator(device="cuda").manual_seed(0)
        qkv = torch.randn(tokens, n + 2 * m, d, device="cuda", generator=random).bfloat16()
        self.do = torch.randn(tokens, n, d, device="cuda", generator=random).bfloat16()
        self.q, self.k, self.v = qkv.split((n, m, m), dim=1)
        dq, dk, dv = torch.empty_like(qkv).split((n, m, m), dim=1)
        self.out = dq, dk, dv
        self.pair_work = (
            n * d * sum(seen(end - start, pe - ps, window) for start, end, ps, pe in self.segments.tolist())
        )

    def time(self, kind: Kind, reps: int) -> tuple[float, float]:
        """Median milliseconds of the forward and of the backward."""
        plan = attention_plan(self.segments, self.q.device, kind=kind)
        forward = median_ms(lambda: attention(self.q, self.k, self.v, plan, self.scale, **self.options), reps)
        o, lse = attention(self.q, self.k, self.v, plan, self.scale, **self.options)
        inputs = self.do, self.q, self.k, self.v, o, lse, plan, self.scale
        # Only Triton writes into the packed buffer by itself; the others would be timed with a copy.
        out = self.out if kind == "triton" else None
        backward = median_ms(lambda: attention_backward(*inputs, **self.options, out=out), reps)
        return forward, backward

    def results(self, kind: Kind, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """o, dq, dk, dv."""
        plan = attention_plan(self.segments, self.q.device, kind=kind)
        q, k, v, do = (x.to(dtype) for x in (self.q, self.k, self.v, self.do))
        o, lse = attention(q, k, v, plan, self.scale, **self.options)
        return [o, *attention_backward(do, q, k, v, o, lse, plan, self.scale, **self.options)]


def segments(layout: str) -> Tensor:
    """int32 [S, 4] of a layout such as 4x2048 or 512+8x1024."""
    match = re.fullmatch(r"(?:(\d+)\+)?(\d+)x(\d+)", layout)
    if match is None:
        raise SystemExit(f"{layout}: a layout is ROWSxTOKENS or PROMPT+ROWSxTOKENS")
    prompt, rows, length = (int(x or 0) for x in match.groups())
    table = [[0, prompt, 0, 0]] if prompt else []
    table += [[prompt + i * length, prompt + (i + 1) * length, 0, prompt] for i in range(rows)]
    return torch.tensor(table, dtype=torch.int32)


def seen(length: int, prefix: int, window: int) -> int:
    """Pairs of a query and a key that it sees, in a segment."""
    if window:
        return sum(min(prefix + i + 1, window) for i in range(length))
    return length * (length + 1) // 2 + length * prefix


def median_ms(run: Callable[[], object], reps: int) -> float:
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * reps)]
    for i in range(reps):
        marks[2 * i].record()
        run()
        marks[2 * i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(marks[2 * i].elapsed_time(marks[2 * i + 1]) for i in range(reps))


def table(args: argparse.Namespace) -> None:
    print(
        f"{'layout':<14}{'kind':<8}{'forward ms':>12}{'TFLOP/s':>9}{'backward ms':>13}{'TFLOP/s':>9}"
        f"{'error o':>11}{'dq':>11}{'dk':>11}{'dv':>11}"
    )
    for layout in args.layouts:
        case = Case(layout, args.heads, args.window, args.softcap)
        exact = case.results("dense", torch.float32) if args.check else None
        for kind in args.kinds:
            try:
                forward, backward = case.time(kind, args.reps)
            except (ValueError, RuntimeError) as error:
                print(f"{layout:<14}{kind:<8}  {str(error).splitlines()[0]}", flush=True)
                continue
            line = f"{forward:>12.3f}{4e-9 * case.pair_work / forward:>9.0f}"
            line += f"{backward:>13.3f}{1e-8 * case.pair_work / backward:>9.0f}"
            if exact is not None:
                for mine, true in zip(case.results(kind), exact, strict=True):
                    line += f"{(mine.float() - true).abs().max().item():>11.2e}"
            print(f"{layout:<14}{kind:<8}{line}", flush=True)
        del case, exact
        torch.cuda.empty_cache()


def sweep(args: argparse.Namespace) -> None:
    cases = {layout: Case(layout, args.heads, args.window, args.softcap) for layout in args.layouts}
    n, m, d = args.heads
    default = attention_triton.launch_for(torch.device("cuda", 0), torch.bfloat16, d, n // m)
    print(f"{'kernel':<16}{'tile':<28}" + "".join(f"{layout:>14}" for layout in cases) + "   ms")
    for kernel, tiles in TILES.items():
        for tile in dict.fromkeys([getattr(default, kernel), *tiles]):
            launch = default._replace(**{kernel: tile})
            times = [_time(case, launch, kernel, args.reps) for case in cases.values()]
            print(f"{kernel:<16}{tuple(tile)!s:<28}" + "".join(f"{t:>14}" for t in times), flush=True)


def _time(case: Case, launch: Launch, kernel: str, reps: int) -> str:
    attention_triton._launch = lambda q, k: launch
    try:
        forward, backward = case.time("triton", reps)
    except OutOfResources:
        return "does not fit"
    return f"{forward if kernel == 'forward' else backward:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=[*KINDS, "dense"])
    parser.add_argument(
        "--heads", nargs=3, type=int, default=[32, 8, 128], metavar=("N", "M", "D"), help="default 32 8 128"
    )
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--no-check", dest="check", action="store_false", help="times only")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark times GPU kernels, and there is no GPU")
    (sweep if args.sweep else table)(args)


if __name__ == "__main__":
    main()
