"""Policy losses: what one token costs, as a function of how its probability has changed.

Axis: M scored tokens; the tokens of a row (a completion) stand together. With the log-ratio d = logp - old, the ratio
r = e^d, the advantage A and, for the losses over whole completions, sums and means over a row's tokens:

    grpo     -min(r A, clip(r, 1 - low, 1 + high) A);  where A < 0 at most cap |A| (ratio_cap)
    gspo     the same with r replaced by s = exp(mean of d over the row)
    luspo    T gspo, T the row's tokens
    gmpo     -A exp(mean of d'), d' = min(d, high) where A > 0, max(d, -low) where A < 0
    cispo    -A sg(min(r, cap)) logp
    sapo     -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A
    vespo    -A sg(phi) logp, phi = exp(lam + k log W - lam W), W = exp(sum of d + log w), (k, lam) by the sign of A
    dppo     -A sg(min(r, cap)) logp where the divergence of the token is within its bound or the step goes back
    sft      -A logp

sg stops the gradient and w = e^(old - sampler) is a token's weight under the trainer instead of the sampler. Papers:
PPO 1707.06347, DAPO 2503.14476, two-sided clip 2505.07291 (the same function as dual clip, 1912.09729), GSPO
2507.18071, LUSPO 2602.05261, GMPO 2507.20673, CISPO 2506.13585, SAPO 2511.20347, VESPO 2602.10693, DPPO 2602.04879.

Everything is finite for log-probs that differ by hundreds of nats: exponents are bounded before they are raised.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from covey.policies.policy import Batch

LARGEST_LOG_RATIO = 20.0  # nats; a ratio is at most e^20 (5e8), and from there on it has no gradient
SMALLEST_LOG_WEIGHT = -18.42068  # vespo's log W is bounded to [ln 1e-8, 20], as in its paper

Options = Callable[[str], Any]  # the loss's settings by name: ObjectiveSection.option


class Tokens:
    """What a loss looks at. Row sums and counts are per token: every token of a row holds its row's."""

    def __init__(self, logp_M: Tensor, old_M: Tensor, batch: Batch):
        self.logp, self.old, self.batch = logp_M, old_M, batch
        self.advantage = batch.advantage
        self.log_ratio = logp_M - old_M
        self._row = row_numbers(batch.row)  # no row lies in two passes

    @cached_property
    def count(self) -> Tensor:
        """[M]: how many tokens the row of each token has."""
        return self.row_sum(torch.ones_like(self.old))

    @property
    def ratio(self) -> Tensor:
        return bounded_exp(self.log_ratio)

    def row_sum(self, x_M: Tensor) -> Tensor:
        """[M]: the sum of x over the row of each token. Added in the order of the tokens, so always the same bits."""
        sums = torch.zeros_like(x_M).index_put((self._row,), x_M, accumulate=True)
        return sums[self._row]

    def row_mean(self, x_M: Tensor) -> Tensor:
        return self.row_sum(x_M) / self.count

    def by_sign(self, positive: float, negative: float) -> Tensor:
        """[M]: one number where the advantage is at least 0, the other where it is below."""
        full = torch.full_like
        return torch.where(
            self.advantage >= 0, full(self.advantage, positive), full(self.advantage, negative)
        )


def row_numbers(row_M: Tensor) -> Tensor:
    """Rows numbered from 0 in the order of their tokens, which stand together: int64 [M]."""
    return torch.cat((row_M[:1] != row_M[:1], row_M[1:] != row_M[:-1])).cumsum(0)


def bounded_exp(log_M: Tensor) -> Tensor:
    return log_M.clamp(max=LARGEST_LOG_RATIO).exp()


def _clipped(ratio_M: Tensor, t: Tokens, options: Options, cap: float | None = None) -> Tensor:
    a = t.advantage
    inside_M = ratio_M.clamp(1 - options("clip_low"), 1 + options("clip_high"))
    loss_M = -torch.minimum(ratio_M * a, inside_M * a)
    return loss_M if cap is None else torch.where(a < 0, torch.minimum(loss_M, -cap * a), loss_M)


def _grpo(t: Tokens, options: Options) -> Tensor:
    return _clipped(t.ratio, t, options, options("ratio_cap"))


def _gspo(t: Tokens, options: Options) -> Tensor:
    return _clipped(bounded_exp(t.row_mean(t.log_ratio)), t, options)


