"""A run as one HTML file: curves, what stood out, where the time went, held-out results and completions.

The file needs nothing but a browser. What a model, a data set or a user wrote is shown as it is: the template escapes
it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from covey.rl.hints import Hints, reward_function
from covey.rl.metrics import Metrics, write_whole
from covey.rl.report.chart import Chart, Series, line_chart
from covey.rl.report.samples import Compared, Shown, compared_evaluations, shown_steps
from covey.rl.run_folder import RunFolder
from covey.rl.terminal import count, duration

FUNCTIONS = "reward/*"
PHASES = ("rollout", "reward", "reference", "train")
TIMES = tuple(f"time/{phase}_s" for phase in PHASES)
# Title and metrics of a chart, in the order of the page; without the first of them there is none. Other evaluations
# come after these, and what is left at the end of the page.
CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean", "eval/reward")),
    ("Reward functions", (FUNCTIONS,)),
    ("Loss per token, in nats", ("sft/nll", "eval/nll")),
    ("Preference loss", ("dpo/loss", "eval/loss")),
    ("Preferences told right", ("dpo/accuracy", "eval/accuracy")),
    ("Margin between chosen and rejected", ("dpo/margin", "eval/margin")),
    ("Log-probs of the pairs", ("logp/chosen", "logp/rejected")),
    ("Tokens of a completion", ("length/mean", "length/max")),
    ("Share cut off, share of groups without spread", ("length/truncated", "groups/no_spread")),
    ("Norm of the gradient before clipping", ("grad/norm",)),
    ("KL to the reference, in nats", ("kl/reference",)),
    ("Entropy, in nats per token", ("entropy/mean",)),
    ("Share of tokens clipped", ("clip/low", "clip/high")),
    ("Sampler's log-probs from the trainer's, in nats", ("sampler/logp_diff",)),
    ("Share of tokens that the correction leaves", ("sampler/ess",)),
    ("Learning rate", ("optim/lr",)),
    ("Seconds of a step", TIMES),
    ("Tokens per second", ("rollout/tokens_per_s", "train/tokens_per_s")),
    ("Peak of GPU memory, in GiB", ("memory/peak_gib",)),
)
NOT_CHARTED = {"step", "eval/rows", "time/step_s"}


class ReportError(ValueError):
    """There is nothing to report on; the message says what to give."""


@dataclass(frozen=True)
class RunData:
    """What lies in a run's folder."""

    path: Path
    metrics: Metrics
    config: Mapping[str, Any]
    environment: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "RunData":
        """ReportError if it is no run, or one without a single number."""
        folder = RunFolder(path)
        if not folder.config.is_file():
            raise ReportError(
                f"{path}: not a run's folder (it has no config.yaml). Give one, such as runs/NAME"
            )
        metrics = Metrics.read(folder.metrics)
        if not len(metrics):
            raise ReportError(
                f"{path}: the run has no numbers yet (metrics.jsonl is empty). Wait for its first step"
            )
        environment = path / "environment.json"
        return cls(
            path,
            metrics,
            yaml.safe_load(folder.config.read_text("utf-8")),
            json.loads(environment.read_text("utf-8")) if environment.is_file() else {},
        )

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def steps(self) -> np.ndarray:
        return np.array([row["step"] for row in self.metrics], dtype=np.float64)

    @property
    def done(self) -> int:
        return int(self.steps[-1])

    def series(self, key: str, name: str, beside: Sequence[str] = ()) -> Series | None:
        """The metric over the steps that have it, or one of those beside it; None if no step has it."""
        if key not in self.metrics.names:
            return None
        has = np.array([any(one in row for one in (key, *beside)) for row in self.metrics])
        return Series(name, self.steps[has], self.metrics.column(key)[has], marks=key.startswith("eval/"))

    def total(self, key: str) -> float:
        return float(np.nansum(self.metrics.column(key))) if key in self.metrics.names else 0.0

    def facts(self) -> dict[str, str]:
        """In the words of the terminal (rl/display.py)."""
        model, optim = self.config["model"], self.config["optim"]
        versions = {
            k: v for k, v in self.environment.get("packages", {}).items() if v and k in ("covey", "torch")
        }
        device = ", ".join(
            [str(self.environment.get("device", "")), *(f"{k} {v}" for k, v in versions.items())]
        )
        rewards = [f"{r['weight']:g} x {r['name'] or r['use']}" for r in self.config.get("rewards", [])]
        facts = {
            "model": f"{model['path']}, {model['method']}",
            "data": _sources(self.config["data"]["train"]),
            "rewards": ", ".join(rewards or filter(None, map(reward_function, self.metrics.names))),
            "steps": str(self.done) if optim.get("epochs") else f"{self.done} of {optim['steps']}",
            "time": duration(self.total("time/step_s")),
            "device": device,
            "folder": str(self.path),
        }
        return {label: text for label, text in facts.items() if text}

    def costs(self) -> dict[str, str]:
        """Where the time of the steps went, and how many tokens there were."""
        whole = self.total("time/step_s")
        costs = {
            phase: f"{duration(seconds)} ({seconds / whole:.0%})"
            for phase in PHASES
            if (seconds := self.total(f"time/{phase}_s")) > 0
        }
        if {"rollout/tokens_per_s", "time/rollout_s"} <= set(self.metrics.names):
            sampled = self.metrics.column("rollout/tokens_per_s") * self.metrics.column("time/rollout_s")
            costs["sampled"] = f"{count(round(np.nansum(sampled)))} tokens"
        for name in ("trained", "computed"):
            if tokens := self.total(f"tokens/{name}"):
                costs[name] = f"{count(round(tokens))} tokens"
        return costs

    def held_out(self) -> list[tuple[str, str, str, str]]:
        """(name, first, last, change) of each number of the evaluations."""
        rows = []
        for key in self.metrics.names:
            series = self.series(key, key) if key.startswith("eval/") and key not in NOT_CHARTED else None
            known = series.values[np.isfinite(series.values)] if series else np.zeros(0)
            if len(known):
                change = f"{known[-1] - known[0]:+.3f}" if len(known) > 1 else ""
                rows.append((key.removeprefix("eval/"), f"{known[0]:.3f}", f"{known[-1]:.3f}", change))
        return rows

    def settings(self) -> str:
        """The recipe, with all defaults."""
        return RunFolder(self.path).config.read_text("utf-8")

    def hints(self) -> list[tuple[int, str]]:
        """(step, sentence) of what the terminal has pointed out."""
        rules = Hints()
        found = []
        for row in self.metrics:
            known = {key: math.nan if value is None else value for key, value in row.items()}
            found += [(row["step"], text) for text in rules.after(row["step"], known) if row["step"] > 0]
        return found


