"""Products with NF4 linears in decoding, on a GPU: python -m benchmarks.nf4_matmul

Microseconds per product in a CUDA graph of 20 layers, each with weights of its own, after a flush of the caches. GB/s
counts the weights in 4 bits with their scales. `ours` is x W^T alone; `adapter` is what a decoding step asks for: LoRA
of rank 16 on every linear, and for gate_up the activation. `dequant` reads W back and multiplies, `bf16` multiplies
with a copy of W that exists, `bnb` is bitsandbytes' product for a single row, where it is installed. The last three are
without an adapter, on the linears of a group as one matrix.

--tune times `adapter` under other launch parameters instead, and prints the best ones as lines for the table HOPPER or
OTHERS in kernels/nf4_matmul_triton.py. Kernels are compiled in --workers processes first.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import torch
from benchmarks.decode_attention import LAYERS, microseconds
from benchmarks.shapes import SHAPES
from triton.runtime.errors import OutOfResources

from covey.kernels import nf4_matmul_triton as kernels
from covey.kernels.lora_linear import LoraGroup, LoraPart
from covey.kernels.nf4 import BLOCK, NESTED_BLOCK, NF4, Nested, dequantize_nf4, dynamic_code
from covey.kernels.nf4_matmul import nf4_matmul

ROWS, RANK, BF16 = (1, 2, 4, 8, 16, 32, 64), 16, torch.bfloat16
MODELS = ("qwen2.5-1.5b", "llama3.1-8b")
TUNE_GROUPS = ("o", "gate_up")
TILES = {  # outputs, columns and warps to try, by rows of x
    8: ((16, 256, 1), (32, 128, 2), (32, 256, 2), (64, 128, 2), (64, 256, 2), (64, 256, 4), (128, 128, 4)),
    16: ((32, 128, 2), (32, 256, 2), (64, 128, 2), (64, 256, 2), (64, 256, 4), (64, 128, 4)),
    32: ((64, 64, 2), (64, 128, 2), (64, 128, 4), (128, 64, 4), (128, 128, 4)),
    64: ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 64, 2), (128, 128, 2)),
}
STAGES = (2, 3)
REGISTERS = (128, 168, 255)  # per thread: they decide how many programs are resident

Shape = tuple[tuple[int, ...], int]  # outputs of the linears, inputs
Work = tuple[Shape, int, kernels.Launch | None]  # with that many rows; None: the launch of the tables


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    keys = sorted({padded(rows) for rows in args.rows})
    if args.tune:
        return tune(args.models, keys, args.reps, args.workers)
    shapes = [shape for model in args.models for shape in groups(model).values()]
    compiled([(shape, key, None) for shape in shapes for key in keys], args.workers)
    print(f"{'':<24}{'N':>7}{'K':>7}{'M':>4}{'GB/s':>7}", end="")
    print("".join(f"{name:>9}" for name in ("ours", "adapter", "dequant", "bf16", "bnb")))
    for model in args.models:
        for name, (sizes, k) in groups(model).items():
            for rows in args.rows:
                case = Case(sizes, k, rows, LAYERS)
                us = [microseconds(call, args.reps) if call else math.nan for call in case.calls()]
                print(f"{f'{model} {name}':<24}{sum(sizes):>7}{k:>7}{rows:>4}", end="")
                print(f"{case.bytes / us[0] / 1e3:>7.0f}" + "".join(f"{t:>9.2f}" for t in us), flush=True)
                del case


def groups(model: str) -> dict[str, Shape]:
    """Of a layer."""
    s = SHAPES[model]
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    return {
        "qkv": ((q, kv, kv), s.hidden),
        "o": ((s.hidden,), q),
        "gate_up": ((s.ff, s.ff), s.hidden),
        "down": ((s.hidden,), s.ff),
    }


def padded(rows: int) -> int:
    """The key of the launch tables."""
    return min(kernels.MOST_ROWS, max(8, 1 << (rows - 1).bit_length()))


def random_weight(n: int, k: int) -> NF4:
    """Any bytes are weights."""
    blocks = n * k // BLOCK

    def bytes_(size: int) -> torch.Tensor:
        return torch.randint(256, (size,), dtype=torch.uint8, device="cuda")

    absmax2 = torch.full((-(-blocks // NESTED_BLOCK),), 0.01, device="cuda")
    nested = Nested(absmax2, dynamic_code(torch.device("cuda")), torch.tensor(0.05, device="cuda"))
    return NF4(bytes_(n * k // 2), bytes_(blocks), (n, k), BF16, BLOCK, nested)


class Case:
    """A group's product for some rows, with the weights of several layers."""

    def __init__(self, sizes: tuple[int, ...], k: int, rows: int, layers: int):
        self.sizes, self.n, self.k = sizes, sum(sizes), k
        self.layers = [tuple(random_weight(n, k) for n in sizes) for _ in range(layers)]
        self.bytes = sum(w.packed.nbytes + w.absmax.nbytes * (1 + 4 / NESTED_BLOCK) for w in self.layers[0])
        self.x = torch.randn(rows, k, device="cuda").to(BF16)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = tuple(
            LoraPart(slice(at, at + n), slice(i * RANK, (i + 1) * RANK), self._normal(n, RANK), None)
            for i, (at, n) in enumerate(zip(starts, sizes, strict=True))
        )
        self.lora = LoraGroup(self._normal(RANK * len(sizes), k), None, parts)
        self.activation = "silu" if len(sizes) == 2 else None

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(BF16)

    def calls(self) -> list[Callable[[int], object] | None]:
        """In the order of the columns."""
        dense = [self._normal(self.n, self.k) for _ in self.layers]
        return [
            lambda layer: nf4_matmul(self.x, self.layers[layer]),
            self.adapted,
            lambda layer: self.read_back(layer, dense[0]),
            lambda layer: self.x @ dense[layer].t(),
            self.bitsandbytes(dense) if len(self.x) == 1 and find_spec("bitsandbytes") else None,
        ]

    def adapted(self, layer: int) -> torch.Tensor:
        return nf4_matmul(self.x, self.layers[layer], self.lora, 2.0, activation=self.activation)

    def read_back(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        for weight, rows in zip(self.layers[layer], out.split(self.sizes), strict=True):
            dequantize_nf4(weight, rows)
        return self.x @ out.t()

    def bitsandbytes(self, dense: list[torch.Tensor]) -> Callable[[int], object]:
        from bitsandbytes import functional, matmul_4bit

        quantised = [functional.quantize_nf4(w, compress_statistics=True) for w in dense]
        return lambda layer: matmul_4bit(self.x, quantised[layer][0].t(), quantised[layer][1])


def tune(models: list[str], rows: list[int], reps: int, workers: int) -> None:
    """Prints the five best launches for every number of rows, by the geometric mean of time / best time over shapes."""
    shapes = [groups(model)[name] for model in models for name in TUNE_GROUPS]
    tried = {r: launches(r) for r in rows}
    runs = compiled([(shape, r, launch) for r in rows for launch in tried[r] for shape in shapes], workers)
    print(f"{sum(runs.values())} of {len(runs)} run; (outputs, inputs): {shapes}", flush=True)
    for r in rows:
        cases = [Case(*shape, r, LAYERS) for shape in shapes]
        times: dict[kernels.Launch, list[float]] = {}
        for launch in tried[r]:
            if all(runs[shape, r, launch] for shape in shapes):
                set_launch(launch)
                times[launch] = [microseconds(case.adapted, reps) for case in cases]
        best = [min(us[i] for us in times.values()) for i in range(len(shapes))]
        ratios = {launch: [t / b for t, b in zip(us, best, strict=True)] for launch, us in times.items()}
        score = {launch: statistics.geometric_mean(ratio) for launch, ratio in ratios.items()}
        for launch in sorted(score, key=lambda launch: score[launch])[:5]:
            us = " ".join(f"{t:.2f}" for t in times[launch])
            now = ", now" if launch == tried[r][0] else ""
            print(f"    {r}: Launch{tuple(launch)},  # {score[launch]:.3f}; {us} us{now}", flush=True)


def launches(rows: int) -> list[kernels.Launch]:
    """The one in use, then those to try."""
    found = [kernels.launch_for(torch.device("cuda", 0), BF16, rows)]
    for outputs, columns, warps in TILES[rows]:
        for stages, registers in itertools.product(STAGES, REGISTERS):
            resident = min(16, 65536 // (32 * warps * registers))
            found.append(kernels.Launch(outputs, columns, warps, stages, resident))
    return list(dict.fromkeys(found))


def compiled(work: list[Work], workers: int) -> dict[Work, bool]:
    """Fills Triton's cache. What needs more than the GPU has is False."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return dict(zip(work, pool.map(compiles, work, chunksize=4), strict=True))


def compiles(work: Work) -> bool:
    shape, rows, launch = work
    case = Case(*shape, rows, 1)
    try:
        if launch is not None:
            set_launch(launch)
        else:
            nf4_matmul(case.x, case.layers[0])
        case.adapted(0)
        torch.cuda.synchronize()
    except OutOfResources:
        return False
    return True


def set_launch(launch: kernels.Launch) -> None:
    setattr(kernels, "launch_for", lambda *arguments: launch)  # noqa: B010  (the type checker objects to the other)


if __name__ == "__main__":
    main()
