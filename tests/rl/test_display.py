import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from covey.rl.display import Display, RunInfo, Summary
from covey.rl.metrics import Sample

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _info(**changes: Any) -> RunInfo:
    facts: dict[str, Any] = {
        "command": "grpo",
        "name": "grpo-tiny-1130-020401",
        "folder": "runs/grpo-tiny-1130-020401",
        "model": "tiny",
        "method": "qlora, rank 16",
        "device": "CPU",
        "trainable": 250_000,
        "parameters": 2_000_000,
        "objective": "minimise L\n  A  [r - mean]",
        "steps": 200,
        "rows": 8,
        "completions": 4,
        "details": {"data": "task:add"},
    }
    return RunInfo(**facts | changes)


def _display(*, terminal: bool = False, width: int = 100) -> tuple[Display, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, width=width, height=50, force_terminal=terminal, legacy_windows=False)
    return Display(console=console), file


def _metrics(**changes: float) -> dict[str, float]:
    return {
        "reward/mean": 0.4125,
        "reward/std": 0.3,
        "reward/math": 0.36,
        "length/mean": 214.4,
        "length/truncated": 0.03,
        "groups/no_spread": 0.31,
        "loss/total": 0.5,
        "grad/norm": 0.9,
        "optim/lr": 2e-5,
        "time/rollout_s": 9.1,
        "time/reward_s": 0.4,
        "time/train_s": 4.6,
        "time/step_s": 14.1,
        "rollout/tokens_per_s": 1812.0,
    } | {name.replace("__", "/"): value for name, value in changes.items()}


def _sample(completion: str, reward: float, **changes: Any) -> Sample:
    facts: dict[str, Any] = {
        "row": 0,
        "prompt": "What is 3 + 4?",
        "completion": completion,
        "ids": [1],
        "logprobs": [-1.0],
        "finish": "eos",
        "version": 0,
        "reward": reward,
        "rewards": {"math": reward},
    }
    return Sample(**facts | changes)


def test_plain_start() -> None:
    display, file = _display()
    display.start(_info(first_step=50))
    assert file.getvalue().splitlines() == [
        "covey grpo  grpo-tiny-1130-020401",
        "model      tiny on CPU",
        "method     qlora, rank 16; 250 k of 2 M parameters are trained (12.5%)",
        "objective  minimise L",
        "             A  [r - mean]",
        "data       task:add",
        "steps      200 steps of 8 prompts x 4 completions = 32; resumed after step 50",
        "folder     runs/grpo-tiny-1130-020401",
    ]


def test_plain_step_is_one_line() -> None:
    display, file = _display(width=40)
    display.start(_info())
    file.truncate(0)
    file.seek(0)
    display.step(7, _metrics())
    # 193 steps of 14.1 s are 45.4 minutes
    assert file.getvalue() == (
        "step   7/200  reward 0.412  math 0.36  length 214  cut off 3%  no spread 31%  loss 0.5  grad 0.9  "
        "lr 2.0e-05  sample 9.1 s  score 0.4 s  train 4.6 s  tokens/s 1,812  45 min left\n"
    )


def test_the_time_left_is_that_of_the_last_twenty_steps() -> None:
    display, file = _display()
    display.start(_info(steps=100))
    for step in range(1, 11):
        display.step(step, {"time/step_s": 1000.0})
    for step in range(11, 31):
        display.step(step, {"time/step_s": 60.0})
    assert file.getvalue().splitlines()[-1] == "step  30/100  70 min left"


def test_dpo_shows_the_loss_and_how_far_apart_the_completions_are() -> None:
    display, file = _display()
    display.start(_info(command="dpo", rows=16))
    metrics = {
        "dpo/loss": 0.5,
        "dpo/accuracy": 0.75,
        "dpo/margin": 0.4567,
        "logp/chosen": -2.0,
        "logp/rejected": -3.5,
    }
    display.step(1, metrics | {"loss/total": 0.5, "dpo/chosen": 0.1, "dpo/rejected": -0.3})
    text = file.getvalue()
    assert "200 steps of 16 pairs\n" in text
    expected = "step   1/200  loss 0.500  accuracy 75%  margin 0.457  logp chosen -2.00  rejected -3.50"
    assert text.splitlines()[-1] == expected


def test_sft_shows_the_loss() -> None:
    display, file = _display()
    display.start(_info(command="sft", rows=16))
    display.step(1, {"sft/nll": 1.25, "loss/total": 1.25, "train/tokens_per_s": 900.0})
    text = file.getvalue()
    assert "200 steps of 16 documents\n" in text
    assert text.splitlines()[-1] == "step   1/200  loss 1.250  tokens/s 900"


def test_hints_come_with_the_steps() -> None:
    display, file = _display()
    display.start(_info())
    display.step(1, _metrics(loss__total=0.0))
    display.hint("read\nthis \x1b[0m")
    lines = file.getvalue().splitlines()
    assert lines[-2].startswith("hint: A loss near 0 is normal in GRPO")
    assert lines[-1] == "hint: read⏎ this \ufffd[0m"


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_in_a_completion_is_interpreted(terminal: bool) -> None:
    display, file = _display(terminal=terminal)
    evil = "[bold red]7[/bold red] [/] [link=x]y :smile: \x1b[2J\x1b]0;title\x07 {braces}"
    names = {"[red]": 1.0}
    row = _sample(evil, 1.0, prompt=evil, rewards=names, notes={"[b]": evil})
    display.samples([row, _sample("no", 0.0)])
    written = file.getvalue()
    assert "\x1b[2J" not in written and "\x1b]0" not in written and "\x07" not in written
    assert "[red] 1.00" in ESCAPE.sub("", written)
    # Everything else is there to be read, once in the prompt and once in the completion (and in the note).
    shown = re.sub(r"\s+", "", ESCAPE.sub("", written))
    for piece in ("[bold", "red]7", "[/]", "[link=x]y", ":smile:", "{braces}"):
        assert shown.count(piece) == (3 if terminal else 2), piece


