"""A box of Landlock and seccomp, made by the package sandlock: what a program is not given is refused."""

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any, cast

from covey.rewards.sandbox import (
    ENVIRONMENT,
    Ending,
    Limits,
    Status,
    boot,
    folder_excess,
    folder_with,
    tree_excess,
    watch,
)

READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/urandom", "/proc/self")

# Landlock is about reading and writing files. These would change whose they are, or reach past the program into
# other processes of the same user and the system's clock; memfd_create makes memory that is not counted.
# fmt: off
DENIED = [
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime", "utimes",
    "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr",
    "fremovexattr", "mknod", "mknodat", "chroot", "prlimit64", "setrlimit", "sched_setaffinity",
    "sched_setscheduler", "sched_setparam", "sched_setattr", "setpriority", "ioprio_set", "migrate_pages",
    "move_pages", "pidfd_open", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "syslog",
    "memfd_create",
]
# fmt: on


class Sandlock:
    name = "sandlock"

    def __init__(self) -> None:
        """Raises RuntimeError if the package or what it needs of the kernel is not there."""
        try:
            import sandlock
        except ImportError as error:
            raise RuntimeError("the package sandlock is not there. Install covey[code].") from error
        found, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        if found < needed:
            raise RuntimeError(
                f"it needs version {needed} of Landlock (Linux 6.12), and the kernel has {found}."
            )
        self.sandlock = sandlock

    def run(self, files: Mapping[str, str], stdin: str, limits: Limits) -> Ending:
        from sandlock import StdioMode

        with folder_with(files) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that gid stands beside uid
            piped = [StdioMode.PIPED] * 3
            with self.sandlock.Sandbox(**_policy(folder, limits)).popen(
                boot(folder, None), *piped
            ) as process:

                def look() -> Status | None:
                    return tree_excess(process.pid or 0, limits) or folder_excess(folder, limits)

                streams = cast(Any, (process.stdin, process.stdout, process.stderr))
                limit, stdout, stderr = watch(streams, stdin, limits, look, process.kill)
                result = process.wait(timeout=1.0)
        if limit is None and result.exit_code < 0 and not stderr:
            limit = "memory"  # what sandlock itself ends a program for
        return Ending(limit or ("ok" if result.exit_code == 0 else "failed"), stdout, stderr)


def _policy(folder: str, limits: Limits) -> dict[str, Any]:
    python = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)}
    # Root is taken its rights; for others there is nothing to take, and the names of users stay as they are.
    user = {"uid": 65534, "gid": 65534} if os.geteuid() == 0 else {}
    return {
        "fs_readable": [path for path in (*READABLE, sys.prefix, *python) if os.path.exists(path)],
        "fs_writable": [folder, "/dev/null"],
        "cwd": folder,
        "clean_env": True,
        "env": ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
        "max_memory": limits.memory_mb * 2**20,
        "max_processes": limits.processes,
        "no_coredump": True,
        "extra_deny_syscalls": DENIED,
        **user,
    }
