"""Tasks that are made on the spot: rows to train and to test on without a file or a network.

A row goes to the held-out split or to training by a hash of its set of operands, so 47 + 25 and 25 + 47 are
never on different sides, whatever the seed. The worked examples of raw prompts are rows of neither side.
The tasks of the package reasoning-gym are "reasoning_gym/NAME"; there the question decides.
"""

import hashlib
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.rewards.procedural import Questions
from covey.rl.sources import DataError, did_you_mean

HELD_OUT_OF = 5  # one in five operand sets is held out
MAX_EXAMPLES = 8
DEFAULT_ROWS = 2000
GYM = "reasoning_gym/"
GYM_PORTION = 50  # questions that are made between two looks at how many there are
GYM_REQUEST = "\n\nWrite your final answer, and nothing else, between <answer> and </answer>."


@dataclass(frozen=True, slots=True)
class Task:
    expression: Callable[[Sequence[int]], str]
    result: Callable[[Sequence[int]], int]


TASKS = {
    "addition": Task(lambda operands: " + ".join(map(str, operands)), sum),
    "multiplication": Task(lambda operands: " * ".join(map(str, operands)), math.prod),
    "gcd": Task(
        lambda operands: f"gcd({', '.join(map(str, operands))})", lambda operands: math.gcd(*operands)
    ),
}


def task_rows(name: str, args: Mapping[str, Any], *, held_out: bool = False) -> list[dict[str, Any]]:
    """Rows {prompt, answer, completion} of task `name`; see `_rows` and `_gym_rows` for the arguments.

    Raises DataError for an unknown task or argument, or a value that makes no sense.
    """
    if name.startswith(GYM):
        return _gym_rows(name.removeprefix(GYM), held_out, **args)
    if name not in TASKS:
        raise DataError(
            f"task:{name}: no such task. Tasks: {', '.join(TASKS)}, {GYM}NAME.{did_you_mean(name, TASKS)}"
        )
    known = inspect.signature(_rows).parameters
    known = {key: p.default for key, p in known.items() if p.default is not inspect.Parameter.empty}
    for key, value in args.items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise DataError(
                f"data.task.{key}: task:{name} has no such argument, only {', '.join(known)}.{hint}"
            )
        wanted = str if key == "style" else int
        if type(value) is not wanted:
            raise DataError(
                f"data.task.{key}: {value!r} is not {'text' if wanted is str else 'a whole number'}."
            )
    return _rows(TASKS[name], held_out, **args)


def preference_rows(name: str, args: Mapping[str, Any], *, held_out: bool = False) -> list[dict[str, Any]]:
    """Rows {prompt, answer, chosen, rejected} of task `name`: the right answer is preferred to one that is wrong by up
    to 10, drawn for each row from the task's seed. Arguments and errors are those of `task_rows`."""
    if name.startswith(GYM):
        raise DataError(
            f"task:{name}: there are no wrong answers to prefer others to. Use {', '.join(TASKS)}, or pairs."
        )
    rows = []
    for row in task_rows(name, args, held_out=held_out):
        chosen, answer = row.pop("completion"), int(row["answer"])
        rng = random.Random(f"wrong answer:{args.get('seed', 0)}:{row['prompt']}")
        wrong = rng.choice([n for n in range(max(0, answer - 10), answer + 11) if n != answer])
        rows.append({**row, "chosen": chosen, "rejected": chosen.replace(str(answer), str(wrong))})
    return rows


