"""Where rewards are called: inline, in a process of the pool, in a thread, or in an event loop.

`Caller.start` returns at once, with a future for each call; calls of all functions and groups run at the same
time. Inline calls aside, an Outcome comes within the call's time limit, whatever the function does.

Two event loops run in threads of their own and outlive a step. One is ours and is never blocked: it watches the
time limits. In the other run the users' async functions, because a client of a server is tied to its loop.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import cloudpickle

from covey.rewards.calls import Row, call_arguments
from covey.rewards.find import RewardError
from covey.rewards.pool import CallTimeout, CannotLoad, Pool, ProcessLost, pools_here
from covey.rewards.pool_child import Call, Failure, Load, Reply, describe_failure
from covey.rewards.reward import Reward
from covey.rewards.scores import Score, read_scores

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_PROCESSES = 16  # one per core, at most this many
REQUEST_SECONDS = 0.005  # work that one request to a process may bundle
MAX_THREADS = 32
MAX_LEFT = 100  # calls of a function that hang in threads
MAX_PICKLED = 64 * 2**20  # bytes of a function with all that it refers to


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended. scores: of its rows, if status is ok; else `message` says what happened.

    status: wrong is a return value that is no score. trace: the traceback of an error. seconds: of the call.
    """

    status: Literal["ok", "error", "timeout", "wrong"]
    scores: Sequence[Score] = ()
    message: str = ""
    trace: str = ""
    cause: BaseException | None = None
    seconds: float = 0.0


class Caller:
    """A reward and how it is called. If its function cannot be sent to a process, its lane becomes thread."""

    def __init__(self, reward: Reward):
        self.reward, self.lane, self.key = reward, reward.lane, next(_keys)
        self.loads: list[Load] = []  # the ways in which a process may get at the function, best first
        self.mean = 1.0  # seconds of a call, about
        self.left: list[Future[Outcome]] = []  # calls that hang in threads
        if self.lane == "process":
            self.loads = _loads(reward)
            if not self.loads:
                self._give_up_processes("it cannot be pickled, or is too large with all that it refers to")

    def start(self, rows: Sequence[Row]) -> "list[Future[Outcome]]":
        """Begin the calls for the rows: one for each row, or one for all of them if it is a batch function."""
        parts: list[Sequence[Row]] = [rows] if self.reward.batch else [[row] for row in rows]
        calls: list[_Waiting] = [(part, Future()) for part in parts]
        if self.lane == "inline":
            _inline_calls().put((self.reward, calls))
            return [future for _, future in calls]
        # Calls that take next to nothing share a request to a process.
        size = max(1, int(REQUEST_SECONDS / max(self.mean, 1e-6))) if self.lane == "process" else 1
        for i in range(0, len(calls), size):
            task = asyncio.run_coroutine_threadsafe(self._run(calls[i : i + size]), _watching_loop())
            for _, future in calls[i : i + size]:
                future.add_done_callback(
                    lambda future, task=task: task.cancel() if future.cancelled() else None
                )
        return [future for _, future in calls]

    async def _run(self, calls: "list[_Waiting]") -> None:
        """Fill the futures; what a reward does wrong is in their outcomes."""
        try:
            await self._call_all(calls)
        except BaseException as error:  # also cancelled; nobody may wait for ever
            for _, future in calls:
                if not future.done() and not future.cancel():
                    future.set_exception(error)
            raise

    async def _call_all(self, calls: "list[_Waiting]") -> None:
        ready: list[_Ready] = []
        for rows, future in calls:
            try:
                ready.append((rows, future, call_arguments(self.reward, rows)))
            except RewardError as error:
                _fill(future, Outcome("wrong", message=str(error)))
        if self.lane == "process":
            await self._in_process(ready)
        here = (
            self._in_loop if self.lane == "loop" else self._in_thread
        )  # what could not run in a process, too
        for rows, future, arguments in ready:
            try:
                _fill(future, await here(arguments, rows))
            except CallTimeout:
                _fill(future, self._timed_out(rows))

    async def _in_process(self, ready: "list[_Ready]") -> None:
        """Takes from `ready` what it has filled; leaves all of it if the function cannot be sent."""
        reward = self.reward
        while ready and self.lane == "process":
            key, load = self.key, self.loads[0]
            calls = [
                Call(reward.where, reward.file, reward.batch, [row.place for row in rows], arguments)
                for rows, _, arguments in ready
            ]

            def done(reply: Reply) -> None:
                self.mean += (reply.seconds - self.mean) / 8
                rows, future, _ = ready.pop(0)
                _fill(future, _read(reward, rows, reply))

            try:
                await pool().call(key, load, calls, reward.timeout, done)
            except CannotLoad as error:
                self._next_load(load, f"a process cannot load it ({error})")
            except CallTimeout:
                rows, future, _ = ready.pop(0)
                _fill(future, self._timed_out(rows))
            except ProcessLost as error:
                rows, future, _ = ready.pop(0)
                _fill(future, Outcome("error", message=f"{reward.where} {error} for {_which(reward, rows)}."))
            except Exception as error:  # pickle raises nearly anything
                self._give_up_processes(f"its arguments cannot be pickled ({error})")

    def _timed_out(self, rows: Sequence[Row]) -> Outcome:
        reward = self.reward
        assert reward.timeout is not None
        self.mean += (reward.timeout - self.mean) / 8
        message = (
            f"{reward.where} took longer than its limit of {reward.timeout:g} s for {_which(reward, rows)}. "
            "Raise its timeout, or set on_timeout: none to go on without these scores."
        )
        return Outcome("timeout", message=message, seconds=reward.timeout)

    def _next_load(self, failed: Load, why: str) -> None:
        """Several calls may find out at the same time; the first of them drops the way that does not work."""
        if self.loads and self.loads[0] is failed:
            self.loads.pop(0)
            self.key = next(_keys)
        if not self.loads:
            self._give_up_processes(why)

    def _give_up_processes(self, why: str) -> None:
        if self.lane == "process":
            self.lane = "thread"
            logger.warning(
                "%s runs in a thread: %s. There it cannot be ended when it takes too long, and a verifier that "
                "uses signals does not work.",
                *(self.reward.where, why),
            )

    async def _in_thread(self, arguments: dict[str, Any], rows: Sequence[Row]) -> Outcome:
        async with _threads():
            future = _thread(lambda: _called(self.reward, rows, arguments))
            await asyncio.wait({asyncio.wrap_future(future)}, timeout=self.reward.timeout)
        if future.done():
            return future.result()
        self.left = [left for left in (*self.left, future) if not left.done()]
        if len(self.left) > MAX_LEFT:
            message = f"{self.reward.where}: {len(self.left)} calls hang in threads, which nobody can end."
            return Outcome("wrong", message=f"{message} Set run: process.")
        raise CallTimeout

    async def _in_loop(self, arguments: dict[str, Any], rows: Sequence[Row]) -> Outcome:
        loop = _users_loop()
        future = asyncio.run_coroutine_threadsafe(_awaited(self.reward, rows, arguments), loop)
        try:
            await asyncio.wait({asyncio.wrap_future(future)}, timeout=self.reward.timeout)
            if future.cancelled():
                message = f"{self.reward.where} cancelled itself for {_which(self.reward, rows)}."
                return Outcome("error", message=message)
            if future.done():
                return future.result()
        finally:
            future.cancel()  # no effect on a finished one
        if not await _answers(loop):
            _users_loop.cache_clear()
            logger.warning(
                "%s blocks its event loop: it is async, but waits without await. Make it a plain function.",
                self.reward.where,
            )
        raise CallTimeout


