"""The sampler is not the trainer: weights that correct for it, and how far the two disagree.

Axis: M scored tokens. With log w = old - sampler of a token, the weight W is that of the token itself, of its whole
completion (exp of the sum of log w), or the completion's geometric mean (exp of the mean). All without gradient.

    truncate  min(W, high)                     (TIS)
    mask      W where low <= W <= high, else 0    (IcePop, MIS)
"""

import math

import torch
from torch import Tensor

from covey.rl.losses import LARGEST_LOG_RATIO, Tokens
from covey.rl.objective_config import ObjectiveSection
from covey.rl.stats import Stats, collect

BAND = (0.9, 1.1)  # weights outside are counted, whatever the correction


def correction_weights(tokens: Tokens, log_weight_M: Tensor, section: ObjectiveSection) -> Tensor:
    """What the policy term of each token is multiplied by, [M]."""
    log_M = log_weight_M.detach()
    if section.correction == "none":
        return torch.ones_like(log_M)
    if section.correction_level == "sequence":
        log_M = tokens.row_sum(log_M)
    elif section.correction_level == "geometric":
        log_M = tokens.row_mean(log_M)
    low, high = section.correction_bounds
    weight_M = log_M.clamp(max=math.log(high)).exp()
    if section.correction == "truncate":
        return weight_M
    inside_M = (log_M >= (math.log(low) if low else -math.inf)) & (log_M <= math.log(high))
    return torch.where(inside_M, weight_M, torch.zeros_like(weight_M))


def sampler_stats(log_weight_M: Tensor, applied_M: Tensor) -> Stats:
    """How far sampler and trainer disagree, token by token and before any cap.

    applied: the weights that the correction made of it.
    """
    difference_M = log_weight_M.detach().double()
    weight_M = difference_M.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    low, high = BAND
    sums = {
        "sampler/logp_diff": difference_M.abs(),
        "sampler/kl": -difference_M,  # estimates KL(sampler || trainer): the tokens come from the sampler
        "sampler/outside": ((weight_M < low) | (weight_M > high)).double(),
        "sampler/masked": (applied_M == 0).double(),
        "sampler/applied": applied_M.double(),
        "sampler/weight": weight_M,
        "weight_square": weight_M**2,
    }
    maxima = {"sampler/logp_diff_max": difference_M.abs(), "sampler/weight_max": weight_M}
    return collect(sums, maxima)
