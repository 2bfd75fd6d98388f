"""What the runner promises of rewards in processes and threads, and of those that fail, leak, die or meddle."""

import asyncio
import functools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from covey.rewards import lanes, pool
from covey.rewards.reward import RewardError, RewardSpec, load_reward
from covey.rewards.runner import Scorer, ScoreTable

NAN = math.nan
LIMIT = 0.4


@dataclass
class Prompt:
    text: str = "q"
    messages: tuple[dict[str, Any], ...] | None = None
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class Completion:
    text: str
    ids: tuple[int, ...] = (5, 6)
    finish: str = "eos"


@dataclass
class Group:
    prompt: Prompt
    completions: tuple[Completion, ...]


def group(*texts: str, **columns: Any) -> Group:
    return Group(Prompt(columns=columns), tuple(Completion(text) for text in texts))


def scorer(use: Any, **spec: Any) -> Scorer:
    return Scorer([load_reward(RewardSpec(use, **spec))])


def score(use: Any, *texts: str, **spec: Any) -> ScoreTable:
    return scorer(use, **spec)([group(*texts)])


@pytest.fixture
def processes(monkeypatch) -> Iterator[list[pool._Process]]:
    """The processes that are started while the test runs."""
    started: list[pool._Process] = []
    original = pool._Process.__init__

    def remember(self, *args):
        original(self, *args)
        started.append(self)

    monkeypatch.setattr(pool._Process, "__init__", remember)
    lanes.pool.cache_clear()  # a pool of its own: no process has started
    yield started
    lanes.pool.cache_clear()


# ------------------------------------------------------------------------------------------- where it runs


def test_one_completion_at_a_time_runs_in_the_main_thread_of_a_process():
    def where(completion):
        main = threading.current_thread() is threading.main_thread()
        return {"score": main, "pid": os.getpid(), "session": os.getsid(0)}

    notes = [row["where.pid"] for row in score(where, *"abcdefgh").notes[0]]
    assert os.getpid() not in notes
    assert (score(where, "a", "b").total == 1.0).all()
    assert score(where, "a").notes[0][0]["where.session"] != os.getsid(0)  # Ctrl-C does not reach it


def test_verifiers_that_use_signals_work():
    def verifier(completion):
        def alarm(number, frame):
            raise TimeoutError

        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            while completion == "hangs":
                pass
            return 1.0
        except TimeoutError:
            return 0.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    assert score(verifier, "fine", "hangs").total.tolist() == [[1.0, 0.0]]


def test_an_alarm_that_is_left_behind_does_not_hit_the_next_call(processes):
    def careless(completion):
        time.sleep(0.1 if completion == "b" else 0)
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # without a handler it ends the process
        return 1.0

    assert score(careless, *"abababab").total.tolist() == [[1.0] * 8]
    assert len(processes) <= 2


def test_a_thread_says_that_signals_do_not_work_there():
    def verifier(completion):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    with pytest.raises(RewardError, match=r"It uses signals: set run: process\."):
        score(verifier, "a", run="thread")


@pytest.mark.parametrize("run", ["inline", "thread"])
def test_inline_and_threads_keep_what_the_function_remembers(run):
    seen = []

    def remembers(completion):
        seen.append((completion, threading.current_thread()))
        return os.getpid()

    assert set(score(remembers, *"abc", run=run).total[0]) == {os.getpid()}
    assert sorted(text for text, _ in seen) == ["a", "b", "c"]
    if run == "inline":
        assert [text for text, _ in seen] == ["a", "b", "c"] and len({thread for _, thread in seen}) == 1
        assert seen[0][1] is not threading.main_thread()  # the sampler goes on


def test_a_batch_function_can_run_in_a_process():
    def batch(completions):
        return [os.getpid()] * len(completions)

    assert os.getpid() not in score(batch, "a", "b", run="process").total
    assert os.getpid() in score(batch, "a", "b").total


def test_what_cannot_be_pickled_runs_in_a_thread_and_says_so(caplog):
    lock = threading.Lock()

    def locked(completion):
        with lock:
            return os.getpid()

    scores = scorer(locked)
    assert scores([group("a", "b")]).total.tolist() == [[os.getpid()] * 2]
    (record,) = caplog.records
    assert "locked() runs in a thread: it cannot be pickled, or is too large" in record.message


def test_arguments_that_cannot_be_pickled_too(caplog):
    def asks(completion, handle):
        return os.getpid()

    scores = scorer(asks)([group("a", "b", handle=threading.Lock())])
    assert scores.total.tolist() == [[os.getpid()] * 2]
    assert "asks() runs in a thread: its arguments cannot be pickled" in caplog.records[0].message


def test_a_function_of_a_module_that_a_process_cannot_import_travels_by_value(caplog):
    assert score(of_this_module, "a").total[0, 0] == 7.0
    assert score(functools.partial(of_this_module, factor=2), "a").total[0, 0] == 14.0
    assert not caplog.records


def helper() -> float:
    return 7.0


def of_this_module(completion, factor=1):
    return factor * helper()


