"""What a model talks to when a completion has several turns, and how its calls are made.

An environment is a plain class. One object of it plays one episode:

    class GuessNumber:
        def start(self, row):                      # row: the columns of the data
            self.secret = row["secret"]
            return [{"role": "user", "content": "Guess my number, 1 to 8."}]

        def step(self, reply):                     # reply: the text of the model's turn
            if reply.strip() == str(self.secret):
                return [], True, 1.0               # messages, done, reward
            return [{"role": "user", "content": "No. Again."}], False, 0.0

Both may be async. docs/environments.md is the guide for users.
"""

import asyncio
import contextlib
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import cache
from typing import Any, Protocol

import numpy as np

from covey.rollout.engine import Message

THREADS = 64  # calls of functions that are not async, at a time

Opening = Sequence[Message] | None
Step = tuple[Sequence[Message], bool, float | None]  # messages to the model, done, reward


class EpisodeError(ValueError):
    """An environment or tool that cannot be used, or that failed."""


class Environment(Protocol):
    """One episode. It may also have `close()`, called at the end, and a dict `notes`, whose numbers become metrics and
    whose entries become columns for the rewards."""

    def start(self, row: Mapping[str, Any]) -> "Opening | Awaitable[Opening]":
        """The opening messages, the same whenever they are asked for this row; None: the prompt of the data."""
        ...

    def step(self, reply: str) -> Step | Awaitable[Step]:
        """What the model reads next, whether that was the last turn, and the turn's reward (None: no opinion)."""
        ...


async def call(function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
    """What the function returns, sync ones in a thread of their own. TimeoutError after `timeout` seconds: a thread
    cannot be ended, so it is left to itself then."""
    if inspect.iscoroutinefunction(function):
        return await asyncio.wait_for(function(*args, **kwargs), timeout)
    async with _threads(asyncio.get_running_loop()):
        return await asyncio.wait_for(
            asyncio.wrap_future(_in_thread(lambda: function(*args, **kwargs))), timeout
        )


def schedule(function: Callable[..., Any], *args: Any, timeout: float | None = None) -> "Future[Any]":
    """`call` on the event loop that all environments of the process share; returns at once."""
    return asyncio.run_coroutine_threadsafe(call(function, *args, timeout=timeout), _loop())


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def check_opening(messages: Any, name: str) -> list[dict[str, Any]]:
    """The messages that `start` gave as dicts; at least one."""
    opening = check_messages(messages, f"{name}.start()")
    if not opening or opening[-1]["role"] == "assistant":
        raise EpisodeError(f"{name}.start() must open with messages that end with one to the model.")
    return opening


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """The messages as dicts. EpisodeError unless each has a role, and content that is text.

    Half of a surrogate pair, which a model can write as JSON ("\\ud800") and a tool can repeat, becomes "?": no
    tokenizer and no file takes it.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise EpisodeError(
            f'{where} gave {_short(messages)}; give a list of messages like [{{"role": "user", "content": "..."}}].'
        )
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise EpisodeError(
                f'{where} gave the message {_short(message)}; write {{"role": "user", "content": "..."}}.'
            )
    return [{key: _encodable(value) for key, value in message.items()} for message in messages]


def _encodable(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def check_step(result: Any, where: str) -> tuple[list[dict[str, Any]], bool, float | None]:
    """What `step` returned. EpisodeError if it is not (messages, done, reward); a reward of NaN is None."""
    if not isinstance(result, tuple) or len(result) != 3:
        raise EpisodeError(f"{where} returned {_short(result)}; return (messages, done, reward).")
    messages, done, reward = result
    if not isinstance(done, bool | np.bool_):
        raise EpisodeError(f"{where} returned done = {_short(done)}; it must be True or False.")
    messages = check_messages(messages, where)
    if not done and not messages:
        raise EpisodeError(f"{where} returned no messages, and is not done: there is nothing to reply to.")
    return messages, bool(done), check_reward(reward, where)


def check_reward(reward: Any, where: str) -> float | None:
    """The reward as a float; None, as NaN: no opinion. EpisodeError for what is no finite number."""
    if reward is None:
        return None
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.inf
    if math.isinf(number):
        raise EpisodeError(f"{where} returned the reward {_short(reward)}; give a number or None.")
    return None if math.isnan(number) else number


def _in_thread(function: Callable[[], Any]) -> "Future[Any]":
    """Runs it in a daemon thread: one that never returns does not keep the process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # it is the caller's, whatever it is
            _settle(future.set_exception, error)
        else:
            _settle(future.set_result, result)

    threading.Thread(target=run, daemon=True, name="covey-environment").start()
    return future


def _settle(put: Callable[[Any], None], value: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # it was given up meanwhile
        put(value)


@cache
def _threads(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    return asyncio.Semaphore(THREADS)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="covey-environments").start()
    return loop


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
