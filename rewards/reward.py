"""What a reward is: any callable that is recognised by the names of its parameters.

    def exact(completion: str, answer: str) -> float | None        # one completion at a time
    def shorter(completions: list[str], **kwargs) -> list[float]   # all of a step at once (TRL's convention)

Besides the completion a reward gets, if it asks for it by name, what the engine knows (`ENGINE_NAMES`), any
column of the data, and the settings in its `args:`. It may be a function, an async function, a partial or an
object with `__call__`. A parameter with a default is optional. docs/rewards.md is the guide for users.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Style = Literal["completion", "completions"]

BUILTINS = {
    "exact": "covey.rewards.text_match:exact",
    "first_number": "covey.rewards.text_match:first_number",
    "format": "covey.rewards.text_match:format",
    "length": "covey.rewards.length:length",
    "math": "covey.rewards.math_answer:math",
}

# What the engine supplies; these names win over columns of the same name.
ENGINE_NAMES: Mapping[Style, tuple[str, ...]] = {
    "completion": ("completion", "prompt", "messages", "completion_ids", "finish"),
    "completions": ("completions", "prompts", "messages", "completion_ids", "finish"),
}


class RewardError(ValueError):
    """A reward that cannot be loaded or called, or that returned what is not a score."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward as it is asked for.

    use: a built-in name, "module:function", "path/to/file.py:function", or the callable itself.
    weight: factor of its scores in the total; 0 logs the scores and leaves the total alone.
    name: how it is called in metrics; default: the function's name.
    args: keyword arguments for the function.
    """

    use: str | Callable[..., Any]
    weight: float = 1.0
    name: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reward:
    """A loaded reward: what to call and with what.

    required: parameters that only a column can fill. optional: parameters that a column may fill.
    all_columns: the function has **kwargs and gets every column.
    where: "rewards.py:12 exact()", for messages. file: the path of its source, "" if unknown.
    """

    name: str
    weight: float
    function: Callable[..., Any]
    style: Style
    is_async: bool
    engine: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    all_columns: bool
    args: Mapping[str, Any]
    where: str
    file: str
    builtin: bool


def load_reward(spec: RewardSpec) -> Reward:
    """Find the function, read its signature and check `weight` and `args`. Raises RewardError."""
    function = _find(spec.use) if isinstance(spec.use, str) else spec.use
    builtin = isinstance(spec.use, str) and spec.use in BUILTINS
    label, file, line = _locate(function)
    where = (
        f"{label}() (built in)" if builtin else f"{_short(file)}:{line} {label}()" if file else f"{label}()"
    )
    if not math.isfinite(spec.weight):
        raise RewardError(f"{where}: weight is {spec.weight}; it must be a finite number.")
    parameters = _parameters(function, where)
    named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    all_columns = len(named) < len(parameters)
    style = _style(named, where)
    engine = tuple(name for name in named if name in ENGINE_NAMES[style])
    settable = [name for name in named if name not in engine]
    _check_args(spec.args, settable, ENGINE_NAMES[style], all_columns, where)
    # What a partial binds by keyword was chosen on purpose: a column of that name must not replace it.
    bound = function.keywords if isinstance(function, functools.partial) else {}
    free = [p for p in parameters if p.name in settable and p.name not in spec.args and p.name not in bound]
    return Reward(
        name=spec.name or label,
        weight=float(spec.weight),
        function=function,
        style=style,
        is_async=_is_async(function),
        engine=engine,
        required=tuple(p.name for p in free if p.default is p.empty),
        optional=tuple(p.name for p in free if p.default is not p.empty),
        all_columns=all_columns,
        args=dict(spec.args),
        where=where,
        file=file,
        builtin=builtin,
    )


def check_columns(reward: Reward, columns: Iterable[str]) -> None:
    """Raise RewardError if the reward needs a column that the data does not have. Cheap: call it early."""
    columns = list(columns)
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
    single, batch = "completion" in named, "completions" in named
    if single and batch:
        raise RewardError(f"{where} has both `completion` and `completions`; keep one of them.")
    if not single and not batch:
        raise RewardError(
            f"{where} takes ({', '.join(named)}). A reward needs a parameter `completion` (one text) "
            "or `completions` (a list of texts)."
        )
    return "completion" if single else "completions"


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


def _check_args(
    args: Mapping[str, Any], settable: list[str], engine: tuple[str, ...], open_ended: bool, where: str
) -> None:
    for key in args:
        if key in engine:
            raise RewardError(f"{where}: args sets `{key}`, which the trainer supplies. Remove it.")
        if key not in settable and not open_ended:
            can = f"It can set: {', '.join(settable)}." if settable else "It has nothing to set."
            raise RewardError(
                f"{where} has no parameter `{key}` for args.{_did_you_mean(key, settable)} {can}"
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


def _short(file: str) -> str:
    """The path as the user would type it: relative if it lies below the current folder."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith("..") else relative


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f' Did you mean "{close[0]}"?' if close else ""


def _find(use: str) -> Callable[..., Any]:
    target = BUILTINS.get(use, use)
    place, colon, name = target.rpartition(":")
    if not colon:
        if target.endswith(".py"):
            found = ", ".join(_functions(_load_file(target))) or "none"
            raise RewardError(f"{target}: say which function, as in {target}:NAME. Functions in it: {found}.")
        raise RewardError(
            f'There is no built-in reward "{use}" ({", ".join(sorted(BUILTINS))}).'
            f"{_did_you_mean(use, BUILTINS)} Your own is named like rewards.py:{use}."
        )
    module = _load_file(place) if place.endswith(".py") else _load_module(place, name)
    if hasattr(module, name):
        return getattr(module, name)
    known = _functions(module)
    listed = ", ".join(known) or "none"
    raise RewardError(
        f"{place} has no function {name}.{_did_you_mean(name, known)} Functions in it: {listed}."
    )


def _functions(module: types.ModuleType) -> list[str]:
    """The public callables that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    ]


def _load_module(name: str, function: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise RewardError(f"Importing the reward module {name} failed: {error}.") from error
        hint = f" Did you mean {name}.py:{function}?" if Path(f"{name}.py").exists() else ""
        raise RewardError(f"There is no module {name} to take a reward from.{hint}") from error
    except Exception as error:  # whatever the user's module does while it is imported
        raise RewardError(f"Importing the reward module {name} failed: {_describe(error)}.") from error


_loaded: dict[
    tuple[Path, int], types.ModuleType
] = {}  # by path and time of change: an edited file loads again


def _load_file(place: str) -> types.ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise RewardError(
            f"There is no reward file {place} (looked for {path}).{_did_you_mean(path.name, near)}"
        )
    key = (path, path.stat().st_mtime_ns)
    if key not in _loaded:
        _loaded[key] = _execute(path, place)
    return _loaded[key]


def _execute(path: Path, place: str) -> types.ModuleType:
    name = f"covey_user_{path.stem}_{len(_loaded)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported; last, so that they hide nothing
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        file = _short(error.filename) if error.filename else place
        raise RewardError(f"{file}:{error.lineno}: syntax error: {error.msg}.") from error
    except Exception as error:  # whatever the user's file does while it is loaded
        del sys.modules[name]
        line = failing_line(error, str(path))
        raise RewardError(f"{line or place} failed while it was loaded: {_describe(error)}.") from error
    return module


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def failing_line(error: BaseException, file: str) -> str:
    """ "rewards.py:14": the innermost line of `file` in the traceback, else the innermost line of all."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    own = [frame for frame in frames if frame[0] == file] or frames
    return f"{_short(own[-1][0])}:{own[-1][1]}" if own else ""
