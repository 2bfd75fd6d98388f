"""What every section of a configuration is made of: strict sections, and numbers with their ranges."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
OpenShare = Annotated[float, Field(gt=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]  # the bias correction divides by 1 - decay
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]


def _token_id(key: object) -> object:
    """A mapping's keys are text in YAML."""
    if isinstance(key, str) and key.isdecimal():
        return int(key)
    if not isinstance(key, int) or isinstance(key, bool) or key < 0:
        raise ValueError("its keys are token ids: whole numbers from 0 on")
    return key


TokenId = Annotated[int, BeforeValidator(_token_id)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
