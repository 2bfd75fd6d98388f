"""Rewards for the number of tokens L of a completion. L counts the end-of-sequence token."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge

from covey.rewards.reward import find_function
from covey.rewards.settings import settings

Count = Annotated[int, Ge(1)]
SETTINGS = {  # shape -> what it needs, and what it may have
    "overlong": ({"max_tokens", "cache"}, set()),
    "target": ({"target", "width"}, set()),
    "cosine": ({"max_tokens"}, {"correct", "wrong", "beyond", "verify"}),
}


def _check(shape: str, **all_settings: Any) -> None:
    needed, allowed = SETTINGS[shape]
    given = {name for name, value in all_settings.items() if value is not None}
    for name in sorted(needed - given):
        raise ValueError(f"shape {shape} needs args.{name}.")
    for name in sorted(given - needed - allowed):
        raise ValueError(f"args.{name} means nothing for shape {shape}. Remove it.")
    cache, max_tokens = all_settings["cache"], all_settings["max_tokens"]
    if shape == "overlong" and not 1 <= cache <= max_tokens:
        raise ValueError(f"it needs 1 <= cache <= max_tokens, not cache {cache}, max_tokens {max_tokens}.")
    for name in ("correct", "wrong"):
        if given >= {name} and len(all_settings[name]) != 2:
            raise ValueError(f"args.{name}: give two numbers, for no token at all and for max_tokens.")


@settings(_check)
def length(
    completion: str,
    completion_ids: Sequence[int],
    answer: Any = "",
    *,
    shape: Literal["overlong", "target", "cosine"] = "overlong",
    max_tokens: Count | None = None,
    cache: Count | None = None,
    target: Count | None = None,
    width: Count | None = None,
    correct: Sequence[float] | None = None,
    wrong: Sequence[float] | None = None,
    beyond: float | None = None,
    verify: Literal["math", "gsm8k", "exact", "first_number", "choice"] | None = None,
) -> float | None:
    """A reward of one of three shapes for the number of tokens L.

    overlong: DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13): 0 while L <= max_tokens - cache, then
        (max_tokens - cache - L) / cache, and -1 beyond max_tokens.
    target: 1 - |L - target| / width, and 0 where that is negative.
    cosine: half a cosine from L = 0 to L = max_tokens between the two numbers of `correct` (unset: [1, 0.5]) for a
        right answer, or of `wrong` (unset: [-1, -0.5]); `beyond` (unset: -1) from max_tokens on (arXiv 2502.03373).
        verify (unset: math) names the built-in reward that tells right answers, by 1.0; no opinion where it has none.

    >>> [length("", range(L), max_tokens=20, cache=4) for L in (16, 18, 20, 21)]
    [0.0, -0.5, -1.0, -1.0]
    >>> [length("", range(L), shape="target", target=100, width=50) for L in (100, 125, 75, 200)]
    [1.0, 0.5, 0.5, 0.0]
    >>> [length("#### 18", range(L), answer=18, shape="cosine", max_tokens=100) for L in (0, 50, 100)]
    [1.0, 0.75, -1.0]
    """
    _check(
        shape,
        **{"max_tokens": max_tokens, "cache": cache, "target": target, "width": width},
        **{"correct": correct, "wrong": wrong, "beyond": beyond, "verify": verify},
    )
    tokens = len(completion_ids)
    if shape == "overlong":
        assert max_tokens and cache
        return (
            -min(max((tokens - (max_tokens - cache)) / cache, 0.0), 1.0) or 0.0
        )  # `or`: 0.0 rather than -0.0
    if shape == "target":
        assert target and width
        return max(1 - abs(tokens - target) / width, 0.0)
    assert max_tokens
    right = _is_right(verify or "math", completion, answer)
    if right is None:
        return None
    if tokens >= max_tokens:
        return -1.0 if beyond is None else beyond
    first, last = (correct or (1.0, 0.5)) if right else (wrong or (-1.0, -0.5))
    return last + (first - last) * (1 + math.cos(math.pi * tokens / max_tokens)) / 2


def _is_right(verify: str, completion: str, answer: Any) -> bool | None:
    verdict = find_function(verify)(completion=completion, answer=answer)
    if verdict is None:
        return None
    return (verdict["score"] if isinstance(verdict, dict) else verdict) == 1.0
