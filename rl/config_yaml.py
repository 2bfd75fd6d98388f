"""YAML as a recipe needs it: scalars after YAML 1.2, every value with its line, mistakes collected.

PyYAML follows YAML 1.1, where `1e-5` is text, `no` is false, `010` is 8 and the second of two equal keys wins
in silence. Here a plain scalar is null, true or false, a number, or text, and the rest is refused.
"""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

KeyPath = tuple[str | int, ...]

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_LEADING_ZERO = re.compile(r"[-+]?0\d+", re.ASCII)
_INT = re.compile(r"[-+]?\d+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MAX_DEPTH = 32  # an alias to its own parent would nest for ever


class Origin(NamedTuple):
    """Where a value was written. An empty source (a Python dict) prints as nothing."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Problem(NamedTuple):
    origin: Origin
    path: KeyPath
    message: str

    def __str__(self) -> str:
        place = f"{self.origin} {dotted(self.path)}".strip()
        return f"{place}: {self.message}" if place else self.message


@dataclass
class Tree:
    """Plain values (dict, list, text, numbers, None), where each was written, and what was wrong so far."""

    value: Any
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def origin(self, path: KeyPath) -> Origin:
        """Of the value at `path`, or of the nearest section around it."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, Origin(""))

    def blame(self, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(self.origin(path), path, message))


def dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


def parse_scalar(text: str) -> Any:
    """A plain scalar: None, bool, int, float or the text itself. ValueError for `010`, which is 8 or 10.

    >>> [parse_scalar(text) for text in ("1e-5", "5", "no", "true", "1:30")]
    [1e-05, 5, 'no', True, '1:30']
    """
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _LEADING_ZERO.fullmatch(text):
        raise ValueError(_leading_zero(text))
    if _INT.fullmatch(text):
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _leading_zero(text: str) -> str:
    readings = {int(text)}
    if not set("89") & set(text):
        readings.add(int(text, 8))
    choice = " or ".join(str(reading) for reading in sorted(readings))
    return f'{text} has a leading zero: write {choice}, or "{text}" in quotes if it is text'


class _Loader(yaml.SafeLoader):
    """Composes nodes only; a plain scalar gets the tag PLAIN, so that `parse_scalar` decides what it is."""

    PLAIN = "plain"

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return self.PLAIN
        return super().resolve(kind, value, implicit)


_Loader.yaml_implicit_resolvers = {}
_TEXT_TAG = "tag:yaml.org,2002:str"


def parse_yaml(text: str, source: str) -> Tree:
    """Reads one YAML document; `source` is what messages call it. An empty document is an empty mapping."""
    tree = Tree(value={}, origins={(): Origin(source)})
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
        context = getattr(error, "context", None)
        origin = Origin(source, mark.line + 1 if mark else 0)
        tree.problems.append(
            Problem(origin, (), f"not valid YAML: {reason}{f' ({context})' if context else ''}")
        )
        return tree
    if node is not None:
        tree.value = _build(node, (), tree)
    return tree


def _build(node: yaml.Node, path: KeyPath, tree: Tree) -> Any:
    if len(path) > _MAX_DEPTH:
        tree.blame(path[:2], "nested too deeply")
        return None
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(node, path, tree)
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            tree.origins[(*path, i)] = Origin(tree.origins[()].source, item.start_mark.line + 1)
        return [_build(item, (*path, i), tree) for i, item in enumerate(node.value)]
    if node.tag == _Loader.PLAIN:
        try:
            return parse_scalar(node.value)
        except ValueError as error:
            tree.blame(path, str(error))
    elif node.tag != _TEXT_TAG:
        tree.blame(path, f"tags like {node.tag} are not read here")
    return node.value


def _build_mapping(node: yaml.MappingNode, path: KeyPath, tree: Tree) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    source = tree.origins[()].source
    for key_node, value_node in node.value:
        origin = Origin(source, key_node.start_mark.line + 1)
        if not isinstance(key_node, yaml.ScalarNode):
            tree.problems.append(
                Problem(origin, path, "a key has to be a word (text that starts with { or [ needs quotes)")
            )
            continue
        key = (*path, key_node.value)
        if key_node.value in mapping:
            first = tree.origins[key].line
            tree.problems.append(Problem(origin, key, f"given twice (first on line {first})"))
            continue
        tree.origins[key] = origin
        mapping[key_node.value] = _build(value_node, key, tree)
    return mapping


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    try:  # only double quotes can hold every control character and line separator
        is_plain = parse_scalar(text) == text and text.isprintable()
    except ValueError:
        is_plain = False
    return dumper.represent_scalar(_TEXT_TAG, text, style=None if is_plain else '"')


_Dumper.add_representer(str, _represent_text)


def dump_yaml(value: Any) -> str:
    """YAML that `parse_yaml` reads back as an equal value (and so does PyYAML)."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
