"""Log-probs from the last hidden states and the head of a transformers model, whose head may be trained too.

Axes: M scored positions, C of a chunk, H hidden size, V vocabulary. With a frozen head everything is as in
kernels/head.py. For a trained one its weight needs a gradient that depends on the loss,

    dW = sum_i (dlogp_i d logp_i / da_i + dentropy_i d entropy_i / da_i) h_i^T        a_i = W h_i

so the backward computes the logits again, chunk by chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels.head import (
    chunk_rows,
    head_logits,
    logit_gradients_reference,
    selected_logprobs_backward,
    selected_logprobs_forward,
    target_logp,
)


@dataclass(frozen=True, slots=True)
class Head:
    """logits = scale * W h, capped to softcap * tanh(logits / softcap) if there is a cap."""

    weight: Tensor  # [V, H]
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return head_logits(hidden_MH, self.weight, softcap=self.softcap, scale=self.scale)

    def logprobs(
        self,
        hidden_MH: Tensor,
        target_M: Tensor,
        temperature: float,
        *,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """(logp [M], entropy [M] or None) in float32 (float64 for float64), differentiable."""
        return _Logprobs.apply(hidden_MH, self.weight, self, target_M, temperature, entropy, entropy_gradient)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        head: Head,
        target_M: Tensor,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        entropy_gradient = entropy and entropy_gradient
        gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ahead = gradient and not ctx.needs_input_grad[1]  # d logp / dh is the whole story
        logp, entropies, u, u_entropy = selected_logprobs_forward(
            hidden_MH,
            weight_VH,
            target_M,
            temperature,
            entropy=entropy,
            gradient=ahead,
            entropy_gradient=ahead and entropy_gradient,
            softcap=head.softcap,
            scale=head.scale,
        )
        if gradient:
            kept = (u, u_entropy) if ahead else (hidden_MH, weight_VH, target_M)
            ctx.save_for_backward(*kept)
            ctx.ahead, ctx.head, ctx.temperature, ctx.entropy_gradient = (
                ahead,
                head,
                temperature,
                entropy_gradient,
            )
        if entropies is not None and not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogp_M: Tensor, dentropy_M: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.ahead:
            u, u_entropy = ctx.saved_tensors
            return selected_logprobs_backward(dlogp_M, u, dentropy_M, u_entropy), *([None] * 6)
        hidden_MH, weight_VH, target_M = ctx.saved_tensors
        dhidden, dweight = torch.empty_like(hidden_MH), torch.zeros_like(weight_VH)
        rows = len(target_M)
        chunk = max(1, chunk_rows(rows, len(weight_VH)))
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            _, _, slope_CV, entropy_slope_CV = logit_gradients_reference(
                head_logits(hidden_MH[part], weight_VH),
                target_M[part],
                ctx.temperature,
                softcap=ctx.head.softcap,
                scale=ctx.head.scale,
                entropy=False,
                gradient=True,
                entropy_gradient=ctx.entropy_gradient,
            )
            assert slope_CV is not None
            da_CV = slope_CV.mul_(dlogp_M[part, None])
            if entropy_slope_CV is not None and dentropy_M is not None:
                da_CV.addcmul_(entropy_slope_CV, dentropy_M[part, None])
            da_CV = da_CV.to(weight_VH.dtype)
            dhidden[part] = da_CV @ weight_VH
            dweight.addmm_(da_CV.t(), hidden_MH[part])
        return dhidden, dweight, *([None] * 5)


def logprobs_of_logits(
    logits_MV: Tensor, target_M: Tensor, temperature: float, *, entropy: bool, entropy_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The same from a model's own logits, which are held whole; gradients by autograd."""
    z_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)) / temperature
    logp = target_logp(z_MV, target_M)
    if not entropy:
        return logp, None
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        log_p_MV = torch.log_softmax(z_MV, -1)
        return logp, -(log_p_MV.exp() * log_p_MV).nan_to_num(0.0).sum(-1)
