"""Supervised fine-tuning: the step of GRPO without sampling and scoring.

The documents fill the same packed Batch (advantage 1), go through the same passes of the same policy, and the
loss is the cross-entropy over the tokens that are trained, each weighing 1 / (all of them in the step).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from covey.policies.policy import Policy
from covey.rl.batch import Document, pack_documents, split, to_device
from covey.rl.config import SftConfig
from covey.rl.distributed import sum_gradients
from covey.rl.objectives import sft_loss
from covey.rl.optimizer import FlatAdamW
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
    """One optimiser step (counted from 0, of `total`) on these documents."""
    clock = Clock(machine.device)
    batch = pack_documents(documents)
    stats = Stats()
    for part in split(batch, config.optim.tokens_per_pass):
        moved = to_device(part, machine.device)
        loss, part_stats = sft_loss(machine.policy.logprobs(moved).logp, moved)
        loss.backward()
        stats += part_stats
    sum_gradients(machine.optimizer.params)
    metrics = over_ranks(stats).finish() | machine.optimizer.step(step, total)
    machine.optimizer.zero_grad()
    clock.lap("train")
    metrics["sft/nll"] = metrics["loss/total"] = metrics.pop("loss/sft")
    metrics["tokens/computed"] = len(batch.input_ids)
    metrics["train/tokens_per_s"] = len(batch.input_ids) / max(clock.seconds["train"], 1e-9)
    return metrics | clock.metrics()


def document_nll(
    policy: Policy, documents: Sequence[Document], tokens_per_pass: int, device: torch.device
) -> float:
    """Mean negative log-likelihood over the trained tokens of all documents, without gradient."""
    total = 0.0
    with torch.no_grad():
        for part in split(pack_documents(documents), tokens_per_pass):
            moved = to_device(part, device)
            total -= float((policy.logprobs(moved).logp * moved.weight).sum())
    return total
