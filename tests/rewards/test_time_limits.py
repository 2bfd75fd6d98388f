"""What the runner promises of time: a call costs its limit and no more, and calls run at the same time."""

import asyncio
import functools
import math
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace as New
from typing import Any

import numpy as np
import pytest

from covey.rewards import lanes, pool
from covey.rewards.reward import RewardError, RewardSpec, load_reward
from covey.rewards.runner import Scorer, ScoreTable

NAN = math.nan
LIMIT = 0.4  # seconds


def group(*texts: str, **columns: Any) -> Any:
    prompt = New(text="q", messages=None, columns=columns)
    return New(prompt=prompt, completions=[New(text=text, ids=(5, 6), finish="eos") for text in texts])


def scorer(use: Any, **spec: Any) -> Scorer:
    return Scorer([load_reward(RewardSpec(use, **spec))])


def score(use: Any, *texts: str, **spec: Any) -> ScoreTable:
    return scorer(use, **spec)([group(*texts)])


@functools.cache
def warm() -> None:
    """All processes of the pool have started, so that a time below is that of the calls."""

    def slow(completion):
        time.sleep(0.2)

    score(slow, *"abcdefgh")


# --------------------------------------------------------------------------------------------- time limits


def hang(completion):
    while completion == "hangs":
        pass
    return 1.0


def hang_without_the_interpreter(completion):
    return float(sum(range(10**12))) if completion == "hangs" else 1.0  # no bytecode runs in `sum`


def sleep(completion):
    time.sleep(60 if completion == "hangs" else 0)
    return 1.0


async def sleep_async(completion):
    await asyncio.sleep(60 if completion == "hangs" else 0)
    return 1.0


async def block_async(completion):
    time.sleep(1.5 if completion == "hangs" else 0)
    return 1.0


def sleep_batch(completions):
    time.sleep(60 if "hangs" in completions else 0)
    return [1.0] * len(completions)


HANGS = [hang, hang_without_the_interpreter, sleep, sleep_async, block_async]


@pytest.mark.parametrize("use", HANGS, ids=lambda use: use.__name__)
def test_a_hung_reward_costs_its_limit_and_no_more(use):
    warm()
    scores = scorer(use, timeout=LIMIT, on_timeout="none")
    scores([group("a")])
    began = time.perf_counter()
    table = scores([group("hangs")])
    assert LIMIT <= time.perf_counter() - began < LIMIT + 0.5
    np.testing.assert_array_equal(table.total, [[NAN]])
    assert table.failures == {f"{use.__name__}/timeouts": 1}
    assert scores([group("a", "b")]).total.tolist() == [[1.0, 1.0]]  # and the next step is as before


def test_a_batch_function_costs_its_limit_too():
    table = score(sleep_batch, "a", "hangs", timeout=LIMIT, on_timeout=-1.0)
    assert table.total.tolist() == [[-1.0, -1.0]]
    assert table.failures == {"sleep_batch/timeouts": 1}


def test_calls_that_take_next_to_nothing_share_a_request_and_nothing_else(monkeypatch):
    requests = []
    original = pool.Pool.call

    async def counted(self, key, load, calls, *more):
        requests.append(len(calls))
        return await original(self, key, load, calls, *more)

    monkeypatch.setattr(pool.Pool, "call", counted)
    scores = scorer(hang, timeout=LIMIT, on_timeout="none")
    for _ in range(10):
        assert (scores([group(*"abcdefgh")]).total == 1.0).all()
    assert requests[:8] == [1] * 8 and requests[-1] == 8
    table = scores([group("a", "hangs", "c", "d", "hangs", "f", "g", "h")])
    np.testing.assert_array_equal(table.total, [[1.0, NAN, 1.0, 1.0, NAN, 1.0, 1.0, 1.0]])
    assert table.failures == {"hang/timeouts": 2}
    assert requests[10 - 1 :][-3:] == [8, 6, 3]  # what is left of the request goes to another process


def test_threads_that_hang_do_not_become_ever_more(monkeypatch):
    monkeypatch.setattr(lanes, "MAX_LEFT", 3)
    scores = scorer(sleep, run="thread", timeout=0.05, on_timeout="none")
    assert np.isnan(scores([group(*["hangs"] * 3)]).total).all()
    with pytest.raises(
        RewardError, match=r"sleep\(\): 4 calls hang in threads, which nobody can end\. Set run: process"
    ):
        scores([group("hangs")])


