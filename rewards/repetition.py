"""A penalty for saying the same again and again."""

from collections.abc import Sequence
from typing import Annotated, Literal

from annotated_types import Ge

from covey.rewards.settings import settings


@settings()
def repetition(
    completion: str,
    completion_ids: Sequence[int],
    *,
    n: Annotated[int, Ge(1)] = 20,
    unit: Literal["tokens", "words"] = "tokens",
) -> float:
    """Minus the share of n-grams that stand earlier in the completion: 0.0 if each stands once, near -1.0 in a loop.

    With N units there are N - n + 1 n-grams, and D different ones: D / (N - n + 1) - 1.
    0.0 if there are fewer than n units. unit: tokens, or words between blanks, without regard to case.

    >>> repetition("so so so so", range(0), n=2, unit="words")  # 3 pairs, 1 of them different
    -0.6666666666666667
    >>> repetition("", [5, 6, 7, 5, 6], n=2), repetition("", [5, 6, 7], n=2), repetition("", [5], n=2)
    (-0.25, 0.0, 0.0)
    """
    units = list(completion_ids) if unit == "tokens" else completion.casefold().split()
    grams = list(zip(*(units[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) - 1 if grams else 0.0
