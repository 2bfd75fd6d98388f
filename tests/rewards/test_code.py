"""The reward for code: which program of a completion is run, which tests, and verdicts that cannot be talked into."""

import doctest
import json
from types import SimpleNamespace as New
from typing import Any

import pytest

from covey.rewards import code_tests, sandbox_tiers
from covey.rewards.code_tests import code, extract_program, read_tests
from covey.rewards.find import RewardError
from covey.rewards.reward import RewardSpec, check_columns, load_reward
from covey.rewards.runner import Scorer
from covey.rewards.sandbox_tiers import BOXES, choose_tiers, open_box


def works(name: str) -> bool:
    try:
        return open_box(name) is not None
    except RewardError:
        return False


# Every tier that the machine has; unsafe-local is what is left where there is none, and behaves the same.
REAL: list[Any] = [name for name in BOXES if works(name)] or ["unsafe-local"]
ALL: list[Any] = ["monty", "auto", *REAL]
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(2, 2) == 5"]


def graded(*args: Any, **settings: Any) -> dict[str, Any]:
    result = code(*args, **settings)
    assert result is not None
    return result


def test_docstring_examples():
    result = doctest.testmod(code_tests)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1"),
        ("```python\nx = 1\n```\nNo:\n```python\nx = 2\n```", "x = 2"),  # the last one
        ("```py\nx = 1\n```\nOutput:\n```text\n1\n```", "x = 1"),  # of Python
        ("```\nx = 1\n```", "x = 1"),
        ("```Python3 title=a.py\nx = 1\n```", "x = 1"),
        ("~~~python\nx = 1\n~~~", "x = 1"),
        ("1. Do:\n   ```python\n   if a:\n     x = 1\n   ```", "if a:\n  x = 1"),
        ("<think>\n```python\nx = 1\n```\n</think>\n```python\nx = 2\n```", "x = 2"),
        ("<think>\n```python\nx = 1\n```\n</think>\nx = 3", "\nx = 3"),
        ("x = 1", "x = 1"),
        ("", ""),
        ("```python\nx = 1", None),  # never closed: cut off
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1"),
        ("```js\nx = 1\n```", None),
        ('```python\ns = "```"\n```', 's = "```"'),
        ("```" * 30_000, None),
        ("```\n" * 30_001, ""),
    ],
)
def test_which_program(completion, program):
    assert extract_program(completion) == program


@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        (["assert a", "assert b"], ["assert a", "assert b"]),
        ("assert a\nassert b", ["assert a", "assert b"]),
        ("x = 1\nassert x\n\nassert (x ==\n  2)\n", ["x = 1\nassert x", "\nassert (x ==\n  2)"]),
        (json.dumps(["assert a"]), ["assert a"]),
        ([{"input": "1", "output": "2"}], [("1", "2")]),
        ([{"input": ["1", "2"], "output": 3}], [("1\n2", "3")]),
        ({"inputs": ["1", "2"], "outputs": ["3", "4"]}, [("1", "3"), ("2", "4")]),
        ({"input": ["1"], "output": ["3"]}, [("1", "3")]),
        (json.dumps({"inputs": ["1"], "outputs": ["3"]}), [("1", "3")]),
    ],
)
def test_forms_of_tests(answer, tests):
    assert read_tests(answer) == tests


def test_human_eval():
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    assert read_tests(check, "add") == [check + "\ncheck(add)"]
    assert graded(ADD, check, entry_point="add") == {"score": 1.0, "passed": "1/1", "why": ""}
    assert graded(ADD, check.replace("3", "4"), entry_point="add")["score"] == 0.0
    with pytest.raises(RewardError, match="has no tests"):
        read_tests(check)  # nothing calls it


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("", "has no tests"),
        ([], "has no tests"),
        (3, "3 has no tests"),
        ("x = 1", "has no tests"),
        ("assert (", "the tests are not Python"),
        ({"inputs": ["1"], "outputs": []}, "two lists of one length"),
        ({"inputs": "1", "outputs": "2"}, "two lists of one length"),
        ({"fn_name": "f", "inputs": [1], "outputs": [2]}, "fn_name are not supported"),
        ([{"input": "1"}], "is no test"),
        ([3], "3 is no test"),
    ],
)
def test_tests_that_are_none(answer, expected):
    with pytest.raises(RewardError, match=expected):
        graded(ADD, answer)


