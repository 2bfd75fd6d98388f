"""Tasks of the package reasoning-gym: their questions, and the reward `reasoning_gym`, which verifies answers.

The package runs in processes of its own (worker.py): it evaluates answers as Python in places, draws from global
random generators, and some of its tasks come out differently with another seed of Python's hashes, which is 0 there.
So a question is named by its task, configuration and number, and made again where it is verified.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from covey.rewards.find import RewardError, did_you_mean
from covey.rewards.math_answer import last_box
from covey.rewards.settings import settings
from covey.rewards.text_match import after_thinking, last_tagged
from covey.rewards.worker import Worker, serve

VERIFY_SECONDS = 5.0  # of processor time, for one answer
MAKE_SECONDS = 120.0  # for one portion of questions
MAX_CHARACTERS = 20_000  # of an answer

_verifier = Worker("covey.rewards.procedural", VERIFY_SECONDS)


def _check(**_: Any) -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise RewardError("reasoning_gym needs the package reasoning-gym: pip install 'covey[gym]'")


@settings(_check)
def reasoning_gym(completion: str, entry: str, *, partial: bool = False) -> dict[str, Any]:
    """1.0 if the package's verifier gives the answer its full score, else 0.0.

    entry: which question it is, a column of the rows of "task:reasoning_gym/NAME".
    The answer is what stands in the last <answer></answer> behind </think>, or else in the last \\boxed{}, or else all
    of that. Setting: partial gives the package's score as it is, with what it grants to answers that are not right.
    An answer whose verification raises, or takes too long, scores 0.0 with the note `failed`.
    """
    text = after_thinking(completion)
    answer = last_tagged(text, "answer")
    if answer is None:
        answer = last_box(text) or text.strip()
    reply = _verifier.ask(("score", entry, answer)) if len(answer) <= MAX_CHARACTERS else None
    if isinstance(reply, str):
        raise RewardError(f"reasoning_gym: {reply}")
    notes = {"read": answer[:200]} | ({"failed": True} if reply is None else {})
    given = min(max(reply or 0.0, 0.0), 1.0)
    return {"score": given if partial else float(given > 1 - 1e-9), **notes}


class Questions:
    """The questions of one task, which are made in a process of their own. Use it in a `with` statement.

    name: of the task. config: its settings. size: how many there are. Raises ValueError for what the package refuses.
    """

    def __init__(self, name: str, config: Mapping[str, Any], seed: int, size: int):
        _check()
        self.key = {"task": name, "config": dict(config), "seed": seed, "size": size}
        self.worker = Worker("covey.rewards.procedural", MAKE_SECONDS)

    def __enter__(self) -> "Questions":
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()

    def portion(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Questions start to stop - 1: dicts with question, answer (None if the task stores none) and entry."""
        made = self.worker.ask(("make", json.dumps(self.key), start, stop))
        if made is None:
            raise ValueError(
                f"making {stop - start} questions took more than {MAKE_SECONDS:g} s or too much memory"
            )
        if isinstance(made, str):
            raise ValueError(made)
        return [
            {"question": question, "answer": answer, "entry": json.dumps(self.key | {"index": start + i})}
            for i, (question, answer) in enumerate(made)
        ]


# --- In the child -------------------------------------------------------------------------------------------

# Tasks whose verifier evaluates the answer as Python, and what an answer may be there.
_LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_FORMULAS = {"countdown", "polynomial_multiplication", "puzzle24"}
_FORMULAS |= {"intermediate_integration", "simple_integration"}
_NAMES = r"(?<![A-Za-z])(?:[A-Za-z]|pi|exp|log|ln|sqrt|a?(?:sin|cos|tan)h?|sec|csc|cot)(?![A-Za-z])"
_FORMULA = re.compile(rf"(?:[\d\s+\-*/^()]|\d\.|\.\d|{_NAMES})*")


def _answer(question: tuple[Any, ...]) -> Any:
    return _make(*question[1:]) if question[0] == "make" else _score(*question[1:])


def _make(key: str, start: int, stop: int) -> list[tuple[str, str | None]] | str:
    try:
        entries = [_entry(key, index) for index in range(start, stop)]
        _check_verifier(key, entries[0])
        return [(entry["question"], entry["answer"]) for entry in entries]
    except Exception as error:  # an assertion about the settings, or whatever comes of those that pass them
        return str(error) or type(error).__name__


def _score(entry: str, answer: str) -> float | str:
    try:
        where = json.loads(entry)
        index = where.pop("index")
        key = json.dumps(where)
        question = _entry(key, index)
    except Exception as error:
        return f"there is no question {str(entry)[:200]!r}: {error}"
    if not _is_harmless(where["task"], answer):
        return float(answer == question["answer"])
    score = float(_dataset(key).score_answer(answer, question))
    return score if math.isfinite(score) else 0.0


def _is_harmless(task: str, answer: str) -> bool:
    """May a verifier evaluate it?"""
    if task in _LITERALS:
        try:
            ast.literal_eval(answer)
        except Exception:
            return False
    return task not in _FORMULAS or _FORMULA.fullmatch(answer) is not None


def _check_verifier(key: str, entry: Mapping[str, Any]) -> None:
    verify, task = _dataset(key).score_answer, json.loads(key)["task"]
    if entry["answer"] is not None and verify(entry["answer"], entry) < 0.99:
        raise ValueError(f"the verifier of {task} rejects the answer {entry['answer']!r} of its own question")
    for text in ("no idea", "?"):
        accepted = False
        with contextlib.suppress(Exception):
            accepted = verify(text, entry) >= 1
        if accepted:
            raise ValueError(f"the verifier of {task} accepts any text, for example {text!r}")


@functools.lru_cache(maxsize=4096)
def _entry(key: str, index: int) -> Any:
    return _dataset(key)[index]


@functools.lru_cache(maxsize=64)
def _dataset(key: str) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    where = json.loads(key)
    name, config = where["task"], where["config"]
    if name not in DATASETS:
        raise ValueError(f"there is no such task.{did_you_mean(name, DATASETS)}")
    fields = [
        field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("size", "seed")
    ]
    for field in config:
        if field not in fields:
            raise ValueError(
                f"{field}: no setting of this task.{did_you_mean(field, fields)} Settings: {', '.join(fields)}"
            )
    return reasoning_gym.create_dataset(name, seed=where["seed"], size=where["size"], **config)


if __name__ == "__main__":
    importlib.import_module("reasoning_gym")  # before the clock of the first answer runs
    serve(_answer)
