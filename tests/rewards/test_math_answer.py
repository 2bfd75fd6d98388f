# ruff: noqa: RUF001  (look-alike characters are what some cases are about)
"""The final answers of solutions: every row of a table of reported mistakes, and what must never happen."""

import os
import threading
import time

import pytest

from covey.rewards import symbolic
from covey.rewards.math_answer import final_answer, math, score
from covey.rewards.reward import RewardError

PROSE = " This follows because every step above was checked twice, by hand." * 8

# Reported by users of other graders; 1 is right, 0 is wrong.
REPORTED = [
    ("6400", r"\boxed{$6{,}400}", 1),
    ("3000", r"\boxed{3,000}", 1),
    ("1234.5", "total is $1,234.50.", 1),
    ("56", "That makes 56 beads, all told.", 1),
    ("18", "#### 18", 1),
    ("18", "#### $18.00", 1),
    ("18", "####18", 1),
    ("42", "#### 42" + PROSE, 1),
    ("42", "#### 42\n" + PROSE, 1),
    ("18", r"so \boxed{17}; no, one was missed, \boxed{18}", 1),
    ("17", r"so \boxed{17}; no, one was missed, \boxed{18}", 0),
    ("1/2", r"\boxed{\frac{1}{2}}", 1),
    ("1/2", r"\dfrac12", 1),
    ("1/2", "0.5", 1),
    ("1/2", ".5", 1),
    ("1/3", r"\boxed{0.33}", 0),
    ("1/3", r"\boxed{0.333333}", 0),
    ("√2/2", r"\boxed{\frac{\sqrt{2}}{2}}", 1),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{\sqrt{2}}{2}}", 1),
    ("1/2", r"\boxed{\frac{1}{2}", 0),
    ("1/2", r"\boxed{}", 0),
    ("1/2", "", 0),
    ("−7", r"\boxed{-7}", 1),
    ("−7", r"\boxed{−7}", 1),
    ("-7", r"\boxed{−7}", 1),
    ("−7", r"\boxed{7}", 0),
    ("75", r"\boxed{75\%}", 1),
    ("0.75", r"\boxed{75\%}", 1),
    ("7.5", r"\boxed{75\%}", 0),
    ("18", r"\boxed{18\text{ apples}}", 1),
    ("18", r"18 \text{ cm}^2", 1),
    ("10", "Answer: 10", 1),
    ("1", "Answer: 10", 0),
    ("250000", r"2.5\times 10^5", 1),
    ("250000", "2.5e5", 1),
    ("250000", r"\boxed{2.5e5}", 1),
    ("64", r"\boxed{６４}", 1),
    ("64", "答案是64。", 1),
    ("58", "Result: **58**", 1),
    ("1/500!", r"\frac{1}{502!}", 0),
    (r"\frac{1}{500!}", r"\boxed{\frac{1}{500!}}", 1),
    ("3^−70", "3^{-69}", 0),
    ("3^{-70}", "3^{-70}", 1),
    ("15", r"\pm 15", 0),
    ("15", r"\boxed{\pm 15}", 0),
    ("(1,2)", "(2,1)", 0),
    ("(1,2)", "(1,2)", 1),
    ("{1,2}", "{2,1}", 1),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
    ("9:30", "3:30", 0),
    ("9:30", "9:30", 1),
]


@pytest.mark.parametrize(("gold", "text", "right"), REPORTED)
def test_reported_cases(gold, text, right):
    assert score(gold, text) == right


NUMBERS = [
    ("1234567", "1,234,567", 1),
    ("1234567", r"\boxed{1\,234\,567}", 1),
    ("1234567", "1\u202f234\u202f567", 1),
    ("1234", "1,2345", 0),
    ("1.5", r"\boxed{1\frac{1}{2}}", 1),
    ("1.5", "1 1/2", 1),
    ("5.5", "1 1/2", 0),
    ("11/2", "1 1/2", 0),
    ("12", "1 2", 0),
    ("-3/4", r"\boxed{-\dfrac{3}{4}}", 1),
    ("-3/4", r"\boxed{\frac{-3}{4}}", 1),
    ("-4", r"\boxed{-2^2}", 1),
    ("512", r"\boxed{2^{3^2}}", 1),
    ("1024", "2^10", 1),
    ("120", r"\boxed{5!}", 1),
    ("5000000", r"\boxed{5\text{ million dollars}}", 1),
    ("5", r"\boxed{5\text{ million}}", 1),
    ("50", r"\boxed{5\text{ million}}", 0),
    ("75%", "0.75", 1),
    ("75%", r"0.75\%", 0),
    ("90", r"\boxed{90^\circ}", 1),
    ("90", "90°", 1),
    ("18", r"\boxed{18\;\mathrm{cm}}", 1),
    ("18 km", r"\boxed{18}", 1),
    ("5", "\\boxed{5 m/s}", 1),
    ("36", "3 dozen eggs", 1),
    ("1e-9", "2e-9", 0),
    ("10", "10 out of 20", 0),
    ("3", r"\boxed{3xy}", 0),
    ("3xy", r"\boxed{3ab}", 0),
    ("3xy", r"\boxed{3yx}", 1),
    ("7", r"\boxed{3 + 4 = 7}", 1),
    ("5", r"\boxed{x = 5}", 1),
    ("5", "so $x = 5$.", 1),
    ("0", r"\boxed{-0.0}", 1),
    (18, "18.0", 1),
    (0.5, r"\boxed{\tfrac{1}{2}}", 1),
    ("½", "0.5", 1),
    ("１，２３４", "1234", 1),
    ("٤٢", "42", 1),
]


