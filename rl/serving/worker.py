"""The thread that samples for `covey serve`: one call of the engine at a time, with all requests that suit it."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from covey.rl.serving.model import Speaker
from covey.rollout.engine import Group, Prompt, Sampling

log = logging.getLogger(__name__)
MAX_WAITING = 512  # requests


@dataclass(frozen=True, slots=True)
class Tokens:
    """New ids of a sample of the job's prompt `place`."""

    place: int
    sample: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Finished:
    """All samples of the job's prompt `place`."""

    place: int
    group: Group


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a job whose completions there will not be."""

    error: Exception


Event = Tokens | Finished | Failed


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. tell: gets its events, in the worker's thread. gone: nobody waits for them any more."""

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    tell: Callable[[Event], object]
    gone: bool = False

    def hear(self, event: Event) -> None:
        if not self.gone:
            with suppress(RuntimeError):  # the event loop has ended
                self.tell(event)


class Busy(RuntimeError):
    """Too many requests wait."""


class Stopped(RuntimeError):
    """The server stops, or all who asked are gone."""


class Worker:
    """Takes jobs until `close`. Jobs with the same settings share a call of the engine, up to `max_rows` completions;
    by the engine's draws none of them depends on that."""

    def __init__(self, speaker: Speaker, *, max_rows: int):
        self._speaker, self._max_rows = speaker, max_rows
        self._waiting: deque[Job] = deque()
        self._closing = False
        self._changed = threading.Condition()  # guards both
        self._thread = threading.Thread(target=self._work, name="covey-sampling", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                raise Busy(f"{MAX_WAITING} requests wait already; try again later")
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Ends what runs at its next token, and waits a little for it."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        if self._speaker.device.type == "cuda":
            torch.cuda.set_device(self._speaker.device)  # which is a thread's own
        while batch := self._next():
            try:
                self._run(batch)
            except Exception as error:
                if not isinstance(error, Stopped):
                    log.exception("sampling failed")
                for job in batch:
                    job.hear(Failed(error))

    def _next(self) -> list[Job]:
        """The job that has waited longest and those that can run with it; none when the worker closes."""
        with self._changed:
            while not self._closing:
                jobs = [job for job in self._waiting if not job.gone]
                batch, rows = jobs[:1], sum(map(_rows, jobs[:1]))
                for job in jobs[1:]:
                    same = (job.n, job.sampling) == (batch[0].n, batch[0].sampling)
                    if same and rows + _rows(job) <= self._max_rows:
                        batch.append(job)
                        rows += _rows(job)
                self._waiting = deque(job for job in jobs if job not in batch)
                if batch:
                    return batch
                self._changed.wait()
        return []

    def _run(self, batch: Sequence[Job]) -> None:
        owners = [(job, place) for job in batch for place in range(len(job.prompts))]

        def tokens(index: int, sample: int, ids: Sequence[int]) -> None:
            if self._closing or all(job.gone for job in batch):
                raise Stopped("the server stops")
            job, place = owners[index]
            job.hear(Tokens(place, sample, ids))

        def finished(index: int, group: Group) -> None:
            job, place = owners[index]
            job.hear(Finished(place, group))

        prompts = [job.prompts[place] for job, place in owners]
        self._speaker.generate(prompts, batch[0].n, batch[0].sampling, finished, tokens)


def _rows(job: Job) -> int:
    return len(job.prompts) * job.n
