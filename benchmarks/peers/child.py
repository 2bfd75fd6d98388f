"""One peer in a process of its own: measures its work and writes a JSON line for each (see __main__.py)."""

import argparse
import gc
import json
import math
import os
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "bitsandbytes",
    "covey",
    "liger-kernel",
    "trl",
    "unsloth",
    "vllm",
)
NAMED_AFTER = {  # the package whose version stands in the table
    "hf": "transformers",
    "hf-static": "transformers",
    "liger": "liger-kernel",
    "trl-flex": "trl",
    "unsloth-graphs": "unsloth",
    "vllm-bf16": "vllm",
}


def measured(peer: Any, spec: str, vocab: int, reps: int) -> dict[str, Any]:
    """Loss and gradient norm of a first step with the common adapter, then the times of later ones."""
    import torch
    from benchmarks.peers.inputs import read_work
    from benchmarks.step import measure

    kind, inputs, tokens = read_work(spec, vocab)
    loss_of = getattr(peer, kind)(inputs)
    peer.fill_adapter()
    update = peer.optimizer() if kind == "sft" else lambda: None

    def compute() -> torch.Tensor:
        if kind == "logp":
            with torch.no_grad():
                return loss_of()
        loss = loss_of()
        loss.backward()
        return loss.detach()

    def finish() -> None:
        update()
        if kind != "logp":
            peer.zero_grad()

    def step() -> None:
        compute()
        finish()

    peer.zero_grad()
    loss = float(compute())
    norm = None
    if kind != "logp":
        norm = float(torch.stack([g.double().square().sum() for g in peer.gradients()]).sum().sqrt())
    finish()
    ms, peak = measure(step, reps, torch.device(peer.device))
    peak = None if math.isnan(peak) else peak
    return {"ms": ms, "tokens_per_s": tokens / ms * 1e3, "peak_gib": peak, "loss": loss, "grad_norm": norm}


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def about(peer: str, reps: int) -> dict[str, Any]:
    """What stands in every record of a process."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    known = versions()
    own = known.get(NAMED_AFTER.get(peer, peer), "?")
    return {"version": own, "versions": known, "reps": reps, "device": device}


def prepare(peer: str) -> TextIO:
    """Before anything else: where records go (what libraries print goes to the log), and what has to come first."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if peer.startswith("unsloth"):
        import unsloth  # type: ignore  # noqa: F401  # patches torch, transformers, peft and trl, if it comes first
    return results


def free_memory() -> None:
    """Gives back what loading, or the work before, has left."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def failure(error: Exception) -> dict[str, Any]:
    """The record of a work that raised; the log gets the traceback."""
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--tokens-per-pass", type=int, required=True)
    parser.add_argument("--reps", type=int, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--work", nargs="+", required=True)
    args = parser.parse_args()
    results = prepare(args.peer)
    from benchmarks.packed import parse_packed
    from benchmarks.peers.inputs import as_downloaded, parse_work
    from benchmarks.peers.models import load
    from benchmarks.peers.trainers import trained
    from benchmarks.shapes import SHAPES, model_folder

    folder = as_downloaded(model_folder(args.shape, args.root))
    longest = max(
        parse_packed(spec)[1] if spec.startswith("packed") else sum(parse_work(spec)[2]) for spec in args.work
    )
    peer = load(args.peer, folder, args.method, args.memory, longest)
    always, vocab = about(args.peer, args.reps), SHAPES[args.shape].vocab
    # SFT first: Unsloth's trainer leaves the model returning hidden states in place of a loss.
    for spec in sorted(args.work, key=lambda spec: not spec.startswith("sft")):
        free_memory()
        try:
            if spec.startswith("packed"):
                record = trained(args.peer, peer, spec, vocab, args.reps, args.tokens_per_pass) | always
            else:
                record = measured(peer, spec, vocab, args.reps) | always
        except Exception as error:
            record = failure(error)
            peer.zero_grad()
        print(json.dumps({"work": spec} | record), file=results, flush=True)
    sys.stderr.flush()
    os._exit(0)  # threads and workers of the libraries are not waited for


if __name__ == "__main__":
    main()
