"""What graphics cards of 8, 16 and 24 GB can train, on one that is larger: python -m benchmarks.cards

torch is kept to --usable of a card's memory (the rest is the CUDA context's and the desktop's), and covey chooses how
it works by what is left, as it would there. For every card and shape one process runs whole GRPO steps on one group:
sampling, a trivial reward, learning. `peak GiB` is the most that torch reserved; where it does not fit, the message
stands.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.shapes import SHAPES, model_folder

CARDS = {"8": 8.0, "16": 16.0, "24": 24.0}  # GiB
WIDTH = 160  # of what is shown of an error
WORK = ("8x256+1024", "8x512+4096")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", default=list(CARDS), choices=list(CARDS))
    parser.add_argument("--shapes", nargs="+", default=["qwen2.5-1.5b", "llama3.1-8b"], choices=list(SHAPES))
    parser.add_argument("--work", nargs="+", default=WORK, metavar="ROWSxPROMPT+NEW")
    parser.add_argument("--usable", type=float, default=0.9)
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "covey-shapes")
    parser.add_argument("--child", nargs=2, metavar=("SHAPE", "GIB"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    print(f"{'card':>6}  {'shape':<14}{'work':<14}{'peak GiB':>9}{'s/step':>8}{'sample s':>9}{'learn s':>9}")
    for card in args.cards:
        for shape in args.shapes:
            model_folder(shape, args.root)
            command = [
                sys.executable,
                "-m",
                "benchmarks.cards",
                "--child",
                shape,
                str(CARDS[card] * args.usable),
            ]
            command += ["--work", *args.work, "--reps", str(args.reps), "--root", str(args.root)]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as running:
                last = "ended without a word"
                for line in running.stdout or ():
                    last = line.strip() or last
                    if line.startswith("{"):
                        record = json.loads(line)
                        print(f"{card + ' GB':>6}  {shape:<14}{record['work']:<14}{row(record)}", flush=True)
            if running.returncode:
                print(f"{card + ' GB':>6}  {shape:<14}{last[:WIDTH]}", flush=True)


def row(record: dict) -> str:
    if "error" in record:
        return record["error"][:WIDTH]
    return f"{record['peak_gib']:>9.2f}{record['step_s']:>8.2f}{record['sample_s']:>9.2f}{record['learn_s']:>9.2f}"


def child(args: argparse.Namespace) -> None:
    import torch
    from benchmarks.peers.inputs import prompts_of
    from benchmarks.peers.samplers import CoveySampler, Settings
    from benchmarks.peers.sampling_child import sizes

    shape, gib = args.child[0], float(args.child[1])
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)
    works = [sizes(f"grpo:{work}") for work in args.work]
    longest = max(prompt + new for _, _, prompt, new in works)
    folder = model_folder(shape, args.root)
    most_rows = max(rows for _, rows, _, _ in works)
    sampler = CoveySampler(
        Settings(folder, args.root, "qlora", "auto", most_rows, longest, tokens_per_pass=longest)
    )
    sampler.start()
    for work, (_, rows, prompt, new) in zip(args.work, works, strict=True):
        torch.cuda.reset_peak_memory_stats()
        try:
            record = sampler.grpo(prompts_of(1, prompt, SHAPES[shape].vocab), rows, new, args.reps)
            record["peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            record = {"error": str(error).splitlines()[0]}
        print(json.dumps(record | {"work": work}), flush=True)


if __name__ == "__main__":
    main()
