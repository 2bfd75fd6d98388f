"""What a reward is: any callable that is recognised by the names of its parameters.

    def exact(completion: str, answer: str) -> float | None        # one completion at a time
    def shorter(completions: list[str], **kwargs) -> list[float]   # all of a step at once (TRL's convention)
    def compute_score(data_source, solution_str, ground_truth, extra_info=None)  # one at a time (verl's)

Besides the completion a reward gets, if it asks for it by name, what the engine knows (`ENGINE_NAMES`), any
column of the data, and the settings in its `args:`. It may be a function, an async function, a partial or an
object with `__call__`. A parameter with a default is optional. docs/rewards.md is the guide for users.
"""

import difflib
import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from covey.rewards.find import RewardError as RewardError
from covey.rewards.find import did_you_mean, file_stamp, find, short_path

Style = Literal["completion", "completions", "solution_str"]  # the parameter that it is recognised by
Form = Literal["text", "messages"]
Lane = Literal["inline", "process", "thread", "loop"]
Policy = Literal["stop", "none"] | float

BUILTINS = {
    "choice": "covey.rewards.choice:choice",
    "code": "covey.rewards.code_tests:code",
    "exact": "covey.rewards.text_match:exact",
    "first_number": "covey.rewards.text_match:first_number",
    "format": "covey.rewards.text_match:format",
    "gsm8k": "covey.rewards.math_answer:gsm8k",
    "json_schema": "covey.rewards.json_schema:json_schema",
    "judge": "covey.rewards.judge:judge",
    "language": "covey.rewards.language:language",
    "length": "covey.rewards.length:length",
    "math": "covey.rewards.math_answer:math",
    "model": "covey.rewards.reward_model:model",
    "reasoning_gym": "covey.rewards.procedural:reasoning_gym",
    "regex": "covey.rewards.text_match:regex",
    "repetition": "covey.rewards.repetition:repetition",
}

# Built-ins that are pure and bounded in time: they run in place, without a process or a time limit of the runner.
# One with a user's regular expression is not bounded, so it runs like a user's function.
IN_PLACE = frozenset(
    {
        "choice",
        "exact",
        "first_number",
        "format",
        "gsm8k",
        "json_schema",
        "language",
        "length",
        "math",
        "reasoning_gym",
        "repetition",
    }
)
UNBOUNDED_ARGS = frozenset({"pattern"})

CALL_SECONDS = 120.0  # default limit of a call for one completion; a call for a whole step has none

