"""Plain Python functions that the model may call: what it is told of them, how its calls are read and answered.

A reply with calls gets one message per call, of the role "tool"; a reply without one ends the episode. What goes wrong
in a call (no such tool, wrong arguments, an exception, too slow) is text for the model, never an error of the run.
"""

import ast
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError, validate_call

from covey.rollout.engine import Message
from covey.rollout.environment import EpisodeError, Step, call, describe

MOST_CHARACTERS = 4000  # of a tool's answer; the rest is cut off


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. problem: why it cannot be made, "" if it can."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. schema: what its chat template is given."""

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]  # checks and converts its arguments


def make_tool(function: Callable[..., Any]) -> Tool:
    """The tool of a function (or async function) with annotated parameters and a docstring in Google's style:

        def add(a: int, b: int) -> int:
            '''Adds two numbers.

            Args:
                a: the first number
                b: the second number
            '''

    EpisodeError if something of that is missing.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    name = getattr(function, "__name__", repr(function))
    if not inspect.isroutine(function):
        raise EpisodeError(
            f"The tool {name} is no function. Give a function with annotations and a docstring."
        )
    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
        raise EpisodeError(
            f"The tool {name} cannot be described to the model: {error}. It needs a type for every parameter, and a "
            'docstring with a line for each under "Args:".'
        ) from error
    return Tool(name, schema, validate_call(function))


class ToolEnvironment:
    """An Environment of tools: it ends with the first reply that calls none, and has no reward of its own.

    parse: the calls in a reply (PARSERS). timeout: seconds of a call.
    """

    def __init__(
        self, tools: Sequence[Tool], parse: Callable[[str], list[ToolCall]], timeout: float | None = None
    ):
        self.tools = {tool.name: tool for tool in tools}
        self.parse, self.timeout = parse, timeout
        self.notes = {"tool_calls": 0, "tool_errors": 0}

    def start(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        return None

    async def step(self, reply: str) -> Step:
        calls = self.parse(reply)
        return [await self._answer(made) for made in calls], not calls, None

    async def _answer(self, made: ToolCall) -> Message:
        self.notes["tool_calls"] += 1
        number = f"{self.notes['tool_calls']:09d}"  # nine letters or digits, as Mistral's templates want
        try:
            content = _as_text(await self._run(made))
        except Exception as error:  # whatever the tool does, the model may learn from it
            self.notes["tool_errors"] += 1
            content = f"Error: {_in_words(error)}"
        if len(content) > MOST_CHARACTERS:
            content = f"{content[:MOST_CHARACTERS]}... (cut: {len(content)} characters)"
        return {"role": "tool", "name": made.name, "content": content, "tool_call_id": number}

    async def _run(self, made: ToolCall) -> Any:
        if made.problem:
            raise EpisodeError(made.problem)
        if made.name not in self.tools:
            raise EpisodeError(f"there is no tool {made.name!r}. Tools: {', '.join(self.tools)}")
        bound = functools.partial(self.tools[made.name].function, **made.arguments)
        try:
            return await call(bound, timeout=self.timeout)
        except TimeoutError:
            raise EpisodeError(f"{made.name} took longer than {self.timeout:g} seconds") from None


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _in_words(error: Exception) -> str:
    if isinstance(error, EpisodeError):
        return str(error)
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return describe(error)


# ------------------------------------------------------------------------------------------------ parsers
# They read decoded text, in which special tokens such as [TOOL_CALLS] and <|python_tag|> are missing already: what
# marks a call is then its form.


def hermes(reply: str) -> list[ToolCall]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them: Hermes, Qwen 2.5 and 3."""
    text = _said(reply)
    return [_call(body) for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)]


def llama3(reply: str) -> list[ToolCall]:
    """{"name": ..., "parameters": {...}}, several with ";" between, or name.call(key="value"): Llama 3.1 to 3.3."""
    text = _said(reply).replace("<|python_tag|>", "").strip()
    if written := re.fullmatch(r"(\w+)\.call(\(.*\))", text, re.DOTALL):
        return [_python_call(*written.groups())]
    calls = []
    while text.startswith("{"):
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return calls + ([_call(text)] if re.match(r'\{\s*"name"', text) else [])
        if not isinstance(value.get("name"), str):
            break
        calls.append(_call(value))
        text = text[end:].lstrip(" ;\n")
    return calls


def mistral(reply: str) -> list[ToolCall]:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]: Mistral, up to the tokenizers of version 7."""
    text = _said(reply)
    found = re.search(r'\[TOOL_CALLS\]\s*|(?=\[\s*\{\s*"(?:name|arguments)")', text)
    if not found:
        return []
    body = text[found.end() :].strip()
    try:
        value, _ = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError):
        return [_call(body)]
    return [_call(item) for item in (value if isinstance(value, list) else [value])]


PARSERS: Mapping[str, Callable[[str], list[ToolCall]]] = {
    "hermes": hermes,
    "llama3": llama3,
    "mistral": mistral,
}


def choose_parser(template: str) -> str:
    """The name of the parser for models with this chat template; "hermes" where nothing speaks for another."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" not in template and ("<|python_tag|>" in template or "ipython" in template):
        return "llama3"
    return "hermes"


def _said(reply: str) -> str:
    """What follows the last thought: calls in one were only thought of."""
    return reply.rpartition("</think>")[2]


def _call(written: Any) -> ToolCall:
    """A call from JSON, read or not. Some models write the arguments as text with JSON in it."""
    try:
        value = json.loads(written) if isinstance(written, str) else written
        arguments = value.get("arguments", value.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(value["name"], str) and isinstance(arguments, dict):
            return ToolCall(value["name"], arguments)
    except (ValueError, KeyError, AttributeError, RecursionError):
        pass
    return ToolCall(
        "", problem='a call is JSON like {"name": "...", "arguments": {...}}, and this one is not'
    )


def _python_call(name: str, arguments: str) -> ToolCall:
    try:
        parsed = ast.parse(f"f{arguments}", mode="eval").body
        if isinstance(parsed, ast.Call) and not parsed.args and all(k.arg for k in parsed.keywords):
            return ToolCall(name, {str(k.arg): ast.literal_eval(k.value) for k in parsed.keywords})
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return ToolCall(name, problem='a call is written name.call(key="value"), with literal values')