@pytest.mark.parametrize(("gold", "text", "right"), NUMBERS)
def test_numbers(gold, text, right):
    assert score(gold, text) == right


COLLECTIONS = [
    ("(1,234)", "(1, 234)", 1),
    ("[0,1)", r"\left[0, 1\right)", 1),
    ("[0,1)", "(0,1)", 0),
    (r"(-\infty, 3]", r"\boxed{(-\infty,3]}", 1),
    ("1, 2", r"\boxed{2, 1}", 1),
    ("1, 2", r"\boxed{2 \text{ and } 1}", 1),
    ("1, 2", r"\boxed{1}", 0),
    ("1, 2", r"\boxed{(1,2)}", 0),
    ("1, 1", r"\boxed{1, 2}", 0),
    ("(1/2, 3)", r"\boxed{\left(\frac{1}{2}, 3\right)}", 1),
    (r"\pm 15", r"\boxed{-15, 15}", 1),
    (r"1 \pm \sqrt{2}", r"\boxed{1+\sqrt{2}, 1-\sqrt{2}}", 1),
    ("9:30", r"\boxed{9:30\text{ a.m.}}", 0),
    ("9:30 PM", r"\boxed{9:30\text{ p.m.}}", 1),
    ("9:30 PM", r"\boxed{9:30\text{ a.m.}}", 0),
    ("(1,2)", r"(x,y) = (1,2)", 1),
]


@pytest.mark.parametrize(("gold", "text", "right"), COLLECTIONS)
def test_collections(gold, text, right):
    assert score(gold, text) == right


SYMBOLIC = [
    ("18", r"\boxed{\sqrt{324}}", 1),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
    (r"2\sqrt{3}", "2sqrt(3)", 1),
    (r"2\sqrt{3}", r"the side is $2\sqrt{3}$ cm", 1),
    ("2", r"\boxed{2\sqrt{3}}", 0),
    ("2", r"2\sqrt{3}", 0),
    ("2π", r"\boxed{2\pi}", 1),
    ("2", r"\boxed{2\pi}", 0),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
    ("x^2+2x+1", r"\boxed{(y+1)^2}", 0),
    (r"\frac{\sqrt{2}}{500!}", r"\boxed{\frac{\sqrt{2}}{502!}}", 0),
    (r"\sqrt{2}", r"\boxed{1.414214}", 0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}", 0),
    (r"\sqrt{2}", r"\boxed{\sqrt{2} \text{ or } \sqrt{3}}", 0),
    ("0", r"\boxed{\sqrt{2}\sqrt{3}-\sqrt{6}}", 1),
    ("0", r"\boxed{\frac{\sqrt{2}}{502!}}", 0),
    ("10", r"\boxed{\binom{5}{2}}", 1),
    ("2+3i", r"\boxed{3i+2}", 1),
    ("2+3i", r"\boxed{2-3i}", 0),
    ("p-q", r"\boxed{q-p}", 0),
    (r"\emptyset", r"\boxed{\varnothing}", 1),
    (r"[1,2]\cup[3,4]", r"\boxed{[3,4]\cup[1,2]}", 1),
    ("x<3", r"\boxed{(-\infty,3)}", 1),
    (r"(-\infty,3)", r"\boxed{x<3}", 1),
    ("x^2+y^2=1", r"\boxed{y^2+x^2=1}", 1),
    ("1", r"\boxed{x^2+y^2=1}", 0),
    ("6", r"\boxed{3x = 6}", 0),
    ("2x+1", r"\boxed{f(x)=2x+1}", 1),
    ("5", r"\boxed{\text{Area} = 2 + 3 = 5}", 1),
    ("5", "x = 5 or x = 6", 0),
    ("B", r"\boxed{\text{(B)}}", 1),
    ("B", r"\boxed{C}", 0),
    ("Tuesday", r"\boxed{\text{tuesday}}", 1),
    ("Tuesday", "Answer: Tuesday", 1),
    ("Tuesday", "Answer: Sunday", 0),
]


