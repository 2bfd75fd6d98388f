"""Supervised fine-tuning: the step of GRPO without sampling and scoring.

The documents fill the same packed Batch (advantage 1), go through the same passes of the same policy, and the
loss is the cross-entropy over the tokens that are trained, each weighing 1 / (all of them in the step).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from covey.policies.policy import Policy
from covey.rl.batch import Document, pack_documents, split, to_device
from covey.rl.config import SftConfig
from covey.rl.data import Row
from covey.rl.distributed import share, sum_gradients, sum_over_ranks
from covey.rl.objectives import sft_loss
from covey.rl.optimizer import FlatAdamW
from covey.rl.sources import DataError
from covey.rl.stats import Stats, over_ranks
from covey.rl.step_metrics import Clock, Measured


@dataclass(frozen=True, slots=True)
class SftMachine:
    """What a step works with."""

    policy: Policy
    optimizer: FlatAdamW
    device: torch.device


def sft_step(
    machine: SftMachine, documents: Sequence[Document], config: SftConfig, step: int, total: int
) -> Measured:
    """One optimiser step (counted from 0, of `total`) on these documents, of which every rank takes its share."""
    clock = Clock(machine.device)
    batch = pack_documents(share(documents, size=tokens))
    stats = Stats()
    for part in split(batch, config.optim.tokens_per_pass):
        moved = to_device(part, machine.device)
        loss, part_stats = sft_loss(machine.policy.logprobs(moved).logp, moved)
        loss.backward()
        stats += part_stats
    metrics = over_ranks(stats).finish()
    sum_gradients(machine.optimizer.params)
    metrics |= machine.optimizer.step(step, total)
    machine.optimizer.zero_grad()
    clock.lap("train")
    metrics["sft/nll"] = metrics["loss/total"] = metrics.pop("loss/sft")
    metrics["tokens/computed"] = computed = sum_over_ranks([len(batch.input_ids)])
    metrics["train/tokens_per_s"] = computed / max(clock.seconds["train"], 1e-9)
    return metrics | clock.metrics()


def tokens(document: Document) -> int:
    return len(document.ids)


def hold_out(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(rows to train on, held-out rows), both in their order: a function of the rows and the seed alone.

    Rows that say the same word for word stay together, so nothing that is held out is trained on in another place.
    Raises DataError if there are too few rows to hold some out.
    """
    copies: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        copies.setdefault(repr((row.text, row.prompt, row.completion, row.messages)), []).append(place)
    groups = list(copies.values())
    random.Random(f"held out:{seed}").shuffle(groups)
    wanted = min(max(1, round(share * len(rows))), len(rows) - 1)
    taken: set[int] = set()
    for group in groups:
        if len(taken) + len(group) <= wanted:
            taken.update(group)
    if not taken:
        raise DataError(
            f"eval.share: {share:g} of {len(rows)} rows, {len(groups)} of them different, cannot be held out. "
            "Give more rows, or data.eval."
        )
    return (
        [row for place, row in enumerate(rows) if place not in taken],
        [row for place, row in enumerate(rows) if place in taken],
    )


def document_nll(
    policy: Policy, documents: Sequence[Document], tokens_per_pass: int, device: torch.device
) -> float:
    """Mean negative log-likelihood over the trained tokens of all documents, without gradient."""
    total = 0.0
    with torch.no_grad():
        for part in split(pack_documents(share(documents, size=tokens)), tokens_per_pass):
            moved = to_device(part, device)
            total -= float((policy.logprobs(moved).logp * moved.weight).sum())
    return sum_over_ranks([total])
