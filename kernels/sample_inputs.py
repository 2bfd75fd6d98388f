"""What a token is drawn from (kernels/sample.py): logits with bias and penalties, and a random number.

Axes: B rows of a batch, V vocabulary.

Penalties, of a token v that stands in the prompt or (c_v times) in the completion so far:

    z_v = x_v + bias_v
    z_v = z_v / repetition  if z_v > 0 else  z_v repetition            v in the prompt or the completion (CTRL,
                                                                       Keskar et al. 2019, section 4.1)
    z_v = z_v - frequency c_v - presence [c_v > 0]                     v in the completion (OpenAI's two)

Both facts are one number per row and token, n_v = c_v + PROMPT [v in the prompt]: counting goes on by adding 1.

Random numbers are addressed, not consumed: u = floor(m(s XOR t) / 2^11) / 2^53 for a row's state s and its token's
index t, where m is the step and output of splitmix64 (Steele, Lea and Flood 2014), in arithmetic modulo 2^64:

    x = s + 0x9E3779B97F4A7C15
    x = (x ^ x >> 30) 0xBF58476D1CE4E5B9
    x = (x ^ x >> 27) 0x94D049BB133111EB
    m(s) = x ^ x >> 31

torch has no unsigned arithmetic to speak of: int64 wraps round the same way, and a mask takes off what an arithmetic
shift to the right has copied from the sign.
"""

import torch
from torch import Tensor

from covey.kernels.dispatch import use_triton

PROMPT = 1 << 30  # more than any completion has tokens


def penalize(
    logits_BV: Tensor,
    bias_V: Tensor | None,
    count_BV: Tensor | None,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Tensor:
    """Logits [B, V] with bias and penalties, in memory of their own.

    logits_BV: float32 or float64, rows of any stride. bias_V: contiguous, in the same dtype. count_BV: int32 with
    contiguous rows, how often the token stands in the row's completion, plus PROMPT if it stands in its prompt. None:
    no bias, no penalties. repetition 1, presence 0 and frequency 0 are off. One launch in Triton.
    """
    (rows, vocab), dtype = logits_BV.shape, logits_BV.dtype
    assert dtype in (torch.float32, torch.float64) and repetition > 0
    if bias_V is not None:
        assert bias_V.shape == (vocab,) and bias_V.dtype == dtype and bias_V.is_contiguous()
    if count_BV is not None:
        assert count_BV.shape == (rows, vocab) and count_BV.dtype == torch.int32
    straight = logits_BV.stride(1) == 1 and (count_BV is None or count_BV.stride(1) == 1)
    if use_triton(logits_BV, "penalize", unless="" if straight else "rows that are not contiguous"):
        from covey.kernels import sample_inputs_triton

        out = logits_BV.new_empty(rows, vocab)
        sample_inputs_triton.penalize(logits_BV, bias_V, count_BV, out, repetition, presence, frequency)
        return out
    return penalize_reference(
        logits_BV, bias_V, count_BV, repetition=repetition, presence=presence, frequency=frequency
    )


def penalize_reference(
    logits_BV: Tensor,
    bias_V: Tensor | None,
    count_BV: Tensor | None,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Tensor:
    """The same in plain torch."""
    z_BV = logits_BV.clone() if bias_V is None else logits_BV + bias_V
    if count_BV is None:
        return z_BV
    repeated_BV = torch.where(z_BV > 0, z_BV / repetition, z_BV * repetition)
    z_BV = torch.where(count_BV > 0, repeated_BV, z_BV)
    own_BV = (count_BV & (PROMPT - 1)).to(z_BV.dtype)
    return z_BV.sub_(own_BV, alpha=frequency).sub_((own_BV > 0).to(z_BV.dtype), alpha=presence)


def draw(state_B: Tensor, step_B: Tensor) -> Tensor:
    """float64 [B] in [0, 1) with 53 random bits: a function of a row's state and step alone, whatever the device.

    state_B: int64 (rollout/sampling.py makes them). step_B: int32 or int64 on the same device, the token's index in
    the completion. Both contiguous. One launch in Triton.
    """
    assert state_B.ndim == 1 and state_B.shape == step_B.shape and state_B.dtype == torch.int64
    assert step_B.dtype in (torch.int32, torch.int64) and state_B.is_contiguous() and step_B.is_contiguous()
    if use_triton(torch.empty(0, device=state_B.device), "draw"):
        from covey.kernels import sample_inputs_triton

        out_B = torch.empty_like(state_B, dtype=torch.float64)
        sample_inputs_triton.draw(state_B, step_B, out_B)
        return out_B
    return draw_reference(state_B, step_B)


def draw_reference(state_B: Tensor, step_B: Tensor) -> Tensor:
    """The same in plain torch."""
    return _shift_right(splitmix64(state_B ^ step_B), 11).double() * 2.0**-53


def splitmix64(state: Tensor) -> Tensor:
    """m of the head of this file, for int64 of any shape that stand for unsigned numbers. A bijection."""
    x = state + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of x."""
    return (x + 2**63) % 2**64 - 2**63