@pytest.mark.parametrize("sandbox", ALL)
def test_asserts(sandbox):
    assert graded(ADD, TESTS[:2], sandbox=sandbox) == {"score": 1.0, "passed": "2/2", "why": ""}
    three = graded(ADD, TESTS, sandbox=sandbox)
    assert (three["score"], three["passed"]) == (0.0, "2/3") and "AssertionError" in three["why"]
    assert graded(ADD, TESTS, sandbox=sandbox, score="share")["score"] == 2 / 3
    assert code(ADD, None, sandbox=sandbox) is None
    assert graded("```python\ndef add(a, b):", TESTS, sandbox=sandbox) == {
        "score": 0.0,
        "passed": "0/3",
        "why": "no closed block of Python",
    }
    broken = graded("def add(a, b) return", TESTS, sandbox=sandbox)
    assert (broken["score"], broken["passed"]) == (0.0, "0/3") and broken["why"]
    assert graded(ADD, ["assert add(K, 1) == 3"], setup="K = 2", sandbox=sandbox)["score"] == 1.0


@pytest.mark.parametrize("sandbox", ALL)
def test_input_and_output(sandbox):
    program = "```python\na, b = map(int, input().split())\nprint('sum ', a + b)\n```"
    pairs = [{"input": "1 2\n", "output": "sum 3"}, {"input": "2 2", "output": "sum  4\n\n"}]
    assert graded(program, pairs, sandbox=sandbox) == {"score": 1.0, "passed": "2/2", "why": ""}
    wrong = [{"input": "1 2", "output": "sum 4"}, *pairs]
    assert graded(program, wrong, sandbox=sandbox, score="share")["score"] == 2 / 3
    all_of_them = graded(program, wrong, sandbox=sandbox)
    assert (all_of_them["score"], all_of_them["passed"]) == (0.0, "0/3")  # the first failure decides
    assert all_of_them["why"] == "printed 'sum  3\\n' instead of 'sum 4'"
    assert graded("print(1, 2)", [{"input": "", "output": "1\n2"}], sandbox=sandbox)["score"] == 0.0


def test_what_monty_lacks_is_run_by_python():
    program = "import heapq\ndef smallest(x):\n    return (yield from heapq.nsmallest(1, x))"
    tests = ["assert list(smallest([3, 1])) == [1]"]
    assert graded(program, tests, sandbox="monty")["score"] == 0.0
    assert graded(program, tests, sandbox="auto")["score"] == 1.0
    whole = "import sys\nprint(len(open(0).read()))"
    assert graded(whole, [{"input": "abc", "output": "3"}], sandbox="auto")["score"] == 1.0


# Attempts to be scored as right without being right.
CHEATS = [
    "import os\nos._exit(0)",
    "import sys\nsys.exit(0)",
    "raise SystemExit",
    "raise KeyboardInterrupt",
    "print('[0, \"\"]')\nprint('[1, \"\"]')\nimport os\nos._exit(0)",
    "import builtins\nbuiltins.AssertionError = Exception\ndef add(a, b): return 0",
    "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0",
    "import sys\nsys.stdout.close()\nsys.stderr.close()",
    "import sys\nprint(sys.stdin.read())\ninput()",
    "import os\nos.close(1)",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nadd = None",
    "while True: pass",
    "import json\njson.loads = lambda text: {'key': '', 'tests': []}",
]


