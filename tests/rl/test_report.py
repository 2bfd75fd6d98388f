"""The page of a run: its numbers by hand, its charts in closed form, and nothing of what a model wrote as markup."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import covey
from covey.rl import loop
from covey.rl.cli import app
from covey.rl.config import GrpoConfig
from covey.rl.config_file import dump_config
from covey.rl.metrics import JsonlLogger, Sample, write_samples
from covey.rl.report.chart import BOTTOM, HEIGHT, LEFT, POINTS, RIGHT, TOP, WIDTH, Series, line_chart, ticks
from covey.rl.report.page import ReportError, RunData, charts, differences, write_report
from covey.rl.report.samples import LONGEST, compared_evaluations, shown_steps
from covey.rl.run_folder import RunFolder

HOSTILE = "</pre><script>alert(1)</script> & \"quoted\" 'text' {{ 7 * 7 }}"


def sample(row: int, reward: float, completion: str = "", **changes: Any) -> Sample:
    one = Sample(row, f"prompt {row}", completion or f"says {reward}", (1, 2), (-0.5, -0.5), "eos", 3, reward)
    return replace(one, **changes)


def run_of(folder: Path, rows: Sequence[dict[str, float]], **objective: Any) -> RunFolder:
    """A run's folder with these metrics, a row per step from 0."""
    folder.mkdir(parents=True)
    config = {"model": {"path": "tiny"}, "data": {"train": "rows.jsonl"}, "objective": objective}
    config["rewards"] = [{"use": "first_number", "weight": 2.0, "name": "right"}]
    (folder / "config.yaml").write_text(dump_config(GrpoConfig.model_validate(config)))
    run = RunFolder(folder)
    log = JsonlLogger(run.metrics)
    for step, row in enumerate(rows):
        log.log(step, row)
    log.close()
    return run


class Page(HTMLParser):
    """Tags by number, and all text that is shown."""

    def __init__(self, path: Path):
        super().__init__(convert_charrefs=True)
        self.tags: dict[str, int] = {}
        self.text, self.points, self._inside = "", list[Any](), ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self._inside = tag
        if points := dict(attrs).get("data-points"):
            self.points.append(json.loads(points))

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


# Charts


def test_ticks_are_round_numbers() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(3, 42, 4) == [10.0, 20.0, 30.0, 40.0]
    assert ticks(-1e-5, 1e-5, 4) == [-1e-5, -5e-6, 0.0, 5e-6, 1e-5]
    assert ticks(2.0, 2.0) == [2.0]


def test_a_curve_is_where_its_numbers_are() -> None:
    steps, values = np.array([0.0, 5.0, 10.0, 20.0]), np.array([0.0, 1.0, math.nan, 2.0])
    chart = line_chart("a & b", [Series("x", steps, values)])
    assert chart is not None
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    middle, half = LEFT + (right - LEFT) / 4, bottom - (bottom - TOP) / 2.08  # 4 % of room above the highest
    top = bottom - (bottom - TOP) / 1.04
    path = f"M{LEFT:.1f} {bottom:.1f}L{middle:.1f} {half:.1f}M{right:.1f} {top:.1f}"
    assert f'd="{path}"' in chart.svg and 'aria-label="a &amp; b"' in chart.svg
    assert chart.points["series"] == [{"name": "x", "x": [0, 5, 10, 20], "y": [0, 1, None, 2]}]
    assert line_chart("nothing", [Series("x", steps, np.full(4, math.nan))]) is None


def test_areas_lie_on_each_other() -> None:
    steps = np.array([1.0, 2.0])
    chart = line_chart(
        "time",
        [Series("a", steps, np.array([1.0, 3.0])), Series("b", steps, np.array([2.0, 1.0]))],
        stacked=True,
    )
    assert chart is not None
    right, bottom = float(WIDTH - RIGHT), float(HEIGHT - BOTTOM)
    y = {v: round(bottom - v / 4.16 * (bottom - TOP), 1) for v in (0, 1, 3, 4)}
    assert f"M{LEFT:.1f} {y[1]}L{right} {y[3]}L{right} {y[0]}L{LEFT:.1f} {y[0]}Z" in chart.svg
    assert f"M{LEFT:.1f} {y[3]}L{right} {y[4]}L{right} {y[3]}L{LEFT:.1f} {y[1]}Z" in chart.svg
    assert [one["y"] for one in chart.points["series"]] == [[1, 3], [2, 1]]  # what is said is not the sum


