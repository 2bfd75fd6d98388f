"""The reward for code: Python from a completion, run in a sandbox against tests."""

import ast
import json
import logging
import secrets
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from covey.rewards import sandbox_monty
from covey.rewards.find import RewardError
from covey.rewards.sandbox import Box, Ending, Limits
from covey.rewards.sandbox_tiers import Tier, choose_tiers, describe_tiers
from covey.rewards.settings import settings

logger = logging.getLogger(__name__)
PYTHON = ("", "python", "py", "python3")  # names after ```
TOTAL_SECONDS = 60.0  # of all tests of a completion; those that it does not get to have failed


def _check(sandbox: Tier, **_: Any) -> str:
    """What a user should know before the run: where programs of the model run."""
    note = describe_tiers(sandbox)
    if sandbox == "unsafe-local":
        logger.warning("code: %s.", note)
    return note


@settings(_check)
def code(
    completion: str,
    answer: Any,
    setup: str = "",
    entry_point: str | None = None,
    *,
    sandbox: Tier = "auto",
    score: Literal["all", "share"] = "all",
    seconds: Annotated[float, Gt(0)] = 5.0,
    memory_mb: Annotated[int, Ge(64)] = 512,
) -> dict[str, Any] | None:
    """1.0 if the program in the completion passes all tests, else 0.0; with score "share" the share that it passes.

    The program is the last closed block of Python after </think>, or the whole text if it has no block at all.
    answer: the tests. Asserts as text, as a list of texts, or a function check(candidate) (HumanEval), which is
        called with `entry_point`; or what the program should print: a list of {"input": ..., "output": ...}, or one
        dict of lists, {"inputs": [...], "outputs": [...]}. Each may be JSON. None: no opinion.
    setup: code that runs before the program, for example its imports (a column of the data, or empty).
    Settings: sandbox (docs/rewards.md); seconds of processor time and memory of one run.
    Notes: passed ("2/3"), and why the first failing test failed.
    """
    if answer is None:
        return None
    tests = read_tests(answer, entry_point)
    program = extract_program(completion)
    if program is None:
        return {"score": 0.0, "passed": f"0/{len(tests)}", "why": "no closed block of Python"}
    limits = Limits(seconds=seconds, memory_mb=memory_mb)
    whys = _run(
        f"{setup}\n{program}" if setup else program, tests, choose_tiers(sandbox), limits, score == "all"
    )
    passed = whys.count("")
    notes = {"passed": f"{passed}/{len(tests)}", "why": next((why for why in whys if why), "")}
    return {"score": passed / len(tests) if score == "share" else float(passed == len(tests)), **notes}


# ------------------------------------------------------------------------------------- programs and tests


def extract_program(completion: str) -> str | None:
    """The last closed block of Python after </think>; the whole text if there is no block; None if none is closed.

    >>> extract_program("So:\\n```python\\nx = 1\\n```\\nDone."), extract_program("x = 1"), extract_program("```\\nx")
    ('x = 1', 'x = 1', None)
    """
    lines = completion.rpartition("</think>")[2].splitlines()
    found, fence, begun = None, "", 0
    any_fence = False
    for i, line in enumerate(lines):
        text = line.strip()
        if not fence and text.startswith(("```", "~~~")):
            any_fence = True
            fence, begun = text[:3], i + 1
            language = text.lstrip("`~").strip().split(" ")[0].lower()
        elif fence and text.startswith(fence) and not text.strip("`~"):
            if language in PYTHON:  # type: ignore[possibly-undefined]
                found = textwrap.dedent("\n".join(lines[begun:i]))  # a block in a list is indented
            fence = ""
    return found if any_fence else "\n".join(lines)


Test = str | tuple[str, str]  # an assert, or what goes in and what should come out


def read_tests(answer: Any, entry_point: str | None = None) -> list[Test]:
    """The tests in one of the forms that `code` describes; RewardError for anything else, or if there are none.

    >>> read_tests("assert f(1) == 2\\nassert f(2) == 3")
    ['assert f(1) == 2', 'assert f(2) == 3']
    >>> read_tests({"inputs": ["1"], "outputs": ["2"]})
    [('1', '2')]
    """
    if isinstance(answer, str):
        answer = _from_text(answer, entry_point)
    if isinstance(answer, Mapping):
        if answer.get("fn_name"):
            raise RewardError(
                "code: tests that call a function by fn_name are not supported. Write them as asserts."
            )
        ins, outs = (answer.get(name, answer.get(f"{name}s")) for name in ("input", "output"))
        if not isinstance(ins, list) or not isinstance(outs, list) or len(ins) != len(outs):
            raise RewardError("code: a dict of tests needs two lists of one length, inputs and outputs.")
        answer = [{"input": i, "output": o} for i, o in zip(ins, outs, strict=True)]
    if not isinstance(answer, list | tuple) or not answer:
        raise RewardError(f"code: {answer!r:.60} has no tests: give asserts, or inputs with outputs.")
    return [_test(test) for test in answer]


