"""One peer in a process of its own: samples, and writes a JSON line for each work (see benchmarks/rollout.py)."""

import argparse
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.child import about, failure, free_memory, prepare

BEGAN = time.perf_counter()
PROBES = 8  # prompts, and tokens after each, sampled greedily to see that all peers compute the same


def sizes(work: str) -> tuple[str, int, int, int]:
    """(kind, rows, prompt tokens, new tokens) of sample:ROWSxPROMPT+NEW or grpo:ROWSxPROMPT+NEW."""
    kind, *numbers = re.split("[:x+]", work)
    rows, prompt, new = map(int, numbers)
    return kind, rows, prompt, new


def measured(sampler: Any, work: str, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one work."""
    import torch
    from benchmarks.peers.inputs import prompts_of

    kind, rows, prompt, new = sizes(work)
    group = min(args.group, rows)
    prompts = prompts_of(rows // group, prompt, vocab)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    if kind == "grpo":
        record = sampler.grpo(prompts, group, new, args.reps)
        return record | {"tokens_per_s": rows * new / record["step_s"], "peak_gib": peak()}
    return sampled(sampler, prompts, group, new, args)


def sampled(
    sampler: Any, prompts: list[list[int]], group: int, new: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Rates and times of sampling: medians of repetitions after a warm-up, each with draws of its own."""

    def run(new: int, seed: int) -> tuple[float, list[int]]:
        """(seconds, lengths)"""
        start = time.perf_counter()
        rows = sampler.generate(prompts, group, new, seed)
        seconds = time.perf_counter() - start
        lengths = [len(row) for row in rows]
        if (
            len(rows) != len(prompts) * group
            or max(lengths) > new
            or (not args.ends_after and min(lengths) < new)
        ):
            raise ValueError(f"{len(rows)} completions of {min(lengths)} to {max(lengths)} tokens came back")
        return seconds, lengths

    run(min(new, sampler.warm_up or new), 0)
    first = statistics.median(run(1, 0)[0] for _ in range(3))
    runs = [run(new, seed) for seed in range(1, args.reps + 1)]
    record = {
        "tokens_per_s": statistics.median(sum(lengths) / seconds for seconds, lengths in runs),
        "step_ms": statistics.median((s - first) / max(1, max(lengths) - 1) for s, lengths in runs) * 1e3,
        "first_s": first,
        "peak_gib": peak(),
        "mean_tokens": statistics.mean(length for _, lengths in runs for length in lengths),
        "longest": max(max(lengths) for _, lengths in runs),
    }
    if hasattr(sampler, "agreement"):
        record |= sampler.agreement(prompts, group, new, args.reps)
    if args.profile:
        from benchmarks.device_time import step_time

        record["profile"] = step_time(lambda tokens: sampler.generate(prompts, group, tokens, 0), new - 1)
    return record


def peak() -> float | None:
    """GiB that tensors have taken at most since the counter was reset."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer")
    parser.add_argument("--model", required=True, help="a shape's name, or a folder")
    parser.add_argument("--method", required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--ends-after", type=int, required=True)
    parser.add_argument("--tokens-per-pass", type=int, required=True)
    parser.add_argument("--reps", type=int, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--work", nargs="+", required=True)
    args = parser.parse_args()
    if args.peer == "unsloth-graphs":
        os.environ["UNSLOTH_DECODE_CUDA_GRAPHS"] = "1"
    results = prepare(args.peer)
    from benchmarks.peers.inputs import as_downloaded, ends_of, prompts_of
    from benchmarks.peers.samplers import Settings, sampler
    from benchmarks.shapes import SHAPES, model_folder

    from covey.policies.spec import read_spec

    shape = args.model in SHAPES
    folder = as_downloaded(model_folder(args.model, args.root)) if shape else Path(args.model)
    vocab = read_spec(folder).vocab_size
    works = [sizes(work) for work in args.work]
    settings = Settings(
        folder,
        args.root,
        args.method,
        args.memory,
        rows=max(rows for _, rows, _, _ in works),
        longest=max(prompt + new for _, _, prompt, new in works),
        ends=ends_of(args.ends_after, vocab) if args.ends_after else (),
        tokens_per_pass=args.tokens_per_pass,
    )
    peer = sampler(args.peer, settings)
    loaded = time.perf_counter()
    peer.start()
    _, rows, prompt, new = works[0]
    group = min(args.group, rows)
    peer.generate(prompts_of(rows // group, prompt, vocab), group, 1, 0)
    always = {"load_s": loaded - BEGAN, "start_s": time.perf_counter() - loaded} | about(args.peer, args.reps)
    always["greedy"] = peer.generate(prompts_of(PROBES, prompt, vocab), 1, min(new, PROBES), 0, greedy=True)
    for work in args.work:
        free_memory()
        try:
            record = measured(peer, work, vocab, args) | always
        except Exception as error:
            record = failure(error)
        print(json.dumps({"work": work} | record), file=results, flush=True)
    sys.stderr.flush()
    os._exit(0)  # threads and workers of the libraries are not waited for


if __name__ == "__main__":
    main()
