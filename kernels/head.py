"""The language-model head: log-probs and entropies of chosen tokens without ever holding all logits.

Axes: M scored positions, H hidden size, V vocabulary. With logits a = s h W^T (s: the model's logit scale), optionally
capped to c tanh(a / c), z = cap(a) / tau, p = softmax(z) and the target y:

    log p_y = -softplus(lse_{v != y} z_v - z_y)             entropy = lse z - sum_v p_v z_v
    d log p_y / dz_v = [v = y] - p_v                        d entropy / dz_v = -p_v (z_v - sum_w p_w z_w)
    d z / dh = s / tau (1 - (cap(a) / c)^2) W               (the last factor only with a cap)

Excluding the target from the log-sum-exp keeps precision where the model is sure: z_y - lse is 0 in float32 as soon
as the target leads by 17 nats, and so would be its gradient 1 - p_y = -expm1(log p_y). For the same reason the
entropy and its gradient (usually written -p_v (log p_v + entropy)) are taken from z - max z. W is frozen, so
u = d log p_y / dh [M, H] does not depend on the loss: it is computed while a chunk of logits is at hand, and the
backward only scales its rows. That is two matrix products in all (three with the entropy's gradient), and memory for
one chunk of logits. What lies between the products is `logit_gradients_reference` or kernels/head_triton.py.
"""

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton
from covey.kernels.lora_linear import matmul_wide
from covey.kernels.rmsnorm import accumulate_dtype

CHUNK_LOGITS = 1 << 27  # logits held at a time; 512 MiB in float32
CHUNK_ROWS = 1024  # but at least these, and multiples of them: with fewer rows the second product starves
ALIGNED = 64  # rows of logits begin at multiples of so many, for vector loads and for cuBLAS


def head_logits(
    hidden_MH: Tensor, weight_VH: Tensor, *, softcap: float | None = None, scale: float = 1.0
) -> Tensor:
    """Logits [M, V] in float32 (float64 for float64 inputs), not rounded to a narrower dtype on the way."""
    logits = matmul_wide(hidden_MH, weight_VH.t(), accumulate_dtype(hidden_MH.dtype))
    if scale != 1.0:
        logits *= scale
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


def target_logp(logits_MV: Tensor, target_M: Tensor) -> Tensor:
    """log softmax(logits)[target], [M], by the target-excluded form. Entries of -inf have probability 0."""
    z = logits_MV.gather(1, target_M[:, None])
    others = logits_MV.scatter(1, target_M[:, None], float("-inf")).logsumexp(1)
    return -torch.logaddexp(torch.zeros_like(others), others - z[:, 0])


