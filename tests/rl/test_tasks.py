import math
import re

import pytest

from covey.rewards.reward import RewardSpec, check_columns, load_reward
from covey.rl.config import DataSection, SftDataSection
from covey.rl.data import DataError, load_rows
from covey.rl.tasks import preference_rows, task_rows


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


GYM = "reasoning_gym/leg_counting"


def test_a_task_of_reasoning_gym():
    """Trained on with the reward of that name; the held-out questions are others, whatever the seed."""
    args = {"max_animals": 4, "max_instances": 3, "rows": 25}
    train = task_rows(GYM, args)
    assert train == task_rows(GYM, args)
    other = task_rows(GYM, args | {"seed": 4}, held_out=True)
    questions = [{row["prompt"][0]["content"] for row in rows} for rows in (train, other)]
    assert [len(side) for side in questions] == [25, 25] and not questions[0] & questions[1]
    for row in train[:3]:
        (message,) = row["prompt"]
        assert message["role"] == "user" and message["content"].endswith("between <answer> and </answer>.")
        assert row["completion"] == f"<answer>{row['answer']}</answer>"
        reward = load_reward(RewardSpec("reasoning_gym"))
        check_columns(reward, row)
        assert reward.function(row["completion"], entry=row["entry"])["score"] == 1.0
        assert reward.function("<answer>0</answer>", entry=row["entry"])["score"] == 0.0


def test_plain_prompts_of_reasoning_gym_through_load_rows():
    section = DataSection(train=f"task:{GYM}", task={"rows": 2, "style": "raw", "max_animals": 3})
    rows = load_rows(f"task:{GYM}", section)
    assert [row.where for row in rows] == [f"task:{GYM} row 0", f"task:{GYM} row 1"]
    assert rows[0].prompt is not None and "how many legs" in rows[0].prompt and rows[0].columns["entry"]


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("reasoning_gym/leg_countin", {}, r'task:reasoning_gym/leg_countin: .*Did you mean "leg_counting"'),
        (GYM, {"max_animls": 2}, r'max_animls: no setting of this task.*Did you mean "max_animals"'),
        (GYM, {"rows": 0}, r"data\.task\.rows: 0 is not a whole number from 1"),
        (GYM, {"seed": "1"}, r"data\.task\.seed: '1' is not a whole number"),
        (GYM, {"style": "poem"}, r"neither raw nor chat"),
        (
            "reasoning_gym/gcd",
            {"min_value": 1, "max_value": 2, "rows": 50},
            r"has only \d+ different questions",
        ),
    ],
)
def test_mistakes_with_reasoning_gym(name, args, says):
    with pytest.raises(DataError, match=says):
        task_rows(name, args)


def test_reasoning_gym_has_no_preferences():
    with pytest.raises(DataError, match="no wrong answers"):
        preference_rows(GYM, {})
