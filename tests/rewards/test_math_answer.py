"""What must hold for any text: which answer is read, what is an error, and that hostile text costs little.

The verdicts on pairs of answers are in test_answer_pairs.py.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from covey.rewards import symbolic
from covey.rewards.math_answer import final_answer, math, score
from covey.rewards.reward import RewardError
from covey.rewards.worker import Worker


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """The worker of math with a limit of half a second."""
    worker = Worker("covey.rewards.symbolic", 0.5)
    monkeypatch.setattr(symbolic, "_worker", worker)
    symbolic.equal.cache_clear()
    yield worker
    worker.stop()
    symbolic.equal.cache_clear()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\\boxed{17}</think>The answer is 18.", "18"),
        ("<think>\\boxed{17}", None),
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
    r"\boxed{" + "*".join(["5000!"] * 160) + "}",  # each is small enough
    r"\boxed{" + "/".join(["5000!/4999!"] * 80) + "}",
    r"\boxed{" + "/".join(["1.7e50000"] * 90) + "}",
    r"\boxed{" + "+".join(f"1/{n}!" for n in range(4880, 5000)) + "}",
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


def test_model_text_neither_raises_nor_hangs(hasty):
    for text in HOSTILE:
        start = time.process_time()
        assert score("17", text) == 0.0, text[:80]
        assert time.process_time() - start < 2, text[:80]  # of this process; the worker has its limit


def test_a_comparison_that_takes_too_long_is_ended_and_the_next_one_works(hasty):
    assert symbolic.equal("x^2+2x+1", "(1+x)^2")
    first = hasty.process
    assert not symbolic.equal("x^2+2", r"(x+y+z+w)^{50}(a+b)^{40}")
    assert symbolic.equal("x^2+4x+4", "(2+x)^2")
    assert hasty.process is not first


def test_a_forked_process_gets_a_worker_of_its_own():
    assert symbolic.equal("x^2+4x+4", "(x+2)^2")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if symbolic._worker.process is None and symbolic.equal("x^2+6x+9", "(x+3)^2") else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert symbolic.equal("x^2+8x+16", "(x+4)^2")


def test_the_limit_holds_in_a_thread_of_a_fresh_process():
    code = (
        "import threading\n"
        "from covey.rewards import symbolic\n"
        "symbolic._worker.cpu_seconds = 0.5\n"
        "found = []\n"
        "pairs = [('x^2+2', '(x+y+z+w)^{50}(a+b)^{40}'), ('x^2+2x+1', '(1+x)^2')]\n"
        "thread = threading.Thread(target=lambda: found.extend(symbolic.equal(*pair) for pair in pairs))\n"
        "thread.start(); thread.join()\n"
        "print(found)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[False, True]\n", done.stderr


def test_the_worker_ends_with_its_process():
    code = "from covey.rewards import symbolic; symbolic.equal('x+1', '1+x'); print(symbolic._worker.process.pid)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the worker lives on")


def test_reward_notes_what_it_read():
    assert math("#### 18", answer="18") == {"score": 1.0, "read": "18"}
    assert math("no idea", answer="18") == {"score": 0.0, "read": ""}
    assert math("18", answer=None) is None
    assert math("18", answer=["17", "18"]) == {"score": 1.0, "read": "18"}
    with pytest.raises(RewardError):
        math("18", answer=[])