# What the engine supplies; these names win over columns of the same name.
ENGINE_NAMES: Mapping[Style, tuple[str, ...]] = {
    "completion": ("completion", "prompt", "messages", "completion_ids", "finish"),
    "completions": ("completions", "prompts", "messages", "completion_ids", "finish"),
    "solution_str": ("solution_str", "data_source", "ground_truth", "extra_info"),
}
GROUND_TRUTH = ("ground_truth", "reward_model", "answer")  # columns that verl's ground_truth is taken from


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward as it is asked for; the keys of an entry of the configuration's `rewards`.

    use: a built-in name, "module:function", "path/to/file.py:function", or the callable itself.
    weight: factor of its scores in the total; 0 logs the scores and leaves the total alone.
    name: how it is called in metrics; default: the function's name.
    args: keyword arguments for the function.
    form: prompts and completions as text or as lists of messages; default: as its annotation says, else text.
    run: where it is called: a process of the pool, a thread, or inline, one call after another; see `_lane`.
    timeout: seconds that one call may take; default: CALL_SECONDS for one completion, none for a whole step.
    on_timeout, on_error: what a call that took too long, or raised, is worth: stop ends the run, none is no
        opinion, a number is that score.
    """

    use: str | Callable[..., Any]
    weight: float = 1.0
    name: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    form: Form | None = None
    run: Literal["auto", "process", "thread", "inline"] = "auto"
    timeout: float | None = None
    on_timeout: Policy = "stop"
    on_error: Policy = "stop"


@dataclass(frozen=True, slots=True)
class Reward:
    """A loaded reward: what to call and with what.

    required: parameters that only a column can fill. optional: parameters that a column may fill.
    all_columns: the function has **kwargs and gets every column.
    where: "rewards.py:12 exact()", for messages. file: the path of its source, "" if unknown.
    lane: where it is called; loop is the event loop of async functions. timeout: seconds, None for no limit.
    stamp: when the file that `use` names was last changed, 0 if it names none.
    note: what the user should know before the run starts, "" for nothing.
    """

    name: str
    weight: float
    use: str | None
    function: Callable[..., Any]
    style: Style
    form: Form
    engine: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    all_columns: bool
    args: Mapping[str, Any]
    lane: Lane
    timeout: float | None
    on_timeout: Policy
    on_error: Policy
    where: str
    file: str
    builtin: bool
    stamp: int
    note: str

    @property
    def batch(self) -> bool:
        return self.style == "completions"


def load_reward(spec: RewardSpec) -> Reward:
    """Find the function, read its signature and check what the spec says about it. Raises RewardError."""
    function = find_function(spec.use) if isinstance(spec.use, str) else spec.use
    builtin = isinstance(spec.use, str) and spec.use in BUILTINS
    label, file, line = _locate(function)
    place = "(built in)" if builtin else ""
    where = f"{short_path(file)}:{line} {label}()" if file and not builtin else f"{label}() {place}".rstrip()
    parameters = _parameters(function, where)
    named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    style = _style(named, where)
    all_columns = len(named) < len(parameters)
    engine = tuple(name for name in named if name in ENGINE_NAMES[style])
    settable = [name for name in named if name not in engine]
    _check_numbers(spec, where)
    _check_args(spec.args, settable, ENGINE_NAMES[style], all_columns, where)
    # What a partial binds by keyword was chosen on purpose: a column of that name must not replace it.
    bound = function.keywords if isinstance(function, functools.partial) else {}
    # Keyword-only parameters of a built-in are settings (settings.py): a column of that name must not set them.
    own = {p.name for p in parameters if builtin and p.kind is p.KEYWORD_ONLY}
    free = [p for p in parameters if p.name in settable and p.name not in {*spec.args, *bound, *own}]
    lane = _lane(spec, function, style, builtin, where)
    start = getattr(function, "start", None) if builtin else None
    return Reward(
        name=spec.name or label,
        weight=float(spec.weight),
        use=spec.use if isinstance(spec.use, str) else None,
        function=function,
        style=style,
        form=spec.form or _form(parameters, style),
        engine=engine,
        required=tuple(p.name for p in free if p.default is p.empty),
        # The keyword-only parameters of a built-in are settings: a column of that name must not replace them.
        optional=tuple(
            p.name for p in free if p.default is not p.empty and not (builtin and p.kind is p.KEYWORD_ONLY)
        ),
        all_columns=all_columns and style != "solution_str",  # verl's **kwargs are settings
        args=dict(spec.args),
        lane=lane,
        timeout=spec.timeout or (None if lane == "inline" or style == "completions" else CALL_SECONDS),
        on_timeout=spec.on_timeout,
        on_error=spec.on_error,
        where=where,
        file=file,
        builtin=builtin,
        stamp=file_stamp(spec.use) if isinstance(spec.use, str) else 0,
        note=start(**spec.args) if start else "",
    )


def find_function(use: str) -> Callable[..., Any]:
    """What a name, "module:function" or "file.py:function" stands for. Raises RewardError."""
    return find(use, BUILTINS)


def _lane(spec: RewardSpec, function: Callable[..., Any], style: Style, builtin: bool, where: str) -> Lane:
    """Async functions share an event loop. The others: pure and bounded built-ins run inline, a function for a
    whole step in a thread, one for a single completion in a process that can be ended."""
    if _is_async(function):
        if spec.run != "auto":
            raise RewardError(
                f"{where} is async and runs in the event loop, so run: {spec.run} means nothing. Remove it."
            )
        return "loop"
    if spec.run != "auto":
        lane = spec.run
    elif builtin and spec.use in IN_PLACE and not UNBOUNDED_ARGS & set(spec.args):
        lane = "inline"
    else:
        lane = "thread" if style == "completions" else "process"
    if lane == "inline" and spec.timeout is not None:
        raise RewardError(
            f"{where} runs inline, where nothing can interrupt it. Leave out timeout, or set run: process."
        )
    return lane


def _form(parameters: Iterable[inspect.Parameter], style: Style) -> Form:
    """messages if the annotation of the completion says so, as list[list[dict[str, str]]] does."""
    annotation = next(p.annotation for p in parameters if p.name == style)
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return "messages" if re.search(r"\b(dict|Dict|Mapping|\w*Message)\b", text) else "text"


def check_columns(reward: Reward, columns: Iterable[str]) -> None:
    """Raise RewardError if the reward needs a column that the data does not have. Cheap: call it early."""
    columns = list(columns)
    if "ground_truth" in reward.engine and not set(GROUND_TRUTH) & set(columns):
        raise RewardError(
            f"{reward.where} needs ground_truth, and there is no column {' or '.join(GROUND_TRUTH)} "
            f"({', '.join(columns) or 'there are none'}). Name the column that holds it in data.answer."
        )
    for name in reward.required:
        if name not in columns:
            listed = ", ".join(columns) or "there are none"
            raise RewardError(
                f'{reward.where} needs "{name}", which is not a column ({listed}). '
                + _column_advice(reward, name, columns)
            )


def _column_advice(reward: Reward, missing: str, columns: list[str]) -> str:
    if reward.builtin and missing == "answer":
        return "Name the column that holds it in data.answer."
    if reward.builtin:
        return f"Set it in the reward's args: {{{missing}: ...}}."
    unused = [c for c in columns if c not in (*reward.engine, *reward.required, *reward.optional)]
    close = difflib.get_close_matches(missing, unused, n=1, cutoff=0.75) or [
        c for c in unused if c == "answer"
    ]
    rename = f'Rename it to "{close[0]}"' if close else "Rename it to one of these"
    return f"{rename} or give it a default."


def _style(named: list[str], where: str) -> Style:
    styles: list[Style] = [style for style in ENGINE_NAMES if style in named]
    if len(styles) > 1:
        both = " and ".join(f"`{style}`" for style in styles)
        raise RewardError(f"{where} has both {both}; keep one of them.")
    if not styles:
        raise RewardError(
            f"{where} takes ({', '.join(named)}). A reward needs a parameter `completion` (one text) "
            "or `completions` (a list of texts)."
        )
    return styles[0]


def _parameters(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    if isinstance(function, type):
        raise RewardError(f"{where} is a class; give a function or an instance with __call__.")
    if not callable(function):
        raise RewardError(f"{function!r} is not callable; a reward is a function or an object with __call__.")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where}: its parameters cannot be read; wrap it in a Python function.") from error
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise RewardError(f"{where}: {p.name} is positional-only, but rewards are called by keyword.")
    return [p for p in parameters if p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]


def _check_numbers(spec: RewardSpec, where: str) -> None:
    for key in ("weight", "on_timeout", "on_error"):
        value = getattr(spec, key)
        if not isinstance(value, str) and not math.isfinite(value):
            raise RewardError(f"{where}: {key} is {value}; it must be a finite number.")
        if isinstance(value, str) and value not in ("stop", "none"):
            raise RewardError(f'{where}: {key} is "{value}"; it must be stop, none or a number.')
    if spec.timeout is not None and not 0 < spec.timeout < math.inf:
        raise RewardError(f"{where}: timeout is {spec.timeout}; it must be a number of seconds above 0.")


def _check_args(
    args: Mapping[str, Any], settable: list[str], engine: tuple[str, ...], open_ended: bool, where: str
) -> None:
    for key in args:
        if key in engine:
            raise RewardError(f"{where}: args sets `{key}`, which the trainer supplies. Remove it.")
        if key not in settable and not open_ended:
            can = f"It can set: {', '.join(settable)}." if settable else "It has nothing to set."
            raise RewardError(
                f"{where} has no parameter `{key}` for args.{did_you_mean(key, settable)} {can}"
            )


def _is_async(function: Any) -> bool:
    if isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _locate(function: Any) -> tuple[str, str, int]:
    """Name, source file and first line of a callable; file "" and line 0 where Python does not know."""
    while isinstance(function, functools.partial):
        function = function.func
    target = inspect.unwrap(function) if callable(function) else function
    name = getattr(target, "__name__", type(target).__name__)
    if not hasattr(target, "__code__") and not isinstance(target, (type, types.MethodType)):
        target = getattr(type(target), "__call__", target)  # noqa: B004  (the method, not a test for it)
    code = getattr(target, "__code__", None)
    if code is None:
        return name, "", 0
    return name, code.co_filename, code.co_firstlineno
