"""Where a reward's function is: a built-in name, "module:function" or "path/to/file.py:function".

Whatever is wrong is a RewardError that names the file and line, what was looked for, and what is there instead.
"""

import difflib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

PICKLED_CODE = "<dynamic-code>"  # what cloudpickle calls the file of a function that it sends


class RewardError(ValueError):
    """A reward that cannot be loaded or called, or that returned what is not a score."""


def find(use: str, builtins: Mapping[str, str], kind: str = "reward") -> Callable[..., Any]:
    """What `use` names. builtins: name -> "module:function". kind: what messages call it. Raises RewardError."""
    target = builtins.get(use, use)
    place, colon, name = target.rpartition(":")
    if not colon:
        if target.endswith(".py"):
            found = ", ".join(_functions(_load_file(target, kind))) or "none"
            raise RewardError(f"{target}: say which function, as in {target}:NAME. Functions in it: {found}.")
        raise RewardError(
            f'There is no built-in {kind} "{use}" ({", ".join(sorted(builtins))}).'
            f"{did_you_mean(use, builtins)} Your own is named like {kind}s.py:{use}."
        )
    module = _load_file(place, kind) if place.endswith(".py") else _load_module(place, name, kind)
    if hasattr(module, name):
        return getattr(module, name)
    known = _functions(module)
    listed = ", ".join(known) or "none"
    raise RewardError(
        f"{place} has no function {name}.{did_you_mean(name, known)} Functions in it: {listed}."
    )


def file_stamp(use: str) -> int:
    """Time of the last change of the file in "file.py:function", in ns; 0 for the other forms."""
    place, _, _ = use.rpartition(":")
    return Path(place).expanduser().stat().st_mtime_ns if place.endswith(".py") else 0


def _functions(module: types.ModuleType) -> list[str]:
    """The public callables that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    ]


def _load_module(name: str, function: str, kind: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise RewardError(f"Importing the {kind} module {name} failed: {error}.") from error
        hint = f" Did you mean {name}.py:{function}?" if Path(f"{name}.py").exists() else ""
        raise RewardError(
            f"There is no module {name} to take {'an' if kind[0] in 'aeiou' else 'a'} {kind} from.{hint}"
        ) from error
    except Exception as error:  # whatever the user's module does while it is imported
        raise RewardError(f"Importing the {kind} module {name} failed: {describe(error)}.") from error


_loaded: dict[
    tuple[Path, int], types.ModuleType
] = {}  # by path and time of change: an edited file loads again


def _load_file(place: str, kind: str) -> types.ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise RewardError(
            f"There is no {kind} file {place} (looked for {path}).{did_you_mean(path.name, near)}"
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
        file = short_path(error.filename) if error.filename else place
        raise RewardError(f"{file}:{error.lineno}: syntax error: {error.msg}.") from error
    except Exception as error:  # whatever the user's file does while it is loaded
        del sys.modules[name]
        line = failing_line(error, str(path))
        raise RewardError(f"{line or place} failed while it was loaded: {describe(error)}.") from error
    return module


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def failing_line(error: BaseException, file: str) -> str:
    """ "rewards.py:14": the innermost line of `file` in the traceback, else the innermost line of all."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        frames.append((file if name == PICKLED_CODE else name, trace.tb_lineno))
        trace = trace.tb_next
    own = [frame for frame in frames if frame[0] == file] or frames
    return f"{short_path(own[-1][0])}:{own[-1][1]}" if own else ""


def short_path(file: str) -> str:
    """The path as the user would type it: relative if it lies below the current folder."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith("..") else relative


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean "exact"?' if one of the known words is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f' Did you mean "{close[0]}"?' if close else ""