_Waiting = tuple[Sequence[Row], "Future[Outcome]"]
_Ready = tuple[Sequence[Row], "Future[Outcome]", dict[str, Any]]


def _fill(future: "Future[Outcome]", outcome: Outcome) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(outcome)


def _read(reward: Reward, rows: Sequence[Row], reply: Reply) -> Outcome:
    """A process's reply as an outcome; what the function printed is printed."""
    if reply.printed:
        print(reply.printed, end="")
    if reply.failed is not None:
        return _failed(reward, rows, reply.failed, reply.seconds)
    if reply.scores is None:
        return Outcome("wrong", message=reply.wrong, seconds=reply.seconds)
    return Outcome("ok", reply.scores, seconds=reply.seconds)


def _loads(reward: Reward) -> list[Load]:
    """The ways in which a process may get at the function; what Python pickles by name it may not find there."""
    path = list(map(str, sys.path))
    if reward.use is not None:
        return [Load(reward.use, reward.stamp, b"", path)]
    function = reward.function
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    found = [_pickled(reward.function)]
    if module is not None and module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)
        found.append(_pickled(reward.function))
        cloudpickle.unregister_pickle_by_value(module)
    return [Load(None, 0, data, path) for data in found if 0 < len(data) <= MAX_PICKLED]


def _pickled(function: Callable[..., Any]) -> bytes:
    try:
        return cloudpickle.dumps(function)
    except Exception:  # what a function refers to may raise anything when it is pickled
        return b""


# ------------------------------------------------------------------------------------------- calls here


