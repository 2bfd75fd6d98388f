"""`choice`: which option a completion decides for, with the verdict worked out by hand."""

import time

import pytest

from covey.rewards.choice import choice
from covey.rewards.reward import RewardError


@pytest.mark.parametrize(
    ("completion", "read"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("b", "B"),
        ("**B**", "B"),
        ("Ｂ", "B"),  # noqa: RUF001
        ("B. Paris", "B"),
        ("(B) Paris", "B"),
        ("B) Paris", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B), since Rome is in Italy.", "B"),
        ("The correct answer is: B", "B"),
        ("**Answer:** B", "B"),
        ("Answer:\n\nB", "B"),
        ("The correct option is (C)", "C"),
        ("the answer is option B", "B"),
        ('{"answer": "B"}', "B"),
        (r"so \boxed{B}", "B"),
        (r"so $\boxed{\text{(B)}}$", "B"),
        (r"\boxed{A}? No, \boxed{B}", "B"),
        (r"\boxed{}", ""),
        ("<answer> b </answer>", "B"),
        ("The answer is A. Wait: the answer is B.", "B"),
        ("The answer is C, because option A is wrong.", "C"),
        ("Is the answer A? No.\nB", "B"),
        ("B\n\nExplanation: A is in Italy.", "B"),
        ("A. Rome\nB. Paris\nThe answer is B", "B"),
        ("A. Rome\nB. Paris\nC. Bonn\nHm.", ""),  # the options once more decide nothing
        ("<think>The answer is A</think>B", "B"),
        ("<think>The answer is B", ""),
        ("The answer is not A.", ""),
        ("The answer is a prime number.", ""),
        ("A dog is an animal.", ""),
        ("The answer is Because", ""),
        ("A or B", ""),
        ("The answer is A or B", ""),
        ("The answer is A, B, or C", ""),
        ("The answer is A and C.", ""),
        ("Answer: A; B", ""),
        ("Answer: A | B", ""),
        ("Answer: A B C", ""),
        ("The answer is A (or maybe B)", ""),
        ("The answer is B and the answer is C", "C"),
        ("The answer is B, I think.", "B"),
        ("The answer is B, A dog being no cat.", "B"),
        ("The answer is B\n\nA. Rome is in Italy.", "B"),
        ("A\nB\nC", ""),
        ("B\n\nB", "B"),
        ("B. A. C.", ""),
        ("B) A) C)", ""),
        (r"\boxed{B. Paris or A. Rome}", ""),
        ("B. Vitamin C.", "B"),
        (r"\boxed{A, B}", ""),
        (r"\boxed{AB}", ""),
        ("Paris", ""),
        ("", ""),
    ],
)
def test_which_option_is_read(completion, read):
    for gold in "ABC":
        assert choice(completion, answer=gold) == {"score": float(read == gold), "read": read}


@pytest.mark.parametrize("answer", ["B", "b", "(B)", "B.", 1, "1", "Paris", "paris"])
def test_the_answer_may_be_a_letter_a_place_or_a_text(answer):
    for completion, score in (
        ("B", 1),
        ("A", 0),
        ("Paris", 1),
        (r"\boxed{\text{Paris}}", 1),
        ("So it is\n**Paris**.", 1),
        ("The answer is Paris.", 1),
        ("The answer is Rome or Paris.", 0),
        ("Rome", 0),
        ("D", 0),
    ):
        scored = choice(completion, answer=answer, choices=["Rome", "Paris", "Bonn"])
        assert scored is not None and scored["score"] == score, completion


def test_labels_of_the_data():
    choices = {"label": ["1", "2", "3"], "text": ["Rome", "Paris", "Bonn"]}
    for completion, read in (("The answer is 2", "2"), ("(2)", "2"), ("paris", "2"), ("B", "")):
        assert choice(completion, answer="2", choices=choices) == {"score": float(read == "2"), "read": read}


def test_other_letters():
    assert choice("The answer is Q", answer="Q", letters="PQRS") == {"score": 1.0, "read": "Q"}
    assert choice("The answer is A", answer="Q", letters="PQRS") == {"score": 0.0, "read": ""}


def test_no_opinion_without_an_answer():
    assert choice("B", answer=None) is None


@pytest.mark.parametrize(
    ("answer", "choices", "says"),
    [
        ("", None, "empty"),
        ("Z", None, "'Z' is none of the options A, B"),
        ("10", None, "none of the options"),
        ("D", ["Rome", "Paris"], "none of the options A, B$"),
        ("A", ["x"] * 11, "11 choices and 10 letters"),
    ],
)
def test_an_answer_that_is_no_option_is_a_mistake_in_the_data(answer, choices, says):
    with pytest.raises(RewardError, match=says):
        choice("B", answer=answer, choices=choices)


@pytest.mark.parametrize(
    "piece",
    ["<answer>", "answer is ", "\\boxed{", "A, ", "(", "**", "\n", "answer A? ", "answer is A ", "A. or "],
)
@pytest.mark.parametrize("end", ["", " ", "or "])
def test_hostile_text_costs_little(piece, end):
    began = time.process_time()
    scored = choice(piece * 20_000 + end * 20_000, answer="B")
    assert scored is not None and scored["score"] == 0.0
    assert time.process_time() - began < 2  # the square of its length would be minutes