def write_report(runs: Sequence[Path], output: Path, samples: int = 4) -> None:
    """Writes the page of one run, or of several side by side.

    samples: completions shown of each step that is shown. Raises ReportError for a folder that is no run, OSError if
    the page cannot be written.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    data = [RunData.read(path) for path in runs]
    alone = data[0] if len(data) == 1 else None
    main, other = charts(data)
    shown: list[Shown] = shown_steps(RunFolder(alone.path), samples) if alone else []
    compared: Compared | None = compared_evaluations(RunFolder(alone.path), samples) if alone else None
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    page = environment.get_template("page.html").render(
        runs=data, main=main, other=other, shown=shown, compared=compared, differences=differences(data)
    )
    write_whole(output, page.encode("utf-8", "replace"))


def charts(runs: Sequence[RunData]) -> tuple[list[Chart], list[Chart]]:
    """Those to look at; and those of all other metrics, and of what is 0 all the time.

    Of several runs each metric has a chart, with a curve per run.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names if name not in NOT_CHARTED))
    functions = [name for name in names if reward_function(name)]
    used, found = set(functions), list[Chart]()
    for title, keys in CHARTS:
        if keys == (FUNCTIONS,):
            if len(functions) > 1:  # one is the reward itself
                found += _charts_of(runs, title, functions)
        elif keys == TIMES or keys[0] in names:
            used.update(keys)
            there = [key for key in keys if key in names]
            found += _charts_of(runs, title, there, stacked=keys == TIMES)
    left = [name for name in names if name not in used]
    held_out = [name for name in left if name.startswith("eval/")]
    for name in held_out:
        found += _charts_of(runs, f"Held-out {name.removeprefix('eval/')}", [name])
    moves = [any(np.nan_to_num(one.values).any() for one in chart.series) for chart in found]
    other = [chart for chart, moving in zip(found, moves, strict=True) if not moving]
    other += [c for name in left if name not in held_out for c in _charts_of(runs, name, [name])]
    return [chart for chart, moving in zip(found, moves, strict=True) if moving], other


def _charts_of(
    runs: Sequence[RunData], title: str, keys: Sequence[str], stacked: bool = False
) -> list[Chart]:
    if len(runs) == 1:
        beside = keys if stacked else ()
        found = [one for key in keys if (one := runs[0].series(key, _label(key), beside)) is not None]
        charts = [line_chart(title, found, stacked=stacked)]
    else:
        charts = []
        for key in keys:
            found = [series for run in runs if (series := run.series(key, run.name)) is not None]
            named = title if len(keys) == 1 else f"{title}: {_label(key)}"
            charts.append(line_chart(named, found))
    return [chart for chart in charts if chart is not None]


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """(key, its value in each run) of the settings that all runs have and that are not the same in all of them."""
    flat = [_flat(run.config) for run in runs]
    shared = [
        key for key in flat[0] if all(key in one for one in flat) and key not in ("run.name", "run.dir")
    ]
    rows = [(key, [one[key] for one in flat]) for key in shared]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(value: Any, key: str = "") -> dict[str, str]:
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None or not value:
        return {key: json.dumps(value, ensure_ascii=False)}
    return {k: v for name, part in items for k, v in _flat(part, f"{key}.{name}".lstrip(".")).items()}


def _label(key: str) -> str:
    area, _, name = key.partition("/")
    if area == "time":
        return name.removesuffix("_s")
    return f"held-out {name}" if area == "eval" else name if area == "reward" else key


def _sources(train: Any) -> str:
    sources = train if isinstance(train, list) else [train]
    return ", ".join(
        str(source.get("path", source)) if isinstance(source, dict) else str(source) for source in sources
    )
