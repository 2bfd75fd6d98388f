"""Causal attention over packed segments that may share a prefix.

Axes: T tokens, S segments, n query heads, m key-value heads (n a multiple of m), d head dimension.
A query attends to the earlier tokens of its own segment, itself included, and to all of its segment's prefix:

    z_ij = scale * q_i k_j        s_ij = z_ij, or c tanh(z_ij / c) with a soft-cap c
    lse_i = log sum_j exp s_ij        p_ij = exp(s_ij - lse_i)        o_i = sum_j p_ij v_j
    dv_j = sum_i p_ij do_i        ds_ij = p_ij (do_i v_j - do_i o_i)        dz_ij = ds_ij, or (1 - (s_ij / c)^2) ds_ij
    dq_i = scale * sum_j dz_ij k_j        dk_j = scale * sum_i dz_ij q_i

With a sliding window w a query at position i sees positions i - w + 1 .. i, counted through its prefix: token t of a
segment with a prefix of P tokens is at P + t.

Four ways lead to the same numbers:

    dense    torch on blocks of small score matrices: everywhere, any dtype, every option; the reference
    flash    torch's FlashAttention on variable lengths: CUDA, 16 bit, no soft-cap, no window
    triton   own kernels (attention_triton.py): every option; COVEY_KERNELS=triton takes it everywhere
    cudnn    one call per group of equal segments: CUDA, 16 bit, no soft-cap, no window, few distinct shapes
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from covey.kernels.attention_cudnn import CudnnPlan, cudnn_attention, cudnn_attention_backward, cudnn_plan
from covey.kernels.attention_dense import Block, attention_backward_reference, attention_reference, dense_plan
from covey.kernels.attention_flash import (
    FlashPlan,
    flash_attention,
    flash_attention_backward,
    flash_plan,
    uses_flash,
)
from covey.kernels.attention_tiles import TileLists
from covey.kernels.dispatch import insists_on_triton, use_triton

Kind = Literal["dense", "flash", "triton", "cudnn"]

FAMILY_TOKENS = 512  # a prompt and its completions up to this many tokens make one dense block with a mask
WIDEST_HEAD = 256  # head dimension that the Triton kernels take
WIDEST_GROUP = 32  # query heads per key-value head that they take


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What is derived from the segments once per batch and used by every layer."""

    kind: Kind
    longest: int  # see `reach`
    blocks: tuple[Block, ...] = ()
    flash: FlashPlan | None = None
    tiles: TileLists | None = None
    cudnn: CudnnPlan | None = None


def pick_kind(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float = 0.0, window: int = 0
) -> Kind:
    """How a model attends whose layers have this head dimension and, in any layer, this soft-cap or window.

    In 16 bit on a GPU Triton on Hopper, where it measured faster, and for what FlashAttention cannot do, else
    FlashAttention; everywhere else torch. COVEY_KERNELS=triton always asks for Triton.
    """
    insists = insists_on_triton()
    flash = not softcap and not window and uses_flash(device, dtype, head_dim)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if insists or (device.type == "cuda" and dtype.itemsize <= 2 and (hopper or not flash)):
        wide = f"head dimension {head_dim}" if head_dim > WIDEST_HEAD else ""
        if use_triton(torch.empty(0, dtype=dtype, device=device), "attention", wide):
            return "triton"
    return "flash" if flash else "dense"


def reach(segments_S4: Tensor) -> int:
    """How many positions the farthest token sees, itself included; a window of this size hides nothing."""
    return max((end - start + pe - ps for start, end, ps, pe in segments_S4.tolist()), default=0)


def attention_plan(
    segments_S4: Tensor, device: torch.device, *, flash: bool = False, kind: Kind | None = None
) -> AttentionPlan:
    """The plan for segments int32 [S, 4] on the CPU: (start, end, prefix_start, prefix_end), tiling T in order.

    kind: how to attend (see `pick_kind`); without it "flash" if `flash` is true, else "dense". Raises ValueError if
    the segments do not suit "cudnn".
    """
    rows = segments_S4.tolist()
    assert all(a[1] == b[0] for a, b in pairwise(rows)), "segments must tile the tokens in order"
    longest = reach(segments_S4)
    kind = kind or ("flash" if flash else "dense")
    if kind == "flash":
        return AttentionPlan(kind, longest, flash=flash_plan(rows, device))
    if kind == "triton":
        return AttentionPlan(kind, longest, tiles=TileLists(rows, device))
    if kind == "cudnn":
        return AttentionPlan(kind, longest, cudnn=cudnn_plan(rows))
    return AttentionPlan(kind, longest, blocks=dense_plan(rows, device, FAMILY_TOKENS))


