"""The reward `json_schema`: is the completion JSON of a given form?

JSON is held against the schema in a process of its own (worker.py): what a model writes can make a `pattern` of the
schema backtrack for ever, and "uniqueItems" takes time with the square of the items.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from covey.rewards.find import RewardError
from covey.rewards.settings import settings
from covey.rewards.text_match import after_thinking
from covey.rewards.worker import Worker, serve

Schema = str | Mapping[str, Any]
MAX_CHARACTERS = 1_000_000
CPU_SECONDS = 1.0

_worker = Worker("covey.rewards.json_schema", CPU_SECONDS)


def _check(schema: Schema | None = None, **_: Any) -> str:
    """What a user should know before the run: formats of the schema that are not checked."""
    if schema is None:
        _library()
        return ""
    form = json.loads(_checked(_key(schema)))
    missing = sorted(_formats(form) - set(_validator(json.dumps(form)).format_checker.checkers))
    return f"not checked: format {', '.join(missing)}" if missing else ""


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
    NaN, Infinity and keys given twice are no JSON here. JSON that takes more than CPU_SECONDS to check is not accepted.
    The note `wrong` says what is the matter and where.

    >>> schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    >>> json_schema('{"age": 41}', schema=schema)
    {'score': 1.0}
    >>> json_schema('{"age": "41"}', schema=schema, parsed=0.25)
    {'score': 0.25, 'wrong': "$.age: '41' is not of type 'integer'"}
    """
    if schema is None:
        return None
    form = _checked(_key(schema))
    text = after_thinking(completion)
    block = _last_block(text) if fenced else None
    text = text if block is None else block
    try:
        _read(text)
    except (ValueError, RecursionError) as error:
        return {"score": 0.0, "wrong": f"no JSON: {error}"[:200]}
    reply = _worker.ask((form, text)) or ("wrong", f"it took more than {CPU_SECONDS:g} s to check")
    status, what = reply
    if status == "missing":
        raise RewardError(f"json_schema: the schema refers to {what}, which is not part of it")
    return {"score": 1.0} if status == "right" else {"score": parsed, "wrong": what}


def _answer(question: tuple[str, str]) -> tuple[str, str]:
    """In the worker: right, wrong and why, or missing and what the schema refers to."""
    from referencing.exceptions import Unresolvable

    form, text = question
    try:
        error = next(_validator(form).iter_errors(_read(text)), None)
    except RecursionError:
        return "wrong", "nested too deeply"
    except Unresolvable as missing:
        return "missing", missing.ref
    return ("right", "") if error is None else ("wrong", f"{error.json_path}: {error.message}"[:200])


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
def _checked(schema: str) -> str:
    """A schema as JSON text. schema: that, or the path of a .json file, which is read once."""
    jsonschema = _library()
    try:
        form = json.loads(Path(schema).read_text(encoding="utf-8") if schema.endswith(".json") else schema)
        jsonschema.validators.validator_for(form).check_schema(form)
    except OSError as error:
        raise RewardError(f"json_schema: cannot read the schema {schema}: {error.strerror}") from error
    except (ValueError, jsonschema.SchemaError) as error:
        what = getattr(error, "message", error)
        raise RewardError(f"json_schema: {schema[:80]!r} is not a JSON Schema: {what}") from error
    return json.dumps(form)


@functools.lru_cache(maxsize=1024)
def _validator(form: str) -> Any:
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = json.loads(form)
    kind = validator_for(schema)
    return kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)


def _formats(schema: Any) -> set[str]:
    """What stands behind "format", anywhere in a schema."""
    if isinstance(schema, list):
        return set().union(*map(_formats, schema))
    if not isinstance(schema, dict):
        return set()
    named = {schema["format"]} if isinstance(schema.get("format"), str) else set()
    return named.union(*map(_formats, schema.values()))


if __name__ == "__main__":
    from jsonschema.validators import validator_for  # before the clock of the first answer runs

    validator_for({})({}).is_valid(1)
    serve(_answer)
