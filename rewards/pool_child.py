"""The other end of pool.py: a process that calls rewards, one after another, each in its main thread.

Requests and replies are pickles behind their length. A request is ("load", key, Load) or ("call", key, [Call, ...]);
there is one Reply for a load and for each call, as soon as it is done. What a reward prints comes back with the reply,
so that it does not tear a live display.
"""

import contextlib
import io
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from covey.rewards.find import PICKLED_CODE, RewardError, failing_line, file_stamp
from covey.rewards.scores import Score, read_scores

LENGTH = struct.Struct(">Q")
MAX_PRINTED = 10_000  # characters of one call


@dataclass(frozen=True, slots=True)
class Load:
    """How a function is found: by the name that the configuration gives it, or pickled. stamp: see find.py."""

    use: str | None
    stamp: int
    pickled: bytes
    path: list[str]  # sys.path


@dataclass(frozen=True, slots=True)
class Call:
    where: str
    file: str
    batch: bool
    places: list[str]
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """One of: scores; `wrong`, a message about what was returned; `failed`, an exception of the function."""

    scores: list[Score] | None = None
    wrong: str = ""
    failed: "Failure | None" = None
    printed: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as it can travel. line: "rewards.py:14"; trace: the traceback as text."""

    what: str
    line: str
    trace: str
    pickled: bytes


def serve(descriptor: int) -> None:
    """Answer requests on a socket until the other end closes it."""
    sock = socket.socket(fileno=descriptor)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that `finally` runs: a sandbox ends its program
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
    threading.Thread(target=_end_with_parent, args=(sock,), daemon=True).start()
    os.dup2(2, 1)  # what is written past sys.stdout must not look like the run's output
    stream = sock.makefile("rwb")
    folder = os.getcwd()
    functions: dict[int, Callable[..., Any]] = {}
    while header := stream.read(LENGTH.size):
        kind, key, request = pickle.loads(stream.read(LENGTH.unpack(header)[0]))
        if kind == "load":
            _answer(stream, _load(functions, key, request))
            continue
        for call in request:
            reply = _call(functions[key], call)
            os.chdir(folder)
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)  # an alarm that a verifier left behind would hit the next call
            _answer(stream, reply)


def _answer(stream: Any, reply: Reply) -> None:
    data = pickle.dumps(reply)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def _end_with_parent(sock: socket.socket) -> None:
    """End this process, whatever it does, when the other end of the socket is closed or dies."""
    poll = select.poll()
    poll.register(sock, select.POLLHUP | select.POLLRDHUP)
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _load(functions: dict[int, Callable[..., Any]], key: int, how: Load) -> Reply:
    sys.path[:] = how.path
    try:
        if how.use is None:
            functions[key] = pickle.loads(how.pickled)
        else:
            from covey.rewards.reward import find_function

            if file_stamp(how.use) != how.stamp:
                return Reply(wrong=f"{how.use.rpartition(':')[0]} was changed after the run started")
            functions[key] = find_function(how.use)
    except Exception as error:  # whatever a user's module does while it is imported
        return Reply(wrong=f"{type(error).__name__}: {error}")
    return Reply()


def _call(function: Callable[..., Any], call: Call) -> Reply:
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            returned, failed = function(**call.arguments), None
        except Exception as error:  # whatever a user's function raises
            returned, failed = None, describe_failure(error, call.file)
    printed, seconds = out.getvalue()[:MAX_PRINTED], time.perf_counter() - began
    if failed is not None:
        return Reply(failed=failed, printed=printed, seconds=seconds)
    try:
        scores = read_scores(call.where, call.batch, call.places, returned)
    except RewardError as error:
        return Reply(wrong=str(error), printed=printed, seconds=seconds)
    return Reply([(score, _plain(notes)) for score, notes in scores], printed=printed, seconds=seconds)


def describe_failure(error: BaseException, file: str) -> Failure:
    """What is worth knowing of an exception that a function of `file` raised."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # an exception that cannot travel
        pickled = b""
    trace = "".join(traceback.format_exception(error)[-6:]).replace(PICKLED_CODE, file)
    return Failure(f"{type(error).__name__}: {error}", failing_line(error, file), trace, pickled)


def _plain(value: Any) -> Any:
    """A note as the parent can read it: of a class that only this process knows, its repr."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float | None) else repr(value)