def _from_text(text: str, entry_point: str | None) -> Any:
    """JSON, a function check(candidate), or asserts, each with the statements before it."""
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.loads(text)
        except ValueError:
            pass  # a list in Python is no assert either, and is reported below
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        raise RewardError(f"code: the tests are not Python ({error}): {text[:60]!r}.") from error
    names = {statement.name for statement in statements if isinstance(statement, ast.FunctionDef)}
    if "check" in names and entry_point:
        return [f"{text}\ncheck({entry_point})"]
    tests, begun = [], 0
    lines = text.splitlines()
    for statement in statements:
        if isinstance(statement, ast.Assert):
            tests.append("\n".join(lines[begun : statement.end_lineno]))
            begun = statement.end_lineno or 0
    return tests


def _test(test: Any) -> Test:
    if isinstance(test, str):
        return test
    if isinstance(test, Mapping) and {"input", "output"} <= set(test):
        return _text(test["input"]), _text(test["output"])
    raise RewardError(f"code: {test!r:.60} is no test: give an assert, or a dict with input and output.")


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


# ------------------------------------------------------------------------------------------------ running


def _run(
    program: str, tests: Sequence[Test], tiers: tuple[bool, Box | None], limits: Limits, need_all: bool
) -> list[str]:
    """Why each test failed, "" if it passed."""
    monty, box = tiers
    asserts = [test for test in tests if isinstance(test, str)]
    pairs = [test for test in tests if not isinstance(test, str)]
    whys: list[str] = []
    if monty:
        whys = sandbox_monty.passes(program, asserts, limits) if asserts else []
        if not (need_all and any(whys)):
            whys += _printed(pairs, need_all, lambda into: sandbox_monty.output(program, into, limits))
        if box is None or not any(whys):
            return whys
    assert box is not None
    whys = _asserted(program, asserts, box, limits) if asserts else []
    if need_all and any(whys):
        return whys
    files = {"main.py": program}
    return whys + _printed(pairs, need_all, lambda into: _read(box.run(files, into, limits)))


def _read(ending: Ending) -> tuple[str, str]:
    return ending.stdout, _why(ending)


def _printed(pairs: Sequence[tuple[str, str]], need_all: bool, run: Any) -> list[str]:
    """Why each pair failed: run(input) is what was printed, and why the program failed."""
    whys: list[str] = []
    deadline = time.monotonic() + TOTAL_SECONDS
    for into, expected in pairs:
        if time.monotonic() > deadline or (need_all and any(whys)):
            whys.append("not run")
            continue
        printed, why = run(into)
        if not why and _words(printed) != _words(expected):
            why = f"printed {printed[:60]!r} instead of {expected[:60]!r}"
        whys.append(why)
    return whys


def _words(text: str) -> list[list[str]]:
    """Lines as lists of words, without blank lines at the end: how much space is between them is no matter."""
    return [line.split() for line in text.rstrip().splitlines()]


def _why(ending: Ending) -> str:
    if ending.status == "ok":
        return ""
    if ending.status != "failed":
        return (
            f"took too much {ending.status}" if ending.status != "processes" else "started too many processes"
        )
    return (ending.stderr.strip().splitlines() or ["failed without a word"])[-1][:200]


# The program cannot see the tests and the key before it has run, nor write to where the verdicts go by accident: its
# output goes nowhere. A program that knows this file could cheat; one that is tested by what it prints cannot.
HARNESS = """
import io, json, os, sys, types
tests, sys.stdin = sys.stdin, io.StringIO("")
verdicts = os.dup(1)
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
module = sys.modules["program"] = types.ModuleType("program")
why = None
try:
    exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"), module.__dict__)
except BaseException as error:
    why = f"{type(error).__name__}: {error}"[:200]
job = json.loads(tests.readline())
def say(i, why):
    os.write(verdicts, (job["key"] + json.dumps([i, why]) + chr(10)).encode())
for i, test in enumerate(job["tests"]):
    try:
        if why is None:
            exec(compile(test, "test", "exec"), module.__dict__)
        say(i, why or "")
    except BaseException as error:
        say(i, f"{type(error).__name__}: {error} in {test}"[:200])
os._exit(0)
"""


def _asserted(program: str, asserts: Sequence[str], box: Box, limits: Limits) -> list[str]:
    """Why each assert failed; all see what the program has defined, and they run one after another."""
    key = secrets.token_hex(16)
    job = json.dumps({"key": key, "tests": list(asserts)})
    ending = box.run({"main.py": HARNESS, "program.py": program}, job + "\n", limits)
    whys = [_why(ending) or "the program ended early"] * len(asserts)
    for line in ending.stdout.splitlines():
        if line.startswith(key):
            i, why = json.loads(line.removeprefix(key))
            whys[i] = why
    return whys
