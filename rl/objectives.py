"""What is minimised: pure functions of log-probs and a Batch. docs/objectives.md is the contract they keep.

Axis: M scored tokens. An objective is a sum over them: `Batch.weight` carries the denominator of the whole step, so no
mean over a pass stands here and the losses of a step's parts add up to the loss of the step.

    L = sum_m w_m [ c_m l_m + beta KL_m - entropy_bonus H_m ]

l is one of rl/losses.py, c one of rl/correction.py, KL one of rl/kl.py, H the entropy of the policy at the token.
"""

import torch
from torch import Tensor

from covey.policies.policy import Batch
from covey.rl.correction import correction_weights, sampler_stats
from covey.rl.kl import kl_term
from covey.rl.losses import LARGEST_LOG_RATIO, LOSSES, Tokens, held
from covey.rl.objective_config import ObjectiveSection
from covey.rl.stats import Stats, collect, token_stats


def policy_objective(
    logp_M: Tensor,
    batch: Batch,
    section: ObjectiveSection,
    *,
    entropy_M: Tensor | None = None,
    entropy_bonus: float = 0.0,
) -> tuple[Tensor, Stats]:
    """The loss of a batch (a sum, 0-dim) and what was measured on the way.

    Without `batch.old` the old log-probs are the present ones: the ratio is exactly 1 and the gradient that of A logp.
    entropy_bonus is the present weight of the entropy (it moves if there is an entropy target) and needs an entropy_M
    that can be differentiated. Raises ValueError for columns of the batch that the section needs and that are missing.
    """
    old_M = logp_M.detach() if batch.old is None else batch.old
    tokens = Tokens(logp_M, old_M, batch)
    loss_M = LOSSES[section.loss](tokens, section.option)
    stats = _ratio_stats(tokens, *held(section.loss, tokens, section.option))
    if batch.sampler is not None:
        log_weight_M = old_M - batch.sampler
        applied_M = correction_weights(tokens, log_weight_M, section)
        loss_M = applied_M * loss_M
        stats += sampler_stats(log_weight_M, applied_M)
    elif section.correction != "none":
        raise ValueError(
            f"correction={section.correction!r} needs the sampler's log-probs: the batch has none"
        )
    loss = (batch.weight * loss_M).sum()
    stats += token_stats("loss/policy", loss, len(logp_M), entropy_M)

    if section.kl_place == "loss":
        if batch.reference is None:
            raise ValueError(f"beta={section.beta:g} needs the reference's log-probs, and the batch has none")
        value_M, term_M = kl_term(
            logp_M, batch.reference, tokens.ratio, section.kl_estimator, live_ratio=section.kl_live_ratio
        )
        kl_loss = section.beta * (batch.weight * term_M).sum()
        loss = loss + kl_loss
        stats += Stats({"loss/kl": kl_loss.detach(), "kl/reference": value_M.sum(dtype=torch.float64)})
    if entropy_bonus:
        if entropy_M is None:
            raise ValueError("an entropy bonus needs the entropies of the policy")
        entropy_loss = -entropy_bonus * (batch.weight * entropy_M).sum()
        loss = loss + entropy_loss
        stats += Stats({"loss/entropy": entropy_loss.detach()})
    return loss, stats


def sft_loss(logp_M: Tensor, batch: Batch, entropy_M: Tensor | None = None) -> tuple[Tensor, Stats]:
    """L = -sum_m w_m A_m logp_m, the cross-entropy for advantage 1 and weight 1 / N_t."""
    loss_M = LOSSES["sft"](Tokens(logp_M, logp_M.detach(), batch), lambda key: None)
    loss = (batch.weight * loss_M).sum()
    return loss, token_stats("loss/sft", loss, len(logp_M), entropy_M)


def _ratio_stats(tokens: Tokens, held_low_M: Tensor, held_high_M: Tensor) -> Stats:
    log_ratio_M = tokens.log_ratio.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).double()
    ratio_M = log_ratio_M.exp()
    sums = {
        "ratio/mean": ratio_M,
        "kl/old": torch.expm1(log_ratio_M) - log_ratio_M,  # k3 of KL(old || policy): the tokens come from old
        "clip/low": held_low_M.double(),
        "clip/high": held_high_M.double(),
    }
    return collect(sums, {"ratio/max": ratio_M, "ratio/min": -ratio_M})