def attention(
    q_Tnd: Tensor,
    k_Tmd: Tensor,
    v_Tmd: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o [T, n, d] in q's dtype and lse [n, T] in float32 (float64 for float64).

    The inputs may be views into one buffer: heads and tokens of any stride, contiguous in d. window: how many
    positions a query sees, 0 for all. softcap: c, 0 for none. out: where o goes, of the same shape and dtype as q, no
    overlap with the inputs. lse: where that goes. Raises ValueError for what the plan's kind cannot do and for an
    `out` that does not fit.
    """
    window = _checked_window(plan, window, softcap)
    _check_out(out, q_Tnd)
    if not q_Tnd.shape[0]:
        return q_Tnd.new_empty(q_Tnd.shape) if out is None else out, lse_room(q_Tnd)
    if plan.tiles is not None:
        from covey.kernels import attention_triton

        q, k, v = _fit(q_Tnd, k_Tmd, v_Tmd)
        o = q.new_empty(q.shape) if out is None else out
        lse = lse_room(q) if lse is None else lse
        attention_triton.forward(q, k, v, plan.tiles, scale, window, softcap, o, lse)
        return o, lse
    if plan.flash is not None:
        o, its_lse = flash_attention(q_Tnd, k_Tmd, v_Tmd, plan.flash, scale)
    elif plan.cudnn is not None:
        o, its_lse = cudnn_attention(q_Tnd, k_Tmd, v_Tmd, plan.cudnn, scale)
    else:
        o, its_lse = attention_reference(q_Tnd, k_Tmd, v_Tmd, plan.blocks, scale, window, softcap)
    return o if out is None else out.copy_(o), its_lse if lse is None else lse.copy_(its_lse)


def lse_room(q_Tnd: Tensor) -> Tensor:
    """An empty lse [n, T]."""
    wide = torch.promote_types(q_Tnd.dtype, torch.float32)
    return torch.empty((q_Tnd.shape[1], len(q_Tnd)), dtype=wide, device=q_Tnd.device)


def attention_backward(
    do_Tnd: Tensor,
    q_Tnd: Tensor,
    k_Tmd: Tensor,
    v_Tmd: Tensor,
    o_Tnd: Tensor,
    lse_nT: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [T, n, d], dk [T, m, d], dv [T, m, d]) in the inputs' dtypes.

    out: where they go, for example views into one gradient buffer; no overlap with the inputs. The rest as in
    `attention`, whose o and lse it takes.
    """
    window = _checked_window(plan, window, softcap)
    inputs = q_Tnd, k_Tmd, v_Tmd
    for place, x in zip(out or (), inputs, strict=bool(out)):
        _check_out(place, x)
    if plan.tiles is not None and q_Tnd.shape[0]:
        from covey.kernels import attention_triton

        grads = out or tuple(x.new_empty(x.shape) for x in inputs)
        q, k, v, o, do = _fit(*inputs, o_Tnd, do_Tnd)
        attention_triton.backward(
            do, q, k, v, o, lse_nT.contiguous(), plan.tiles, scale, window, softcap, *grads
        )
        return grads  # type: ignore[return-value]
    if not q_Tnd.shape[0]:
        grads = tuple(x.new_empty(x.shape) for x in inputs)
    elif plan.flash is not None:
        grads = flash_attention_backward(do_Tnd, *inputs, o_Tnd, lse_nT, plan.flash, scale)
    elif plan.cudnn is not None:
        grads = cudnn_attention_backward(do_Tnd, *inputs, o_Tnd, lse_nT, plan.cudnn, scale)
    else:
        grads = attention_backward_reference(
            do_Tnd, *inputs, o_Tnd, lse_nT, plan.blocks, scale, window, softcap
        )
    if out is None:
        return grads  # type: ignore[return-value]
    for place, grad in zip(out, grads, strict=True):
        place.copy_(grad)
    return out


def _checked_window(plan: AttentionPlan, window: int, softcap: float) -> int:
    """The window, 0 if it hides nothing in this batch."""
    if window < 0 or softcap < 0:
        raise ValueError(f"window {window} and softcap {softcap} are 0 (none) or more")
    window = window if window < plan.longest else 0
    if (window or softcap) and plan.kind in ("flash", "cudnn"):
        raise ValueError(
            f"attention of kind {plan.kind!r} has no sliding window and no soft-cap: see pick_kind"
        )
    return window


def _check_out(out: Tensor | None, like: Tensor) -> None:
    if out is None:
        return
    if out.shape != like.shape or out.dtype != like.dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not {like.dtype} {tuple(like.shape)}")
    if out.stride(2) != 1:
        raise ValueError(f"out has stride {out.stride(2)} between the elements of a head, not 1")


def _fit(q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The tensors as the Triton kernels take them: with contiguous heads."""
    dim, group = q.shape[2], q.shape[1] // k.shape[1]
    if dim > WIDEST_HEAD or group > WIDEST_GROUP:
        raise ValueError(
            f"the Triton kernels take heads of up to {WIDEST_HEAD} and {WIDEST_GROUP} query heads per key-value head, "
            f"not {dim} and {group}: choose another kind of attention"
        )
    return tuple(x if x.stride(2) == 1 else x.contiguous() for x in (q, k, *others))
