"""What a reward may return: a number, None, or a dict with "score" and notes; for a batch a list of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from covey.rewards.find import RewardError

Score = tuple[float, dict[str, Any]]  # NaN is no opinion; and the notes


def read_scores(where: str, batch: bool, places: Sequence[str], returned: Any) -> list[Score]:
    """One score for each place ("row 3 (prompt 0, completion 3)"); RewardError if it cannot be read as that."""
    if not batch:
        return [_score(where, places[0], returned)]
    if hasattr(returned, "tolist"):  # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise RewardError(
            f"{where} returned {_shown(returned)} for {len(places)} completions; "
            "return a list with one float or None for each."
        )
    if len(returned) != len(places):
        raise RewardError(
            f"{where} returned {len(returned)} values for {len(places)} completions; "
            "return one float or None for each."
        )
    return [_score(where, place, value) for place, value in zip(places, returned, strict=True)]


def _score(where: str, place: str, returned: Any) -> Score:
    value, notes = returned, {}
    if isinstance(returned, Mapping):
        if "score" not in returned:
            keys = ", ".join(map(str, returned)) or "none"
            raise RewardError(
                f'{where} returned a dict without "score" for {place} (keys: {keys}); '
                'return {"score": x, ...notes}.'
            )
        value, notes = returned["score"], {str(k): v for k, v in returned.items() if k != "score"}
    if value is None:
        return math.nan, notes
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise RewardError(f"{where} returned {_shown(value)} for {place}; return a float or None.")
    try:
        score = float(value)
    except OverflowError:  # an int beyond the range of floats
        score = math.inf
    if math.isinf(score):
        raise RewardError(
            f"{where} returned {score} for {place}; return a finite number, or None for no opinion."
        )
    return score, notes


def _shown(value: Any) -> str:
    text = repr(value).replace('"', "'") if not isinstance(value, str) else f'"{value}"'
    return f"{text[:60]} ({type(value).__name__})"
