"""Loading a recipe: a YAML file, a shipped recipe's name or a dict, then `section.key=value` overrides.

All mistakes are reported at once, one line each, with the file's line and the key that was probably meant.
Nothing heavy is imported here, so that a typing mistake costs a fraction of a second.
"""

import difflib
import json
import numbers
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from covey.rl.config import DpoConfig, GrpoConfig, SftConfig
from covey.rl.config_hints import suggest
from covey.rl.config_types import Section
from covey.rl.config_yaml import KeyPath, Origin, Problem, Tree, dotted, dump_yaml, parse_scalar, parse_yaml

Source = str | os.PathLike[str] | Mapping[str, Any] | BaseModel | None
Overrides = Sequence[str] | Mapping[str, Any]
Config = TypeVar("Config", bound=GrpoConfig | SftConfig | DpoConfig)

RECIPES = Path(__file__).parents[1] / "configs"
COMMAND_LINE = "command line"
EXAMPLES = {
    "model.path": 'a folder, a hub id such as Qwen/Qwen3-0.6B, a .gguf file, or "tiny"',
    "data.train": "FILE.jsonl, a hub id such as openai/gsm8k:main:train, or task:NAME",
    "rewards.use": 'a built-in name, "module:function" or "file.py:function"',
}


class ConfigError(ValueError):
    """What is wrong with a recipe: one line per mistake."""


def load_config(source: Source, overrides: Overrides, model: type[Config]) -> Config:
    """A validated configuration.

    source: a YAML file, the name of a recipe in configs/ ("quickstart"), a nested mapping, a configuration,
        or None to start from the defaults.
    overrides: "section.key=value" texts (YAML scalars; lists and mappings in flow syntax; list items by
        index: "rewards.0.weight=2"), or a mapping with nested or dotted keys. Later ones win.
    Raises ConfigError.
    """
    tree = _read(source)
    if isinstance(tree.value, dict):
        _apply(tree, overrides, model)
        config = _validate(tree, model)
    else:
        tree.blame((), f"expected sections (key: value lines), got {_show(tree.value)}")
        config = None
    if tree.problems or config is None:
        lines = [str(problem) for problem in sorted(tree.problems, key=lambda problem: problem.origin.line)]
        raise ConfigError("\n".join(lines))
    return config


def dump_config(config: GrpoConfig | SftConfig | DpoConfig) -> str:
    """The whole configuration, defaults included, as YAML that `load_config` reads back as an equal one."""
    return dump_yaml(config.model_dump())


def recipes() -> list[str]:
    """Names of the recipes that come with covey."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


# Reading the source


def _read(source: Source) -> Tree:
    if source is None:
        return Tree(value={})
    if isinstance(source, BaseModel):
        return Tree(value=source.model_dump(exclude_unset=True))
    if isinstance(source, Mapping):
        return Tree(value=_plain(source))
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"expected a file, the name of a recipe or a mapping, got {_show(source)}")
    path, label = _find(source)
    try:
        return parse_yaml(path.read_text(encoding="utf-8-sig"), label)
    except UnicodeDecodeError:
        raise ConfigError(f"{label}: not a text file in UTF-8") from None


def _find(source: str | os.PathLike[str]) -> tuple[Path, str]:
    """The file, and what messages call it."""
    path = Path(source).expanduser()
    shipped = RECIPES / f"{source}.yaml"
    if path.is_file():
        return path, str(source)
    if path.name == str(source) and shipped.is_file():
        return shipped, shipped.name
    if path.is_dir():
        inner = path / "config.yaml"  # as in a run's folder
        advice = f". Did you mean {inner}?" if inner.is_file() else ""
        raise ConfigError(f"{source}: a folder, not a recipe{advice}")
    siblings = [str(p.relative_to(".") if not path.is_absolute() else p) for p in _yaml_files(path.parent)]
    close = difflib.get_close_matches(str(path), siblings, n=1)
    close = close or difflib.get_close_matches(path.stem, recipes(), n=1)
    advice = f"Did you mean {close[0]}?" if close else f"Recipes that come with covey: {', '.join(recipes())}"
    raise ConfigError(f"{source}: no such file. {advice}")


def _yaml_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]) if folder.is_dir() else []


def _plain(value: Any) -> Any:
    """What YAML would have given: dicts, lists, text and Python's own numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return value


# Overrides


def _apply(tree: Tree, overrides: Overrides, model: type[Section]) -> None:
    if isinstance(overrides, Mapping):
        for path, value in _flatten(_plain(overrides)):
            _set(tree, path, value, Origin(""), model)
        return
    for text in overrides:
        key, equals, written = text.partition("=")
        origin = Origin(COMMAND_LINE)
        if not equals or not key.strip():
            tree.problems.append(Problem(origin, (), f'expected section.key=value, got "{text}"'))
            continue
        path = tuple(key.strip().split("."))
        parsed = _parse_override(written)
        _set(tree, path, parsed.value, origin, model)
        tree.problems += [Problem(origin, path, problem.message) for problem in parsed.problems]


def _parse_override(written: str) -> Tree:
    """A scalar is taken whole ("####" and "Q: {x}" are text); flow syntax starts with [ or { or a quote."""
    if written[:1] in ("[", "{", '"', "'"):
        return parse_yaml(written, COMMAND_LINE)
    try:
        return Tree(parse_scalar(written))
    except ValueError as error:
        return Tree(written, problems=[Problem(Origin(COMMAND_LINE), (), str(error))])


