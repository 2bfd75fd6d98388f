"""Drawing a token from a row of logits, and the log-prob of the token drawn.

Axes: B rows, V vocabulary. With d_v = x_v - max x (so that equal logits have equal masses, and the largest mass is 1):

    mass    m_v = exp(d_v / T)
    kept    K   = the top_k largest logits; of those the fewest whose mass reaches top_p of theirs; of those, the ones
                  with d_v >= T log(min_p). Equal logits are taken in the order of their ids.
    draw    y   = the first id with  sum_{v <= y, v in K} m_v > u sum_{v in K} m_v,  u in [0, 1)
    logp        = log(m_y / sum_{v in K} m_v) = -log(1 + sum_{v in K, v != y} exp((x_v - x_y) / T))

The draw inverts the cumulative distribution in the order of ids, so it is a function of the row and of u alone. The
log-prob is that of the distribution drawn from, by the target-excluded form of kernels/head.py: where y is nearly
certain, log m_y - log sum m would cancel to 0, this keeps all digits. T = 0 is greedy: y is the first largest logit and
logp that of softmax(x), whatever the truncation.

What both paths promise, and where they may differ. Masses are float32 (of float32 logits) and accumulated in float64
or, within a chunk of the vocabulary, in a float32 tree. K by top_k and min_p compares logits only and is the same on
both paths. A token at top_p's cut goes one way or the other if the sum up to it is within rounding (some 1e-7 of the
total) of top_p; u within as much of a boundary between two tokens may give either. A token of mass 0 (d_v / T < -104,
logits of -inf) is never drawn. A logit of NaN or +inf, and a row of -inf, give a logp of NaN and some id of the row.
"""

import math

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton
from covey.kernels.head import target_logp

_TOP_P_FIRST_LOOK = 1024  # candidates looked at before the whole vocabulary is sorted


def sample(
    logits_BV: Tensor,
    uniform_B: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Ids int64 [B] of the tokens drawn, and their log-probs [B] in the dtype of the logits.

    logits_BV: float32 or float64, rows of any stride; they are only read. uniform_B: float64 or float32 in [0, 1), on
    the same device. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch a truncation off. out: contiguous
    tensors to write to and return. AssertionError for other shapes, dtypes or settings.

    The Triton path takes two launches, waits for nothing and can be captured in a CUDA graph (with the settings that
    were given at the time); two runs agree bit for bit.
    """
    rows, vocab = logits_BV.shape
    assert logits_BV.dtype in (torch.float32, torch.float64) and uniform_B.shape == (rows,) and vocab > 0
    assert temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1
    if out is not None:
        assert out[0].shape == out[1].shape == (rows,) and out[0].is_contiguous() and out[1].is_contiguous()
        assert out[0].dtype == torch.int64 and out[1].dtype == logits_BV.dtype
    top_k = top_k if top_k < vocab else 0
    if temperature == 0:
        top_k, top_p, min_p = 0, 1.0, 0.0
    rows_apart = "" if logits_BV.stride(1) == 1 or vocab == 1 else "rows that are not contiguous"
    if use_triton(logits_BV, "sample", unless=rows_apart):
        from covey.kernels import sample_triton

        if out is None:
            out = logits_BV.new_empty(rows, dtype=torch.int64), logits_BV.new_empty(rows)
        share = _share(logits_BV.dtype, top_p) if top_p < 1 else 1.0
        least = _least(logits_BV, temperature, min_p)
        sample_triton.sample(logits_BV, uniform_B.contiguous(), temperature, top_k, share, least, *out)
        return out
    found = sample_reference(
        logits_BV, uniform_B, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    if out is None:
        return found
    return out[0].copy_(found[0]), out[1].copy_(found[1])


def sample_reference(
    logits_BV: Tensor,
    uniform_B: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    greedy = temperature == 0
    temperature = 1.0 if greedy else temperature
    top_B1, best_B1 = logits_BV.max(-1, keepdim=True)
    mass_BV = _mass(logits_BV, top_B1, temperature)
    if greedy:
        id_B1 = best_B1
    else:
        if top_k or top_p < 1 or min_p:
            mass_BV.masked_fill_(~_kept(logits_BV, mass_BV, temperature, top_k, top_p, min_p), 0)
        id_B1 = _invert(mass_BV, uniform_B.double(), best_B1)
    relative_B = (logits_BV.gather(-1, id_B1) - top_B1).squeeze(-1) / temperature
    rest_B = mass_BV.scatter_(-1, id_B1, 0).sum(-1).double()
    logp_B = -torch.logaddexp(rest_B.log() - relative_B, torch.zeros_like(rest_B))
    return id_B1.squeeze(-1), logp_B.to(logits_BV.dtype)


def log_prob(logits_BV: Tensor, id_B: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature)[id], [B] in the dtype of the logits: what a token that was drawn from other
    logits, or from a part of these, has under the whole distribution. temperature 0 is 1, as in `sample`.

    logits_BV: float32 or float64, only read. id_B: int64, contiguous. One launch in Triton, of the head's kernel.
    """
    assert logits_BV.dtype in (torch.float32, torch.float64) and id_B.shape == (logits_BV.shape[0],)
    temperature = temperature or 1.0
    # The head's kernel reads what lies between rows.
    rows_apart = "" if logits_BV.is_contiguous() else "rows that are not contiguous"
    if use_triton(logits_BV, "log_prob", unless=rows_apart):
        from covey.kernels import head_triton

        settings = {"softcap": None, "scale": 1.0, "entropy": False, "gradient": False, "dentropy_MV": None}
        return head_triton.logit_gradients(logits_BV, id_B, temperature, dtype=logits_BV.dtype, **settings)[0]
    return target_logp(logits_BV / temperature, id_B)


def _mass(logits_BV: Tensor, top_B1: Tensor, temperature: float) -> Tensor:
    """The largest is 1, so the sum lies in [1, V]; what underflows has no chance to be drawn either."""
    below_BV = logits_BV - top_B1
    if temperature != 1:
        below_BV /= temperature
    return below_BV.exp_()


def _invert(mass_BV: Tensor, uniform_B: Tensor, best_B1: Tensor) -> Tensor:
    """The first token whose cumulative mass exceeds uniform * total: a token of mass 0 adds nothing and is
    never the first. Accumulated in float64: in float32 a vocabulary's tail is lost in rounding."""
    cumulative_BV = mass_BV.cumsum(-1, dtype=torch.float64)
    threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    id_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True).clamp_(max=mass_BV.shape[-1] - 1)
    # A GPU's parallel scan rounds its partial sums apart and need not ascend where mass is 0.
    return torch.where(mass_BV.gather(-1, id_B1) > 0, id_B1, best_B1)


