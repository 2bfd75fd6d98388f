"""Python in an interpreter without system calls (pydantic-monty): a subset of the language, in about a millisecond.

It has no numpy, no heapq, no generators. What fails here may be right in Python, what passes is right.
"""

import functools
from collections.abc import Sequence
from typing import Any

from covey.rewards.sandbox import Limits

MOST_SECONDS = 1.0  # it is slower than Python, so a program that takes long is left to that
MOST_MB = 128


@functools.cache
def _pool() -> Any:
    """Raises RuntimeError if the package is not there."""
    try:
        from pydantic_monty import Monty
    except ImportError as error:
        raise RuntimeError("the package pydantic-monty is not there. Install covey[code].") from error
    pool = Monty(max_processes=1, request_timeout=2 * MOST_SECONDS)
    return pool.__enter__()  # it ends with this process


def check() -> None:
    """Raises RuntimeError if it does not work here."""
    assert passes("x = 1", ["assert x == 1"], Limits()) == [""]


def passes(code: str, tests: Sequence[str], limits: Limits) -> list[str]:
    """Why each test failed, "" if it passed. All see what `code` has defined."""
    with _session(limits) as session:
        why = _feed(session, code)
        return [why or _feed(session, test) for test in tests]


def output(code: str, stdin: str, limits: Limits) -> tuple[str, str]:
    """What the program prints, and why it failed, "" if it did not. input() reads from stdin."""
    from pydantic_monty import CollectString

    lines = iter(stdin.splitlines())

    def read_line(*_: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError("EOF when reading a line")
        return line

    printed = CollectString(max_bytes=limits.output_kb * 2**10)
    with _session(limits) as session:
        why = _feed(session, code, print_callback=printed, external_lookup={"input": read_line})
    return printed.output, why


def _session(limits: Limits) -> Any:
    seconds, megabytes = min(limits.seconds, MOST_SECONDS), min(limits.memory_mb, MOST_MB)
    bounds = {"max_feed_duration_secs": seconds, "max_memory": megabytes * 2**20}
    return _pool().checkout(limits=bounds, assert_message_annotations=False)


def _feed(session: Any, code: str, **more: Any) -> str:
    from pydantic_monty import CollectString, MontyError

    try:
        session.feed_run(code, **{"print_callback": CollectString(max_bytes=2**16), **more})
    except (MontyError, ValueError) as error:  # ValueError: text that is no UTF-8
        return f"{error}"[:200] or type(error).__name__
    return ""
