"""The command line: what it hands to the run, what it says when something is wrong, and its haste."""

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.rl import cli
from covey.rl.config import DpoConfig, GrpoConfig, SftConfig
from covey.rl.config_file import load_config

GRPO = "model: {path: tiny}\ndata: {train: 'task:addition'}\n"
SFT = GRPO + "optim: {steps: 3}\n"


class OurError(ValueError):
    """As ConfigError, DataError, RewardError and ModelError are."""


class OurRunError(RuntimeError):
    """As RunError is."""


OurError.__module__ = OurRunError.__module__ = "covey.rl.somewhere"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command line in a folder with grpo.yaml and sft.yaml; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    Path("grpo.yaml").write_text(GRPO)
    Path("sft.yaml").write_text(SFT)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["covey", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0)

    return run


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands in for covey.rl.api: remembers its calls, raises `error` if there is one, or returns `run`."""
    run = types.SimpleNamespace(folder=Path("runs/a"), interrupted=False)
    fake = types.SimpleNamespace(calls=[], error=None, run=run)

    def record(name: str) -> Callable[..., Any]:
        def called(config: Any, *, resume: str | None) -> Any:
            fake.calls.append((name, config, resume))
            if fake.error is not None:
                raise fake.error
            return run

        return called

    fake.run_grpo, fake.run_sft, fake.run_dpo = record("grpo"), record("sft"), record("dpo")
    monkeypatch.setitem(sys.modules, "covey.rl.api", fake)
    return fake


def test_a_recipe_and_its_overrides_reach_the_run(run: Any, api: Any, tmp_path: Path) -> None:
    assert run("grpo", "grpo.yaml", "optim.lr=1e-4", "run.seed=3", "--name", "007") == 0
    assert run("sft", "sft.yaml", "--resume", "auto", "optim.rows_per_step=4") == 0
    assert run("dpo", "sft.yaml", "objective.beta=0.2", "--name", "b") == 0
    first, second, third = api.calls
    expected = load_config(
        tmp_path / "grpo.yaml", {"optim.lr": 1e-4, "run": {"seed": 3, "name": "007"}}, GrpoConfig
    )
    assert first == ("grpo", expected, None)
    assert second == ("sft", load_config(tmp_path / "sft.yaml", ["optim.rows_per_step=4"], SftConfig), "auto")
    assert third == ("dpo", load_config("sft.yaml", ["objective.beta=0.2", "run.name=b"], DpoConfig), None)


def test_without_a_recipe_it_says_how_to_start(run: Any, api: Any, capsys: Any) -> None:
    assert run("grpo") == 2
    assert "Try: covey grpo quickstart" in capsys.readouterr().err
    assert run("sft", "optim.lr=1e-4") == 2
    assert "covey sft needs a recipe first" in capsys.readouterr().err
    assert run("dpo") == 2
    assert "Try: covey dpo quickstart-dpo" in capsys.readouterr().err
    assert api.calls == []


def test_mistakes_are_one_line_each_on_stderr(run: Any, api: Any, capsys: Any) -> None:
    assert run("grpo", "grpo.yaml", "optim.learnin_rate=1", "lora.rank=0") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "error: command line lora.rank: must be at least 1, got 0",
        "error: command line optim.learnin_rate: unknown key. Did you mean optim.lr?",
    ]
    assert api.calls == []


def test_a_key_with_dashes_is_shown_without(run: Any, api: Any, capsys: Any) -> None:
    assert run("grpo", "grpo.yaml", "--optim.lr=1e-4") == 2
    assert "written without dashes: optim.lr=VALUE" in capsys.readouterr().err
    assert run("grpo", "grpo.yaml", "--dryrun") == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            OurError("rewards.py:12 exact() needs a column"),
            2,
            "error: rewards.py:12 exact() needs a column\n",
        ),
        (OurRunError("cannot write runs/a"), 1, "error: cannot write runs/a\n"),
        (OSError("disk full"), 1, "error: OSError: disk full\n(--debug shows where)\n"),
        (RuntimeError("out of memory"), 1, "error: RuntimeError: out of memory\n(--debug shows where)\n"),
        (KeyError("a"), 1, "error: KeyError: 'a'\n(--debug shows where)\n"),
        (ValueError("odd"), 2, "error: ValueError: odd\n(--debug shows where)\n"),
    ],
)
def test_a_run_that_fails_is_a_sentence_and_an_exit_code(
    error: Exception, code: int, said: str, run: Any, api: Any, capsys: Any
) -> None:
    api.error = error
    assert run("grpo", "grpo.yaml") == code
    assert capsys.readouterr().err == said
    assert run("grpo", "grpo.yaml", "--debug") == code
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on(run: Any, api: Any, capsys: Any) -> None:
    api.run.interrupted = True  # after the first Ctrl-C: the step was finished and saved
    assert run("grpo", "grpo.yaml", "data.prompt=Q: {question}", "--resume", "auto") == 130
    expected = "covey grpo grpo.yaml 'data.prompt=Q: {question}' --resume runs/a\n"
    assert capsys.readouterr().err == f"interrupted. Go on with: {expected}"
    api.error = KeyboardInterrupt()  # after the second, or before the first step
    assert run("sft", "sft.yaml", "--name", "b", "--resume", "runs/a") == 130
    expected = "covey sft sft.yaml --name b --resume auto\n"
    assert capsys.readouterr().err == f"interrupted. Go on with: {expected}"


def test_one_of_several_processes_speaks(
    run: Any, api: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.run.interrupted = True
    said = []
    for rank in "01":
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, rank)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert run("grpo", "grpo.yaml") == 130 and run("grpo", "nowhere.yaml") == 2
        said.append(capsys.readouterr().err.splitlines())
    assert said[0][0] == (
        "interrupted. Go on with: torchrun --nproc-per-node 2 -m covey grpo grpo.yaml --resume runs/a"
    )
    assert said[0][1].startswith("error: nowhere.yaml") and said[1] == []


def test_a_dry_run_prints_the_plan_and_a_recipe_and_starts_nothing(run: Any, api: Any, capsys: Any) -> None:
    assert run("grpo", "grpo.yaml", "rewards.0.use=math", "optim.steps=10", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "# step     8 prompts x 8 = 64 completions of up to 256 tokens" in printed
    assert "# run      10 steps, 640 completions" in printed
    assert "# rewards  1 x math" in printed
    Path("resolved.yaml").write_text(printed)
    expected = load_config("grpo.yaml", ["rewards.0.use=math", "optim.steps=10"], GrpoConfig)
    assert load_config("resolved.yaml", [], GrpoConfig) == expected

    assert run("sft", "sft.yaml", "--dry-run") == 0
    assert "# run      3 steps, learning rate 0.0002 (constant)" in capsys.readouterr().out
    assert api.calls == []


def test_help_and_version(run: Any, capsys: Any) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert "covey grpo quickstart" in text and "covey sft my.yaml" in text
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("covey 0.")
    assert run("grpo", "--help") == 0
    assert "--resume PATH|auto" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["dpo", "--help"],
        ["grpo", "grpo.yaml", "optim.lrr=1"],
        ["dpo", "sft.yaml", "a=1"],
        ["grpo", "no.yaml"],
    ],
)
def test_help_and_mistakes_are_quick(arguments: list[str], run: Any) -> None:
    """Under one CPU-second (about 0.35 s where this was written), because nothing heavy is imported."""
    program = (
        "import atexit, sys, time\n"
        "heavy = ('torch', 'triton', 'transformers', 'datasets', 'peft', 'bitsandbytes', 'numpy', 'pandas')\n"
        "loaded = lambda: [name for name in heavy if name in sys.modules]\n"
        "atexit.register(lambda: print('LOADED', loaded(), time.process_time()))\n"
        "from covey.rl.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    loaded, seconds = done.stdout.rsplit("LOADED ", 1)[1].rsplit(" ", 1)
    assert loaded == "[]"
    assert float(seconds) < 1.0
    assert done.returncode == (0 if "--help" in arguments else 2)


def test_python_m_covey_is_the_same_command(run: Any) -> None:
    done = subprocess.run([sys.executable, "-m", "covey", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("covey 0.")
