"""The language-model head: log-probs and entropies of chosen tokens without ever holding all logits.

Axes: M scored positions, H hidden size, V vocabulary. With z = h W^T / tau and the target y:

    log p_y = -softplus(lse_{v != y} z_v - z_y)          entropy = lse z - sum_v p_v z_v
    d log p_y / dh = (W_y - sum_v p_v W_v) / tau  =: u

Excluding the target from the log-sum-exp keeps precision where the model is sure: z_y - lse is 0 in float32 as soon
as the target leads by 17 nats, and so would be its gradient 1 - p_y = -expm1(log p_y). W is frozen, so u [M, H] does
not depend on the loss: it is computed while a chunk of logits is at hand, and the backward only scales its rows.
That is two matrix products in all, and memory for one chunk of logits.
"""

import torch
from torch import Tensor

from covey.kernels.lora_linear import matmul_wide
from covey.kernels.rmsnorm import accumulate_dtype

CHUNK_LOGITS = 1 << 27  # logits held at a time; 512 MiB in float32


def head_logits(hidden_MH: Tensor, weight_VH: Tensor) -> Tensor:
    """Logits [M, V] in float32 (float64 for float64 inputs), not rounded to a narrower dtype on the way."""
    return matmul_wide(hidden_MH, weight_VH.t(), accumulate_dtype(hidden_MH.dtype))


def target_logp(logits_MV: Tensor, target_M: Tensor) -> Tensor:
    """log softmax(logits)[target], [M], by the target-excluded form. Entries of -inf have probability 0."""
    z = logits_MV.gather(1, target_M[:, None])
    others = logits_MV.scatter(1, target_M[:, None], float("-inf")).logsumexp(1)
    return -torch.logaddexp(torch.zeros_like(others), others - z[:, 0])


def selected_logprobs_reference(
    hidden_MH: Tensor, weight_VH: Tensor, target_M: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(logp [M], entropy [M]) in plain torch with all logits at once; differentiable by autograd."""
    logits = head_logits(hidden_MH, weight_VH) / temperature
    logp = torch.log_softmax(logits, -1)
    return logp.gather(1, target_M[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def selected_logprobs_forward(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    target_M: Tensor,
    temperature: float,
    *,
    entropy: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(logp [M], entropy [M] | None, u [M, H] in hidden's dtype | None)."""
    rows, acc = hidden_MH.shape[0], accumulate_dtype(hidden_MH.dtype)
    logp = hidden_MH.new_empty(rows, dtype=acc)
    entropies = hidden_MH.new_empty(rows, dtype=acc) if entropy else None
    u = torch.empty_like(hidden_MH) if gradient else None
    chunk = max(1, CHUNK_LOGITS // weight_VH.shape[0])
    for i in range(0, rows, chunk):
        part = slice(i, i + chunk)
        target = target_M[part, None]
        logits = head_logits(hidden_MH[part], weight_VH)
        if temperature != 1.0:
            logits /= temperature
        logp[part] = target_logp(logits, target[:, 0])
        if not (entropy or gradient):
            continue
        lse = logits.logsumexp(1, keepdim=True)
        p = torch.exp(logits - lse)
        if entropies is not None:
            entropies[part] = lse[:, 0] - torch.linalg.vecdot(p, logits.masked_fill_(p == 0, 0.0))
        if u is not None:
            dz = p.neg_().scatter_(1, target, -torch.expm1(logp[part, None])).div_(temperature)
            u[part] = matmul_wide(dz.to(weight_VH.dtype), weight_VH, acc)
    return logp, entropies, u


def selected_logprobs_backward(dlogp_M: Tensor, u_MH: Tensor) -> Tensor:
    """d hidden [M, H] in u's dtype."""
    return (u_MH * dlogp_M[:, None]).to(u_MH.dtype)
