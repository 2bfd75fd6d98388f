"""`reasoning_gym`: questions that can be made again, and a verifier that hostile answers cannot use."""

import json
import re

import pytest
from reasoning_gym.factory import DATASETS

from covey.rewards import procedural
from covey.rewards.procedural import Questions, reasoning_gym
from covey.rewards.reward import RewardError

SINGLE = sorted(set(DATASETS) - {"composite"})  # composite is made of others


def question(task: str, **config: object) -> tuple[str, str | None, str]:
    """Question 0 of a task, its answer and its entry, from the verifier's own process."""
    key = json.dumps({"task": task, "config": config, "seed": 3, "size": 10})
    made = procedural._verifier.ask(("make", key, 0, 1))
    if not isinstance(made, list):
        raise ValueError(made)
    return (*made[0], json.dumps(json.loads(key) | {"index": 0}))


def test_the_answer_of_a_question_scores_1_wherever_it_is_made_again():
    with Questions("leg_counting", {"max_animals": 3}, seed=3, size=20) as questions:
        made = questions.portion(0, 3) + questions.portion(3, 4)
    assert len({one["question"] for one in made}) == 4
    for one in made:
        assert json.loads(one["entry"])["config"] == {"max_animals": 3}
        right, wrong = f"<think>2?</think><answer>{one['answer']}</answer>", "<answer>1</answer>"
        assert reasoning_gym(right, one["entry"]) == {"score": 1.0, "read": one["answer"]}
        assert reasoning_gym(wrong, one["entry"]) == {"score": 0.0, "read": "1"}


def test_where_the_answer_is_read():
    _, answer, entry = question("leg_counting")
    for text, score in [
        (f"<answer>1</answer> no: <answer> {answer} </answer>", 1),
        (f"<answer>{answer}</answer> no: <answer>1</answer>", 0),
        (f"so \\boxed{{{answer}}}", 1),
        (f"{answer}\n", 1),
        (f"<think><answer>{answer}</answer></think>", 0),
        (f"<think>{answer}", 0),
        (f"It is {answer}.", 0),
        ("", 0),
        ("x" * 50_000, 0),
    ]:
        assert reasoning_gym(text, entry)["score"] == score, text


def test_partial_credit_is_what_the_package_gives():
    """leg_counting grants the length of the right answer over that of the text it stands in."""
    _, answer, entry = question("leg_counting")
    assert answer is not None
    text = f"It is {answer}."
    assert reasoning_gym(text, entry, partial=True)["score"] == pytest.approx(len(answer) / len(text))
    assert reasoning_gym(text, entry)["score"] == 0.0


def test_puzzles_with_many_right_answers():
    _, answer, entry = question("countdown", min_numbers=3, max_numbers=3)
    assert answer is not None
    assert reasoning_gym(f"<answer>{answer}</answer>", entry)["score"] == 1.0
    turned = " + ".join(reversed(answer.split(" + "))) if " + " in answer else f"({answer})"
    assert reasoning_gym(f"<answer>{turned}</answer>", entry)["score"] == 1.0
    assert reasoning_gym("<answer>1 + 1</answer>", entry)["score"] == 0.0


def test_settings_reach_the_task():
    text, answer, _ = question(
        "chain_sum", min_terms=3, max_terms=3, min_digits=1, max_digits=1, allow_negation=False
    )
    terms = re.search(r"(\d) ([+-]) (\d) ([+-]) (\d)\D*$", text)
    assert terms is not None and answer is not None
    a, first, b, second, c = terms.groups()
    assert int(answer) == int(a) + int(first + b) + int(second + c)


@pytest.mark.parametrize(
    ("task", "config", "says"),
    [
        ("leg_countin", {}, r'there is no such task. Did you mean "leg_counting"'),
        (
            "leg_counting",
            {"max_animls": 3},
            r'max_animls: no setting of this task. Did you mean "max_animals"',
        ),
        ("leg_counting", {"min_animals": -1}, "min_animals must be positive"),
        ("game_of_life_halting", {}, "accepts any text"),
    ],
)
def test_what_cannot_be_made(task, config, says):
    with pytest.raises(ValueError, match=says):
        question(task, **config)


@pytest.mark.parametrize(
    "entry", ["", "{}", '{"task": "no", "config": {}, "seed": 0, "size": 9, "index": 0}']
)
def test_an_entry_that_names_no_question_is_an_error(entry):
    with pytest.raises(RewardError, match="there is no question"):
        reasoning_gym("1", entry)


def test_no_verifier_runs_what_a_model_writes(tmp_path):
    """Every task, so that one that begins to evaluate answers in a later version of the package is noticed."""
    canary = tmp_path / "canary"
    call = f"__import__('pathlib').Path('{canary}').touch()"
    for task in SINGLE:
        if task == "game_of_life_halting":
            continue
        _, answer, entry = question(task)
        if answer is not None:  # the guard lets right answers pass
            assert procedural._verifier.ask(("score", entry, answer)) == 1.0, task
        for text in (call, f"[{call}]", f"[[{call}]]", f"1 + 0*len(str({call}))", f"(lambda: {call})()"):
            assert reasoning_gym(text, entry)["score"] == 0.0, task
        assert not canary.exists(), task


def test_a_verification_that_takes_too_long_scores_0(monkeypatch):
    monkeypatch.setattr(procedural, "_verifier", procedural.Worker("covey.rewards.procedural", 0.5))
    _, _, entry = question("puzzle24")
    scored = reasoning_gym("<answer>9**9**9**9</answer>", entry)
    assert scored == {"score": 0.0, "read": "9**9**9**9", "failed": True}
    procedural._verifier.stop()