@pytest.mark.parametrize(("gold", "text", "right"), SYMBOLIC)
def test_symbols_and_words(gold, text, right):
    assert score(gold, text) == right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 42. Let me check: 6 * 7 is 42 and 1 + 1 is 2.", "42"),
        ("The answer is 3/4 of the pie.", "3/4"),
        ("The answer is:\n\n$$\\frac{1}{2}$$\nas said.", r"\frac{1}{2}"),
        ("#### Step 1\nAdd them.\n#### Step 2\nThe answer is **72**.", "72"),
        ("It costs $5 and then $10.", "$10"),
        ("There are $3$ cats in 5 houses", "5"),
        ("We add 3 and 4, so we get $x = 7$.", "x = 7"),
        ("from 10-7 you see it", "7"),
        ("\\boxed{17} and #### 18", "17"),
        ("\\fbox{3} ", "3"),
        ("\\boxed 7.", "7"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("no idea", None),
        ("   ", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize("gold", ["", "   ", "$$", r"\boxed{}", r"so \boxed{"])
def test_empty_gold_is_an_error(gold):
    with pytest.raises(RewardError):
        score(gold, "18")


def test_a_whole_solution_may_be_the_gold_answer():
    assert score("She has 3 * 6 = 18.\n#### 18", "18") == 1
    assert score(r"Thus $x=\boxed{\frac{1}{2}}$.", "0.5") == 1


HOSTILE = [
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{x + 9^{9^{9^9}}}",
    r"\boxed{100000000!}",
    r"\boxed{x 100000000!}",
    r"\boxed{1e999999999999}",
    r"\boxed{\frac{1}{0}}",
    r"\boxed{0^{-1}}",
    r"\boxed{" + "(" * 900,
    r"\boxed{" + "(" * 400 + ")" * 400 + "}",
    r"\boxed{" + "{" * 400 + "1" + "}" * 401,
    r"\boxed{" + "2^" * 450 + "2}",
    r"\boxed{" + "-" * 900 + "1}",
    r"\boxed{" + "9" * 5000 + "}",
    r"\boxed{\sum_{k=1}^{\infty} k^k}",
    r"\boxed{(x+y+z)^{99}}",
    r"\boxed{\frac{\frac{}{}}{}}",
    r"\boxed{\undefined{1}}",
    "\\boxed{\x00\ud800}",
    "$" * 20000,
    "$1$ " * 20000,
    "####" * 5000,
    "answer is " * 5000,
    "1," * 20000,
    "\\boxed{" * 5000,
    "a" * 100000,
    " " * 100000 + "1",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_model_text_neither_raises_nor_hangs(text):
    start = time.process_time()
    assert score("17", text) == 0.0
    assert time.process_time() - start < 2  # of this process; symbolic.py bounds the worker's


def test_a_comparison_that_takes_too_long_is_ended_and_the_next_one_works():
    start = symbolic._worker.process
    assert not symbolic.equal("x^2+2", r"(x+y+z+w)^{50}(a+b)^{40}")
    assert symbolic.equal("x^2+2x+1", "(1+x)^2")
    assert symbolic._worker.process is not start


def test_a_forked_process_gets_a_worker_of_its_own():
    assert symbolic.equal("x^2+4x+4", "(x+2)^2")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if symbolic._worker.process is None and symbolic.equal("x^2+6x+9", "(x+3)^2") else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert symbolic.equal("x^2+8x+16", "(x+4)^2")


def test_works_in_threads_and_always_gives_the_same_score():
    rows = [(g, t) for g, t, _ in REPORTED + COLLECTIONS + SYMBOLIC]
    alone = [score(g, t) for g, t in rows]
    results: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda: results.append([score(g, t) for g, t in rows])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [alone] * 4


def test_reward_notes_what_it_read():
    assert math("#### 18", answer="18") == {"score": 1.0, "read": "18"}
    assert math("no idea", answer="18") == {"score": 0.0, "read": ""}
    assert math("18", answer=None) is None
    assert math("18", answer=["17", "18"]) == {"score": 1.0, "read": "18"}
    with pytest.raises(RewardError):
        math("18", answer=[])