def _rows(
    task: Task,
    held_out: bool,
    *,
    digits: int = 2,
    largest: int | None = None,
    operands: int = 2,
    examples: int | None = None,
    style: str = "raw",
    rows: int | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Distinct rows in a random order that follows from the seed.

    digits: of each operand (2: from 10 to 99). largest: upper bound of the operands, if not 99.
    operands: how many.
    style: raw gives "21 + 34 = 55\\n47 + 25 =" with completion " 72"; chat gives a user message, and "72".
    examples: worked examples in front of a raw prompt; 1 unless said.
    rows: 2000 unless said, or as many as the task has if these are fewer.
    """
    for key, value, low, high in (
        ("digits", digits, 1, 18),
        ("operands", operands, 2, 16),
        ("examples", examples or 0, 0, MAX_EXAMPLES),
        ("rows", DEFAULT_ROWS if rows is None else rows, 1, 10**6),
        ("largest", largest if largest is not None else 10**digits - 1, 10 ** (digits - 1), 10**digits - 1),
    ):
        if not low <= value <= high:
            raise DataError(f"data.task.{key}: {value} is not between {low} and {high}.")
    if style not in ("raw", "chat"):
        raise DataError(f'data.task.style: "{style}" is neither raw nor chat.')
    if style == "chat" and examples:
        raise DataError(
            "data.task.examples: only raw prompts have worked examples. Remove it, or style: chat."
        )

    span = 10 ** (digits - 1), 10**digits - 1 if largest is None else largest
    worked = _worked_examples(digits, operands)
    shots = "".join(
        f"{task.expression(e)} = {task.result(e)}\n" for e in worked[: 1 if examples is None else examples]
    )
    drawn = _draw(span, operands, {tuple(sorted(e)) for e in worked}, rows or DEFAULT_ROWS, seed, held_out)
    if rows and len(drawn) < rows and not held_out:
        raise DataError(
            f"data.task.rows: with {operands} operands from {span[0]} to {span[1]} there are only "
            f"{len(drawn)} rows to train on, not {rows}. Lower rows, or raise digits or operands."
        )
    return [_row(task, numbers, shots, style) for numbers in drawn]


def _row(task: Task, numbers: Sequence[int], shots: str, style: str) -> dict[str, Any]:
    expression, answer = task.expression(numbers), str(task.result(numbers))
    if style == "raw":
        return {"prompt": f"{shots}{expression} =", "answer": answer, "completion": f" {answer}"}
    question = f"What is {expression}? Reply with the number only."
    return {"prompt": [{"role": "user", "content": question}], "answer": answer, "completion": answer}


def _draw(
    span: tuple[int, int], operands: int, excluded: set[tuple[int, ...]], rows: int, seed: int, held_out: bool
) -> list[tuple[int, ...]]:
    """Up to `rows` different operand tuples of one side of the split."""
    low, high = span
    rng = random.Random(f"{low}:{high}:{operands}:{seed}:{held_out}")
    space = (high - low + 1) ** operands
    seen: set[tuple[int, ...]] = set()
    drawn: list[tuple[int, ...]] = []
    while len(drawn) < rows and len(seen) < space:
        numbers = tuple(rng.randint(low, high) for _ in range(operands))
        if numbers in seen:
            continue
        seen.add(numbers)
        key = tuple(sorted(numbers))
        if _is_held_out(" ".join(map(str, key))) == held_out and key not in excluded:
            drawn.append(numbers)
    return drawn


def _is_held_out(question: str) -> bool:
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_OF == 0


def _worked_examples(digits: int, operands: int) -> list[tuple[int, ...]]:
    """The same for every seed. The first of two-digit tasks is easy to remember: 21 + 34 = 55."""
    rng = random.Random(f"worked examples:{digits}:{operands}")
    low, high = 10 ** (digits - 1), 10**digits - 1
    examples = [tuple(rng.randint(low, high) for _ in range(operands)) for _ in range(MAX_EXAMPLES)]
    if digits == 2:
        examples[0] = (21, 34, *examples[0][2:])
    return examples


def _gym_rows(
    name: str, held_out: bool, *, style: str = "chat", rows: Any = None, seed: Any = 0, **config: Any
) -> list[dict[str, Any]]:
    """Distinct rows of a task of reasoning-gym, for the reward of that name, which reads the column `entry`.

    style: chat gives a user message, raw plain text. rows: 2000 unless said, or as many as there are if these are
    fewer. seed: of the questions. config: the settings of the task.
    """
    where = f"task:{GYM}{name}"
    for key, value, low in (("rows", DEFAULT_ROWS if rows is None else rows, 1), ("seed", seed, 0)):
        if type(value) is not int or not low <= value <= 10**6:
            raise DataError(f"data.task.{key}: {value!r} is not a whole number from {low} to {10**6}.")
    if style not in ("raw", "chat"):
        raise DataError(f'data.task.style: "{style}" is neither raw nor chat.')
    wanted = rows or DEFAULT_ROWS
    size = 2 * wanted * (HELD_OUT_OF if held_out else 1) + GYM_PORTION
    drawn: dict[str, dict[str, Any]] = {}
    try:
        with Questions(name, config, seed, size) as questions:
            for start in range(0, size, GYM_PORTION):
                for made in questions.portion(start, min(start + GYM_PORTION, size)):
                    if _is_held_out(made["question"]) == held_out and len(drawn) < wanted:
                        drawn.setdefault(made["question"], made)
                if len(drawn) == wanted:
                    break
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if rows and len(drawn) < rows and not held_out:
        raise DataError(
            f"data.task.rows: {where} has only {len(drawn)} different questions to train on, not {rows}."
        )
    return [_gym_row(style, **made) for made in drawn.values()]


def _gym_row(style: str, question: str, answer: str | None, entry: str) -> dict[str, Any]:
    text = question.strip() + GYM_REQUEST
    row = {
        "prompt": text if style == "raw" else [{"role": "user", "content": text}],
        "answer": answer,
        "entry": entry,
    }
    return row if answer is None else row | {"completion": f"<answer>{answer}</answer>"}
