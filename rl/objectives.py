"""What is minimised: pure functions of log-probs and a Batch. docs/objectives.md is the contract they keep.

Axis: M scored tokens. An objective is a sum over them: `Batch.weight` carries the denominator of the whole
step, so no mean stands here and the losses of a step's parts add up to the loss of the step. Everything is
finite for log-probs that differ by hundreds of nats: exponents are bounded before they are raised.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from covey.policies.policy import Batch
from covey.rl.advantages import EPS, FORMULAS
from covey.rl.config import ObjectiveSection

Correction = Literal["none", "truncate", "mask"]

LARGEST_LOG_RATIO = 20.0  # nats; a ratio is at most e^20 (5e8), and from there on it has no gradient

SFT_OBJECTIVE = """\
minimise  L = sum over target tokens of  [-logp] / D
  D    N_t: all target tokens, every token counts the same (cross-entropy); counted once per optimiser step"""


@dataclass(frozen=True, slots=True)
class Stats:
    """Sums and maxima over scored tokens (0-dim tensors), which add up over the parts of a step."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: "Stats") -> "Stats":
        sums, maxima = dict(self.sums), dict(self.maxima)
        for name, value in other.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return Stats(sums, maxima)

    def finish(self) -> dict[str, float]:
        """Metrics by name (area/name): losses and counts as they are, the rest per token if there is any."""
        sums = {name: value.item() for name, value in self.sums.items()}
        metrics = {name: sums.pop(name) for name in list(sums) if name.startswith("loss/")}
        metrics["tokens/trained"] = tokens = sums.pop("tokens", 0.0)
        if not tokens:
            return metrics
        weight, weight_square = sums.pop("weight", 0.0), sums.pop("weight_square", 0.0)
        if weight_square:  # effective sample size (sum w)^2 / (n sum w^2): 1 if all weights are equal
            metrics["sampler/ess"] = weight**2 / (tokens * weight_square)
        metrics |= {name: value / tokens for name, value in sums.items()}
        metrics |= {name: value.item() for name, value in self.maxima.items()}
        if "ratio/min" in metrics:
            metrics["ratio/min"] *= -1  # kept as the largest negative one
        return metrics