def test_long_and_noisy_curves() -> None:
    steps = np.arange(3.0 * POINTS)
    (long,) = line_chart("", [Series("x", steps, steps**2)]).series  # type: ignore[union-attr]
    assert len(long.values) == POINTS and long.steps[1] == 4.0
    assert long.values[1] == pytest.approx((9 + 16 + 25) / 3)
    noisy = line_chart("", [Series("x", steps[:60], steps[:60] % 2)])
    smooth = line_chart("", [Series("x", steps[:60], steps[:60])])
    assert noisy is not None and "faint" in noisy.svg and noisy.svg.count("curve") == 2
    assert smooth is not None and "faint" not in smooth.svg


# A run


FIRST = {
    "reward/mean": 0.5, "reward/right": 0.25, "rollout/tokens_per_s": 100.0, "time/rollout_s": 2.0, "time/train_s": 1.0,
    "time/step_s": 3.0, "clip/low": 0.0, "clip/high": 0.0, "made/up": 7.0, "tokens/trained": 150.0,
}  # fmt: skip
SECOND = {
    "reward/mean": 0.75, "reward/right": 0.375, "rollout/tokens_per_s": 50.0,
    "time/rollout_s": 6.0, "time/train_s": 1.0,
    "time/step_s": 7.0, "clip/low": 0.0, "clip/high": 0.0, "made/up": 8.0, "tokens/trained": 200.0, "eval/reward": 0.75,
}  # fmt: skip
ROWS: list[dict[str, float]] = [{"eval/reward": 0.25, "eval/rows": 4}, FIRST, SECOND]


def test_facts_costs_and_evaluations(tmp_path: Path) -> None:
    run = RunData.read(run_of(tmp_path / "one", ROWS).path)
    assert run.costs() == {
        "rollout": "8.0 s (80%)",
        "train": "2.0 s (20%)",
        "sampled": "500 tokens",
        "trained": "350 tokens",
    }
    assert run.held_out() == [("reward", "0.250", "0.750", "+0.500")]
    facts = run.facts()
    assert (facts["rewards"], facts["time"], facts["steps"][:5]) == ("2 x right", "10 s", "2 of ")


def test_every_number_has_a_chart(tmp_path: Path) -> None:
    main, other = charts([RunData.read(run_of(tmp_path / "one", ROWS).path)])
    shown = {chart.title: [one.name for one in chart.series] for chart in main}
    assert shown["Reward"] == ["mean", "held-out reward"] and "Reward functions" not in shown
    assert shown["Seconds of a step"] == ["rollout", "train"]
    assert "Share of tokens clipped" in {chart.title for chart in other}  # 0 all the time
    assert {"made/up", "tokens/trained"} <= {chart.title for chart in other}


def test_phases_that_some_steps_lack_and_many_curves(tmp_path: Path) -> None:
    rows = [{}, {"time/train_s": 1.0, "time/rollout_s": 2.0}, {"time/train_s": 3.0}]
    rows[1] |= {f"reward/f{i}": float(i) for i in range(10)}
    main, _ = charts([RunData.read(run_of(tmp_path / "one", rows).path)])
    times = next(chart for chart in main if chart.title == "Seconds of a step")
    assert [one["y"] for one in times.points["series"]] == [[2, None], [1, 3]]
    assert [one["x"] for one in times.points["series"]] == [[1, 2], [1, 2]]
    functions = next(chart for chart in main if chart.title == "Reward functions")
    assert len(functions.series) == 10 and functions.svg.count('curve c1"') == 2 and "c8" not in functions.svg


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    first = run_of(tmp_path / "first", ROWS, beta=0.0)
    second = run_of(tmp_path / "second", ROWS[:2], beta=0.1)
    data = [RunData.read(run.path) for run in (first, second)]
    assert differences(data) == [("objective.beta", ["0.0", "0.1"])]
    main, _ = charts(data)
    assert [one.name for one in next(c for c in main if c.title == "Reward: mean").series] == [
        "first",
        "second",
    ]
    write_report([run.path for run in (first, second)], tmp_path / "both.html")
    assert "Settings that differ" in Page(tmp_path / "both.html").text