@pytest.mark.parametrize(
    ("policy", "total"), [("none", [1.0, NAN, 1.0]), (0.0, [1.0, 0.0, 1.0]), (-2, [1.0, -2.0, 1.0])]
)
def test_on_timeout(policy, total, caplog):
    table = score(sleep, "a", "hangs", "c", timeout=LIMIT, on_timeout=policy)
    np.testing.assert_array_equal(table.total, [total])
    (record,) = caplog.records
    assert "sleep() took longer than its limit of 0.4 s for row 1 (prompt 0, completion 1)" in record.message


def test_by_default_a_time_limit_stops_the_run_at_once():
    with pytest.raises(
        RewardError, match=r"limit of 0\.4 s for row 0 .*Raise its timeout, or set on_timeout: none"
    ):
        score(sleep, *["hangs"] * 40, timeout=LIMIT)  # not 40 / processes times the limit


def test_time_limits_that_mean_nothing_are_errors():
    for spec, expected in [
        ({"run": "inline", "timeout": 3.0}, "runs inline, where nothing can interrupt it"),
        ({"timeout": 0.0}, "timeout is 0.0; it must be a number of seconds above 0"),
        ({"on_error": "skip"}, 'on_error is "skip"; it must be stop, none or a number'),
        ({"on_timeout": NAN}, "on_timeout is nan; it must be a finite number"),
    ]:
        with pytest.raises(RewardError) as error:
            load_reward(RewardSpec(hang, **spec))
        assert expected in str(error.value)
    with pytest.raises(
        RewardError, match="is async and runs in the event loop, so run: thread means nothing"
    ):
        load_reward(RewardSpec(sleep_async, run="thread"))
    assert load_reward(RewardSpec(hang)).timeout == 120.0
    assert load_reward(RewardSpec(sleep_batch)).timeout is None


# ---------------------------------------------------------------------------------------- concurrency


def test_eight_async_rewards_of_half_a_second():
    async def judge(completion):
        await asyncio.sleep(0.5)
        return 1.0

    rewards = [load_reward(RewardSpec(judge, name=f"judge{i}")) for i in range(8)]
    began = time.perf_counter()
    assert (Scorer(rewards)([group(*"abcd")]).total == 8.0).all()
    assert time.perf_counter() - began < 1


def test_functions_of_all_kinds_run_at_the_same_time():
    """Each waits for the others: a file per kind, in a process, a thread, the loop, and for a batch."""
    warm()

    def single(completion, folder, name="process"):
        (folder / name).touch()
        for _ in range(400):
            if len(list(folder.iterdir())) == 4:
                return 1.0
            time.sleep(0.02)
        return 0.0

    def threaded(completion, folder):
        return single(completion, folder, "thread")

    def batch(completions, folder):
        return [single("", folder[0], "batch")]

    async def awaited(completion, folder):
        return await asyncio.to_thread(single, completion, folder, "loop")

    with tempfile.TemporaryDirectory() as folder:
        specs = [
            RewardSpec(single),
            RewardSpec(threaded, run="thread"),
            RewardSpec(batch),
            RewardSpec(awaited),
        ]
        table = Scorer([load_reward(spec) for spec in specs])([group("a", folder=Path(folder))])
    assert table.total.tolist() == [[4.0]]


def test_groups_are_scored_while_others_are_sampled():
    scored = threading.Event()

    async def quick(completion):
        scored.set()
        return float(completion)

    calls = []

    def batch(completions):
        calls.append(completions)
        return [10.0] * len(completions)

    both = Scorer([load_reward(RewardSpec(quick)), load_reward(RewardSpec(batch))])
    late = both.submit(group("3", "4"), p=1)
    assert scored.wait(10)  # before the other group exists
    assert calls == []  # a function for a whole step waits for the step
    early = both.submit(group("1", "2"), p=0)
    assert both.gather([early, late]).total.tolist() == [[11.0, 12.0], [13.0, 14.0]]
    assert calls == [["1", "2", "3", "4"]]
