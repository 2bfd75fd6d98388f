"""Symbolic equality of two answers by math-verify, in a process of its own.

Sympy takes unbounded time and memory on some of what a model writes, (x+y+z)^{99} or 9^{9^{9^9}}, and nothing
can stop it within a thread. So it runs in a worker that the system ends when one comparison uses more than
CPU_SECONDS; processor time, because a busy machine must not change a score. The next starts a new one.
"""

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

CPU_SECONDS = 3.0
MEMORY_BYTES = 4 * 2**30


class _Worker:
    """One process for all threads; it starts when it is first needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def ask(self, gold: str, found: str) -> bool:
        with self.lock:
            try:
                return self.exchange(json.dumps([gold, found])) == "true\n"
            except (
                BaseException
            ):  # Ctrl-C between question and answer: the next answer must not be this one's
                self.stop()
                raise

    def exchange(self, question: str) -> str:
        if self.process is None or self.process.poll() is not None:
            self.process = self.start()
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:  # it used up its time
            self.stop()
        return answer

    def start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-m", "covey.rewards.symbolic"]
        environment = os.environ | {"PYTHONHASHSEED": "0"}  # sympy orders some things by hash
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the LaTeX parser complains about every formula that it cannot read
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(command)} did not start; run it to see why")
        return process

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


_worker = _Worker()


def _after_fork() -> None:
    global _worker
    _worker = _Worker()  # two processes on one pipe would read each other's answers


os.register_at_fork(after_in_child=_after_fork)


@functools.lru_cache(maxsize=4096)  # the completions of a group repeat one another
def equal(gold: str, found: str) -> bool:
    """Are two LaTeX expressions equal? math-verify follows the form of gold. False if it takes too long."""
    return _worker.ask(gold, found)


def _serve() -> None:
    """The worker: one line of JSON [gold, found] in, one line true or false out."""
    from math_verify import grader, parser

    # Its own timeouts stay off, and so does its warning about that: the timer below ends a comparison.
    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # no handler: the kernel ends the process
        answer = _compare(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=answers, flush=True)


def _compare(gold: str, found: str) -> bool:
    from math_verify import verify

    try:
        golds, targets = _parse(gold), _parse(found)
        same = verify(golds, targets, allow_set_relation_comp=True, timeout_seconds=None)
        return same and _close(golds[0], targets[0])
    except Exception:  # sympy raises nearly anything on what a model can write; that is a wrong answer
        return False


def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(f"\\boxed{{{text}}}", config, parsing_timeout=None)  # type: ignore[arg-type]


def _close(gold: Any, target: Any) -> bool:
    """math-verify rounds to a few decimals, which makes tiny numbers equal: look at the relative error."""
    gold, target = (getattr(side, "rhs", side) for side in (gold, target))
    if not all(getattr(side, "is_number", False) for side in (gold, target)):
        return True
    difference = (target - gold).simplify() if gold.is_zero else target - gold
    return bool(abs(difference.evalf(30)) <= 1e-12 * abs(gold.evalf(30)))


if __name__ == "__main__":
    _serve()