def _luspo(t: Tokens, options: Options) -> Tensor:
    return t.count * _gspo(t, options)


def _gmpo(t: Tokens, options: Options) -> Tensor:
    up_M, down_M = t.log_ratio.clamp(max=options("clip_high")), t.log_ratio.clamp(min=-options("clip_low"))
    bounded_M = torch.where(t.advantage > 0, up_M, down_M)
    return -t.advantage * bounded_exp(t.row_mean(bounded_M))


def _cispo(t: Tokens, options: Options) -> Tensor:
    return -t.advantage * t.ratio.detach().clamp(max=options("ratio_cap")) * t.logp


def _sapo(t: Tokens, options: Options) -> Tensor:
    tau_M = t.by_sign(options("tau_positive"), options("tau_negative"))
    return -t.advantage * (4.0 / tau_M) * torch.sigmoid(tau_M * (t.ratio - 1))


def _vespo(t: Tokens, options: Options) -> Tensor:
    log_weight_M = t.log_ratio.detach()
    if t.batch.sampler is not None:
        log_weight_M = log_weight_M + (t.old - t.batch.sampler)
    log_weight_M = t.row_sum(log_weight_M).clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_RATIO)
    (k_up, lam_up), (k_down, lam_down) = options("gamma_positive"), options("gamma_negative")
    k_M, lam_M = t.by_sign(k_up, k_down), t.by_sign(lam_up, lam_down)
    phi_M = (lam_M + k_M * log_weight_M - lam_M * log_weight_M.exp()).exp()
    return -t.advantage * phi_M * t.logp


def _dppo(t: Tokens, options: Options, kl: bool) -> Tensor:
    return _cispo(t, options).masked_fill(_beyond(t, options, kl), 0.0)


def _beyond(t: Tokens, options: Options, kl: bool) -> Tensor:
    """[M] bool: too far from the old policy, and A pushes further away."""
    moved_M = t.logp.detach().exp() - t.old.exp()
    divergence_M = binary_kl(t.old, t.logp.detach()) if kl else moved_M.abs()
    return (divergence_M > options("max_divergence")) & (moved_M * t.advantage > 0)


def binary_kl(old_M: Tensor, logp_M: Tensor) -> Tensor:
    """KL between two coins that show the token with probability e^old and e^logp; at least 0."""
    p_old_M, rest_old_M = old_M.exp(), -torch.expm1(old_M)
    # log(1 - p), bounded where a probability rounds to 1.
    log_rest_M, log_rest_old_M = ((-torch.expm1(x)).clamp(min=1e-12).log() for x in (logp_M, old_M))
    return (p_old_M * (old_M - logp_M) + rest_old_M * (log_rest_old_M - log_rest_M)).clamp(min=0.0)


def _sft(t: Tokens, options: Options) -> Tensor:
    return -t.advantage * t.logp


LOSSES: dict[str, Callable[[Tokens, Options], Tensor]] = {
    "grpo": _grpo,
    "gspo": _gspo,
    "luspo": _luspo,
    "gmpo": _gmpo,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
    "dppo_tv": lambda t, options: _dppo(t, options, kl=False),
    "dppo_kl": lambda t, options: _dppo(t, options, kl=True),
    "sft": _sft,
}


def held(loss: str, t: Tokens, options: Options) -> tuple[Tensor, Tensor]:
    """([M], [M]) bool: tokens that a bound of the loss holds, below (A < 0) and above (A > 0).

    CISPO and DPPO have no clip range: there the first is where a negative advantage is out of bounds.
    """
    a, d = t.advantage, t.log_ratio.detach()
    if loss in ("grpo", "gspo", "luspo"):
        ratio_M = bounded_exp(d if loss == "grpo" else t.row_mean(d))
        return (ratio_M < 1 - options("clip_low")) & (a < 0), (ratio_M > 1 + options("clip_high")) & (a > 0)
    if loss == "gmpo":
        return (d < -options("clip_low")) & (a < 0), (d > options("clip_high")) & (a > 0)
    if loss == "cispo":
        outside_M = bounded_exp(d) > options("ratio_cap")
    elif loss.startswith("dppo"):
        outside_M = _beyond(t, options, kl=loss == "dppo_kl")
    else:
        outside_M = torch.zeros_like(a, dtype=torch.bool)
    return outside_M & (a < 0), outside_M & (a > 0)