def _flatten(mapping: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    leaves: list[tuple[tuple[str, ...], Any]] = []
    for key, value in mapping.items():
        path = (*prefix, *key.split("."))
        leaves += _flatten(value, path) if isinstance(value, dict) and value else [(path, value)]
    return leaves


def _set(tree: Tree, path: tuple[str, ...], value: Any, origin: Origin, model: type[Section]) -> None:
    node: Any = tree.value
    done: KeyPath = ()
    for key, following in zip(path, (*path[1:], None), strict=True):
        place: Any = _index(node, key) if isinstance(node, list) else key
        if place is None:
            message = f"not an item of {dotted(done)}; the next free one is {dotted((*done, len(node)))}"
            tree.problems.append(Problem(origin, path, message))
            return
        done = (*done, place)
        if isinstance(node, list) and place == len(node):
            node.append(None)
        if following is None:
            node[place] = value
        elif not isinstance(node[place] if isinstance(node, list) else node.get(place), dict | list):
            mapping = get_origin(_locate(model, done)[1]) is dict  # its keys may be numbers
            node[place] = [] if following.isdecimal() and not mapping else {}
        node = node[place]
    stale = [known for known in tree.origins if known[: len(done)] == done]
    for known in stale:
        del tree.origins[known]
    tree.origins[done] = origin


def _index(items: list[Any], key: str) -> int | None:
    return int(key) if key.isdecimal() and int(key) <= len(items) else None


# Validation, and messages that say what to do


def _validate(tree: Tree, model: type[Config]) -> Config | None:
    _open_sections(tree.value, model)
    try:
        return model.model_validate(tree.value)
    except ValidationError as error:
        reported = {problem.path for problem in tree.problems}
        for detail in error.errors(include_url=False):
            path, annotation = _locate(model, detail["loc"])
            path, message = _explain(detail, path, annotation, tree, model)
            if path not in reported:
                reported.add(path)
                tree.blame(path, message)
    return None


def _open_sections(values: dict[str, Any], model: type[Section]) -> None:
    """A header with nothing under it is an empty section, and a missing section is missing its keys."""
    for name, info in model.model_fields.items():
        is_section = isinstance(info.annotation, type) and issubclass(info.annotation, Section)
        if values.get(name, name) is None:
            del values[name]
        if is_section and info.is_required():
            values.setdefault(name, {})


def _locate(model: type[Section], location: tuple[int | str, ...]) -> tuple[KeyPath, Any]:
    """The keys of a pydantic location (which also names members of unions) and the type expected there."""
    path: KeyPath = ()
    expected: Any = model
    for part in location:
        if isinstance(expected, type) and issubclass(expected, Section):
            info = expected.model_fields.get(str(part))
            expected = info.annotation if info else None
        elif get_origin(expected) in (list, dict):
            expected = get_args(expected)[-1]
        else:
            break
        path = (*path, part)
    return path, expected


def _explain(
    detail: Any, path: KeyPath, expected: Any, tree: Tree, model: type[Section]
) -> tuple[KeyPath, str]:
    kind, got, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return path, suggest(path, model)
    if kind == "missing":
        example = EXAMPLES.get(dotted(tuple(key for key in path if isinstance(key, str))))
        return path, "missing" + (f"; give {example}" if example else "")
    if kind == "value_error":
        return _named_in(str(context["error"]), path, model)
    bounds = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    for bound, words in bounds.items():
        if bound in context and isinstance(got, int | float):
            return path, f"must be {words} {context[bound]:g}, got {_show(got)}"
    if kind == "finite_number":
        return path, f"must be a finite number, got {_show(got)}"
    advice = _advice(path, expected, got, tree.origin(path))
    return path, f"expected {_describe(expected)}, got {_show(got)}{advice}"


def _named_in(message: str, path: KeyPath, model: type[Section]) -> tuple[KeyPath, str]:
    """A check of several keys begins its message with "section.key: ", which is then the place to name."""
    key, colon, rest = message.partition(": ")
    named: KeyPath = tuple(key.split("."))
    is_key = bool(colon) and _locate(model, named)[1] is not None
    return (named, rest) if is_key else (path, message)


def _advice(path: KeyPath, expected: Any, got: Any, origin: Origin) -> str:
    members = _members(expected)
    if str in members and isinstance(got, bool | int | float):
        quoted = f'"{_show(got)}"'
        return f"; write {dotted(path)}='{quoted}'" if origin.source == COMMAND_LINE else f"; write {quoted}"
    if str in members and isinstance(got, dict | list):
        return "; put text that starts with { or [ in quotes"
    if int in members and isinstance(got, float) and got.is_integer():
        return f"; write {int(got)}"
    return ""


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, without the bounds that Annotated adds."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    return (annotation,)


def _describe(annotation: Any) -> str:
    *others, last = [word for member in _members(annotation) for word in _words(member)]
    return f"{', '.join(others)} or {last}" if others else last


def _words(kind: Any) -> list[str]:
    simple = {float: "a number", int: "a whole number", str: "text", types.NoneType: "null"}
    if kind in simple:
        return [simple[kind]]
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return [_show(choice) for choice in get_args(kind)]
    if get_origin(kind) is list:
        return [f"a list with {_describe(get_args(kind)[0])} as items"]
    if isinstance(kind, type) and issubclass(kind, Section):
        required = [name for name, info in kind.model_fields.items() if info.is_required()]
        return [f"a section ({(required or list(kind.model_fields))[0]}: …)"]
    return ["a mapping (key: value)"]


def _show(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)  # json would write NaN
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
