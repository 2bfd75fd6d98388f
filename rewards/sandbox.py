"""Runs Python that a model wrote: text that may do anything.

A box (sandbox_tiers.py finds one) runs a program in processes of its own, without a network, with nothing to read
but Python and nothing to write but a small folder that is new for each run, within limits of time, memory,
processes, disk and output, and ends all of it together. Which boxes work depends on the system:

    sandlock        Landlock and seccomp: other files, processes and networks are refused (Linux 6.12 and newer)
    bubblewrap      namespaces: they do not exist (where a user may make namespaces, so not in most containers)
    monty           a subset of Python in an interpreter that has no system calls to make (sandbox_monty.py)
    unsafe-local    limits alone. It keeps accidents small and is no boundary: the program may read your files and
                    use the network. It is used only if it is asked for by this name.
"""

import contextlib
import functools
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

import psutil

Status = Literal["ok", "failed", "time", "memory", "processes", "disk", "output"]
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a program and all its processes together.

    seconds: of processor time, because a busy machine must not change a score; of wall time about twice as many.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    processes: int = 16  # threads count
    disk_mb: int = 16
    output_kb: int = 256

    @property
    def wall_seconds(self) -> float:
        return 2 * self.seconds + 0.5


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended: ok is exit code 0, failed any other, and the rest names the limit that it ran into."""

    status: Status
    stdout: str
    stderr: str


class Box(Protocol):
    name: str

    def run(self, files: Mapping[str, str], stdin: str, limits: Limits) -> Ending:
        """Run main.py, one of `files` (name -> text), which lie in its working folder."""
        ...


# What runs in the box before the program: limits that the kernel holds it to, and another user than root.
BOOT = """
import os, resource, sys
name = value = None
for name, value in {rlimits!r}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
if {uid!r}:
    os.setgroups([]); os.setgid({uid!r}); os.setuid({uid!r})
os.chdir({folder!r})
sys.argv = ["main.py"]
__file__ = "main.py"
del name, value, os, resource, sys
exec(compile(open("main.py", encoding="utf-8").read(), "main.py", "exec"))
"""


def boot(folder: str, limits: Limits | None, uid: int = 0) -> list[str]:
    """The command that runs main.py of `folder`. limits: None if the box sets them. uid: user to become, 0 to stay."""
    rlimits = {}
    if limits is not None:
        rlimits = {
            "AS": limits.memory_mb * 2**20,
            "CPU": math.ceil(limits.seconds) + 1,
            "FSIZE": limits.disk_mb * 2**20,
            "NOFILE": 64,
            "CORE": 0,
            "NPROC": limits.processes,
        }
    return [sys.executable, "-I", "-c", BOOT.format(rlimits=rlimits, uid=uid, folder=folder)]


# ------------------------------------------------------------------------------------------- watching it


def watch(
    streams: "tuple[IO[bytes], IO[bytes], IO[bytes]]",
    stdin: str,
    limits: Limits,
    look: Callable[[], Status | None],
    end: Callable[[], None],
) -> tuple[Status | None, str, str]:
    """Feed a program its input and read its output until it has ended, or ran into a limit and was ended.

    streams: its stdin, stdout and stderr. look: the limit that it has passed, "ok" if it has ended, else None.
    end: ends it. Returns the limit, or None if there was none, and what it wrote.
    """
    to, *outputs = streams
    data = memoryview(stdin.encode("utf-8", "surrogatepass"))
    read = {stream: bytearray() for stream in outputs}
    deadline, pause = time.monotonic() + limits.wall_seconds, 0.05
    limit, ended = None, False
    with selectors.DefaultSelector() as selector:
        os.set_blocking(to.fileno(), False)
        selector.register(to, selectors.EVENT_WRITE)
        for stream in outputs:
            selector.register(stream, selectors.EVENT_READ)
        while limit is None and any(stream in selector.get_map() for stream in outputs):
            ready = selector.select(0 if ended else min(pause, max(deadline - time.monotonic(), 0)))
            for key, _ in ready:
                if key.fileobj is to:
                    data = _feed(to, data)
                    if not data:
                        selector.unregister(to)
                        to.close()
                    continue
                more = os.read(key.fd, 2**16)
                read[key.fileobj] += more  # type: ignore[index]
                if not more:
                    selector.unregister(key.fileobj)
            if sum(map(len, read.values())) > limits.output_kb * 2**10:
                limit = "output"
            elif time.monotonic() >= deadline:
                limit = "time"
            elif ended and not ready:
                break  # all is read; something that it started keeps the pipes open
            elif not ready:
                found, pause = look(), min(2 * pause, 0.2)
                ended, limit = found == "ok", None if found == "ok" else found
        if limit is not None:
            end()
    texts = [bytes(read[stream]).decode("utf-8", "replace") for stream in outputs]
    return limit, texts[0], texts[1]


def _feed(to: "IO[bytes]", data: memoryview) -> memoryview:
    """What is left to write; nothing if the program does not want it."""
    try:
        return data[os.write(to.fileno(), data[: 2**16]) :] if data else data
    except BrokenPipeError:
        return data[:0]


def tree_excess(pid: int, limits: Limits) -> Status | None:
    """The limit that a process and its descendants together have passed; "ok" if it has ended."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
        if root.status() == psutil.STATUS_ZOMBIE:
            return "ok"
    except psutil.Error:
        return "ok"
    bytes_used, cpu = 0, 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            bytes_used += process.memory_info().rss
            times = process.cpu_times()
            cpu += times.user + times.system + times.children_user + times.children_system
    if bytes_used > limits.memory_mb * 2**20:
        return "memory"
    if cpu > limits.seconds:
        return "time"
    return "processes" if len(processes) > limits.processes + 2 else None