def test_best_and_worst_of_the_step() -> None:
    display, file = _display()
    display.samples(
        [_sample("six", 0.25), _sample("no idea", math.nan), _sample("7", 1.0), _sample("ten", 0.0)]
    )
    assert file.getvalue().splitlines() == [
        "  best  1.00  math 1.00  What is 3 + 4?  ->  7",
        "  worst 0.00  math 0.00  What is 3 + 4?  ->  ten",
    ]


def test_equal_rewards_show_one_and_no_rewards_none() -> None:
    display, file = _display()
    display.samples([_sample("a", 0.5), _sample("b", 0.5)])
    display.samples([_sample("a", math.nan)])
    display.samples([])
    assert file.getvalue() == "  all   0.50  math 0.50  What is 3 + 4?  ->  a\n"


def test_evaluations_before_and_after() -> None:
    display, file = _display()
    display.start(_info(steps=2))
    display.evaluation(0, {"eval/accuracy": 0.25, "eval/rows": 40.0})
    display.step(1, {"reward/mean": 0.0})
    display.step(2, {"reward/mean": 1.0})
    display.evaluation(2, {"eval/accuracy": 0.75, "eval/rows": 40.0})
    display.finish(Summary(seconds=75.0, lines={"adapter": "runs/x/adapter"}))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert "held-out: before the run on 40 rows: accuracy 0.250" in lines
    assert "held-out: after step 2 on 40 rows: accuracy 0.750 (+0.500)" in lines
    table = lines.index("held-out  before     after  change")
    assert lines[table + 1] == "accuracy   0.250  →  0.750  +0.500"
    assert "reward per step   ◆ held-out accuracy" in lines
    assert lines[-2:] == ["done     2 of 2 steps in 75 s", "adapter  runs/x/adapter"]


def test_a_resumed_run_goes_on_with_its_curve_and_its_first_evaluation() -> None:
    display, file = _display()
    history = [
        {"step": 0, "eval/reward": 0.5},
        {"step": 1, "reward/mean": 0.0},
        {"step": 2, "reward/mean": None},
    ]
    display.start(_info(steps=3, first_step=2, history=history))
    display.step(3, {"reward/mean": 1.0})
    display.evaluation(3, {"eval/reward": 1.0})
    display.finish(Summary(seconds=1.0, interrupted=True))
    text = file.getvalue()
    assert "reward     0.500  →  1.000  +0.500" in text and "stopped  3 of 3 steps" in text
    assert "└1───────3" in text  # three steps, three columns each


def test_a_run_that_ends_at_once() -> None:
    display, file = _display()
    display.start(_info())
    display.finish(Summary(seconds=0.0, interrupted=True))
    assert file.getvalue().splitlines()[-1] == "stopped  0 of 200 steps in 0.0 s"


def test_live_area() -> None:
    display, file = _display(terminal=True)
    with display:
        display.start(_info())
        assert not display.plain
        for step in range(1, 5):
            display.step(step, _metrics(reward__mean=0.25 * step))
        display.phase("sampling 32 completions")
        area = Console(file=io.StringIO(), width=100, record=True)
        area.print(display._area())
        lines = [line.rstrip() for line in area.export_text().splitlines()]
    assert re.match(r"step +4/200 .* 14.1 s a step   46 min left$", lines[0])
    # Mean of the last two against that of the first two: 0.875 - 0.375
    assert lines[1] == "reward  1.000 ▁▃▆█ +0.500 since the start   math 0.36"
    assert lines[2] == "groups  length 214   cut off 3%   no spread 31%"
    assert lines[3] == "update  loss 0.5   grad 0.9   lr 2.0e-05"
    assert lines[4] == "time    sample 9.1 s   score 0.4 s   train 4.6 s   tokens/s 1,812"
    assert re.match(r"now +\S sampling 32 completions   \d\.\d s$", lines[5])
    screen = ESCAPE.sub("", file.getvalue())
    assert "covey grpo  grpo-tiny-1130-020401" in screen and "A  [r - mean]" in screen


def test_an_error_gives_the_terminal_back() -> None:
    display, file = _display(terminal=True)
    with pytest.raises(ZeroDivisionError), display:
        display.start(_info())
        assert "\x1b[?25l" in file.getvalue()  # the cursor is hidden
        raise ZeroDivisionError
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")
    display.close()


def test_numbers_that_are_not_finite_do_not_stop_the_display() -> None:
    for terminal in (False, True):
        display, _ = _display(terminal=terminal)
        with display:
            display.start(_info(steps=3))
            for step in range(1, 4):
                display.step(step, _metrics(reward__mean=math.nan, grad__norm=math.inf))
            display.console.print(display._area())
            display.finish(Summary(seconds=1.0))
