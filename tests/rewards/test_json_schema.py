"""`json_schema`: JSON as the standard has it, and the schema as the package jsonschema reads it."""

import json
import socket

import pytest

from covey.rewards import json_schema as module
from covey.rewards.json_schema import json_schema
from covey.rewards.reward import RewardError, RewardSpec, load_reward
from covey.rewards.worker import Worker

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ('{"name": "Ann", "age": 41}', 1),
        (' \n{"name": "Ann"}\n', 1),
        ('{"name": "Änn \\u00e9"}', 1),
        ('{"age": 41}', 0),
        ('{"name": "Ann", "age": "41"}', 0),
        ('{"name": "Ann", "age": -1}', 0),
        ('{"name": "Ann", "age": true}', 0),
        ('{"name": "Ann", "age": NaN}', 0),
        ('{"name": "Ann", "age": Infinity}', 0),
        ('{"name": "Ann", "name": "Bob"}', 0),
        ('{"name": "Ann", "hobby": "chess"}', 0),
        ("{'name': 'Ann'}", 0),
        ('{"name": "Ann",}', 0),
        ('{"name": "Ann"} as you asked', 0),
        ('{"name": "Ann"', 0),
        ("null", 0),
        ("", 0),
        ('Here:\n```json\n{"name": "Ann"}\n```\nDone.', 1),
        ('```\n{"name": "Ann"}\n```', 1),
        ('```json\n{"age": 1}\n```\n```json\n{"name": "Ann"}\n```', 1),  # the last one
        ('```json\n{"name": "Ann"}\n```\n```json\n{"age": 1}\n```', 0),
        ('```python\nx = 1\n```\n{"name": "Ann"}', 0),
        ('```json\n{"name": "Ann"}', 0),
        ('<think>{"age": 1}</think>{"name": "Ann"}', 1),
        ('<think>{"name": "Ann"}', 0),
        ("[" * 100_000, 0),
        ("```json\n" * 100_000, 0),
        ('{"name": "Ann", "age": ' + "9" * 5000 + "}", 0),
        ('{"name": "' + "a" * 1_000_000 + '"}', 0),
    ],
)
def test_what_is_accepted(completion, score):
    scored = json_schema(completion, schema=PERSON)
    assert scored is not None and scored["score"] == score
    assert ("wrong" in scored) == (not score)


def test_a_fence_may_be_forbidden():
    text = '```json\n{"name": "Ann"}\n```'
    assert json_schema(text, schema=PERSON, fenced=False) == {
        "score": 0.0,
        "wrong": "no JSON: Expecting value: line 1 column 1 (char 0)",
    }


def test_json_of_another_form_may_be_worth_something():
    assert json_schema('{"name": 3}', schema=PERSON, parsed=0.25) == {
        "score": 0.25,
        "wrong": "$.name: 3 is not of type 'string'",
    }
    scored = json_schema("{name: 3}", schema=PERSON, parsed=0.25)
    assert scored is not None and scored["score"] == 0.0


def test_a_schema_may_be_text_or_a_file(tmp_path):
    file = tmp_path / "person.json"
    file.write_text(json.dumps(PERSON))
    for schema in (json.dumps(PERSON), str(file)):
        assert json_schema('{"name": "Ann"}', schema=schema) == {"score": 1.0}
    assert json_schema("{}", schema=None) is None


def test_formats_are_checked():
    assert json_schema('"2024-12-31"', schema={"format": "date"}) == {"score": 1.0}
    assert json_schema('"2024-13-31"', schema={"format": "date"})["score"] == 0.0  # type: ignore[index]


def test_formats_that_nobody_checks_are_said():
    def note(schema):
        return load_reward(RewardSpec("json_schema", args={"schema": schema})).note

    assert note({"properties": {"day": {"format": "no-such"}, "mail": {"format": "email"}}}) == (
        "not checked: format no-such"
    )
    assert note({"format": "date"}) == note({"properties": {"format": {"type": "string"}}}) == ""


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"pattern": "^(a+)+$"}, json.dumps("a" * 40 + "!")),
        ({"propertyNames": {"pattern": "^(a|a)*$"}}, json.dumps({"a" * 40 + "!": 1})),
        ({"uniqueItems": True}, json.dumps([{"a": i} for i in range(6000)])),
    ],
)
def test_what_takes_for_ever_to_check_is_given_up(monkeypatch, schema, text):
    worker = Worker("covey.rewards.json_schema", 0.3)
    monkeypatch.setattr(module, "_worker", worker)
    assert json_schema(text, schema=schema, parsed=0.25) == {
        "score": 0.25,
        "wrong": "it took more than 1 s to check",
    }
    assert json_schema('"aaa"', schema={"pattern": "^(a+)+$"}) == {"score": 1.0}
    worker.stop()


def test_nesting_that_is_too_deep_for_the_validator():
    text = "[" * 900 + "]" * 900
    assert json_schema(text, schema={"items": {"$ref": "#"}}) == {"score": 0.0, "wrong": "nested too deeply"}


def test_no_schema_is_fetched():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        place = f"http://127.0.0.1:{server.getsockname()[1]}/other.json"
        with pytest.raises(RewardError, match="other"):
            json_schema("1", schema={"$ref": place})
        with pytest.raises(TimeoutError):
            server.accept()
