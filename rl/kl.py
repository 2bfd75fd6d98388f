"""Estimators of the KL divergence to a reference policy, as a loss and as a penalty on the reward.

Axis: M scored tokens, sampled from the policy (or, off-policy, from the old one). With k = logp - reference:

    k1 = k        k2 = k^2 / 2        k3 = exp(-k) - 1 + k >= 0

As a penalty on the reward (no gradient) k1 and k3 have the expectation KL(policy || reference). As a loss, the gradient
counts: that of k1 has the expectation 0, that of k2 (k dlogp) is right on-policy, and that of k3 belongs to the
other KL. Times the live ratio r = exp(logp - old) every kj has the gradient of its own expectation under the policy,
d(r kj) = r (kj + kj') dlogp, on-policy and off-policy (arXiv 2512.02556); for k3 that is r k dlogp.
"""

import torch
from torch import Tensor

from covey.rl.losses import LARGEST_LOG_RATIO
from covey.rl.objective_config import KlEstimator


def kl_value(k_M: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimator [M] of k = logp - reference. k3 is bounded at k = -20; rounding cannot make it negative."""
    if estimator == "k1":
        return k_M
    if estimator == "k2":
        return 0.5 * k_M.square()
    bounded_M = k_M.clamp(min=-LARGEST_LOG_RATIO)
    return (torch.expm1(-bounded_M) + bounded_M).clamp(min=0.0)


def kl_term(
    logp_M: Tensor, reference_M: Tensor, ratio_M: Tensor, estimator: KlEstimator, *, live_ratio: bool
) -> tuple[Tensor, Tensor]:
    """(value [M] without gradient, term [M] with it): kj, and what is summed in the loss, r kj or kj.

    The gradients are written down instead of derived: the exponentials of d(r k3) = r (1 - exp(-k) + k3) dlogp
    cancel far from the reference, and float32 would make -16 of -18 at k = -18.
    """
    k_M = (logp_M - reference_M).detach()
    value_M = kl_value(k_M, estimator)
    change_M = logp_M - logp_M.detach()
    if live_ratio:
        slope_M = {"k1": k_M + 1, "k2": k_M + value_M, "k3": k_M}[estimator]
        return value_M, ratio_M.detach() * (value_M + slope_M * change_M)
    bounded_M = k_M.clamp(min=-LARGEST_LOG_RATIO)
    slope_M = {"k1": torch.ones_like(k_M), "k2": k_M, "k3": -torch.expm1(-bounded_M)}[estimator]
    return value_M, value_M + slope_M * change_M
