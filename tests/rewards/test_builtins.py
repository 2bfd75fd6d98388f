"""The rewards that look at text and tokens, and what all built-ins share. Their docstrings' examples run too."""

import doctest
import importlib
import inspect
import math
import subprocess
import sys

import pytest

from covey.rewards import text_match
from covey.rewards.length import length
from covey.rewards.repetition import repetition
from covey.rewards.reward import BUILTINS, RewardError, RewardSpec, find_function, load_reward
from covey.rewards.text_match import exact, first_number, format, regex

MODULES = sorted({place.partition(":")[0] for place in BUILTINS.values()})


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


# --- exact, first_number ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "settings", "score"),
    [
        ("  Paris\n", "Paris", {}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("\n 4\nmore", 4, {"first_line": True}, 1.0),
        ("\n 4\nmore", 4, {}, 0.0),
        ("", "4", {}, 0.0),
        ("4", None, {}, None),
        ("<think>5?</think>\n4", "4", {}, 1.0),
        ("4</think>5", "4", {}, 0.0),
        ("<think>4", "<think>4", {}, 0.0),
        ("Rome", ["Paris", "Rome"], {}, 1.0),
        ("ROME", ["Paris", "Rome"], {"ignore_case": True}, 1.0),
        ("Bonn", ["Paris", "Rome"], {}, 0.0),
    ],
)
def test_exact(completion, answer, settings, score):
    assert exact(completion, answer, **settings) == score


@pytest.mark.parametrize("answer", ["  ", [], ["Paris", ""], float("nan")])
def test_exact_wants_an_answer(answer):
    with pytest.raises(RewardError):
        exact("72", answer)


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (" 72\n48 + 3 = 51", "72", 1.0),
        (" 72.", "72", 1.0),
        (" 72.0", 72, 1.0),
        (" 720", "72", 0.0),
        (" 7 2", "72", 0.0),
        (" -5", "-5", 1.0),
        (" \N{MINUS SIGN}5", "-5", 1.0),
        (" 5", "-5", 0.0),
        (" 1,072 in all", "1072", 1.0),
        (" 1,0725", "1", 1.0),
        ("$.50", "0.5", 1.0),
        ("none", "72", 0.0),
        ("", 72.0, 0.0),
        ("72", None, None),
    ],
)
def test_first_number(completion, answer, score):
    assert first_number(completion, answer) == score


@pytest.mark.parametrize("answer", ["", " ", "seventy", "1 2"])
def test_first_number_wants_a_number_as_answer(answer):
    with pytest.raises(RewardError):
        first_number("72", answer)


# --- regex --------------------------------------------------------------------------------------------------

NAMED = r"Total: (?P<answer>\d+)"


@pytest.mark.parametrize(
    ("completion", "answer", "settings", "score"),
    [
        ("so Total: 18 eggs", "", {"pattern": r"Total: \d+"}, 1.0),
        ("so total: 18 eggs", "", {"pattern": r"Total: \d+"}, 0.0),
        ("so total: 18 eggs", "", {"pattern": r"(?i)Total: \d+"}, 1.0),
        ("so Total: 18", "", {"pattern": r"Total: \d+", "full": True}, 0.0),
        ("Total: 18", "", {"pattern": r"Total: \d+", "full": True}, 1.0),
        ("a\nb", "", {"pattern": "a.b", "full": True}, 0.0),
        ("a\nb", "", {"pattern": "(?s)a.b", "full": True}, 1.0),
        ("Total: 18", None, {"pattern": r"Total: \d+"}, 1.0),  # the answer is not looked at
        ("Total: 17. No. Total: 18", "18", {"pattern": NAMED}, 1.0),
        ("Total: 18. No. Total: 17", "18", {"pattern": NAMED}, 0.0),
        ("Total: 18", ["17", "18"], {"pattern": NAMED}, 1.0),
        ("none", "18", {"pattern": NAMED}, 0.0),
        ("Total: 18", None, {"pattern": NAMED}, None),
        ("", "18", {"pattern": "(?P<answer>x)?"}, 0.0),
    ],
)
def test_regex(completion, answer, settings, score):
    scored = regex(completion, answer, **settings)
    assert (scored and scored["score"]) == score


def test_a_group_to_compare_needs_an_answer():
    with pytest.raises(RewardError, match="the answer is empty"):
        regex("Total: 18", pattern=NAMED)


@pytest.mark.parametrize("full", [False, True])
def test_a_pattern_that_takes_too_long_is_given_up(monkeypatch, full):
    monkeypatch.setattr(text_match, "MATCH_SECONDS", 0.2)
    assert regex("a" * 60 + "!", pattern="(a|aa)+b", full=full) == {"score": 0.0, "gave_up": True}


