"""A process of its own for work on hostile text that may take any amount of time or memory.

Nothing can stop sympy, or somebody else's verifier, within a thread. So it runs in a child that the system ends
when one answer takes more than its seconds of processor time; processor time, because a busy machine must not
change a score. The next question starts a new child. It works in any thread and after a fork.
"""

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

MEMORY_BYTES = 4 * 2**30
CHILD_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # what iterates over a set does so alike in every run
    "OMP_NUM_THREADS": "1",  # many threads reserve much of the memory that the child may have
    "OPENBLAS_NUM_THREADS": "1",
}


class Worker:
    """One child for all threads, running `python -m module`, which calls `serve`. It starts when it is first needed.

    cpu_seconds: processor time of one answer; what goes beyond it ends the child.
    """

    def __init__(self, module: str, cpu_seconds: float):
        self.module, self.cpu_seconds = module, cpu_seconds
        self.reset()
        _workers.add(self)

    def reset(self) -> None:
        """Forget the child without ending it: after a fork it is the parent's."""
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Any) -> Any:
        """The child's answer to a question that can be pickled; None if it took too much time or memory.

        Raises RuntimeError if the child does not start.
        """
        with self.lock:
            try:
                return self._exchange(question)
            except BaseException:  # Ctrl-C while it answers: the next answer must not be this one's
                self.stop()
                raise

    def _exchange(self, question: Any) -> Any:
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(question, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):  # its time was up, maybe while it wrote
            self.stop()
            return None

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", self.module, str(self.cpu_seconds)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the LaTeX parser complains about every formula that it cannot read
            env=os.environ | CHILD_ENVIRONMENT,
        )
        assert process.stdout is not None
        try:
            pickle.load(process.stdout)
        except EOFError:
            raise RuntimeError(f"{' '.join(command)} did not start; run it to see why") from None
        return process

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def _after_fork() -> None:
    for worker in _workers:
        worker.reset()  # two processes on one pipe would read each other's answers


os.register_at_fork(after_in_child=_after_fork)


def serve(answer: Callable[[Any], Any]) -> None:
    """The child: answers pickled questions on stdin until the parent closes it. An exception answers None."""
    cpu_seconds = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever a library prints is no answer
    questions = sys.stdin.buffer
    pickle.dump("ready", answers)
    answers.flush()
    with contextlib.suppress(EOFError):
        while True:
            question = pickle.load(questions)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # no handler: the kernel ends the process
            try:
                result = answer(question)
            except Exception:  # libraries raise nearly anything on what a model can write
                result = None
            signal.setitimer(signal.ITIMER_PROF, 0)
            pickle.dump(result, answers)
            answers.flush()