def test_a_file_is_loaded_in_the_process(tmp_path, monkeypatch, caplog):
    (tmp_path / "constants_of_mine.py").write_text("x = 3.0\n")
    (tmp_path / "mine.py").write_text(
        "import os, constants_of_mine\ndef f(completion): return constants_of_mine.x * os.getpid()\n"
    )
    scores = scorer(f"{tmp_path}/mine.py:f")
    found = scores([group("a")]).total[0, 0]
    assert found % 3 == 0 and found != 3 * os.getpid()
    # The run goes on with what it began with, also in a process that starts later.
    os.utime(tmp_path / "mine.py", ns=(1, 1))
    scores._callers[0].key = next(lanes._keys)
    assert scores([group("a")]).total[0, 0] == 3 * os.getpid()
    assert "mine.py was changed after the run started" in caplog.records[0].message


def test_prints_come_out_here(capsys):
    def talks(completion):
        print("saw", completion)
        return 1.0

    score(talks, "a")
    assert capsys.readouterr().out == "saw a\n"


# ------------------------------------------------------------------------------------ errors and processes


def fails(completion):
    if completion == "bad":
        raise KeyError("colour")
    return 1.0


async def fails_async(completion):
    return fails(completion)


def fails_batch(completions):
    return [fails(completion) for completion in completions]


@pytest.mark.parametrize("run", ["process", "thread", "inline"])
def test_on_error(run, caplog):
    scores = scorer(fails, run=run, on_error="none")
    for _ in range(10):
        table = scores([group("a", "bad")])
        np.testing.assert_array_equal(table.total, [[1.0, NAN]])
        assert table.failures == {"fails/errors": 1}
    first, tenth = (record.message for record in caplog.records)
    assert "fails() raised KeyError: 'colour' for row 1 (prompt 0, completion 1), completion 'bad'." in first
    assert "in fails" in first and "test_pool.py" in first  # the traceback
    assert tenth == "fails/errors: 10 by now."


def test_on_error_of_the_other_kinds():
    assert score(fails_async, "a", "bad", on_error=0.5).total.tolist() == [[1.0, 0.5]]
    table = score(fails_batch, "a", "bad", on_error=0.5)
    assert table.total.tolist() == [[0.5, 0.5]] and table.failures == {"fails_batch/errors": 1}
    assert score(fails_batch, "a", on_error=0.5).failures == {"fails_batch/errors": 0}


def test_a_message_names_the_place_that_the_group_has_in_the_step():
    failing = scorer(fails)
    pending = [failing.submit(group("a", "b"), p=5), failing.submit(group("a", "bad"), p=2)]
    with pytest.raises(RewardError, match=r"row 5 \(prompt 2, completion 1\)"):
        failing.gather(pending)


@pytest.mark.parametrize("run", ["process", "thread", "inline"])
def test_a_function_that_wants_to_end_the_program_fails(run):
    def leaves(completion):
        if completion == "bad":
            sys.exit(3)
        return 1.0

    table = score(leaves, "a", "bad", "c", run=run, on_error="none")
    np.testing.assert_array_equal(table.total, [[1.0, NAN, 1.0]])
    assert table.failures == {"leaves/errors": 1}


def test_async_functions_that_end_the_program_or_themselves_fail():
    async def leaves(completion):
        raise {"exit": SystemExit, "cancel": asyncio.CancelledError}[completion]

    for end, says in (("exit", "raised SystemExit"), ("cancel", "cancelled itself")):
        with pytest.raises(RewardError, match=rf"leaves\(\) {says}.* for row 0 .*"):
            score(leaves, end)
    assert score(fails_async, "a").total.tolist() == [[1.0]]  # the loop goes on


def test_what_cannot_be_shown_does_not_hang_the_run():
    class Silent:
        def __repr__(self):
            raise ValueError("no words")

    with pytest.raises(ValueError, match="no words"):
        score(lambda completion: Silent(), "a", run="inline")
    assert score(fails, "a", run="inline").total.tolist() == [[1.0]]


def test_what_is_no_score_stops_the_run_whatever_the_policy():
    with pytest.raises(RewardError, match=r'returned "1" \(str\) for row 0'):
        score(lambda completion: "1", "a", on_error="none")


def test_a_process_that_dies_is_an_error_and_is_replaced():
    def dies(completion):
        if completion == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        return 1.0

    np.testing.assert_array_equal(score(dies, "a", "dies", "c", on_error="none").total, [[1.0, NAN, 1.0]])
    with pytest.raises(RewardError, match=r"dies\(\) ended its process \(SIGSEGV\) for row 0"):
        score(dies, "dies")


def test_an_exception_of_a_class_that_only_the_process_knows(tmp_path):
    (tmp_path / "own.py").write_text("class Own(Exception): pass\n\ndef f(completion):\n    raise Own('x')\n")
    with pytest.raises(RewardError, match=r"own\.py:4: .*f\(\) raised Own: x for row 0"):
        score(f"{tmp_path}/own.py:f", "a")