def test_nothing_that_was_written_becomes_markup(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run <b>", [{"reward/mean": 0.0, f"reward/{HOSTILE}": 1.0, "reward/x": 0.5}])
    bad = sample(
        0, 1.0, HOSTILE, prompt=HOSTILE, rewards={HOSTILE: 1.0}, notes={HOSTILE: HOSTILE}, finish=HOSTILE
    )
    write_samples(run.samples(1), [bad])
    for step in (0, 1):
        write_samples(run.samples(step, "eval"), [bad])
    write_report([run.path], run.report)
    page = Page(run.report)
    assert page.tags["script"] == 1 and "run <b>" in page.text
    assert page.text.count(HOSTILE) >= 8  # prompts, completions, scores, notes, a metric's name
    assert HOSTILE in {one["name"] for points in page.points for one in points["series"]}


def test_samples_go_from_the_best_to_the_worst(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ROWS)
    for step in range(1, 10):
        rewards = [0.1, math.nan, 0.9, 0.5, 0.3]
        write_samples(run.samples(step), [sample(i, r, advantage=r - 0.4) for i, r in enumerate(rewards)])
    shown = shown_steps(run, 3)
    assert [one.step for one in shown] == [1, 4, 6, 9] and {one.count for one in shown} == {5}
    assert [text.row for text in shown[0].texts] == [2, 4, 1]  # 0.9, 0.3, and the one without a reward
    assert shown[0].texts[0].scores == {"advantage": "0.5", "ended by": "eos"}
    assert shown_steps(run, 0) == []


def test_evaluations_are_compared_row_by_row(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ROWS)
    write_samples(run.samples(0, "eval"), [sample(i, r) for i, r in enumerate([0.0, 1.0, 0.5, 0.0])])
    assert compared_evaluations(run, 4) is None
    write_samples(run.samples(8, "eval"), [sample(i, r) for i, r in enumerate([0.25, 0.0, 0.5, 1.0])])
    found = compared_evaluations(run, 3)
    assert found is not None and (found.before, found.after, found.gained, found.lost) == (0, 8, 2, 1)
    assert [(old.row, old.reward, new.reward) for old, new in found.pairs] == [
        (3, 0.0, 1.0),
        (2, 0.5, 0.5),
        (1, 1.0, 0.0),
    ]
    write_samples(run.samples(9, "eval"), [sample(5, 0.25)])  # other rows
    assert compared_evaluations(run, 3) is None


def test_long_texts_keep_their_ends(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ROWS)
    write_samples(run.samples(1), [sample(0, 1.0, "a" * LONGEST + "b" * 500)])
    text = shown_steps(run, 1)[0].texts[0].completion
    assert (
        text.startswith("aaa")
        and text.endswith("bbb")
        and "500 characters" in text
        and len(text) < LONGEST + 50
    )


# The command, and the end of a run


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "runs/mine", ROWS)
    done = CliRunner().invoke(app, ["report", "mine"])
    assert done.exit_code == 0 and done.output.strip() == "runs/mine/report.html"
    assert "held-out" in Page(Path("runs/mine/report.html")).text
    assert CliRunner().invoke(app, ["report", "runs/mine", "-o", "other.html"]).exit_code == 0
    assert Path("other.html").is_file()
    for arguments, words in (
        (["nobody"], "nobody: not a run's folder (it has no config.yaml)"),
        (
            ["mine", "-o", "no/such/folder.html"],
            "cannot write no/such/folder.html: no such file or directory",
        ),
    ):
        failed = CliRunner().invoke(app, ["report", *arguments])
        assert failed.exit_code == 2 and words in failed.output
    run_of(tmp_path / "runs/empty", [])
    with pytest.raises(ReportError, match=r"the run has no numbers yet"):
        RunData.read(Path("runs/empty"))


def train(folder: Path, name: str) -> Any:
    config = {
        "model": {"path": "tiny", "device": "cpu"},
        "optim": {"steps": 2, "rows_per_step": 2},
        "run": {"dir": str(folder), "name": name, "threads": 1},
    }
    rows = [{"prompt": f"{i}:", "completion": f" {i}"} for i in range(4)]
    return covey.sft(config, data=rows, eval_data=rows[:2], plain=True)


def test_a_run_leaves_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tmp_path, "one")
    assert f"{run.folder}/report.html" in capsys.readouterr().out
    assert "Loss per token" in Page(run.folder / "report.html").text

    def fails(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(loop, "write_report", fails)
    run = train(tmp_path, "two")
    assert len(run.metrics) == 3 and "none (OSError: the disk is full)" in capsys.readouterr().out
