"""A penalty for completions that come near to, or pass, a length."""

from collections.abc import Sequence


def length(completion: str, completion_ids: Sequence[int], max_tokens: int, cache: int) -> float:
    """Soft overlong penalty in tokens (DAPO, arXiv 2503.14476, eq. 13). L counts the end-of-sequence token.

    0                               L <= max_tokens - cache
    (max_tokens - cache - L) / cache    up to max_tokens
    -1                              beyond

    Settings: max_tokens, and cache, the width of the ramp before it (1 <= cache <= max_tokens).

    >>> [length("", range(L), max_tokens=20, cache=4) for L in (16, 18, 20, 21)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 1 <= cache <= max_tokens:
        raise ValueError(f"length needs 1 <= cache <= max_tokens, not cache {cache}, max_tokens {max_tokens}")
    over = len(completion_ids) - (max_tokens - cache)
    return -min(max(over / cache, 0.0), 1.0) or 0.0  # `or`: 0.0 rather than -0.0