@pytest.mark.parametrize("program", CHEATS)
@pytest.mark.parametrize("sandbox", ["auto", REAL[-1]])  # auto is monty and the first
def test_cheats(program, sandbox):
    assert graded(program, TESTS[:2], sandbox=sandbox, seconds=0.5)["score"] == 0.0


@pytest.mark.parametrize("sandbox", REAL)
def test_what_honest_programs_may_do(sandbox):
    noisy = ADD.replace("    return", "    print('adding' * 1000)\n    return")
    assert graded(noisy, TESTS[:2], sandbox=sandbox)["score"] == 1.0
    thread = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
        + "add = int.__add__"
    )
    assert graded(thread, TESTS[:2], sandbox=sandbox)["score"] == 1.0  # and nobody waits for the thread
    main = "def add(a, b): return a + b\nif __name__ == '__main__': add(int(input()), 2)"
    assert graded(main, TESTS[:2], sandbox=sandbox)["score"] == 1.0
    typed = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\ndef add(a, b): return P(a).x + b"
    assert graded(typed, TESTS[:2], sandbox=sandbox)["score"] == 1.0


def test_limits_say_what_was_too_much():
    for program, why in [("while True: pass", "time"), ("x = bytearray(2**31)\nadd = 1", "memory")]:
        result = graded(program, TESTS[:2], sandbox=REAL[0], seconds=0.5, memory_mb=200)
        assert result["score"] == 0.0 and (why in result["why"].lower())


def test_a_completion_has_a_total_time(monkeypatch):
    monkeypatch.setattr(code_tests, "TOTAL_SECONDS", 0.0)
    pairs = [{"input": str(i), "output": str(i)} for i in range(3)]
    result = graded("print(input())", pairs, sandbox=REAL[0], score="share")
    assert result["score"] == 0.0 and result["why"] == "not run"


def test_it_says_which_tier_is_active():
    assert load_reward(RewardSpec("code")).note == f"programs run in {REAL[0]}, simple ones in monty first"
    assert load_reward(RewardSpec("code", args={"sandbox": REAL[0]})).note == f"programs run in {REAL[0]}"
    assert "a subset of Python" in load_reward(RewardSpec("code", args={"sandbox": "monty"})).note
    note = load_reward(RewardSpec("code", args={"sandbox": "unsafe-local"})).note
    assert "which is no sandbox: they can read your files and use the network" in note


def test_without_any_tier_it_is_refused_before_the_run(monkeypatch):
    def nothing(*_):
        raise RuntimeError("it is not there.")

    def refused(name):
        raise RewardError(f"The sandbox {name} cannot be used here: it is not there.")

    monkeypatch.setattr(sandbox_tiers.sandbox_monty, "check", nothing)
    monkeypatch.setattr(sandbox_tiers, "open_box", refused)
    choose_tiers.cache_clear()
    try:
        with pytest.raises(RewardError) as error:
            load_reward(RewardSpec("code"))
    finally:
        choose_tiers.cache_clear()
    message = str(error.value)
    assert "The sandbox monty cannot be used here: it is not there." in message
    assert "unsafe-local is no boundary, and is used only if you set sandbox: unsafe-local." in message


def test_it_is_a_reward_like_the_others():
    reward = load_reward(RewardSpec("code", args={"score": "share"}))
    assert (reward.lane, reward.required) == ("process", ("answer",))
    with pytest.raises(RewardError, match=r"Name the column that holds it in data\.answer"):
        check_columns(reward, ["tests"])
    prompt = New(text="", messages=None, columns={"answer": TESTS})
    completions = [New(text=text, ids=(), finish="eos") for text in (ADD, "add = 1")]
    groups: list[Any] = [New(prompt=prompt, completions=completions)]
    scores = Scorer([reward])(groups)
    assert scores.total.tolist() == [[2 / 3, 0.0]]
    assert scores.notes[0][0]["code.passed"] == "2/3"
