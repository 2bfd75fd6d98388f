"""Preference optimisation: learn which of two completions is the better one (DPO, arXiv 2305.18290).

Axes: M scored tokens of a pass, N pairs of it; the sides of a pair are the chosen completion (0) and the rejected (1).

    d_N2  log pi - log reference, summed over a completion's tokens (ipo: their mean)
    h_N   d of the chosen completion - d of the rejected one

    sigmoid  -(1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h)   eps: label_smoothing (cDPO, Mitchell 2023)
    ipo      (h - 1 / (2 beta))^2                                         arXiv 2310.12036, on means per token
    hinge    max(0, 1 - beta h)                                           SLiC, arXiv 2305.10425
    + sft_weight * mean over the chosen completion's tokens of -log pi    RPO, arXiv 2404.19733

The loss of a step is the mean over its pairs. Like every loss here it is computed as a sum, whose weights (1 / N of the
whole step) come with the batch, and a pair is never split between passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from covey.policies.policy import Batch, Policy
from covey.rl.batch import pack_pairs, split, to_device
from covey.rl.config import DpoConfig, DpoSection
from covey.rl.distributed import share, sum_gradients, sum_over_ranks
from covey.rl.grpo import with_reference
from covey.rl.losses import row_numbers
from covey.rl.optimizer import FlatAdamW
from covey.rl.pairs import Pair
from covey.rl.stats import Stats, over_ranks
from covey.rl.step_metrics import Clock, Measured

TERMS = {
    "sigmoid": "-log sigmoid({beta} h)",
    "smooth": "-{right} log sigmoid({beta} h) - {wrong} log sigmoid(-{beta} h)",
    "ipo": "(h - {target})^2",
    "hinge": "max(0, 1 - {beta} h)",
}


@dataclass(frozen=True, slots=True)
class DpoMachine:
    """What a step works with."""

    policy: Policy
    optimizer: FlatAdamW
    device: torch.device


def dpo_step(
    machine: DpoMachine, pairs: Sequence[Pair], config: DpoConfig, step: int, total: int
) -> Measured:
    """One optimiser step (counted from 0, of `total`) on these pairs, of which every rank takes its share."""
    clock = Clock(machine.device)
    parts = pair_passes(machine.policy, pairs, config.optim.tokens_per_pass, machine.device)
    clock.lap("reference")
    stats = Stats()
    for part in parts:
        loss, part_stats = preference_loss(machine.policy.logprobs(part).logp, part, config.objective)
        loss.backward()
        stats += part_stats
    metrics = pair_metrics(over_ranks(stats))
    sum_gradients(machine.optimizer.params)
    metrics |= machine.optimizer.step(step, total)
    machine.optimizer.zero_grad()
    clock.lap("train")
    metrics["tokens/computed"] = computed = sum_over_ranks(len(part.input_ids) for part in parts)
    metrics["train/tokens_per_s"] = computed / max(clock.seconds["train"], 1e-9)
    return metrics | clock.metrics()


def evaluate_pairs(
    policy: Policy, pairs: Sequence[Pair], section: DpoSection, tokens_per_pass: int, device: torch.device
) -> Measured:
    """Loss, accuracy and margin over all pairs, without gradient, as eval/NAME."""
    stats = Stats()
    with torch.no_grad():
        for part in pair_passes(policy, pairs, tokens_per_pass, device):
            stats += preference_loss(policy.logprobs(part).logp, part, section)[1]
    found = pair_metrics(over_ranks(stats))
    return {f"eval/{name}": found[f"dpo/{name}"] for name in ("loss", "accuracy", "margin")}


def pair_passes(
    policy: Policy, pairs: Sequence[Pair], tokens_per_pass: int, device: torch.device
) -> list[Batch]:
    """This rank's passes of a step, on the device, with the reference policy's log-probs."""
    mine = share(pairs, size=lambda pair: sum(len(document.ids) for document in pair))
    parts = split(pack_pairs(mine), tokens_per_pass, keep_families=True)
    return with_reference(policy, [to_device(part, device) for part in parts])


def preference_loss(logp_M: Tensor, batch: Batch, section: DpoSection) -> tuple[Tensor, Stats]:
    """The loss of a batch of pairs (0-dim, float64) and what was measured on the way.

    The batch is one of pack_pairs, whole pairs with their reference log-probs; sums over completions are float64.
    """
    if batch.reference is None:
        raise ValueError(
            "preferences are relative to the reference policy, and the batch has no log-probs of it"
        )
    sides = _Sides(batch)
    logp_N2 = sides.sum(logp_M)
    d_N2 = sides.sum(logp_M.double() - batch.reference.double())
    tokens_N2 = sides.sum(torch.ones_like(batch.weight))
    weight_N = sides.sum(batch.weight)[:, 0] / tokens_N2[:, 0]  # equal for all tokens of the step
    if section.loss == "ipo":
        d_N2 = d_N2 / tokens_N2
    h_N = d_N2[:, 0] - d_N2[:, 1]

    preference = (weight_N * pair_loss(h_N, section)).sum()
    nll = -section.sft_weight * (weight_N * logp_N2[:, 0] / tokens_N2[:, 0]).sum()
    h_N, d_N2, logp_N2 = h_N.detach(), d_N2.detach(), logp_N2.detach()
    sums = {
        "loss/preference": preference.detach(),
        "loss/sft": nll.detach(),
        "pairs": torch.ones_like(h_N).sum(),
        "accuracy": (h_N > 0).double().sum(),
        "margin": section.beta * h_N.sum(),
        "chosen": section.beta * d_N2[:, 0].sum(),
        "rejected": section.beta * d_N2[:, 1].sum(),
        "logp/chosen": logp_N2[:, 0].sum(),
        "logp/rejected": logp_N2[:, 1].sum(),
        "tokens/chosen": tokens_N2[:, 0].sum(),
        "tokens/rejected": tokens_N2[:, 1].sum(),
    }
    return preference + nll, Stats(sums)


def pair_loss(h_N: Tensor, section: DpoSection) -> Tensor:
    """What each pair costs; finite for any h."""
    scaled_N, wrong = section.beta * h_N, section.label_smoothing
    if section.loss == "hinge":
        return torch.relu(1.0 - scaled_N)
    if section.loss == "ipo":
        return (h_N - 1.0 / (2.0 * section.beta)) ** 2
    return -(1.0 - wrong) * logsigmoid(scaled_N) - wrong * logsigmoid(-scaled_N)


def pair_metrics(stats: Stats) -> Measured:
    """Metrics by name: losses as they are minimised, the rest per pair or per token; without pairs only zeros."""
    sums = {name: value.item() for name, value in stats.sums.items()}
    pairs = sums.get("pairs", 0.0)
    if not pairs:
        return {"dpo/loss": 0.0, "loss/total": 0.0, "tokens/trained": 0.0}
    metrics = {"dpo/loss": sums["loss/preference"]}
    metrics |= {f"dpo/{name}": sums[name] / pairs for name in ("accuracy", "margin", "chosen", "rejected")}
    metrics |= {
        f"logp/{side}": sums[f"logp/{side}"] / sums[f"tokens/{side}"] for side in ("chosen", "rejected")
    }
    metrics |= {"loss/sft": sums["loss/sft"]} if sums["loss/sft"] else {}
    metrics["loss/total"] = sums["loss/preference"] + sums["loss/sft"]
    metrics["tokens/trained"] = sums["tokens/chosen"] + sums["tokens/rejected"]
    return metrics


def explain_pairs(section: DpoSection, reference: str) -> str:
    """What a run minimises, with every number of the section and the denominator. reference: what it is."""
    beta, wrong = section.beta, section.label_smoothing
    numbers = {
        "beta": f"{beta:g}",
        "right": f"{1 - wrong:g}",
        "wrong": f"{wrong:g}",
        "target": f"{1 / (2 * beta):g}",
    }
    term = TERMS["smooth" if wrong else section.loss].format(**numbers)
    each = "its mean per token" if section.loss == "ipo" else "each summed over the completion's tokens"
    lines = [
        "N          pairs, every pair counts the same; counted once per optimiser step",
        f"h          logp - reference of the chosen completion, less that of the rejected one; {each}",
        f"reference  {reference}",
    ]
    if section.sft_weight:
        term += f" + {section.sft_weight:g} nll"
        lines.append("nll        -logp of the chosen completion, its mean per token")
    return "\n".join([f"minimise  L = sum over pairs of  [{term}] / N", *(f"  {line}" for line in lines)])


class _Sides:
    """Sums over the completions of a batch of whole pairs: [M] to float64 [N, 2], chosen and rejected."""

    def __init__(self, batch: Batch):
        # A pair has one segment without a prefix, its prompt. `segments` lies on the CPU: no waiting for the device.
        self.pairs = int((batch.segments[:, 3] == 0).sum())
        self.row = row_numbers(batch.row)  # chosen, rejected, chosen, rejected, ...

    def sum(self, x_M: Tensor) -> Tensor:
        """Added in the order of the tokens, so always the same bits."""
        zeros = torch.zeros(2 * self.pairs, dtype=torch.float64, device=x_M.device)
        return zeros.index_put((self.row,), x_M.double(), accumulate=True).view(self.pairs, 2)
