"""The reward `json_schema`: is the completion JSON of a given form?"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from covey.rewards.find import RewardError
from covey.rewards.settings import settings
from covey.rewards.text_match import after_thinking

Schema = str | Mapping[str, Any]
MAX_CHARACTERS = 1_000_000


def _check(schema: Schema | None = None, **_: Any) -> None:
    if schema is None:
        _library()
    else:
        _validator(_key(schema))


@settings(_check)
def json_schema(
    completion: str,
    schema: Schema | None,
    *,
    fenced: bool = True,
    parsed: Annotated[float, Ge(0), Le(1)] = 0.0,
) -> dict[str, Any] | None:
    """1.0 if what stands behind </think>, or all of the completion, is JSON that the schema accepts, else 0.0.

    schema: a JSON Schema as a dict, as JSON text, or (ending in .json) as the path of a file; set for all rows in
        `args`, or a column. None is no opinion. Other documents that it refers to are not fetched.
    Settings: fenced, whether the last code block ```json ... ``` may be the JSON, with other text around it;
        parsed, the score of JSON that the schema does not accept.
    NaN, Infinity and keys given twice are no JSON here. The note `wrong` says what is the matter and where.

    >>> schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    >>> json_schema('{"age": 41}', schema=schema)
    {'score': 1.0}
    >>> json_schema('{"age": "41"}', schema=schema, parsed=0.25)
    {'score': 0.25, 'wrong': "$.age: '41' is not of type 'integer'"}
    """
    if schema is None:
        return None
    validator = _validator(_key(schema))
    text = after_thinking(completion)
    block = _last_block(text) if fenced else None
    try:
        value = _read(text if block is None else block)
    except (ValueError, RecursionError) as error:
        return {"score": 0.0, "wrong": f"no JSON: {error}"[:200]}
    from referencing.exceptions import Unresolvable

    try:
        error = next(validator.iter_errors(value), None)
    except RecursionError:
        return {"score": parsed, "wrong": "nested too deeply"}
    except Unresolvable as missing:
        raise RewardError(
            f"json_schema: the schema refers to {missing.ref}, which is not part of it"
        ) from missing
    if error is None:
        return {"score": 1.0}
    return {"score": parsed, "wrong": f"{error.json_path}: {error.message}"[:200]}


def _read(text: str) -> Any:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters")
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


def _last_block(text: str) -> str | None:
    """What is in the last closed code block ``` or ```json."""
    lines, start, block = text.split("\n"), None, None
    for i, line in enumerate(line.strip() for line in lines):
        if start is None and line.startswith("```"):
            start = i
        elif start is not None and line == "```":
            if lines[start].strip().removeprefix("```").strip().lower() in ("", "json"):
                block = "\n".join(lines[start + 1 : i])
            start = None
    return block


def _key(schema: Schema) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _library() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise RewardError("json_schema needs the package jsonschema: pip install 'covey[rewards]'") from error
    return jsonschema


@functools.lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    """schema: JSON text, or the path of a .json file, which is read once."""
    jsonschema = _library()
    from referencing import Registry

    try:
        form = json.loads(Path(schema).read_text(encoding="utf-8") if schema.endswith(".json") else schema)
        kind = jsonschema.validators.validator_for(form)
        kind.check_schema(form)
    except OSError as error:
        raise RewardError(f"json_schema: cannot read the schema {schema}: {error.strerror}") from error
    except (ValueError, jsonschema.SchemaError) as error:
        what = getattr(error, "message", error)
        raise RewardError(f"json_schema: {schema[:80]!r} is not a JSON Schema: {what}") from error
    return kind(form, registry=Registry(), format_checker=kind.FORMAT_CHECKER)
