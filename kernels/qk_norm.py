"""RMSNorm of every query and key head before the rotation (Qwen3, Gemma 3), fused with the RoPE of kernels/rope.py.

Axes: T tokens, n query heads, m key-value heads, d head dimension, all of which is rotated or only its first part.
For each head x [d] of q, and likewise of k with its own weight, R(a) the rotation of kernels/rope.py:

    rstd = (mean_d(x^2) + eps)^(-1/2)        x_hat = x * rstd        y = R(a) (x_hat * w)
    dx   = rstd * (g - x_hat * mean_d(g * x_hat))        with g = (R(-a) dy) * w

Roundings of the forward are those of `rmsnorm` followed by `rope`; the backward rounds once. The weights are frozen.
"""

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton
from covey.kernels.rmsnorm import accumulate_dtype, rmsnorm_backward_reference, rmsnorm_reference
from covey.kernels.rope import columns_of_heads, rope_reference


def qk_norm_rope(
    q_Tnd: Tensor,
    k_Tmd: Tensor,
    weight_q_d: Tensor,
    weight_k_d: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k normed and rotated, and rstd [T, n + m] in float32 (float64 for float64), in one launch.

    q and k may be views into one packed buffer: rows and heads have any stride. q_out and k_out may be q and k
    themselves, but the backward wants these as they were. Raises ValueError for shapes that do not agree.
    """
    q_out = q_Tnd.new_empty(q_Tnd.shape) if q_out is None else q_out
    k_out = k_Tmd.new_empty(k_Tmd.shape) if k_out is None else k_out
    _check(cos, sin, (q_Tnd, q_out), (k_Tmd, k_out))
    weights = weight_q_d, weight_k_d
    if use_triton(q_Tnd, "qk_norm_rope", unless=_unfit(cos, sin, weights, q_Tnd, k_Tmd, q_out, k_out)):
        from covey.kernels import qk_norm_triton

        rstd = qk_norm_triton.norm_rope(q_Tnd, k_Tmd, weights, eps, cos, sin, q_out, k_out, plus_one)
        return q_out, k_out, rstd
    normed, rstds = zip(
        *(rmsnorm_reference(x, w, eps, plus_one) for x, w in zip((q_Tnd, k_Tmd), weights, strict=True)),
        strict=True,
    )
    q_out.copy_(rope_reference(normed[0], cos, sin))
    k_out.copy_(rope_reference(normed[1], cos, sin))
    return q_out, k_out, torch.cat(rstds, 1).squeeze(-1)


def pack_qk_norm_grad(
    dq_Tnd: Tensor,
    dk_Tmd: Tensor,
    dv_Tmd: Tensor,
    q_Tnd: Tensor,
    k_Tmd: Tensor,
    weight_q_d: Tensor,
    weight_k_d: Tensor,
    rstd_TN: Tensor,
    out_TN: Tensor,
    cos: Tensor,
    sin: Tensor,
    plus_one: bool = False,
) -> None:
    """`pack_qkv_grad` of kernels/rope.py for heads with a norm: q and k are those before it, rstd is the forward's.

    The columns of out may be the storage of q, k and v, each in its place, declared scratch.
    """
    q_to, k_to, v_to = columns_of_heads(out_TN, dq_Tnd.shape, dk_Tmd.shape[1])
    _check(cos, sin, (dq_Tnd, q_Tnd), (dk_Tmd, k_Tmd), (dv_Tmd, k_Tmd))
    weights, heads = (weight_q_d, weight_k_d), (dq_Tnd, dk_Tmd, dv_Tmd, q_Tnd, k_Tmd, q_to, k_to, v_to)
    unfit = _unfit(cos, sin, weights, *heads) or ("" if rstd_TN.is_contiguous() else "rstd is not contiguous")
    if use_triton(q_Tnd, "pack_qk_norm_grad", unless=unfit):
        from covey.kernels import qk_norm_triton

        return qk_norm_triton.norm_rope_backward(*heads, weights, rstd_TN, cos, sin, plus_one)
    acc, start = accumulate_dtype(q_Tnd.dtype), 0
    for dy, x, w, to in ((dq_Tnd, q_Tnd, weight_q_d, q_to), (dk_Tmd, k_Tmd, weight_k_d, k_to)):
        rstd = rstd_TN[:, start : start + x.shape[1], None]
        g = rope_reference(dy.to(acc), cos, sin, backward=True)
        to.copy_(rmsnorm_backward_reference(g, x, w, rstd, None, plus_one))
        start += x.shape[1]
    v_to.copy_(dv_Tmd)


def _check(cos: Tensor, sin: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    rows, _, d = pairs[0][0].shape
    for x, y in pairs:
        if x.shape != y.shape or x.shape[0] != rows or x.shape[2] != d or x.dtype != y.dtype:
            raise ValueError(f"heads {tuple(x.shape)} beside {tuple(y.shape)} for {rows} tokens of {d}")
    if cos.shape != (rows, 1, cos.shape[-1]) or sin.shape != cos.shape or 2 * cos.shape[-1] > d:
        raise ValueError(f"tables {tuple(cos.shape)}, {tuple(sin.shape)} for {rows} tokens and heads of {d}")


def _unfit(cos: Tensor, sin: Tensor, weights: tuple[Tensor, Tensor], *heads: Tensor) -> str:
    """Why the kernels cannot take these tensors; empty if they can."""
    d = heads[0].shape[2]
    if 2 * cos.shape[-1] != d:
        return "heads of which only a part is rotated"
    for weight in weights:
        if weight.shape != (d,) or weight.stride(0) != 1:
            return "a weight that is not contiguous, or of another size than a head"
    for x in heads:
        if x.stride(2) != 1:
            return "the head dimension is not contiguous"
    return "" if cos.is_contiguous() and sin.is_contiguous() else "tables that are not contiguous"