def grpo_loss(
    logp_M: Tensor,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    beta: float,
    correction: Correction,
    correction_cap: float,
    entropy_M: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """L = sum_m w_m [ -c_m min(r_m A_m, clip(r_m, 1 - clip_low, 1 + clip_high) A_m) + beta r_m k3_m ].

    r = exp(logp - old) (PPO, arXiv 1707.06347; clip_high > clip_low: DAPO, 2503.14476); without `batch.old`
    the old log-probs are the present ones, the ratio is exactly 1 and the gradient that of A logp.
    c corrects for the sampler (correction_weights) and weighs the policy term only. k3: see kl_terms.
    """
    old_M = logp_M.detach() if batch.old is None else batch.old
    log_ratio_M = logp_M - old_M
    ratio_M = log_ratio_M.clamp(max=LARGEST_LOG_RATIO).exp()
    clipped_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    gain_M = torch.minimum(ratio_M * batch.advantage, clipped_M * batch.advantage)
    if correction != "none":
        if batch.sampler is None:
            raise ValueError(f"correction={correction!r} needs the sampler's log-probs: the batch has none")
        gain_M = gain_M * correction_weights(old_M - batch.sampler, correction, correction_cap)
    policy_loss = -(batch.weight * gain_M).sum()
    stats = _ratio_stats(log_ratio_M.detach(), batch.advantage, clip_low, clip_high)
    stats += _token_stats("loss/policy", policy_loss, len(logp_M), entropy_M)
    if batch.sampler is not None:
        stats += _sampler_stats(old_M - batch.sampler, correction_cap)
    if not beta:
        return policy_loss, stats

    if batch.reference is None:
        raise ValueError(f"beta={beta:g} needs the reference's log-probs, and the batch has none")
    k3_M, pull_M = kl_terms(logp_M, batch.reference, ratio_M)
    kl_loss = beta * (batch.weight * pull_M).sum()
    kl_sums = {"loss/kl": kl_loss.detach(), "kl/reference": k3_M.sum(dtype=torch.float64)}
    return policy_loss + kl_loss, stats + Stats(kl_sums)


def sft_loss(logp_M: Tensor, batch: Batch, entropy_M: Tensor | None = None) -> tuple[Tensor, Stats]:
    """L = -sum_m w_m A_m logp_m, the cross-entropy for advantage 1 and weight 1 / N_t."""
    loss = -(batch.weight * batch.advantage * logp_M).sum()
    return loss, _token_stats("loss/sft", loss, len(logp_M), entropy_M)


def correction_weights(log_weight_M: Tensor, correction: Correction, cap: float) -> Tensor:
    """c [M] from log w = old - sampler, without gradient.

    truncate: min(w, cap) (TIS). mask: w where 1/cap <= w <= cap, else 0 (IcePop). none: 1.
    """
    log_weight_M = log_weight_M.detach()
    if correction == "none":
        return torch.ones_like(log_weight_M)
    bounded_M = log_weight_M.clamp(max=math.log(cap)).exp()
    if correction == "truncate":
        return bounded_M
    return torch.where(log_weight_M.abs() <= math.log(cap), bounded_M, 0.0)


def kl_terms(logp_M: Tensor, reference_M: Tensor, ratio_M: Tensor) -> tuple[Tensor, Tensor]:
    """k3 [M] without gradient, and r k3 [M] with it, for k = logp - reference and k3 = exp(-k) - 1 + k >= 0.

    k3 alone has the gradient of the other KL; times the live ratio r it has that of KL(policy || reference)
    (arXiv 2512.02556): d(r k3) = r dk3 + k3 dr = r (1 - exp(-k) + k3) dlogp = r k dlogp. The last form is
    written down as such, because the two exponentials of the one before cancel badly far from the reference.
    """
    k_M = (logp_M - reference_M).detach()
    bounded_M = k_M.clamp(min=-LARGEST_LOG_RATIO)
    k3_M = (torch.expm1(-bounded_M) + bounded_M).clamp(min=0.0)  # rounding can leave -1 ulp
    return k3_M, ratio_M.detach() * (k3_M + k_M * (logp_M - logp_M.detach()))


def explain(section: ObjectiveSection, *, max_new_tokens: int) -> str:
    """The objective that a run minimises, in symbols and words, with its denominator."""
    low, high, cap = 1 - section.clip_low, 1 + section.clip_high, section.correction_cap
    denominator = {
        "token": "N_t: all trained tokens, every token counts the same (DAPO)",
        "sequence": "N_s * T: completions times own trained tokens, every completion counts the same (GRPO)",
        "constant": f"N_s * {max_new_tokens}: completions times max_new_tokens (Dr. GRPO)",
    }[section.aggregation]
    correction = {
        "none": "none: the sampler's log-probs are taken for the trainer's",
        "truncate": f"trainer / sampler probability of the token, at most {cap:g}; no gradient",
        "mask": f"trainer / sampler probability of the token, 0 outside [{1 / cap:g}, {cap:g}]; no gradient",
    }[section.correction]
    term = f"-min(r * A, clip(r, {low:g}, {high:g}) * A)"
    if section.correction != "none":
        term = f"-c * {term[1:]}"
    if section.beta:
        term += f" + {section.beta:g} * r * k3"
        kl = "k3 = exp(-k) - 1 + k, where k = logp - logp of the reference"
    else:
        kl = "none (beta 0): the reference is never computed"
    eps = f", eps {EPS:g}" if section.advantage == "group" else ""
    once = " (1 at the only update, so nothing is clipped)" if section.updates_per_rollout == 1 else ""
    cut = " or that max_new_tokens cut off" if section.truncated == "mask" else ""
    return f"""\
minimise  L = sum over trained tokens of  [{term}] / D
  D    {denominator}; counted once per optimiser step
  A    {FORMULAS[section.advantage]}{eps}
  r    exp(logp - logp before the first update){once}
  c    {correction}
  KL   {kl}
  left out of L and of its denominator: completions that no reward function scored{cut}"""


def _token_stats(name: str, loss: Tensor, count: int, entropy_M: Tensor | None) -> Stats:
    sums = {name: loss.detach(), "tokens": torch.full_like(loss.detach(), count, dtype=torch.float64)}
    if entropy_M is not None:
        sums["entropy/mean"] = entropy_M.detach().sum(dtype=torch.float64)
    return Stats(sums)


def _ratio_stats(log_ratio_M: Tensor, advantage_M: Tensor, clip_low: float, clip_high: float) -> Stats:
    log_ratio_M = log_ratio_M.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).double()
    ratio_M = log_ratio_M.exp()
    sums = {
        "ratio/mean": ratio_M,
        "kl/old": torch.expm1(log_ratio_M) - log_ratio_M,  # k3 of KL(old || policy): the tokens come from old
        "clip/low": ((ratio_M < 1 - clip_low) & (advantage_M < 0)).double(),
        "clip/high": ((ratio_M > 1 + clip_high) & (advantage_M > 0)).double(),
    }
    return _collect(sums, {"ratio/max": ratio_M, "ratio/min": -ratio_M})


def _sampler_stats(log_weight_M: Tensor, cap: float) -> Stats:
    """How far sampler and trainer disagree, before any cap."""
    difference_M = log_weight_M.detach().double()
    weight_M = difference_M.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    sums = {
        "sampler/logp_diff": difference_M.abs(),
        "sampler/outside": ((weight_M < 0.9) | (weight_M > 1.1)).double(),
        "sampler/above_cap": (weight_M > cap).double(),
        "weight": weight_M,
        "weight_square": weight_M**2,
    }
    return _collect(sums, {"sampler/logp_diff_max": difference_M.abs()})


def _collect(sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> Stats:
    return Stats(
        {name: value_M.sum() for name, value_M in sums.items()},
        {name: value_M.max() for name, value_M in maxima.items() if len(value_M)},
    )
