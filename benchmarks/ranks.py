"""What more GPUs give: python -m benchmarks.ranks --shape qwen2.5-1.5b --processes 1 2 --work grpo:32x8x256 sft:32x1024

Runs the same recipe on random weights with so many processes, one to a GPU, started as torchrun starts them. Work is
`grpo:PROMPTSxCOMPLETIONSxNEW` or `sft:ROWSxTOKENS`, of a step of all processes together. Times are medians over the
steps after the first two, in seconds. `loss`, `grad` and `reward` are those of the first step, which are to be the same
up to the rounding of sums.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.start import spread

ROOT = Path(__file__).parents[1]
TIMES = {"step": "time/step_s", "rollout": "time/rollout_s", "train": "time/train_s"}
FIRST = {"loss": "loss/total", "grad": "grad/norm", "reward": "reward/mean"}
WARM = 2  # steps


def words(count: int, letters: int) -> list[str]:
    """Texts of so many letters, which are as many tokens."""
    random = np.random.default_rng(0)
    return ["".join(random.choice(list("abcdefgh "), letters)) for _ in range(count)]


def run(work: str, model: Path, method: str, steps: int, folder: Path) -> None:
    """In each process: the recipe."""
    import covey

    kind, sizes = work.split(":")
    numbers = [int(n) for n in sizes.split("x")]
    common: dict[str, Any] = {
        "model": {"path": str(model), "method": method},
        "run": {"dir": str(folder), "name": "run", "save_every": 0, "samples_every": 0},
    }
    optim = {"steps": steps, "lr": 1e-5, "warmup_steps": 0}
    if kind == "grpo":
        prompts, completions, new = numbers
        rollout = {
            "prompts_per_step": prompts, "group_size": completions, "max_new_tokens": new, "stop": [],
        }  # fmt: skip
        rows = [{"prompt": text} for text in words(4 * prompts, 128)]
        covey.grpo(common | {"rollout": rollout, "optim": optim}, data=rows, rewards=[spread], plain=True)
    else:
        rows_per_step, tokens = numbers
        rows = [{"prompt": text[:16], "completion": text[16:]} for text in words(4 * rows_per_step, tokens)]
        covey.sft(common | {"optim": optim | {"rows_per_step": rows_per_step}}, data=rows, plain=True)


def measured(work: str, world: int, options: argparse.Namespace, model: Path) -> dict[str, float]:
    """The numbers of one run of so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world]
        command += ["-m", "benchmarks.ranks", "--shape", options.shape, "--method", options.method]
        command += ["--steps", options.steps, "--root", options.root, "--inside", folder, "--work", work]
        with (options.root / "ranks.log").open("a") as log:
            subprocess.run(
                list(map(str, command)), cwd=ROOT, check=True, stdout=log, stderr=log, timeout=options.limit
            )
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step_s" in row]
    out = {name: rows[0][key] for name, key in FIRST.items() if key in rows[0]}
    for name, key in TIMES.items():
        if key in rows[0]:
            out[name] = statistics.median(row[key] for row in rows[WARM:])
    return out


def main() -> None:
    from benchmarks.shapes import SHAPES, model_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--method", default="qlora")
    parser.add_argument("--work", nargs="+", default=["grpo:32x8x256", "sft:32x1024"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--root", default=Path(tempfile.gettempdir()) / "covey-shapes", type=Path)
    parser.add_argument("--limit", type=float, default=600, help="seconds of a run")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = model_folder(options.shape, options.root)
    if options.inside:
        run(options.work[0], model, options.method, options.steps, Path(options.inside))
        return
    names = (*TIMES, *FIRST)
    print(f"{'work':<16}{'processes':>10}" + "".join(f"{name:>12}" for name in names) + f"{'faster':>10}")
    for work in options.work:
        alone = 0.0
        for world in options.processes:
            found = measured(work, world, options, model)
            alone = alone or found["step"]
            numbers = "".join(f"{found.get(name, float('nan')):>12.4g}" for name in names)
            print(f"{work:<16}{world:>10}{numbers}{alone / found['step']:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