def folder_excess(folder: str, limits: Limits) -> Status | None:
    """Whether the files in a folder take more disk than `limits` allow, or are very many."""
    used, count = 0, 0
    for where, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                used += os.lstat(os.path.join(where, name)).st_blocks * 512
        count += 1 + len(files)
    return "disk" if used > limits.disk_mb * 2**20 or count > 2000 else None


@contextlib.contextmanager
def folder_with(files: Mapping[str, str]):
    """A new folder for a program, open to the user that it runs as; it is gone afterwards."""
    folder = tempfile.mkdtemp(prefix="covey-code-")
    try:
        os.chmod(folder, 0o777)
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8", errors="surrogatepass")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class UnsafeLocal:
    """A child process with limits: no boundary."""

    name = "unsafe-local"

    def run(self, files: Mapping[str, str], stdin: str, limits: Limits) -> Ending:
        with folder_with(files) as folder:
            child = subprocess.Popen(
                boot(folder, limits),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
                start_new_session=True,
            )
            look = functools.partial(folder_excess, folder, limits)
            return finish(child, stdin, limits, lambda: _end_tree(child.pid), look)


def finish(
    child: "subprocess.Popen[bytes]",
    stdin: str,
    limits: Limits,
    end: Callable[[], None],
    look: Callable[[], Status | None],
) -> Ending:
    """Watch a child to its end. look: the limit that it has passed, beside those that hold for any process."""
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    try:
        streams = (child.stdin, child.stdout, child.stderr)
        limit, stdout, stderr = watch(
            streams, stdin, limits, lambda: tree_excess(child.pid, limits) or look(), end
        )
    finally:
        end()  # also what it left behind, and if we are interrupted
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()
        child.stderr.close()
        code = child.wait()
    return Ending(limit or _status(code, stderr), stdout, stderr)


def _status(code: int, stderr: str) -> Status:
    if code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return "time"
    if code and "MemoryError" in stderr.rpartition("\n  ")[2]:
        return "memory"
    return "failed" if code else "ok"


def _end_tree(pid: int) -> None:
    """Kill the process group that `pid` leads, and its descendants that have left it."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
