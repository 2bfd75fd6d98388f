"""What a run shows in the terminal: a live area on a terminal, one plain line per step everywhere else.

What a model or a data set wrote is printed as it is: markup and escape sequences in it have no effect.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from covey.rl.hints import Hints, reward_function
from covey.rl.metrics import Sample
from covey.rl.terminal import MARK, block_chart, clean, count, duration, print_anything, shorten, sparkline

# (metric, label, format) of the parts of a line; a metric that a step does not have is left out.
_Fields = tuple[tuple[str, str, str], ...]
_LINES: dict[str, _Fields] = {
    "groups": (
        ("length/mean", "length", "{:.0f}"),
        ("length/truncated", "cut off", "{:.0%}"),
        ("groups/no_spread", "no spread", "{:.0%}"),
    ),
    "pairs": (
        ("dpo/accuracy", "accuracy", "{:.0%}"),
        ("dpo/margin", "margin", "{:.3f}"),
        ("logp/chosen", "logp chosen", "{:.2f}"),
        ("logp/rejected", "rejected", "{:.2f}"),
    ),
    "update": (
        ("loss/total", "loss", "{:.2g}"),
        ("grad/norm", "grad", "{:.2g}"),
        ("kl/reference", "KL", "{:.2g}"),
        ("entropy/mean", "entropy", "{:.2f}"),
        ("optim/lr", "lr", "{:.1e}"),
    ),
    "time": (
        ("time/rollout_s", "sample", "{:.1f} s"),
        ("time/reward_s", "score", "{:.1f} s"),
        ("time/reference_s", "reference", "{:.1f} s"),
        ("time/train_s", "train", "{:.1f} s"),
        ("rollout/tokens_per_s", "tokens/s", "{:,.0f}"),
        ("train/tokens_per_s", "tokens/s", "{:,.0f}"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a run will do. `details` are further lines, for example data, rewards and memory."""

    command: Literal["grpo", "sft", "dpo"]
    name: str
    folder: str
    model: str
    method: str
    device: str
    trainable: int  # parameters
    parameters: int  # all of them
    objective: str
    steps: int
    rows: int  # prompts, documents or pairs per step
    completions: int = 1  # per prompt
    details: Mapping[str, str] = field(default_factory=dict)
    first_step: int = 0  # steps that a resumed run has behind it
    history: Sequence[Mapping[str, float]] = ()  # metrics of those steps, with their "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended. `lines` says where things are and what can be done with them."""

    seconds: float
    interrupted: bool = False
    lines: Mapping[str, str] = field(default_factory=dict)


