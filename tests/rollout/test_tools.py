"""Calls of tools: what the model is told of a function, how its calls are read, and what it reads back."""

import asyncio
import json
import time
from typing import Any, Literal

import pytest

from covey.rollout.environment import EpisodeError, check_step
from covey.rollout.tools import MOST_CHARACTERS, PARSERS, ToolEnvironment, choose_parser, hermes, make_tool


def scale(value: float, unit: Literal["m", "km"], times: int = 1) -> dict[str, Any]:
    """Scales a length.

    Args:
        value: the length
        unit: of the length
        times: how often
    """
    return {"length": value * times, "unit": unit}


async def wait(seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "waited"


def sleep(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "slept"


def fail(text: str) -> str:
    """Fails.

    Args:
        text: why
    """
    raise LookupError(text)


def repeat(times: int) -> str:
    """Writes much.

    Args:
        times: how much
    """
    return "x" * times


def answers(*calls: tuple[str, Any], timeout: float | None = None) -> tuple[list[str], dict[str, int]]:
    reply = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls
    )
    environment = ToolEnvironment([make_tool(f) for f in (scale, wait, sleep, fail, repeat)], hermes, timeout)
    messages, done, reward = asyncio.run(environment.step(reply))
    assert (done, reward) == (not calls, None)
    assert [(m["role"], m["name"]) for m in messages] == [("tool", name) for name, _ in calls]
    assert [m["tool_call_id"] for m in messages] == [f"{k:09d}" for k in range(1, len(calls) + 1)]
    return [message["content"] for message in messages], environment.notes


def test_the_schema_follows_from_signature_and_docstring() -> None:
    schema = make_tool(scale).schema
    described = {name: part for name, part in schema["function"].items() if name != "return"}
    assert schema["type"] == "function" and described == {
        "name": "scale",
        "description": "Scales a length.",
        "parameters": {
            "type": "object",
            "properties": {
                "value": {"type": "number", "description": "the length"},
                "unit": {"type": "string", "enum": ["m", "km"], "description": "of the length"},
                "times": {"type": "integer", "description": "how often"},
            },
            "required": ["value", "unit"],
        },
    }


def test_calls_are_answered_in_their_order_with_converted_arguments() -> None:
    contents, notes = answers(
        ("scale", {"value": "1.5", "unit": "km", "times": 2}),
        ("wait", {"seconds": 0}),
        ("sleep", {"seconds": 0}),
    )
    assert contents == ['{"length": 3.0, "unit": "km"}', "waited", "slept"]
    assert notes == {"tool_calls": 3, "tool_errors": 0}


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("scale", {"value": "far", "unit": "km"}, "Error: value: Input should be a valid number"),
        ("scale", {"value": 1, "unit": "mile"}, "Error: unit: Input should be 'm' or 'km'"),
        ("scale", {"value": 1}, "Error: unit: Missing required argument"),
        ("scale", {"value": 1, "unit": "m", "colour": 1}, "Error: colour: Unexpected keyword argument"),
        ("fail", {"text": "no such city"}, "Error: LookupError: no such city"),
        ("scael", {}, "Error: there is no tool 'scael'. Tools: scale, wait, sleep, fail, repeat"),
        ("wait", {"seconds": 2}, "Error: wait took longer than 0.05 seconds"),
        ("sleep", {"seconds": 2}, "Error: sleep took longer than 0.05 seconds"),
    ],
)
def test_what_goes_wrong_is_text_for_the_model(name: str, arguments: dict[str, Any], text: str) -> None:
    (content,), notes = answers((name, arguments), timeout=0.05)
    assert content.startswith(text)
    assert notes == {"tool_calls": 1, "tool_errors": 1}


def test_parameters_may_be_called_as_ours_are() -> None:
    def fetch(function: str, timeout: float) -> str:
        """Fetches.

        Args:
            function: what
            timeout: in seconds
        """
        return f"{function} within {timeout:g}"

    reply = '<tool_call>{"name": "fetch", "arguments": {"function": "it", "timeout": 3}}</tool_call>'
    messages, _, _ = asyncio.run(ToolEnvironment([make_tool(fetch)], hermes, timeout=1.0).step(reply))
    assert messages[0]["content"] == "it within 3"


