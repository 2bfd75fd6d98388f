"""Attention of a decoding step on a GPU: python -m benchmarks.decode_attention

Microseconds of one layer's call in a CUDA graph of 20 layers, each with its own keys and values, and the share of what
memory allows: the bytes of all keys and values (a group's prompt once), queries and outputs at 4.2 TB/s. Medians over
replays that find nothing in the caches. `plan` is paid once per step, `store` (RoPE and writing) once per layer.
--tune prints the fastest launch parameters for the middle case instead.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from covey.kernels import decode_attention_triton as kernels
from covey.kernels.decode_attention import DecodePlan, DecodeTables, decode_attention, rope_store
from covey.kernels.rope import rope_tables

BYTES_PER_SECOND = 4.2e12
LAYERS, GROUP = 20, 8
HEADS = ((32, 8, 128), (12, 2, 128), (32, 8, 64))
ROWS, PROMPTS, OWN = (1, 64, 256), (256, 1024), (128, 512, 2048)
TUNE_AT = (64, 1024, 512)
BF16 = torch.bfloat16

Heads = tuple[int, int, int]  # query heads, key-value heads, head dimension


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", nargs="+", type=heads_of, default=HEADS, help="n,m,d for example 32,8,128")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    if not args.tune:
        print(
            f"{'n':>4}{'m':>4}{'d':>5}{'rows':>6}{'prompt':>8}{'own':>6}{'us':>9}{'share':>7}{'plan':>7}{'store':>7}"
        )
    for heads in args.heads:
        pool = new_pool(heads, max(args.rows))
        if args.tune:
            tune(heads, pool, args.reps)
            continue
        for rows, prompt, own in itertools.product(args.rows, PROMPTS, OWN):
            case = Case(heads, rows, prompt, own, pool)
            us, plan, store = (
                microseconds(call, args.reps) for call in (case.attend, case.refresh, case.store)
            )
            share = case.size / BYTES_PER_SECOND * 1e6 / us
            print(f"{heads[0]:>4}{heads[1]:>4}{heads[2]:>5}{rows:>6}{prompt:>8}{own:>6}", end="")
            print(f"{us:>9.2f}{share:>7.0%}{plan:>7.2f}{store:>7.2f}", flush=True)


def heads_of(text: str) -> Heads:
    n, m, d = map(int, text.split(","))
    return n, m, d


def places(rows: int, prompt: int, own: int) -> int:
    return -(-rows // GROUP) * prompt + rows * own


def new_pool(heads: Heads, rows: int) -> Tensor:
    """bf16 [layers, N, 2, m, d]: 20 layers or as many as fit, for the largest case."""
    _, m, d = heads
    size = places(rows, max(PROMPTS), max(OWN)) * 2 * m * d
    layers = min(LAYERS, int(torch.cuda.mem_get_info()[0] * 0.8) // (2 * size))
    pool = torch.empty(layers, size // (2 * m * d), 2, m, d, device="cuda", dtype=BF16)
    for layer in pool:
        layer.normal_()
    return pool


class Case:
    """`rows` completions of `own` tokens in groups of 8 with prompts of `prompt` tokens."""

    def __init__(self, heads: Heads, rows: int, prompt: int, own: int, pool: Tensor):
        n, m, d = heads
        groups = -(-rows // GROUP)
        self.pool, self.scale = pool, d**-0.5
        self.tables = t = DecodeTables.idle(rows, groups, GROUP, own, prompt, "cuda")
        row = torch.arange(rows, device="cuda")
        t.own_start.copy_(groups * prompt + row * own)
        t.own_length.fill_(own)
        t.prefix_start.copy_(torch.arange(groups, device="cuda") * prompt)
        t.prefix_length.fill_(prompt)
        t.rows_of_group.view(-1)[:rows] = row
        t.group_of_row.copy_(row // GROUP)
        self.plan = DecodePlan(t, n, m, d, BF16)
        self.plan.refresh()
        qkv = torch.randn(rows, n + 2 * m, d, device="cuda").to(BF16)
        self.q, self.k, self.v = qkv.split((n, m, m), dim=1)
        self.out = torch.empty(rows, n, d, device="cuda", dtype=BF16)
        inv_freq = 1e4 ** -(torch.arange(0, d, 2, device="cuda") / d)
        self.cos, self.sin = rope_tables(self.plan.position_B, inv_freq, 1.0, BF16)
        self.size = 2 * (places(rows, prompt, own) * 2 * m * d + 2 * rows * n * d)

    def attend(self, layer: int) -> None:
        k, v = self.pool[layer % len(self.pool)].unbind(1)
        decode_attention(self.q, k, v, self.tables, self.scale, plan=self.plan, out=self.out)

    def store(self, layer: int) -> None:
        k, v = self.pool[layer % len(self.pool)].unbind(1)
        rope_store(self.q, self.k, self.v, self.cos, self.sin, k, v, self.plan.place_B)

    def refresh(self, layer: int) -> None:
        self.plan.refresh()


def microseconds(call: Callable[[int], object], reps: int) -> float:
    """GPU time of one of LAYERS calls in a graph. The flush also hides the time it takes to launch the graph."""
    flush = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(LAYERS):
            call(layer)
    times = []
    for _ in range(reps + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / LAYERS


def tune(heads: Heads, pool: Tensor, reps: int) -> None:
    """Times `attend` and `join` under other launch parameters and sizes of a query tile, at TUNE_AT."""
    results = []
    before = kernels.launch_for, kernels.TILE_ROWS
    keys = (32, 64) if heads[2] > 64 else (64, 128)
    for tile_rows, *parameters in itertools.product((32, 64), keys, (4,), (3, 4), (2, 3, 4), (16, 64)):
        if parameters[-1] > tile_rows:
            continue
        launch = kernels.Launch(*parameters)
        set_launch(lambda *arguments, launch=launch: launch, tile_rows)
        try:
            us = microseconds(Case(heads, *TUNE_AT, pool).attend, reps)
        except OutOfResources:
            continue
        results.append((us, tile_rows, launch))
    set_launch(*before)
    print(
        f"{heads}, (rows, prompt, own) {TUNE_AT}: now {microseconds(Case(heads, *TUNE_AT, pool).attend, reps):.2f} us"
    )
    for us, tile_rows, launch in sorted(results)[:8]:
        print(f"  {us:8.2f} us  TILE_ROWS {tile_rows}, {launch}", flush=True)


def set_launch(launch_for: object, tile_rows: object) -> None:
    for name, value in (("launch_for", launch_for), ("TILE_ROWS", tile_rows)):
        setattr(kernels, name, value)


if __name__ == "__main__":
    main()