class Display:
    """The terminal of one run. Use it as a context manager, so that an error finds the terminal as it was.

    plain: lines instead of a live area; default: where there is no terminal.
    """

    def __init__(self, *, plain: bool | None = None, console: Console | None = None) -> None:
        if console is None:
            print_anything()
        self.console = console or Console()
        console = self.console
        live = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
        self.plain = plain if plain is not None else not live
        self._live: Live | None = None
        self._info: RunInfo | None = None
        self._hints = Hints()
        self._step = 0
        self._metrics: Mapping[str, float] = {}
        self._curve: list[float] = []  # reward or loss per step
        self._evaluations: dict[str, list[tuple[int, float]]] = {}
        self._seconds: deque[float] = deque(maxlen=20)  # of the last steps
        self._phase: tuple[str, float] | None = None  # what is going on, and since when
        self._spinner = Spinner("dots")

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def start(self, info: RunInfo) -> None:
        """Say what the run will do, and begin."""
        self._info, self._step = info, info.first_step
        for row in info.history:
            self._remember(int(row["step"]), row)
        if self.plain:
            self._line(f"covey {info.command}  {info.name}")
            self._plain_facts(_plan(info))
            return
        facts = _facts(_plan(info))
        title = Text.assemble((f"covey {info.command}", "bold cyan"), "  ", (clean(info.name), "bold"))
        self._print(Panel(facts, title=title, title_align="left", border_style="dim", expand=False))
        self._live = Live(
            get_renderable=self._area, console=self.console, refresh_per_second=4, transient=True
        )
        self._live.start()

    def phase(self, text: str) -> None:
        """What is going on now: "sampling 64 completions"."""
        self._phase = clean(text), time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step (from 1) is done."""
        self._step = step
        shown = self._goal[1] == "loss"
        self._metrics = {k: v for k, v in metrics.items() if not (shown and k == "loss/total")}
        self._remember(step, metrics)
        if "time/step_s" in metrics:
            self._seconds.append(metrics["time/step_s"])
        if self.plain:
            parts = [f"step {step:>{len(str(self._steps))}}/{self._steps}", *self._goal_parts()]
            parts += [part for line in _LINES.values() for part in _parts(line, self._metrics)]
            parts.append(self._left())
            self._line("  ".join(part for part in parts if part))
        for text in self._hints.after(step, metrics):
            self.hint(text)

    def samples(self, rows: Sequence[Sample]) -> None:
        """The best and the worst completion of the step."""
        scored = [row for row in rows if math.isfinite(row.reward)]
        if not scored:
            return
        best, worst = max(scored, key=lambda row: row.reward), min(scored, key=lambda row: row.reward)
        equal = best.reward == worst.reward
        picked = [("all", best)] if equal else [("best", best), ("worst", worst)]
        if self.plain:
            for label, row in picked:
                scores = "  ".join([f"{row.reward:.2f}", *(f"{n} {v:.2f}" for n, v in row.rewards.items())])
                texts = f"{shorten(row.prompt, 100)}  ->  {shorten(row.completion, 300)}"
                self._line(f"  {label:<5} {scores}  {texts}")
            return
        self._print(Group(Text(), _sample_table(f"step {self._step}", picked), Text()))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Results on held-out prompts after `step` steps; 0: before the run."""
        self._remember(step, {name: value for name, value in metrics.items() if name.startswith("eval/")})
        parts = []
        for key in metrics:
            points = self._evaluations.get(key, [])
            if points:
                change = points[-1][1] - points[0][1]
                since = f" ({change:+.3f})" if len(points) > 1 else ""
                parts.append(f"{key.removeprefix('eval/')} {points[-1][1]:.3f}{since}")
        when = f"after step {step}" if step else "before the run"
        rows = f" on {metrics['eval/rows']:.0f} rows" if "eval/rows" in metrics else ""
        self._notice("held-out", f"{when}{rows}: {', '.join(parts)}", "magenta")

    def hint(self, text: str) -> None:
        """Something that the user should know or do."""
        self._notice("hint", text, "yellow")

    def finish(self, summary: Summary) -> None:
        """The curve of the run, held-out results before and after, and where things are."""
        self.close()
        if len({value for value in self._curve if math.isfinite(value)}) > 1:  # a flat line says nothing
            self._print(self._chart())
        if any(len(points) > 1 for points in self._evaluations.values()):
            self._print(Group(_before_and_after(self._evaluations), Text()))
        state = "stopped" if summary.interrupted else "done"
        steps = f"{self._step} of {self._steps} steps in {duration(summary.seconds)}"
        facts = {state: steps, **summary.lines}
        if self.plain:
            self._plain_facts(facts)
        else:
            self._print(_facts(facts))

    @property
    def _steps(self) -> int:
        return self._info.steps if self._info else self._step

    @property
    def _goal(self) -> tuple[str, str]:
        """The metric to watch, and its name."""
        command = self._info.command if self._info else "grpo"
        return {"sft": ("sft/nll", "loss"), "dpo": ("dpo/loss", "loss")}.get(
            command, ("reward/mean", "reward")
        )

    def _remember(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._goal[0] in metrics:
            value = metrics[self._goal[0]]
            self._curve.append(math.nan if value is None else value)
        for key, result in metrics.items():
            if key.startswith("eval/") and key != "eval/rows" and result is not None:
                points = self._evaluations.setdefault(key, [])
                if points and points[-1][0] == step:
                    points.pop()
                points.append((step, result))

    def _goal_parts(self) -> list[str]:
        key, label = self._goal
        parts = [f"{label} {self._metrics[key]:.3f}"] if key in self._metrics else []
        for name, value in self._metrics.items():
            if function := reward_function(name):
                parts.append(f"{clean(function)} {value:.2f}")
        return parts

    def _left(self) -> str:
        if not self._seconds or self._step >= self._steps:
            return ""
        return f"{duration(sum(self._seconds) / len(self._seconds) * (self._steps - self._step))} left"

    def _area(self) -> RenderableType:
        """The live area; called from the thread that refreshes it."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        pace = f"{self._seconds[-1]:.1f} s a step" if self._seconds else ""
        bar.add_row(
            Text(f"{self._step}/{self._steps}", "bold"),
            ProgressBar(self._steps, self._step, complete_style="cyan", finished_style="green"),
            Text("   ".join(part for part in (pace, self._left()) if part), "dim"),
        )
        rows: dict[str, RenderableType] = {"step": bar}
        if self._metrics:
            goal, *others = self._goal_parts() or [""]
            name, _, value = goal.partition(" ")
            curve = Text.assemble((value, "bold cyan"), " ", (sparkline(self._curve, 24), "cyan"))
            if len(self._curve) > 1:
                curve.append(f" {_change(self._curve):+.3f} since the start", "dim")
            rows[name] = curve.append("   ".join(["", *others]))
            lines = {label: "   ".join(_parts(fields, self._metrics)) for label, fields in _LINES.items()}
            rows |= {label: line for label, line in lines.items() if line}
        if self._phase is not None:
            text, since = self._phase
            self._spinner.update(text=Text(f"{text}   {duration(time.monotonic() - since)}"))
            rows["now"] = self._spinner
        return _facts(rows)

    def _chart(self) -> RenderableType:
        _, label = self._goal
        wanted = ("eval/nll", "eval/loss") if label == "loss" else ("eval/accuracy", "eval/reward")
        held_out = next((name for name in wanted if name in self._evaluations), None)
        marks = self._evaluations.get(held_out, []) if held_out else []
        width = max(10, min(72, self.console.width - 12))
        text = Text("\n".join(block_chart(self._curve, marks, width=width)), "cyan", no_wrap=True)
        text.highlight_regex(MARK, "bold magenta")
        legend = Text(f"\n{label} per step", "dim")
        if marks and held_out:
            legend.append(f"   {MARK}", "magenta").append(f" held-out {held_out.removeprefix('eval/')}")
        return Group(Text(), text.append_text(legend), Text())

    def _notice(self, label: str, text: str, style: str) -> None:
        if self.plain:
            self._line(f"{label}: {clean(text)}")
            return
        grid = Table.grid(padding=(0, 1))
        grid.add_row(Text(f"{label}", f"bold {style}"), Text(clean(text)))
        self._print(grid)

    def _plain_facts(self, facts: Mapping[str, str]) -> None:
        width = max(map(len, facts))
        for label, value in facts.items():
            for i, line in enumerate(value.split("\n")):
                self._line(f"{'' if i else label:<{width}}  {clean(line)}")

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _print(self, renderable: RenderableType) -> None:
        self.console.print(renderable, highlight=False)


def _plan(info: RunInfo) -> dict[str, str]:
    share = info.trainable / max(1, info.parameters)
    if info.command == "grpo":
        work = f"{info.rows} prompts x {info.completions} completions = {info.rows * info.completions}"
    else:
        work = f"{info.rows} {'pairs' if info.command == 'dpo' else 'documents'}"
    steps = f"{info.steps} steps of {work}"
    if info.first_step:
        steps += f"; resumed after step {info.first_step}"
    trained = f"{count(info.trainable)} of {count(info.parameters)} parameters are trained ({share:.1%})"
    return {
        "model": f"{info.model} on {info.device}",
        "method": f"{info.method}; {trained}",
        "objective": info.objective,
        **info.details,
        "steps": steps,
        "folder": info.folder,
    }


def _facts(rows: Mapping[str, RenderableType]) -> Table:
    """Labels and what belongs to them, in two columns."""
    grid = Table.grid(padding=(0, 2))
    for label, value in rows.items():
        if isinstance(value, str):
            value = Text("\n".join(map(clean, value.split("\n"))))
        grid.add_row(Text(label, "dim"), value)
    return grid


def _parts(fields: _Fields, metrics: Mapping[str, float]) -> list[str]:
    found = ((label, form, metrics.get(key)) for key, label, form in fields)
    return [f"{label} {form.format(value)}" for label, form, value in found if value is not None]


def _sample_table(title: str, picked: Sequence[tuple[str, Sample]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0), header_style="dim")
    table.add_column(title, style="bold", no_wrap=True)
    table.add_column("reward", style="cyan", no_wrap=True)
    table.add_column("prompt", style="dim", ratio=2)
    table.add_column("completion", ratio=3)
    for label, row in picked:
        scores = [f"{row.reward:.2f}", *(f"{clean(name)} {value:.2f}" for name, value in row.rewards.items())]
        completion = Text(shorten(row.completion, 320))
        for name, note in row.notes.items():
            completion.append(f"\n{clean(name)}: {shorten(str(note), 100)}", "dim")
        table.add_row(label, Text("\n".join(scores)), Text(shorten(row.prompt, 240)), completion)
    return table


def _before_and_after(evaluations: Mapping[str, list[tuple[int, float]]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left", "right", "right"):
        grid.add_column(justify=justify)
    grid.add_row("held-out", "before", "", "after", "change", style="dim")
    for key, points in evaluations.items():
        if len(points) > 1:
            before, after = points[0][1], points[-1][1]
            name = clean(key.removeprefix("eval/"))
            grid.add_row(name, f"{before:.3f}", "→", Text(f"{after:.3f}", "bold"), f"{after - before:+.3f}")
    return grid


def _change(curve: Sequence[float]) -> float:
    """How far the mean of the last five values is from that of the first five."""
    finite = [value for value in curve if math.isfinite(value)]
    size = min(5, len(finite) // 2)
    return (sum(finite[-size:]) - sum(finite[:size])) / size if size else 0.0