def test_half_a_character_does_not_reach_the_tokenizer() -> None:
    """JSON can spell one, and a tool repeats it; a tokenizer raises on it."""
    reply = '<tool_call>{"name": "fail", "arguments": {"text": "\\ud800"}}</tool_call><tool_call>{"name": "\\ud800"}'
    environment = ToolEnvironment([make_tool(fail)], hermes)
    messages, _, _ = check_step(asyncio.run(environment.step(reply)), "step()")
    assert messages[0]["content"] == "Error: LookupError: ?" and messages[1]["name"] == "?"


def test_long_answers_are_cut_and_replies_without_calls_end_the_episode() -> None:
    (content,), _ = answers(("repeat", {"times": 10_000}))
    assert content == "x" * MOST_CHARACTERS + "... (cut: 10000 characters)"
    assert answers() == ([], {"tool_calls": 0, "tool_errors": 0})


def test_functions_that_cannot_be_described_are_refused() -> None:
    def bare(a: int) -> int:
        return a

    def half(a: int, b: int) -> int:
        """Adds.

        Args:
            a: a number
        """
        return a + b

    with pytest.raises(EpisodeError, match=r"The tool bare cannot be described .* docstring"):
        make_tool(bare)
    with pytest.raises(EpisodeError, match=r"The tool half cannot be described .* b"):
        make_tool(half)
    with pytest.raises(EpisodeError, match="is no function"):
        make_tool(dict)


BAD = "one that cannot be read"


@pytest.mark.parametrize(
    ("parser", "reply", "calls"),
    [
        ("hermes", "no call at all", []),
        ("hermes", 'So: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name":"g"}',
         [("f", {}), ("g", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": [2]}"}</tool_call>',
         [("f", {"a": [2]})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', [BAD]),
        ("hermes", '<tool_call>["f"]</tool_call>', [BAD]),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', [BAD]),
        ("hermes", '<think><tool_call>{"name": "f"}</tool_call></think>No need.', []),
        ("hermes", "<tool_call>" + "[" * 100_000, [BAD]),
        ("llama3", "The answer is {4}.", []),
        ("llama3", '{"name": "f", "parameters": {"a": "x"}}', [("f", {"a": "x"})]),
        ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', [("f", {})]),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
         [("f", {}), ("g", {"b": 2})]),
        ("llama3", '<|python_tag|>search.call(query="rain (today)", n=3)',
         [("search", {"query": "rain (today)", "n": 3})]),
        ("llama3", 'search.call(query=__import__("os"))', [BAD]),
        ("llama3", "search.call(3)", [BAD]),
        ("llama3", '{"name": "f", "parameters": {"a": ', [BAD]),
        ("llama3", '{"answer": 3}', []),
        ("mistral", "Plain text with [1, 2].", []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
         [("f", {"a": 1}), ("g", {})]),
        ("mistral", 'Let me see. [{"name": "f", "arguments": {"a": 1}, "id": "012345678"}]',
         [("f", {"a": 1})]),
        ("mistral", '[{"arguments": {"a": 1}, "name": "f"}]', [("f", {"a": 1})]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}', [BAD]),
        ("mistral", "[TOOL_CALLS] [3]", [BAD]),
        ("mistral", "[TOOL_CALLS]" + "[" * 100_000, [BAD]),
        ("llama3", '{"name": "f", "parameters": ' + "[" * 100_000, [BAD]),
        ("llama3", '{"a": ' * 100_000, []),
    ],
)  # fmt: skip
def test_parsers(parser: str, reply: str, calls: list[Any]) -> None:
    found = PARSERS[parser](reply)
    assert [BAD if call.problem else (call.name, dict(call.arguments)) for call in found] == calls


def test_the_parser_follows_from_the_chat_template() -> None:
    assert choose_parser("... <tool_call> ... ipython") == "hermes"
    assert choose_parser("{{ '<|python_tag|>' }}") == choose_parser("role == 'ipython'") == "llama3"
    assert choose_parser("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert choose_parser("plain ChatML") == "hermes"
