"""The run around the steps: evaluations, metrics, samples, checkpoints, and stopping without losing anything."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from covey.rl.checkpoint import RunError, load_checkpoint, save_checkpoint, weights_folder
from covey.rl.config import EvalSection, RunSection, SftEvalSection
from covey.rl.display import Display, Summary
from covey.rl.distributed import from_first, gather_objects, is_first
from covey.rl.metrics import JsonlLogger, Logger, Metrics, Sample, write_samples
from covey.rl.report.page import write_report
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

    def load_adapter(self, adapter: Path, step: int) -> None:
        """Take the weights of a saved adapter, that of `step`."""
        ...


class Patience:
    """Which evaluation was the best, and how many since then were not better by more than `min_delta`.

    limit: so many end the run; None: evaluations are not compared at all.
    """

    METRIC = "eval/nll"

    def __init__(self, limit: int | None = None, min_delta: float = 0.0) -> None:
        self.limit, self.min_delta = limit, min_delta
        self.best: int | None = None  # step
        self.value = math.inf
        self.waited = 0
        self.seen = -1  # step of the last evaluation

    def __call__(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Takes note of an evaluation. True if it is the best so far; the first one is, whatever it says."""
        if self.limit is None or step == self.seen:
            return False
        value, self.seen = metrics[self.METRIC], step
        if self.best is None or value < self.value - self.min_delta:
            self.best, self.waited = step, 0
            self.value = math.inf if math.isnan(value) else value
            return True
        self.waited += 1
        return False

    @property
    def exhausted(self) -> bool:
        return self.limit is not None and self.waited >= self.limit

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "value": self.value, "waited": self.waited, "seen": self.seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.value = state["best"], state["value"]
        self.waited, self.seen = state["waited"], state["seen"]

    def say(self, steps: int) -> str:
        best = "before the run, so training has not helped" if not self.best else f"after step {self.best}"
        why = f"; {self.waited} evaluations in a row were not better: stopped early, of {steps} steps"
        return f"{self.METRIC} {self.value:.4f} {best}{why if self.exhausted else ''}"


class RunLoop:
    """One run in one folder. `metrics` fills up as it goes; a step's number is that of finished steps (from 1).

    With several ranks all of them are here; the first one writes.
    """

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
        self.patience = (
            Patience(evaluation.patience, evaluation.min_delta)
            if isinstance(evaluation, SftEvalSection)
            else Patience()
        )
        self.done = 0
        self.interrupted = False
        self._saved = -1
        if folder.checkpoint is not None:
            self._resume(folder.checkpoint)
        self._log: Logger = Metrics()
        if is_first():
            self._log = JsonlLogger(folder.metrics, self.done if folder.checkpoint else None)
        self.metrics = from_first(lambda: Metrics.read(folder.metrics))

    def _resume(self, path: Path) -> None:
        checkpoint = load_checkpoint(path)
        state = dict(checkpoint.state)
        if (compared := state.pop("patience", None)) and self.patience.limit is not None:
            self.patience.restore(compared)
        self.trainer.restore(checkpoint.adapter, state, checkpoint.step)
        checkpoint.restore_rng()
        if is_first():
            self.folder.rewind(checkpoint.step)
        self.done = self._saved = checkpoint.step
        if not self.adapter.is_dir():
            raise RunError(
                f"the best adapter of this run is missing: {self.adapter}. Copy that checkpoint back, resume from "
                "another one, or without eval.patience"
            )

    def __call__(self) -> None:
        """Run the steps that are left."""
        started = time.perf_counter()
        try:
            with _stop_requests(self.display.hint) as stop_requested:
                if self._evaluation_is_due():
                    self._evaluate()
                while not self._finished and not any(gather_objects(stop_requested())):
                    self._step()
                self.interrupted = not self._finished
                every = self.evaluation.every
                if not self.interrupted and (every == 0 or self.done % every):
                    self._evaluate()
                self._save()
        finally:
            self._log.close()
        lines = {self.adapter.name: str(self.adapter), "metrics": str(self.folder.metrics)}
        if is_first() and len(self.metrics):
            lines["report"] = self._report()
        if self.patience.best is not None:
            lines = {"best": self.patience.say(self.trainer.steps), **lines}
            if self.patience.best != self._saved:  # what the caller gets is the policy that is reported
                gather_objects(None)  # it lies there
                self.trainer.load_adapter(self.adapter, self.patience.best)
        self.display.finish(
            Summary(
                seconds=time.perf_counter() - started,
                interrupted=self.interrupted,
                lines=lines,
            )
        )

    def _report(self) -> str:
        """Where the page is. A run that is done does not fail for want of one."""
        try:
            write_report([self.folder.path], self.folder.report)
        except Exception as error:
            return f"none ({type(error).__name__}: {error}); covey report {self.folder.path} tries again"
        return str(self.folder.report)

    @property
    def adapter(self) -> Path:
        """The saved adapter (or whole model) with the best evaluation if these are compared, else the newest."""
        step = self._saved if self.patience.best is None else self.patience.best
        return weights_folder(self.folder.checkpoints / f"step-{step:06d}")

    @property
    def _finished(self) -> bool:
        return self.done >= self.trainer.steps or self.patience.exhausted

    def _evaluation_is_due(self) -> bool:
        """Before the first step. A resumed run also makes up for one that its checkpoint was saved before."""
        if self.patience.limit is None:
            return self.done == 0
        every = self.evaluation.every
        return self.patience.seen < self.done and self.done % every == 0 and not self._finished

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
            self._keep(samples, "step")
            if self.run.samples_every and (self.done == 1 or self.done % self.run.samples_every == 0):
                self.display.samples(samples)
        save = bool(self.run.save_every) and self.done % self.run.save_every == 0
        if save and self.patience.limit is None:
            self._save()
        if self.evaluation.every and self.done % self.evaluation.every == 0:
            try:
                self._evaluate()
            except Exception:
                self._save()
                raise
        if save:  # behind the evaluation, so that a resumed run knows of it
            self._save()

    def _evaluate(self) -> None:
        self.display.phase("evaluating on held-out rows")
        results = self.trainer.evaluate()
        if results is None:
            return
        metrics, samples = results
        self._record(metrics)
        self.display.evaluation(self.done, metrics)
        if samples:
            self._keep(samples, "eval")
        if self.patience(self.done, metrics):
            self._save()

    def _keep(self, samples: list[Sample], kind: str) -> None:
        if is_first():
            write_samples(self.folder.samples(self.done, kind), samples)

    def _record(self, metrics: Mapping[str, float]) -> None:
        self._log.log(self.done, metrics)
        self.metrics.log(self.done, metrics)

    def _save(self, state: dict[str, Any] | None = None) -> None:
        if self._saved == self.done or (self.done == 0 and self.patience.best is None):
            return
        state = state or self.trainer.state()
        if self.patience.limit is not None:
            state = state | {"patience": self.patience.state()}
        if is_first():
            save_checkpoint(
                self.folder.path,
                self.done,
                adapter_writer=self.trainer.save_adapter,
                state=state,
                keep=self.run.keep,
                best=self.patience.best,
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