# --- format -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a\nb</think>42", 1.0),
        ("\n<think></think>\n\n42\n", 1.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> \n", 0.0),
        ("<think>a</think>\u200b", 0.0),  # a space of no width
        ("<think>a", 0.0),
        ("a</think>42", 0.0),
        ("so <think>a</think>42", 0.0),
        ("<think>a</think>42<think>b</think>", 0.0),
        ("<think>a<think>b</think>42", 0.0),
        ("<think>a</think>42</think>", 0.0),
        ("</think>a<think>42", 0.0),
        ("42", 0.0),
        ("<think>" + "a" * 100_000, 0.0),
        ("<think>" * 100_000, 0.0),
    ],
)
def test_format(completion, score):
    assert format(completion) == score


BOTH = ["think", "answer"]


@pytest.mark.parametrize(
    ("completion", "whole", "once", "share"),
    [
        ("<think>a</think>\n<answer>42</answer>\n", 1, 1, 1),
        ("Hm. <think>a</think> So <answer>42</answer>.", 0, 1, 1),
        ("<think>a</think><answer> </answer>", 0, 0, 1),
        ("<think>a</think><answer>\u200b\u00a0</answer>", 0, 0, 1),
        ("<answer>42</answer><think>a</think>", 0, 0, 1),  # share does not look at the order
        ("<think>a<answer>42</answer></think>", 0, 0, 1),
        ("<think>a</think>42", 0, 0, 0.5),
        ("<think>a</think><answer>42", 0, 0, 0.75),
        ("<think>a</think><answer>42</answer></answer>", 0, 0, 0.75),
        ("<think>a</think><answer>4</answer><answer>2</answer>", 0, 0, 0.5),
        ("42", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_levels_of_format(completion, whole, once, share):
    found = [format(completion, tags=BOTH, level=level) for level in ("whole", "once", "share")]
    assert found == [whole, once, share]


def test_format_where_the_template_opened_the_block():
    assert format("a</think>42", opened=True) == 1.0
    assert format("<think>a</think>42", opened=True) == 0.0
    assert format("a</think><answer>42</answer>", tags=BOTH, opened=True) == 1.0
    assert format("a</think>42", tags=BOTH, level="share", opened=True) == 0.5


# --- length, repetition -------------------------------------------------------------------------------------


# DAPO's soft overlong punishment for L_max 20, L_cache 4.
@pytest.mark.parametrize(
    ("n", "score"), [(0, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (21, -1), (99, -1)]
)
def test_overlong(n, score):
    assert length("", range(n), max_tokens=20, cache=4) == score


@pytest.mark.parametrize(
    ("n", "score"), [(0, 0), (50, 0), (60, 0.2), (100, 1), (110, 0.8), (150, 0), (999, 0)]
)
def test_target(n, score):
    assert length("", range(n), shape="target", target=100, width=50) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "n", "score"),
    [
        ("18", 0, 1.0),
        ("18", 25, 0.5 + 0.5 * (1 + math.sqrt(0.5)) / 2),  # cos 45 degrees
        ("18", 50, 0.75),
        ("18", 99, 0.5 + 0.5 * (1 + math.cos(0.99 * math.pi)) / 2),
        ("18", 100, -1.0),  # cut off
        ("17", 0, -1.0),
        ("17", 50, -0.75),
        ("17", 200, -1.0),
    ],
)
def test_cosine(text, n, score):
    assert length(text, range(n), answer="18", shape="cosine", max_tokens=100) == pytest.approx(score)


def test_cosine_with_other_numbers():
    settings = {"shape": "cosine", "max_tokens": 100, "correct": [2, 0], "wrong": [-10, -4], "beyond": -20}
    assert length("18", range(50), answer="18", **settings) == pytest.approx(1)
    assert length("17", range(50), answer="18", **settings) == pytest.approx(-7)
    assert length("18", range(100), answer="18", **settings) == -20
    assert length("The answer is 18", range(50), answer="18", verify="gsm8k", **settings) == pytest.approx(-7)
    assert length("(B)", range(50), answer="B", verify="choice", **settings) == pytest.approx(1)
    assert length("18", range(50), answer=None, **settings) is None
    with pytest.raises(RewardError, match="the answer is empty"):
        length("18", range(50), **settings)


@pytest.mark.parametrize("cache", [0, -1, 21])
def test_a_ramp_that_does_not_fit(cache):
    with pytest.raises(ValueError, match="cache"):
        length("", range(3), max_tokens=20, cache=cache)


@pytest.mark.parametrize(
    ("ids", "n", "score"),
    [
        ([1, 2, 3, 4], 2, 0.0),
        ([1, 2, 1, 2, 1], 2, -0.5),  # 12 21 12 21
        ([7] * 10, 2, -8 / 9),  # nine pairs, one of them different
        ([7] * 10, 10, 0.0),
        ([7] * 10, 11, 0.0),
        ([], 1, 0.0),
    ],
)
def test_repetition(ids, n, score):
    assert repetition("", ids, n=n) == pytest.approx(score)


def test_repetition_of_words():
    # the cat. | cat. the | the cat. | cat. the | the dog: five pairs, three different
    assert repetition("The cat. the  CAT.\nthe dog", range(9), n=2, unit="words") == pytest.approx(-0.4)
    assert repetition("so " * 100, range(9), n=3, unit="words") == pytest.approx(-97 / 98)


# --- what all built-ins share -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "args", "says"),
    [
        ("exact", {"first_line": "yes"}, r"exact\(\) \(built in\): args.first_line is 'yes': .*boolean"),
        ("exact", {"firstline": True}, 'no parameter `firstline`.*Did you mean "first_line"'),
        ("regex", {}, "args.pattern is missing"),
        ("regex", {"pattern": "(a"}, r"the pattern '\(a' is not a regular expression: missing \)"),
        ("regex", {"pattern": 3}, "args.pattern is 3: .*string"),
        ("format", {"tags": "think"}, "args.tags is 'think'"),
        ("format", {"tags": []}, r"args.tags is \[\]: give one or more"),
        ("format", {"tags": ["a", "a"]}, "different names"),
        ("format", {"tags": ["<a>"]}, "different names"),
        ("format", {"level": "hard"}, "args.level is 'hard': Input should be 'whole', 'once' or 'share'"),
        ("gsm8k", {"marked": 1}, "args.marked is 1"),
        ("choice", {"letters": "A"}, "args.letters is 'A': give two or more"),
        ("choice", {"letters": "AAB"}, "two or more different"),
        ("length", {}, "shape overlong needs args.cache"),
        ("length", {"max_tokens": 20, "cache": 0}, "args.cache is 0: .*greater than or equal to 1"),
        ("length", {"max_tokens": 20, "cache": 21}, "cache 21, max_tokens 20"),
        ("length", {"max_tokens": 20, "cache": True}, "args.cache is True"),
        ("length", {"max_tokens": 20, "cache": 4, "width": 3}, "args.width means nothing for shape overlong"),
        ("length", {"shape": "target", "target": 20}, "shape target needs args.width"),
        ("length", {"shape": "square"}, "args.shape is 'square'"),
        ("length", {"shape": "cosine", "max_tokens": 9, "wrong": [1]}, "args.wrong: give two numbers"),
        ("length", {"shape": "cosine", "max_tokens": 9, "beyond": math.inf}, "args.beyond is inf: .*finite"),
        ("length", {"shape": "cosine", "max_tokens": 9, "verify": "judge"}, "args.verify is 'judge'"),
        ("repetition", {"n": 0}, "args.n is 0"),
        ("repetition", {"unit": "letters"}, "args.unit is 'letters'"),
        ("language", {"language": "engl"}, "'engl' is none of the codes"),
        ("language", {"language": "fr", "among": ["en", "de"]}, "'fr' is none of the codes de, en"),
        ("language", {"among": ["xx"]}, r"args.among is \['xx'\]"),
        ("json_schema", {"schema": {"type": "objekt"}}, "is not a JSON Schema"),
        ("json_schema", {"schema": "{"}, "is not a JSON Schema"),
        ("json_schema", {"schema": "no_such_file.json"}, "cannot read the schema no_such_file.json"),
        ("json_schema", {"schema": {}, "parsed": 2}, "args.parsed is 2: .*less than or equal to 1"),
        ("reasoning_gym", {"partial": "no"}, "args.partial is 'no'"),
    ],
)
def test_mistakes_in_the_settings_are_errors_before_a_run(use, args, says):
    with pytest.raises(RewardError, match=says):
        load_reward(RewardSpec(use, args=args))


GOOD = {
    "regex": {"pattern": "x"},
    "length": {"max_tokens": 20, "cache": 4},
    "language": {"language": "en"},
    "json_schema": {"schema": {"type": "object"}},
    "judge": {"url": "http://localhost:8000/v1", "model": "m"},
    "model": {"path": "organisation/name"},
}


@pytest.mark.parametrize("use", sorted(set(BUILTINS) - {"code"}))
def test_settings_are_never_taken_from_columns(use):
    reward = load_reward(RewardSpec(use, args=GOOD.get(use, {})))
    parameters = inspect.signature(find_function(use)).parameters.values()
    settings = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert not settings & {*reward.required, *reward.optional}


def test_nothing_heavy_is_imported():
    modules = ", ".join(module for module in MODULES if not module.endswith("code_tests"))
    heavy = "{'math_verify', 'sympy', 'torch', 'transformers', 'pandas', 'py3langid', 'jsonschema', 'httpx2'}"
    code = f"import sys, covey.rewards.runner, {modules}\nsys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
