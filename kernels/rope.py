"""Rotary position embedding on half-split heads (Su et al. 2021, in the layout of Llama and Qwen checkpoints).

Axes: T tokens, n query heads, m key-value heads, d head dimension, d_rot <= d rotated dimensions (partial rotary:
the other d - d_rot pass unchanged). With the first d_rot split in the middle, [x1, x2], and the angles a = p * f:

    y1 = x1 cos a - x2 sin a        y2 = x2 cos a + x1 sin a

The map is a rotation, so its gradient is the rotation by -a. Products and sums in float32 (float64 for float64),
rounded once. cos and sin are [T, 1, d_rot / 2] from `rope_tables`, in that arithmetic dtype. In every tensor of
heads, rows and heads have any stride and the head dimension is contiguous.
"""

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton
from covey.kernels.rmsnorm import accumulate_dtype


def rope_tables(
    positions_T: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, d_rot/2] in the arithmetic dtype for `dtype`; `scaling` multiplies both (YaRN)."""
    acc = accumulate_dtype(dtype)
    angles = positions_T.to(acc)[:, None, None] * inv_freq.to(acc)
    return angles.cos() * scaling, angles.sin() * scaling


def rope(x_Tnd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotated heads, in x's dtype; the input is left as it is."""
    y = x_Tnd.new_empty(x_Tnd.shape)
    rope_copy(x_Tnd, y, cos, sin)
    return y


def rope_backward(dy_Tnd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient with respect to the unrotated heads."""
    dx = dy_Tnd.new_empty(dy_Tnd.shape)
    rope_copy(dy_Tnd, dx, cos, sin, backward=True)
    return dx


def rope_copy(src_Tnd: Tensor, dst_Tnd: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> None:
    """Writes the rotated heads of src into dst, which is src itself or does not overlap with it."""
    _rotate_parts(((src_Tnd, dst_Tnd),), None, cos, sin, backward)


def rope_inplace(q_Tnd: Tensor, k_Tmd: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> None:
    """Rotates q and k where they are, in one launch; they may be views into one packed [T, (n + 2 m) d] buffer."""
    _rotate_parts(((q_Tnd, q_Tnd), (k_Tmd, k_Tmd)), None, cos, sin, backward)


def pack_qkv_grad(
    dq_Tnd: Tensor, dk_Tmd: Tensor, dv_Tmd: Tensor, out_TN: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Writes dq and dk, rotated back, and dv side by side into the first (n + 2 m) d columns of out, in one launch.

    out has rows of any stride; its columns beyond those are left alone. It does not overlap with the others.
    Raises ValueError if it is too narrow.
    """
    q, k, v = columns_of_heads(out_TN, dq_Tnd.shape, dk_Tmd.shape[1])
    _rotate_parts(((dq_Tnd, q), (dk_Tmd, k)), (dv_Tmd, v), cos, sin, True)


def rope_reference(x_Tnd: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    half = cos.shape[-1]
    if backward:
        sin = -sin
    x1, x2, rest = x_Tnd[..., :half], x_Tnd[..., half : 2 * half], x_Tnd[..., 2 * half :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1).to(x_Tnd.dtype)


def columns_of_heads(packed_TN: Tensor, shape: torch.Size, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """The views q [T, n, d] = shape, k and v [T, m, d] side by side in the first columns.

    Raises ValueError if they do not fit.
    """
    tokens, n, d = shape
    if packed_TN.dim() != 2 or packed_TN.shape[0] != tokens or packed_TN.shape[1] < (n + 2 * m) * d:
        raise ValueError(
            f"out is {tuple(packed_TN.shape)}: no {n} + 2 * {m} heads of {d} for {tokens} tokens"
        )
    (row, column), start = packed_TN.stride(), packed_TN.storage_offset()
    q, k, v = (
        packed_TN.as_strided((tokens, heads, d), (row, d * column, column), start + before * d * column)
        for heads, before in ((n, 0), (m, n), (m, n + m))
    )
    return q, k, v


Part = tuple[Tensor, Tensor]  # where heads are read, where they are written


def _rotate_parts(
    rotated: tuple[Part, ...], copied: Part | None, cos: Tensor, sin: Tensor, backward: bool
) -> None:
    """Rotates one or two groups of heads and copies a third. Raises ValueError for shapes that do not agree."""
    every = rotated if copied is None else (*rotated, copied)
    rows, _, d = every[0][0].shape
    for src, dst in every:
        if src.shape != dst.shape or src.shape[0] != rows or src.shape[2] != d or src.dtype != dst.dtype:
            raise ValueError(f"heads {tuple(src.shape)} to {tuple(dst.shape)} beside {rows} tokens of {d}")
    if cos.shape != (rows, 1, cos.shape[-1]) or sin.shape != cos.shape or 2 * cos.shape[-1] > d:
        raise ValueError(f"tables {tuple(cos.shape)}, {tuple(sin.shape)} for {rows} tokens and heads of {d}")
    if use_triton(every[0][0], "rope", unless=_unfit(every, cos, sin)):
        from covey.kernels import rope_triton

        return rope_triton.rotate_parts(rotated, copied, cos, sin, backward)
    for src, dst in rotated:
        dst.copy_(rope_reference(src, cos, sin, backward))
    if copied is not None:
        copied[1].copy_(copied[0])


def _unfit(parts: tuple[Part, ...], cos: Tensor, sin: Tensor) -> str:
    """Why the kernel cannot take these tensors; empty if it can."""
    for src, dst in parts:
        if src.stride(2) != 1 or dst.stride(2) != 1:
            return "the head dimension is not contiguous"
    return "" if cos.is_contiguous() and sin.is_contiguous() else "tables that are not contiguous"
