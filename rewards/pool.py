"""A bounded pool of processes in which rewards are called, so that one that hangs, leaks or dies can be ended.

The processes are started afresh (no fork, so CUDA in this process is no matter, and `__main__` is not run again),
live between steps, and call a function in their main thread, which is where signals work. All of this runs in one
event loop (lanes.py); nothing here blocks it.
"""

import asyncio
import atexit
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from covey.rewards.pool_child import LENGTH, Call, Load, Reply

LOAD_SECONDS = 300.0  # to start a process and import a user's module
GRACE_SECONDS = 0.3  # between asking a process to end and ending it
GROWTH_BYTES = 512 * 2**20  # beyond twice its size after its first call, a process is replaced between calls
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from covey.rewards.pool_child import serve; serve(int(sys.argv[2]))"
)
# Many processes are the parallelism. Equal hashes: what iterates over a set does so alike in every process.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class CallTimeout(Exception):
    """A call took longer than its limit; its process was ended."""


class ProcessLost(Exception):
    """A process ended during a call, by itself or because it took too much memory; the message says how."""


class CannotLoad(Exception):
    """A process could not load the function; the message says why."""


def pools_here() -> int:
    """On this machine: torchrun says how many processes of the run are there, and each has its own."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class Pool:
    """At most `size` processes. They start when they are needed."""

    def __init__(self, size: int):
        self._free = asyncio.Semaphore(size)
        self._idle: list[_Process] = []
        self._unloadable: dict[int, str] = {}  # keys of functions, and why
        self._most_bytes = max(2 * 2**30, psutil.virtual_memory().total // (2 * size * pools_here()))

    async def call(
        self,
        key: int,
        load: Load,
        calls: Sequence[Call],
        seconds: float | None,
        done: Callable[[Reply], None],
    ) -> None:
        """Make calls of the function `key`, which `load` says how to find, in one process, one after another.

        done: is called with the reply to each. seconds: of each; waiting for a free process, starting it and loading
        do not count. Raises CallTimeout or ProcessLost because of the first call without a reply; CannotLoad; and
        what pickle raises if the arguments cannot travel.
        """
        request = _frame("call", key, calls)
        async with self._free:
            if key in self._unloadable:
                raise CannotLoad(self._unloadable[key])
            process = self._take(key) or _Process()
            try:
                await process.load(key, load, self._most_bytes)
                for i in range(len(calls)):
                    done(await process.ask(b"" if i else request, seconds, self._most_bytes))
            except CannotLoad as error:
                self._unloadable[key] = str(error)
                process.end()
                raise
            except BaseException:  # also cancelled: it is still at work on what nobody wants any more
                process.end()
                raise
            if process.has_grown():
                process.end()
            else:
                self._idle.append(process)

    def _take(self, key: int) -> "_Process | None":
        """An idle process, one that knows the function if there is one."""
        self._idle.sort(key=lambda process: key in process.known)
        while self._idle:
            process = self._idle.pop()
            if process.child.poll() is None:
                return process
            process.end()  # it died between calls; what it started may live on
        return None


class _Process:
    def __init__(self) -> None:
        # A bare socket and no stream: after a fork, tidying up a stream in the child would take the socket out of
        # the selector that both share.
        self.sock, theirs = socket.socketpair()
        self.sock.setblocking(False)
        self.child = child = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, json.dumps(list(map(str, sys.path))), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=ENVIRONMENT | os.environ,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal does not reach it, and its children end with it
        )
        theirs.close()
        self.memory = psutil.Process(child.pid)
        self.known: set[int] = set()
        self.base_bytes = 0  # after the first request for the function that was loaded last
        _children.add(child)

    async def load(self, key: int, load: Load, most_bytes: int) -> None:
        """Let it find the function, if it does not know it. Raises CannotLoad."""
        if key in self.known:
            return
        try:
            loaded = await self.ask(_frame("load", key, load), LOAD_SECONDS, most_bytes)
        except CallTimeout:
            raise CannotLoad(f"importing it took longer than {LOAD_SECONDS:g} s") from None
        except ProcessLost as error:
            raise CannotLoad(f"importing it {error}") from None
        if loaded.wrong:
            raise CannotLoad(loaded.wrong)
        self.known.add(key)
        self.base_bytes = 0

    async def ask(self, request: bytes, seconds: float | None, most_bytes: int) -> Reply:
        """The next reply, after sending the request if there is one. Raises CallTimeout, ProcessLost."""
        clock = asyncio.get_running_loop().time
        started = clock()
        reading = asyncio.ensure_future(self._exchange(request))
        try:
            while not reading.done():
                left = 0.25 if seconds is None else min(0.25, started + seconds - clock())
                if left <= 0:
                    raise CallTimeout
                await asyncio.wait({reading}, timeout=left)
                if not reading.done() and (size := self._bytes()) > most_bytes:
                    limit = f"{most_bytes / 2**30:.1f} GiB are its limit"
                    raise ProcessLost(f"grew to {size / 2**30:.1f} GiB, and {limit}")
            return reading.result()
        except (EOFError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(0.1)
            raise ProcessLost(_how_it_ended(self.child.returncode)) from None
        finally:
            reading.cancel()
            await asyncio.wait(
                {reading}
            )  # until the loop has let go of the socket, whose number may be used anew

    async def _exchange(self, request: bytes) -> Reply:
        await asyncio.get_running_loop().sock_sendall(self.sock, request)
        (length,) = LENGTH.unpack(await self._read(LENGTH.size))
        return pickle.loads(await self._read(length))

    async def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            more = await asyncio.get_running_loop().sock_recv(self.sock, length - len(data))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def _bytes(self) -> int:
        with contextlib.suppress(psutil.Error):
            return self.memory.memory_info().rss
        return 0

    def has_grown(self) -> bool:
        """Whether it uses much more memory than after its first request."""
        self.base_bytes = self.base_bytes or self._bytes()
        return self._bytes() > 2 * self.base_bytes + GROWTH_BYTES

    def end(self) -> None:
        """Ask it to end, and end it with all its children a moment later. Does not wait."""
        self.sock.close()
        _signal(self.child, signal.SIGTERM)
        asyncio.get_running_loop().call_later(GRACE_SECONDS, _kill, self.child)


_children: set["subprocess.Popen[bytes]"] = set()


def _signal(child: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _kill(child: "subprocess.Popen[bytes]") -> None:
    _signal(child, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_SECONDS)
    _children.discard(child)


@atexit.register
def _end_all() -> None:
    for child in _children:
        _signal(child, signal.SIGTERM)
    for child in list(_children):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
        _kill(child)


os.register_at_fork(after_in_child=_children.clear)  # they are the parent's


def _frame(*request: Any) -> bytes:
    data = pickle.dumps(request)
    return LENGTH.pack(len(data)) + data


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended its process ({signal.Signals(-code).name})"
    return f"ended its process (exit code {code})"
