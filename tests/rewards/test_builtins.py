"""The rewards that compare text, and the length penalty. Their docstrings' examples run too."""

import doctest
import importlib
import subprocess
import sys

import pytest

from covey.rewards.length import length
from covey.rewards.reward import RewardError
from covey.rewards.text_match import exact, first_number, format


@pytest.mark.parametrize("module", ["text_match", "math_answer", "length"])
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(f"covey.rewards.{module}"))
    assert result.attempted > 0 and result.failed == 0


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
    ],
)
def test_exact(completion, answer, settings, score):
    assert exact(completion, answer, **settings) == score


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


def test_exact_wants_an_answer():
    with pytest.raises(RewardError):
        exact("72", "  ")


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a\nb</think>42", 1.0),
        ("\n<think></think>\n\n42\n", 1.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> \n", 0.0),
        ("<think>a", 0.0),
        ("a</think>42", 0.0),
        ("so <think>a</think>42", 0.0),
        ("<think>a</think>42<think>b</think>", 0.0),
        ("<think>a<think>b</think>42", 0.0),
        ("<think>a</think>42</think>", 0.0),
        ("42", 0.0),
        ("<think>" + "a" * 100_000, 0.0),
    ],
)
def test_format(completion, score):
    assert format(completion) == score


def test_format_with_a_pattern():
    assert format("a\nb", pattern="a.b") == 1.0
    assert format("a\nbc", pattern="a.b") == 0.0


# DAPO's soft overlong punishment for L_max 20, L_cache 4.
@pytest.mark.parametrize(
    ("n", "score"), [(0, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (21, -1), (99, -1)]
)
def test_length(n, score):
    assert length("", range(n), max_tokens=20, cache=4) == score


@pytest.mark.parametrize("cache", [0, -1, 21])
def test_length_settings(cache):
    with pytest.raises(ValueError, match="cache"):
        length("", range(3), max_tokens=20, cache=cache)


def test_nothing_heavy_is_imported():
    code = (
        "import sys, covey.rewards.runner, covey.rewards.math_answer, covey.rewards.text_match\n"
        "sys.exit(bool({'math_verify', 'sympy', 'torch', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
