"""The run around the steps: evaluations, metrics, samples, checkpoints, and stopping without losing anything."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from covey.rl.checkpoint import load_checkpoint, save_checkpoint
from covey.rl.config import EvalSection, RunSection
from covey.rl.display import Display, Summary
from covey.rl.metrics import JsonlLogger, Metrics, Sample, write_samples
from covey.rl.run_folder import RunFolder

Results = tuple[dict[str, float], list[Sample]]


class Trainer(Protocol):
    """An algorithm with its data: what a run of steps is made of."""

    steps: int

    def step(self, index: int) -> Results:
        """Optimiser step `index` (from 0): its metrics and what was sampled in it."""
        ...

    def evaluate(self) -> Results | None:
        """Metrics named eval/... on held-out rows and what was sampled for them; None if there are no such rows."""
        ...

    def save_adapter(self, folder: Path) -> None: ...

    def state(self) -> dict[str, Any]:
        """What `restore` needs beside the adapter to go on as if nothing had happened; "updates" counts updates."""
        ...

    def restore(self, adapter: Path, state: Mapping[str, Any], step: int) -> None: ...


class RunLoop:
    """One run in one folder. `metrics` fills up as it goes; a step's number is that of finished steps (from 1)."""

    def __init__(
        self, trainer: Trainer, folder: RunFolder, evaluation: EvalSection, run: RunSection, display: Display
    ):
        self.trainer, self.folder, self.evaluation, self.run, self.display = (
            trainer,
            folder,
            evaluation,
            run,
            display,
        )
        self.done = 0
        self.interrupted = False
        self._saved = -1
        if folder.checkpoint is not None:
            self._resume(folder.checkpoint)
        self._log = JsonlLogger(folder.metrics, self.done if folder.checkpoint else None)
        self.metrics = Metrics.read(folder.metrics)

    def _resume(self, path: Path) -> None:
        checkpoint = load_checkpoint(path)
        self.trainer.restore(checkpoint.adapter, checkpoint.state, checkpoint.step)
        checkpoint.restore_rng()
        self.folder.rewind(checkpoint.step)
        self.done = self._saved = checkpoint.step

    def __call__(self) -> None:
        """Run the steps that are left."""
        started = time.perf_counter()
        try:
            with _stop_requests(self.display.hint) as stop_requested:
                if self.done == 0:
                    self._evaluate()
                while self.done < self.trainer.steps and not stop_requested():
                    self._step()
                self.interrupted = self.done < self.trainer.steps
                every = self.evaluation.every
                if not self.interrupted and (every == 0 or self.done % every):
                    self._evaluate()
                self._save()
        finally:
            self._log.close()
        self.display.finish(
            Summary(
                seconds=time.perf_counter() - started,
                interrupted=self.interrupted,
                lines={"adapter": str(self.adapter), "metrics": str(self.folder.metrics)},
            )
        )

    @property
    def adapter(self) -> Path:
        """The newest saved adapter, in PEFT's format."""
        return self.folder.checkpoints / f"step-{self._saved:06d}" / "adapter"

    def _step(self) -> None:
        before = self.trainer.state()
        self.display.phase(f"step {self.done + 1}")
        try:
            metrics, samples = self.trainer.step(self.done)
        except Exception:
            # Whatever went wrong (a reward, memory), the steps before it are paid for: keep them, unless the
            # failed step has moved the weights already.
            if self.trainer.state()["updates"] == before["updates"]:
                self._save(before)
            raise
        self.done += 1
        self._record(metrics)
        self.display.step(self.done, metrics)
        if samples:
            write_samples(self.folder.samples(self.done), samples)
            if self.run.samples_every and (self.done == 1 or self.done % self.run.samples_every == 0):
                self.display.samples(samples)
        if self.run.save_every and self.done % self.run.save_every == 0:
            self._save()
        if self.evaluation.every and self.done % self.evaluation.every == 0:
            self._evaluate()

    def _evaluate(self) -> None:
        self.display.phase("evaluating on held-out rows")
        results = self.trainer.evaluate()
        if results is None:
            return
        metrics, samples = results
        self._record(metrics)
        self.display.evaluation(self.done, metrics)
        if samples:
            write_samples(self.folder.samples(self.done, "eval"), samples)

    def _record(self, metrics: Mapping[str, float]) -> None:
        self._log.log(self.done, metrics)
        self.metrics.log(self.done, metrics)

    def _save(self, state: dict[str, Any] | None = None) -> None:
        if self._saved == self.done or self.done == 0:
            return
        save_checkpoint(
            self.folder.path,
            self.done,
            adapter_writer=self.trainer.save_adapter,
            state=state or self.trainer.state(),
            keep=self.run.keep,
        )
        self._saved = self.done


@contextmanager
def _stop_requests(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """While entered, the first Ctrl-C (or SIGTERM) asks for a stop after the present step; the second is immediate."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield requested.is_set
        return

    def handle(number: int, frame: Any) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        say("stopping after this step, which is saved. Ctrl-C again stops at once and loses the step")

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested.is_set
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