def test_notes_of_a_class_that_only_the_process_knows(tmp_path):
    (tmp_path / "own.py").write_text(
        "class Own:\n    def __repr__(self): return 'Own!'\n\n"
        "def f(completion): return {'score': 1, 'what': Own(), 'n': [1, (2, None)]}\n"
    )
    assert score(f"{tmp_path}/own.py:f", "a").notes == [[{"f.what": "Own!", "f.n": [1, [2, None]]}]]


def test_starting_a_process_does_not_count(processes):
    def quick(completion):
        return 1.0

    assert score(quick, "a", timeout=0.03).total.tolist() == [[1.0]]  # Python alone takes longer to start
    assert len(processes) == 1


def test_a_hung_process_and_its_children_are_ended(processes, tmp_path):
    def parent(completion):
        child = subprocess.Popen(["sleep", "60"])
        Path(completion).write_text(str(child.pid))
        child.wait()

    file = tmp_path / "pid"
    score(parent, str(file), timeout=LIMIT, on_timeout="none")
    gone(processes[0].child.pid)
    gone(int(file.read_text()))


def gone(pid: int) -> None:
    """Waits until a process has ended; a zombie has."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} lives")


def test_a_process_that_has_grown_is_replaced(processes, monkeypatch):
    monkeypatch.setattr(pool, "GROWTH_BYTES", 2**20)

    def leaks(completion, kept=[]):  # noqa: B006  (that is the leak)
        kept.append(bytearray(int(completion) * 2**20))
        return len(kept)

    scores = scorer(leaks)
    kept = [scores([group(size)]).total[0, 0] for size in ("0", "1", "200", "0", "0")]
    assert kept == [1, 2, 3, 1, 2]
    assert len(processes) == 2


def test_a_call_that_takes_too_much_memory_is_ended(monkeypatch):
    monkeypatch.setattr(lanes.pool(), "_most_bytes", 300 * 2**20)

    def bomb(completion):
        data = bytearray(500 * 2**20)
        time.sleep(20)
        return len(data)

    with pytest.raises(
        RewardError, match=r"bomb\(\) grew to 0\.\d GiB, and 0\.3 GiB are its limit for row 0"
    ):
        score(bomb, "a")


def test_processes_end_with_the_program(tmp_path):
    """Also one that is busy, and when the program is killed and cannot clean up."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom types import SimpleNamespace as New\n"
        "from covey.rewards.reward import RewardSpec, load_reward\nfrom covey.rewards.runner import Scorer\n"
        "def pid(completion):\n    print(os.getpid(), flush=True)\n    while completion == 'hangs': pass\n"
        "    return 1.0\n"
        "def hang(completion):\n    open(completion, 'w').write(str(os.getpid()))\n    while True: pass\n"
        "def group(text): return New(prompt=New(text='', messages=None, columns={}),"
        " completions=[New(text=text, ids=(), finish='eos')])\n"
        "Scorer([load_reward(RewardSpec(pid))])([group('a')])\n"
        "if len(sys.argv) > 1: Scorer([load_reward(RewardSpec(hang))])([group(sys.argv[1])])\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    gone(int(ended.stdout))

    file = tmp_path / "pid"
    for number in (signal.SIGINT, signal.SIGKILL):
        file.unlink(missing_ok=True)
        run = subprocess.Popen([sys.executable, script, file], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not file.exists() or not file.read_text():
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        run.send_signal(number)
        assert b"KeyboardInterrupt" in run.communicate(timeout=20)[1] or number == signal.SIGKILL
        gone(int(file.read_text()))


# --------------------------------------------------------------------------------- the run is left alone


@pytest.mark.parametrize("run", ["process", "thread", "inline"])
def test_ids_random_state_and_folder_of_the_run_are_left_alone(run):
    import random

    import torch

    def vandal(completion, completion_ids, messages, answers):
        completion_ids.append(9)
        messages[0]["content"] = messages.append({}) or "changed"
        answers["a"].append(2)
        random.seed(1)
        np.random.seed(1)
        if generators := sys.modules.get("torch"):  # a process has not imported it
            generators.manual_seed(1)
        os.chdir("/")
        return 1.0

    rows = Group(
        Prompt("q", ({"role": "user", "content": "q"},), {"answers": {"a": [1]}}), (Completion("a", (5,)),)
    )
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    expected = (random.random(), np.random.rand(), torch.rand(()).item())
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    folder = os.getcwd()
    assert scorer(vandal, run=run)([rows]).total.tolist() == [[1.0]]
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected
    assert os.getcwd() == folder
    assert rows.prompt.messages == ({"role": "user", "content": "q"},)
    assert rows.prompt.columns == {"answers": {"a": [1]}} and rows.completions[0].ids == (5,)


def test_a_forked_process_gets_a_pool_and_loops_of_its_own():
    async def awaited(completion):
        return 1.0

    def single(completion):
        return 1.0

    assert score(single, "a").total[0, 0] == score(awaited, "a").total[0, 0] == 1.0
    pid = os.fork()
    if pid == 0:
        fine = [score(single, "a", run=run).total[0, 0] for run in ("process", "thread", "inline")]
        fine.append(score(awaited, "a").total[0, 0])
        pool._end_all()
        os._exit(0 if fine == [1.0] * 4 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert score(single, "a").total[0, 0] == 1.0