def _kept(
    logits_BV: Tensor, mass_BV: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """bool [B, V]: the tokens that top-k, then top-p, then min-p leave."""
    vocab = logits_BV.shape[-1]
    limit = min(top_k or vocab, vocab)
    top_B1 = logits_BV.amax(-1, keepdim=True)
    least_B1 = top_B1 + _least(logits_BV, temperature, min_p)
    if limit == vocab and top_p == 1:
        return logits_BV >= least_B1
    if top_p == 1:
        sorted_BK = logits_BV.topk(limit, -1).values
        count_B1 = torch.full_like(sorted_BK[:, :1], limit, dtype=torch.int64)
    else:
        sorted_BK, count_B1 = _nucleus(logits_BV, mass_BV, temperature, limit, top_p)
    cut_B1 = sorted_BK.gather(-1, count_B1 - 1)
    above_BV = logits_BV > cut_B1
    tied_BV = logits_BV == cut_B1
    room_B1 = count_B1 - above_BV.sum(-1, keepdim=True)
    kept_BV = above_BV | (tied_BV & (tied_BV.cumsum(-1, dtype=torch.int32) <= room_B1))
    return kept_BV & (logits_BV >= least_B1)


def _least(logits_BV: Tensor, temperature: float, min_p: float) -> float:
    """How far below the largest logit min_p cuts (<= 0). Logits carry rounding: 0.05 must be a tenth of 0.5."""
    return temperature * (math.log(min_p) - 4 * torch.finfo(logits_BV.dtype).eps) if min_p else -math.inf


def _nucleus(
    logits_BV: Tensor, mass_BV: Tensor, temperature: float, limit: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """The largest logits in descending order, and how many of them top-p keeps: int64 [B, 1]."""
    truncated = limit < logits_BV.shape[-1]
    sorted_BK = logits_BV.topk(limit if truncated else min(limit, _TOP_P_FIRST_LOOK), -1).values
    sorted_mass_BK = _mass(sorted_BK, sorted_BK[:, :1], temperature)
    total_B1 = (sorted_mass_BK if truncated else mass_BV).sum(-1, keepdim=True, dtype=torch.float64)
    wanted_B1 = total_B1 * _share(logits_BV.dtype, top_p)
    cumulative_BK = sorted_mass_BK.cumsum(-1, dtype=torch.float64)
    if sorted_BK.shape[-1] < limit and bool((cumulative_BK[:, -1:] < wanted_B1).any()):
        sorted_BK = logits_BV.sort(-1, descending=True).values
        cumulative_BK = _mass(sorted_BK, sorted_BK[:, :1], temperature).cumsum(-1, dtype=torch.float64)
    short_B1 = (cumulative_BK < wanted_B1).sum(-1, keepdim=True)
    return sorted_BK, (short_B1 + 1).clamp_(max=sorted_BK.shape[-1])


def _share(dtype: torch.dtype, top_p: float) -> float:
    """top_p less the rounding of the masses' exponentials: 0.5 + 0.3 must reach a top_p of 0.8."""
    return top_p * (1 - 4 * torch.finfo(dtype).eps)
