import math
import re

import pytest

from covey.rl.config import DataSection, SftDataSection
from covey.rl.data import DataError, load_rows
from covey.rl.tasks import task_rows


def operands(row) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", row["prompt"].splitlines()[-1]))


def test_addition_as_written():
    rows = task_rows("addition", {})
    assert len(rows) == 2000
    for row in rows:
        a, b = operands(row)
        assert 10 <= a <= 99 and 10 <= b <= 99
        assert row == {
            "prompt": f"21 + 34 = 55\n{a} + {b} =",
            "answer": str(a + b),
            "completion": f" {a + b}",
        }
        assert {a, b} != {21, 34}
    assert len({row["prompt"] for row in rows}) == 2000


@pytest.mark.parametrize("args", [{}, {"seed": 3}, {"digits": 1}, {"operands": 3, "rows": 3000}])
def test_held_out_and_training_sets_share_no_operands(args):
    train = {tuple(sorted(operands(row))) for row in task_rows("addition", args)}
    other = {
        tuple(sorted(operands(row))) for row in task_rows("addition", {**args, "seed": 9}, held_out=True)
    }
    assert train and other
    assert not train & other


def test_rows_are_the_same_every_time_and_differ_by_seed():
    assert task_rows("addition", {"rows": 5}) == task_rows("addition", {"rows": 5})
    assert task_rows("addition", {"rows": 5}) != task_rows("addition", {"rows": 5, "seed": 1})
    assert task_rows("addition", {"rows": 5}) == task_rows("addition", {"rows": 9})[:5]


def test_longer_sums_and_other_tasks():
    for row in task_rows("addition", {"operands": 4, "examples": 2, "rows": 20}):
        *worked, last = row["prompt"].splitlines()
        assert len(worked) == 2
        for line in worked:
            left, right = line.split(" = ")
            assert sum(map(int, left.split(" + "))) == int(right)
        assert len(operands(row)) == 4 and row["answer"] == str(sum(operands(row)))
        assert last.endswith(" =")
    row = task_rows("gcd", {"rows": 1, "examples": 0})[0]
    assert row["answer"] == str(math.gcd(*operands(row))) and row["prompt"].startswith("gcd(")
    row = task_rows("multiplication", {"rows": 1, "digits": 3})[0]
    a, b = operands(row)
    assert row["answer"] == str(a * b) and min(a, b) >= 100


def test_chat_style():
    row = task_rows("addition", {"style": "chat", "rows": 1})[0]
    (message,) = row["prompt"]
    assert message["role"] == "user" and row["completion"] == row["answer"]
    loaded = load_rows("task:addition", SftDataSection(train="task:addition", task={"style": "chat"}))[0]
    assert loaded.messages == (task_rows("addition", {"style": "chat"})[0]["prompt"][0],)
    assert loaded.prompt_messages == 1


def test_small_spaces_give_all_they_have():
    train, other = task_rows("addition", {"digits": 1}), task_rows("addition", {"digits": 1}, held_out=True)
    every = {operands(row) for row in train + other}
    assert len(every) == len(train) + len(other)
    assert len(every) > 81 - 2 * 8 - 1  # all pairs of 1 to 9 but those of at most 8 worked examples


def test_through_load_rows():
    section = DataSection(train="task:addition", eval="task:addition", task={"rows": 3})
    train, other = load_rows("task:addition", section), load_rows("task:addition", section, held_out=True)
    assert len(train) == len(other) == 3
    assert train[0].where == "task:addition row 0"
    assert train[0].prompt is not None and train[0].prompt.startswith("21 + 34 = 55\n")
    assert train[0].columns["answer"] == task_rows("addition", {"rows": 3})[0]["answer"]


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("adition", {}, r'no such task.*Did you mean "addition"'),
        ("addition", {"digts": 2}, r'data\.task\.digts.*Did you mean "digits"'),
        ("addition", {"digits": "2"}, r"data\.task\.digits: '2' is not a whole number"),
        ("addition", {"digits": True}, r"data\.task\.digits: True is not a whole number"),
        ("addition", {"digits": 0}, r"data\.task\.digits: 0 is not between 1 and"),
        ("addition", {"rows": 0}, r"data\.task\.rows: 0 is not between 1 and"),
        ("addition", {"style": "poem"}, r"neither raw nor chat"),
        ("addition", {"style": "chat", "examples": 1}, r"data\.task\.examples: only raw prompts"),
        ("addition", {"digits": 1, "rows": 2000}, r"data\.task\.rows: .* only \d\d rows"),
    ],
)
def test_mistakes(name, args, says):
    with pytest.raises(DataError, match=says):
        task_rows(name, args)


def test_largest_bounds_the_operands():
    args = {"largest": 20, "rows": 60}
    train, other = task_rows("addition", args), task_rows("addition", args, held_out=True)
    assert all(10 <= n <= 20 for row in train + other for n in operands(row))
    assert not {tuple(sorted(operands(r))) for r in train} & {tuple(sorted(operands(r))) for r in other}
    with pytest.raises(DataError, match=r"data\.task\.largest: 100 is not between 10 and 99"):
        task_rows("addition", {"largest": 100})