def selected_logprobs_reference(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    target_M: Tensor,
    temperature: float = 1.0,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(logp [M], entropy [M]) in plain torch with all logits at once; differentiable by autograd."""
    logits = head_logits(hidden_MH, weight_VH) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, target_M[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def logit_gradients_reference(
    logits_MV: Tensor,
    target_M: Tensor,
    temperature: float = 1.0,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    entropy: bool,
    gradient: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(logp [M], entropy [M], d logp / d(h W^T) [M, V], d entropy / d(h W^T) [M, V]) of given products h W^T.

    All in the dtype of the logits, which are overwritten; what is not asked for is None. Logits of -inf have
    probability 0 and gradient 0.
    """
    z, factor = logits_MV, scale / temperature
    slope = None
    if scale != 1.0:
        z *= scale
    if softcap is not None:
        unit = z.div_(softcap).tanh_()
        slope = 1 - unit.square()
        z = unit.mul_(softcap)
    if temperature != 1.0:
        z /= temperature
    logp = target_logp(z, target_M)
    if not (entropy or gradient or entropy_gradient):
        return logp, None, None, None
    below = z.sub_(z.amax(1, keepdim=True))
    p = below.exp()
    mass_M1 = p.sum(1, keepdim=True)
    p /= mass_M1
    entropies = dz = dentropy_dz = None
    if entropy or entropy_gradient:
        below.masked_fill_(p == 0, 0.0)  # 0 * -inf
        mean_M1 = torch.linalg.vecdot(p, below)[:, None]
        entropies = mass_M1.log().sub_(mean_M1)[:, 0] if entropy else None
        if entropy_gradient:
            dentropy_dz = below.sub_(mean_M1).mul_(p).mul_(-factor)
    if gradient:
        dz = p.neg_().scatter_(1, target_M[:, None], -torch.expm1(logp[:, None])).mul_(factor)
    if slope is not None:
        for gradient_MV in (dz, dentropy_dz):
            if gradient_MV is not None:
                gradient_MV.mul_(slope)
    return logp, entropies, dz, dentropy_dz


@torch.no_grad()
def selected_logprobs_forward(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    target_M: Tensor,
    temperature: float,
    *,
    entropy: bool,
    gradient: bool,
    entropy_gradient: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(logp [M], entropy [M], d logp / dh [M, H], d entropy / dh [M, H]); None for what is not asked for.

    The first two are in float32 (float64 for float64 inputs), the gradients in hidden's dtype. The logits are
    scale * h W^T, capped to softcap * tanh(logits / softcap) if softcap is given, divided by the temperature.
    hidden and weight share a dtype. `chunk` rows are done at a time. Besides the results that takes memory for one
    chunk of logits (in Triton, where gradients take their place; the torch path holds a few copies), and for a
    chunk of gradients in the weight's dtype if the entropy needs one too.
    """
    (rows, hidden), vocab = hidden_MH.shape, weight_VH.shape[0]
    acc = accumulate_dtype(hidden_MH.dtype)
    logp = hidden_MH.new_empty(rows, dtype=acc)
    entropies = hidden_MH.new_empty(rows, dtype=acc) if entropy else None
    u = torch.empty_like(hidden_MH) if gradient else None
    u_entropy = torch.empty_like(hidden_MH) if entropy_gradient else None

    triton = use_triton(hidden_MH, "head")
    chunk = min(rows, chunk or chunk_rows(rows, vocab))
    logits_CV = _rows_of(hidden_MH, chunk, vocab, acc)
    second_CV = _rows_of(hidden_MH, chunk, vocab, weight_VH.dtype) if triton and entropy_gradient else None
    wide_CH = hidden_MH.new_empty(chunk, hidden, dtype=acc) if hidden_MH.dtype != acc else None
    for start in range(0, rows, max(chunk, 1)):
        part = slice(start, min(start + chunk, rows))
        logits, target = logits_CV[: part.stop - start], target_M[part]
        _matmul_into(logits, hidden_MH[part], weight_VH.t())
        if triton:
            from covey.kernels import head_triton

            dentropy_dz = None if second_CV is None else second_CV[: part.stop - start]
            logp[part], entropy_M, dz = head_triton.logit_gradients(
                logits,
                target.contiguous(),
                temperature,
                softcap=softcap,
                scale=scale,
                entropy=entropy,
                gradient=gradient,
                dtype=weight_VH.dtype,
                dentropy_MV=dentropy_dz,
            )
        else:
            logp[part], entropy_M, dz, dentropy_dz = logit_gradients_reference(
                logits,
                target,
                temperature,
                softcap=softcap,
                scale=scale,
                entropy=entropy,
                gradient=gradient,
                entropy_gradient=entropy_gradient,
            )
        if entropies is not None and entropy_M is not None:
            entropies[part] = entropy_M
        for out, slope_CV in ((u, dz), (u_entropy, dentropy_dz)):
            if out is not None and slope_CV is not None:
                result = out[part] if wide_CH is None else wide_CH[: part.stop - start]
                _matmul_into(result, slope_CV.to(weight_VH.dtype), weight_VH)
                if wide_CH is not None:
                    out[part] = result
    return logp, entropies, u, u_entropy


def chunk_rows(rows: int, vocab: int) -> int:
    """How many rows to do at a time: as many as CHUNK_LOGITS allows, no fewer than CHUNK_ROWS, in equal chunks."""
    most = max(1, CHUNK_LOGITS // vocab // CHUNK_ROWS) * CHUNK_ROWS
    chunks = max(1, -(-rows // most))
    return min(most, -(-rows // chunks // 128) * 128)


def _rows_of(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised [rows, columns] whose rows are aligned."""
    return like.new_empty(rows, -(-columns // ALIGNED) * ALIGNED, dtype=dtype)[:, :columns]


def _matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, not rounded to a dtype narrower than out's on the way."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def selected_logprobs_backward(
    dlogp_M: Tensor,
    u_MH: Tensor,
    dentropy_M: Tensor | None = None,
    u_entropy_MH: Tensor | None = None,
) -> Tensor:
    """d hidden [M, H] in u's dtype, from the gradients of logp and, if it was asked for, of the entropy."""
    dh = u_MH * dlogp_M[:, None]
    if dentropy_M is not None and u_entropy_MH is not None:
        dh += u_entropy_MH * dentropy_M[:, None]
    return dh.to(u_MH.dtype)
