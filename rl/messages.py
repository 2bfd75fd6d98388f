"""Conversations and tools as rows hold them: messages with role and content, or ShareGPT's with from and value."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from covey.rl.files import ArrowRow, DataError

Message = Mapping[str, Any]

CALL = "function_call"  # ShareGPT: an assistant's turn whose text is the JSON of a call
ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    CALL: "assistant",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
} | {role: role for role in ("system", "user", "assistant", "tool")}


def role_of(message: Message, roles: Mapping[str, str]) -> str | None:
    """Who speaks, under the usual name; roles: {name in the data: role}, before the names that are known."""
    name = message.get("role") or message.get("from")
    if not isinstance(name, str):
        return None
    return roles.get(name, ROLES.get(name.lower(), name))


def read_messages(
    row: Mapping[str, Any], column: str, where: str, roles: Mapping[str, str]
) -> tuple[Message, ...]:
    """The messages in a column, a list or JSON text with one; keys that are null are left out. Raises DataError."""
    value = _written(row, column)
    if isinstance(value, str):  # as CSV holds them
        value = _json(value) or value
    if not isinstance(value, list | tuple) or not value:
        raise DataError(
            f'{where}: "{column}" is {short(value)}. It must be a list like [{{"role": "user", "content": "..."}}].'
        )
    return tuple(
        _message(m, f'{where}: "{column}", message {number}', roles) for number, m in enumerate(value)
    )


def read_tools(row: Mapping[str, Any], column: str, where: str) -> tuple[Mapping[str, Any], ...]:
    """What a column says about the tools there are: a list of objects, or JSON text with one. Raises DataError."""
    value = _written(row, column)
    tools = _json(value) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(
            f'{where}: "{column}" is {short(value)}. Tools are a list like [{{"type": "function", "function": '
            '{"name": "...", "parameters": {...}}}]: correct this row, or rename the column if it is no such list.'
        )
    return tuple(tools)


def with_text_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text, as OpenAI has them and some chat templates expect."""
    return {**message, "tool_calls": [_with_arguments(call, json.dumps) for call in message["tool_calls"]]}


def called(message: Message) -> list[str]:
    """The names of the functions that the message calls."""
    functions = [call.get("function", call) for call in message.get("tool_calls", ())]
    return [str(function.get("name", "")) for function in functions]


def short(value: Any) -> str:
    """A value for a message of an error, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _message(message: Any, place: str, roles: Mapping[str, str]) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f'{place} is {short(message)}. Write {{"role": "user", "content": "..."}}.')
    if (role := role_of(message, roles)) is None:
        raise DataError(f'{place} has no "role". It must say who speaks: system, user or assistant.')
    content = message.get("value") if message.get("content") is None else message["content"]
    calls = message.get("tool_calls") or []
    if message.get("role", message.get("from")) == CALL and role == "assistant":
        content, calls = "", _calls_in(content, place)
    if not (isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)):
        raise DataError(f'{place} has "tool_calls" that are no list of objects. Correct or remove this row.')
    if content is None and calls:
        content = ""
    if not isinstance(content, str | list):
        raise DataError(f'{place} has no text in "content". Correct or remove this row.')
    named = ("role", "from", "content", "value", "tool_calls")
    others = {key: part for key, part in message.items() if part is not None and key not in named}
    calls = [_with_arguments(call, _parsed_arguments) for call in calls]
    return {"role": role, "content": content, **({"tool_calls": calls} if calls else {}), **others}


def _calls_in(text: Any, place: str) -> list[dict[str, Any]]:
    value = _json(text) if isinstance(text, str) else None
    functions = value if isinstance(value, list) else [value]
    if not all(
        isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions
    ):
        raise DataError(
            f'{place} is a {CALL}, but {short(text)} is not JSON like {{"name": "...", "arguments": {{...}}}}. '
            "Correct or remove this row."
        )
    return [{"type": "function", "function": function} for function in functions]


def _with_arguments(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The call with change(arguments) as its arguments, wherever they stand."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else dict(call)


def _parsed_arguments(arguments: Any) -> Any:
    """OpenAI's arguments are JSON text, which most chat templates would write as a text inside JSON."""
    value = _json(arguments) if isinstance(arguments, str) else None
    return value if isinstance(value, dict) else arguments


def _json(text: str) -> Any:
    """None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _written(row: Mapping[str, Any], column: str) -> Any:
    """What stands in the column, without the nulls that Arrow has put into its objects."""
    value = row.get(column)
    return _without_nulls(value) if isinstance(row, ArrowRow) else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list | tuple) else value