def _called(reward: Reward, rows: Sequence[Row], arguments: dict[str, Any]) -> Outcome:
    """Call the function here and now."""
    began = time.perf_counter()
    try:
        returned = reward.function(**arguments)
    except BaseException as error:  # whatever it raises; sys.exit() would end this thread without a word
        return _raised(reward, rows, error, time.perf_counter() - began)
    return _returned(reward, rows, returned, time.perf_counter() - began)


async def _awaited(reward: Reward, rows: Sequence[Row], arguments: dict[str, Any]) -> Outcome:
    began = time.perf_counter()
    try:
        returned = await reward.function(**arguments)
    except asyncio.CancelledError:  # by the time limit, or because nobody waits any more
        raise
    except BaseException as error:  # whatever a user's function raises; sys.exit() would end the loop
        return _raised(reward, rows, error, time.perf_counter() - began)
    return _returned(reward, rows, returned, time.perf_counter() - began)


def _returned(reward: Reward, rows: Sequence[Row], returned: Any, seconds: float) -> Outcome:
    try:
        scores = read_scores(reward.where, reward.batch, [row.place for row in rows], returned)
    except RewardError as error:
        return Outcome("wrong", message=str(error), seconds=seconds)
    return Outcome("ok", scores, seconds=seconds)


def _raised(reward: Reward, rows: Sequence[Row], error: BaseException, seconds: float) -> Outcome:
    return _failed(reward, rows, describe_failure(error, reward.file), seconds, error)


def _failed(
    reward: Reward, rows: Sequence[Row], failure: Failure, seconds: float, error: BaseException | None = None
) -> Outcome:
    if error is None and failure.pickled:
        with contextlib.suppress(Exception):  # an exception of a class that only the process knows
            error = pickle.loads(failure.pickled)
    hint = " It uses signals: set run: process." if "only works in main thread" in failure.what else ""
    message = f"{failure.line}: {reward.where} raised {failure.what} for {_which(reward, rows)}.{hint}"
    return Outcome("error", message=message, trace=failure.trace, cause=error, seconds=seconds)


def _which(reward: Reward, rows: Sequence[Row]) -> str:
    following = " and the following" if reward.batch else ""
    return f"{rows[0].place}{following}, completion {rows[0].completion.text[:80]!r}"


# ------------------------------------------------------------------------------- loops, threads, the pool

_keys = itertools.count()  # of functions, in the processes of the pool


def _loop_in_a_thread(name: str) -> asyncio.AbstractEventLoop:
    """It also works where the caller already runs in a loop, as in a notebook."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


@functools.cache
def _watching_loop() -> asyncio.AbstractEventLoop:
    return _loop_in_a_thread("covey-rewards")


@functools.cache
def _users_loop() -> asyncio.AbstractEventLoop:
    return _loop_in_a_thread("covey-async-rewards")


@functools.cache
def pool() -> Pool:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Pool(max(2, min(MAX_PROCESSES, cores // pools_here())))


@functools.cache
def _threads() -> asyncio.Semaphore:
    return asyncio.Semaphore(MAX_THREADS)


def _thread(function: Callable[[], T]) -> "Future[T]":
    """Call in a daemon thread: one that hangs for ever does not keep the program from ending."""
    future: Future[T] = Future()

    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="covey-reward", daemon=True).start()
    return future


@functools.cache
def _inline_calls() -> "queue.SimpleQueue[tuple[Reward, list[_Waiting]]]":
    """What is put in is called in one thread, in order, so that who puts it in (the sampler) goes on at once."""
    waiting: queue.SimpleQueue[tuple[Reward, list[_Waiting]]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            reward, calls = waiting.get()
            for rows, future in calls:
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(_inline(reward, rows))
                except BaseException as error:  # a __repr__ that raises; the next ones go on
                    future.set_exception(error)

    threading.Thread(target=work, name="covey-inline-rewards", daemon=True).start()
    return waiting


def _inline(reward: Reward, rows: Sequence[Row]) -> Outcome:
    try:
        arguments = call_arguments(reward, rows)
    except RewardError as error:
        return Outcome("wrong", message=str(error))
    return _called(reward, rows, arguments)


async def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    ping = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
    done, _ = await asyncio.wait({ping}, timeout=0.1)
    return bool(done)


_of_the_parent: list[Any] = []  # in a forked child, kept: to tidy them up would disturb the parent


def _after_fork() -> None:
    """A child has none of the threads, so it starts everything anew."""
    for cached in (_watching_loop, _users_loop, pool, _threads, _inline_calls):
        if cached.cache_info().currsize:
            _of_the_parent.append(cached())
            cached.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
