"""Settings of the built-in rewards, checked before a run.

The keyword-only parameters of a built-in are its settings: `args` of the configuration fills them, a column of the
data never does (MATH has a column "level").
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from covey.rewards.find import RewardError

F = TypeVar("F", bound=Callable[..., Any])


def settings(check: Callable[..., str | None] | None = None) -> Callable[[F], F]:
    """Decorator of a built-in: gives it `start(**args)`, which load_reward calls with what the configuration sets.

    It holds each argument against its annotation, and then calls check(**args) with the defaults filled in, which
    raises ValueError if they do not go together, and may return a note for the user. start raises RewardError.
    """

    def mark(function: F) -> F:
        def start(**args: Any) -> str:
            try:
                return _check(function, check, args) or ""
            except (ValueError, ImportError) as error:
                raise RewardError(f"{function.__name__}() (built in): {error}") from error

        function.start = start  # type: ignore[attr-defined]
        return function

    return mark


def _check(
    function: Callable[..., Any], check: Callable[..., str | None] | None, args: dict[str, Any]
) -> str | None:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    config = ConfigDict(strict=True, allow_inf_nan=False)
    hints = get_type_hints(function, include_extras=True)
    for name, value in args.items():
        try:
            TypeAdapter(hints[name], config=config).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"args.{name} is {value!r}: {error.errors()[0]['msg']}.") from error
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    missing = [p.name for p in own if p.default is p.empty and p.name not in args]
    if missing:
        raise ValueError(f"args.{missing[0]} is missing. Set it in the reward's args: {{{missing[0]}: ...}}.")
    return check(**{p.name: p.default for p in own} | args) if check else None
