"""The same work on covey and on its peers, in one table: python -m benchmarks.peers --shape llama3.1-8b

Peers are `covey`, `hf` (transformers, PEFT and bitsandbytes), `liger` (the same with liger-kernel), `trl` (its GRPO
loss), `trl-flex` (with flex attention) and `unsloth`, as far as they are installed. Each runs in a process of its own,
because some of them patch the others, and gets at most `--limit` seconds. All quantise the same weights to NF4 with
double quantisation and get the same adapter of rank 16 on seven linears; the peers recompute activations in the
backward pass.

Work is spelt as for benchmarks.step: `sft:ROWSxTOKENS` (forward, backward and AdamW, of 8 bits in the peers),
`grpo:GxPROMPT+NEW` (forward and backward of the GRPO loss on one group with one prompt) or `logp:GxPROMPT+NEW` (its
log-probs alone). Tokens per second count every row with its prompt. `packed:ROWSxTOKENS/MEAN` is whole SFT steps on
documents of real lengths (benchmarks/packed.py): covey's own, and those of the SFTTrainer of `trl`, `trl-flex` and
`unsloth` with its packing, ROWS rows of TOKENS tokens a step. Here tokens per second count trained tokens alone.

`x covey` is the time of a token as a multiple of covey's in its first `--memory` mode. `loss` (for logp the mean
negative log-prob) and `grad norm` (of the adapter) belong to the first step, the loss of packed work to the whole run;
where they differ from those of hf, or else of the first peer, by more than bfloat16 explains, a remark below the table
says so.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.packed import WARM_UP, in_words, parse_packed
from benchmarks.peers.inputs import parse_work
from benchmarks.peers.process import Case, Record, gather, number
from benchmarks.shapes import SHAPES

PEERS = {  # by name: the modules without which it cannot run
    "covey": ("covey",),
    "hf": ("transformers", "peft", "bitsandbytes"),
    "liger": ("transformers", "peft", "bitsandbytes", "liger_kernel"),
    "trl": ("transformers", "peft", "bitsandbytes", "datasets", "trl"),
    "trl-flex": ("transformers", "peft", "bitsandbytes", "datasets", "trl"),
    "unsloth": ("unsloth",),
}
TRAINERS = ("covey", "trl", "trl-flex", "unsloth")  # what does the works packed:...
WORK = ("sft:4x2048", "sft:1x8192", "grpo:8x512+1024", "logp:8x512+1024")
TOLERANCE = {"loss": 1e-3, "grad_norm": 1e-2}  # relative


def cases(peers: list[str], memory: list[str], work: list[str]) -> list[Case]:
    """One per peer, and per memory mode of covey; covey first, since the others are compared with it.

    A trainer leaves the model changed, so each of the works packed:... has a process of its own.
    """
    packed = [w for w in work if w.startswith("packed")]
    chosen = []
    for peer in (p for p in PEERS if p in peers):
        mine = [w for w in work if w not in packed]
        if peer == "trl":  # on texts it has transformers' model and loss, which is `hf`
            mine = [w for w in mine if not w.startswith("sft")]
        elif peer == "trl-flex":
            mine = []
        sets = [*([mine] if mine else []), *([w] for w in packed if peer in TRAINERS)]
        chosen += [Case(peer, mode, s) for mode in (memory if peer == "covey" else [""]) for s in sets]
    return chosen


def table(records: list[Record]) -> Iterator[str]:
    """Lines of the table, one work after the other, and what does not agree."""
    yield (
        f"{'work':<18}{'peer':<12}{'version':<12}{'ms':>10}{'x covey':>9}{'tokens/s':>11}{'peak GiB':>10}"
        f"{'loss':>10}{'grad norm':>12}"
    )
    remarks = []
    for work in dict.fromkeys(r["work"] for r in records):
        rows = [r for r in records if r["work"] == work]
        measured = [r for r in rows if "error" not in r]
        ours = next((r["tokens_per_s"] for r in measured if r["peer"].startswith("covey")), math.nan)
        expected = next((r for r in measured if r["peer"] == "hf"), measured[0] if measured else None)
        for r in rows:
            head = f"{work:<18}{r['peer']:<12}"
            if "error" in r:
                yield head + r["error"][:90]
                continue
            yield (
                f"{head}{r['version']:<12}{r['ms']:>10.1f}{number(ours / r['tokens_per_s'], '.2f'):>9}"
                f"{r['tokens_per_s']:>11,.0f}{number(r['peak_gib'], '.2f'):>10}"
                f"{r['loss']:>10.5f}{number(r['grad_norm'], '.5g'):>12}"
            )
            assert expected is not None
            remarks += _disagreements(r, expected)
    yield from remarks


def _disagreements(record: Record, expected: Record) -> list[str]:
    found = []
    for key, tolerance in TOLERANCE.items():
        is_, should = record[key], expected[key]
        if should is not None and not abs(is_ - should) <= tolerance * abs(should):
            name = f"{record['work']} {record['peer']}"
            found.append(
                f"! {name}: {key} {is_:.6g} is not {expected['peer']}'s {should:.6g} within {tolerance:.1%}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--shape", choices=list(SHAPES), default="llama3.1-8b")
    parser.add_argument("--work", nargs="+", default=WORK)
    parser.add_argument("--method", default="qlora", choices=["qlora", "lora"])
    parser.add_argument("--memory", nargs="+", default=["fast", "lean"], choices=["fast", "lean", "auto"])
    parser.add_argument(
        "--tokens-per-pass", type=int, default=1 << 30, help="of covey, for packed; default: a step at once"
    )
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--limit", type=float, default=600, help="seconds for one peer, loading included")
    parser.add_argument(
        "--json", type=Path, help="append a line per result; the table covers earlier lines too"
    )
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "covey-shapes")
    args = parser.parse_args()
    packed = [work for work in args.work if work.startswith("packed")]
    try:
        for work in args.work:
            (parse_packed if work in packed else parse_work)(work)
    except ValueError as error:
        parser.error(str(error))
    args.root = args.root.resolve()
    args.root.mkdir(parents=True, exist_ok=True)
    options = [
        "--shape",
        args.shape,
        "--method",
        args.method,
        "--tokens-per-pass",
        str(args.tokens_per_pass),
        "--reps",
        str(args.reps),
        "--root",
        str(args.root),
    ]
    setting = {"shape": args.shape, "method": args.method, "tokens_per_pass": args.tokens_per_pass}
    for spec in packed:
        print(f"# {in_words(spec, WARM_UP + args.reps)}", flush=True)
    chosen = cases(args.peers, args.memory, args.work)
    records = gather(
        chosen,
        "benchmarks.peers.child",
        options,
        PEERS,
        setting,
        args,
        lambda record: f"{record['ms']:.1f} ms, {record['tokens_per_s']:,.0f} tokens/s",
    )
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
