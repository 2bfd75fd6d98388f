# ruff: noqa: RUF001  (look-alike characters are what some cases are about)
"""`gsm8k`: which number is read, and whether it is the answer; the verdict worked out by hand: 1 is right, 0 wrong."""

import pytest

from covey.rewards.math_answer import gsm8k
from covey.rewards.reward import RewardError

PROSE = " This follows because every step above was checked twice, by hand." * 8
SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"  # as the data set writes its answers

GSM8K: list[tuple[object, str, int]] = [
    (SOLUTION, "So there are 72.\n#### 72", 1),
    (SOLUTION, "#### 48", 0),
    (SOLUTION, "#### 24\nWait.\n#### 72", 1),
    (SOLUTION, "#### 72\nWait.\n#### 24", 0),
    (SOLUTION, "####72", 1),
    (SOLUTION, "#### 72.", 1),
    (SOLUTION, "#### 72.0", 1),
    (SOLUTION, "#### $72.00", 1),
    (SOLUTION, "#### 72 clips", 1),
    (SOLUTION, "#### **72**", 1),
    (SOLUTION, "#### 72\n" + PROSE + " 3 times.", 1),
    (SOLUTION, "#### 144/2", 1),
    (SOLUTION, "#### 7.2e1", 1),
    (SOLUTION, "#### -72", 0),
    (SOLUTION, "#### 720", 0),
    (SOLUTION, "#### 7", 0),
    (SOLUTION, "#### 72,5", 0),
    (SOLUTION, "#### 72 or 73", 0),
    (SOLUTION, "####", 0),
    (SOLUTION, "#### seventy-two", 0),
    (SOLUTION, "### 72", 0),
    (SOLUTION, r"so \boxed{72}.", 1),
    (SOLUTION, r"so \boxed{72\text{ clips}}.", 1),
    (SOLUTION, r"so \boxed{24}, no, \boxed{72}", 1),
    (SOLUTION, r"so \boxed{72}, no, \boxed{24}", 0),
    (SOLUTION, r"so \boxed{72", 0),
    (SOLUTION, r"so \boxed{}", 0),
    (SOLUTION, "The answer is 72.", 0),  # not marked
    (SOLUTION, "72", 0),
    (SOLUTION, "", 0),
    (SOLUTION, "<think>#### 72</think>", 0),
    (SOLUTION, "<think>#### 24</think>#### 72", 1),
    ("70,000", "#### 70000", 1),
    ("70000", "#### 70,000", 1),
    ("70000", "#### 70", 0),
    ("70000", "#### ７０，０００", 1),
    ("-3", "#### −3", 1),
    ("-3", "#### 3", 0),
    ("0.5", "#### 1/2", 1),
    (20, "#### 20%", 1),
    (18, r"\boxed{1/500!}", 0),
]


@pytest.mark.parametrize(("answer", "text", "right"), GSM8K)
def test_gsm8k(answer, text, right):
    scored = gsm8k(text, answer=answer)
    assert scored is not None and scored["score"] == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The answer is 72.", 1),
        ("72", 1),
        ("It is 24 and 48, so 72", 1),
        ("72 and then 48", 0),
        ("#### 24\nor 72", 0),
    ],
)
def test_gsm8k_that_need_not_be_marked(text, right):
    scored = gsm8k(text, answer="72", marked=False)
    assert scored is not None and scored["score"] == right


@pytest.mark.parametrize("gold", ["", "  ", "seventy-two", "#### x", "1, 2", r"\sqrt{2}"])
def test_gsm8k_wants_a_number_as_gold_answer(gold):
    with pytest.raises(RewardError):
        gsm8k("#### 72", answer=gold)


def test_gsm8k_has_no_opinion_without_an_answer():
    assert gsm8k("#### 72", answer=None) is None
