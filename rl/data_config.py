"""What data.train and data.eval may be: one source, or a list of sources with weights."""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

from covey.rl.config_types import Positive, Section


class SourceSection(Section):
    """One of several sources."""

    path: str  # a file, folder, glob or hub id
    weight: Positive = 1.0  # 2: every row twice; 0.5: half of the rows, chosen by data.seed

    def __str__(self) -> str:
        return self.path if self.weight == 1 else f"{self.path} x {self.weight:g}"

    __repr__ = __str__


def _check(value: Any) -> Any:
    """Lists in their long form. The sentences are here, because those about a union would name neither form."""
    if not isinstance(value, list):
        return value
    if not value:
        raise ValueError("the list of sources is empty; write [{path: a.jsonl}, {path: b.jsonl, weight: 2}]")
    return [_check_item(number, item) for number, item in enumerate(value)]


def _check_item(number: int, item: Any) -> Any:
    if isinstance(item, SourceSection):
        return item
    if isinstance(item, str):
        item = {"path": item}
    if not isinstance(item, dict) or not isinstance(item.get("path"), str):
        raise ValueError(f"source {number} has no path; write {{path: a.jsonl, weight: 2}}")
    if unknown := [key for key in item if key not in SourceSection.model_fields]:
        raise ValueError(f'source {number} has the unknown key "{unknown[0]}"; a source has path and weight')
    weight = item.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ValueError(f"source {number} has the weight {weight!r}; it must be a number above 0")
    return item


Source = Annotated[str | list[SourceSection], BeforeValidator(_check)]
