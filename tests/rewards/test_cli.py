"""covey rewards list, try and check: what they show, and what they find wrong."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from covey.rewards.reward import BUILTINS, RewardError, RewardSpec, load_reward
from covey.rl import cli
from covey.rl.config import DataSection, GrpoConfig
from covey.rl.config_file import ConfigError, load_config
from covey.rl.metrics import Sample, write_samples
from covey.rl.reward_trials import Tried, TriedPrompt, check, given, made_up, score, summary

REWARDS = """
import os, random, time
def brevity(completion, limit=5): return float(len(completion) <= limit)
def raises(completion, answer): return 1 / len(completion)
def constant(completions): return [0.5] * len(completions)
def silent(completion): return None
def penalty(completion): return -float(len(completion))
def slow(completion): time.sleep(0.02); return float(len(completion))
def chance(completion): return random.random()
def backwards(completion, answer): return float(str(answer) not in completion)
def ids(completion, completion_ids, finish): return {"score": len(completion_ids), "finish": finish}
def pid(completion): return {"score": 1, "pid": os.getpid()}
def text(completion): return "1"
"""
ROWS = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(1, 4)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("rewards.py").write_text(REWARDS)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `covey rewards ...`; the exit code, what it printed, and its errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["covey", "rewards", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


# ------------------------------------------------------------------------------------------------ list


def test_list_has_every_builtin_with_what_it_needs(run):
    code, out, _ = run("list")
    assert code == 0
    for name in BUILTINS:
        assert f"\n{name:<15} " in "\n" + out
    assert "1.0 if the final answer of the completion equals the answer" in out
    assert "needs answer; settings setup='', entry_point=None, sandbox='auto'" in " ".join(out.split())


# ------------------------------------------------------------------------------------------------- try


def test_try_with_texts(run):
    code, out, _ = run("try", "math", "answer=72", "--completion", "It is 72.", "--completion", "It is 71.")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[1][:5] == ["0", "It", "is", "72.", "1"] and lines[2][:5] == ["1", "It", "is", "71.", "0"]
    assert "read: 72" in out
    assert "2 completions, 0 failed, 0 without an opinion" in out
    assert "scores: mean 0.5, std 0.5, from 0 to 1; above 0: 1 of 2" in out
    assert "prompts whose completions differ in score: 1 of 1" in out


def test_try_with_a_file_and_data(run, folder):
    rows = [{"completion": "2"}, {"completions": ["4", "5"]}, {"row": 0, "completion": "6"}]
    Path("c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = run("try", "exact", "--data", "rows.jsonl", "--completions", "c.jsonl")
    scores = [line.split()[2] for line in out.splitlines()[1:5]]
    assert code == 0 and scores == ["1", "1", "0", "0"]
    columns = ("--prompt", "answer", "--answer", "question")
    code, out, err = run("try", "exact", "--data", "rows.jsonl", *columns, "--completion", "1 + 1?")
    assert code == 0 and "above 0: 1 of 1" in out, err


def test_try_on_the_samples_of_a_run(run):
    samples = [
        Sample(row, "q", text, ids, [0.0] * len(ids), "length", 0, 1.0, {"old": 1.0})
        for row, text, ids in ((2, "6", (7, 8, 9)), (0, "6", (7,)))
    ]
    write_samples(Path("samples.parquet"), samples)
    code, out, err = run("try", "exact", "--data", "rows.jsonl", "--completions", "samples.parquet")
    assert code == 0, err
    assert [line.split()[2] for line in out.splitlines()[1:3]] == ["1", "0"]
    code, out, _ = run("try", "rewards.py:ids", "--completions", "samples.parquet")
    assert [line.split()[2] for line in out.splitlines()[1:3]] == ["3", "1"] and "finish: length" in out


def test_try_shows_a_failure_and_goes_on(run):
    code, out, _ = run("try", "rewards.py:raises", "answer=1", "--completion", "", "--completion", "ab")
    assert code == 1
    assert "failed" in out and "rewards.py:4 raises() raised ZeroDivisionError: division by zero" in out
    assert "2 completions, 1 failed" in out and "0.5" in out
    code, out, _ = run("try", "rewards.py:text", "--completion", "a")
    assert code == 1 and 'returned "1" (str)' in out
    code, out, _ = run("try", "rewards.py:silent", "--completion", "a")
    assert code == 0 and "1 completions, 0 failed, 1 without an opinion" in out and "none" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["math"], "give either --completions FILE or --completion TEXT"),
        (["math", "--completion", "a", "--completions", "b"], "give either --completions FILE or"),
        (["mth", "--completion", "a"], 'Did you mean "math"?'),
        (["rewards.py:brevity", "limt=3", "--completion", "a"], 'Did you mean "limit"? It can set: limit.'),
        (["rewards.py:brevity", "limit", "--completion", "a"], "limit is no setting: write KEY=VALUE"),
        (["math", "--completions", "none.jsonl"], "none.jsonl"),
        (
            ["math", "--completions", "rows.jsonl"],
            "rows.jsonl:1: no completion. Name its column completion or",
        ),
        (["math", "--completion", "a", "--timeout", "3"], "runs inline, where nothing can interrupt it"),
    ],
)
def test_try_says_what_is_wrong(run, arguments, expected):
    code, _, err = run("try", *arguments)
    assert code == 2 and err.startswith("error: ") and expected in err


def test_a_missing_column_is_shown(run):
    code, out, _ = run("try", "exact", "--completion", "a")
    assert code == 1 and 'exact() (built in) needs "answer"; completion 0 has no columns' in out


def test_settings_are_read_as_in_a_recipe(run):
    code, out, _ = run("try", "rewards.py:brevity", "limit=1e1", "--completion", "0123456789")
    assert code == 0 and "from 1 to 1" in out
    code, out, _ = run("try", "math", "answer=[71, 72]", "--completion", "72")
    assert code == 0 and "from 1 to 1" in out


def test_spread_within_prompts():
    prompt = TriedPrompt("q", None, {})
    tried = [Tried(prompt, text, (), where=where) for where, text in zip("aabbc", "01110", strict=True)]

    def number(completion):
        return float(completion)

    lines = summary(score(load_reward(RewardSpec(number, run="inline")), tried))
    # Of the prompts a (0, 1), b (1, 1) and c (0) two have several completions; those of a differ.
    assert "prompts whose completions differ in score: 1 of 2" in lines
    assert "scores: mean 0.6, std 0.49, from 0 to 1; above 0: 3 of 5" in lines  # sqrt(0.6 * 0.4) = 0.4899


def test_completions_that_belong_to_no_row():
    Path("c.jsonl").write_text('{"completion": "a", "row": 7}\n')
    with pytest.raises(ValueError, match="belongs to row 7 of the data, which has 3 rows"):
        given("c.jsonl", [], DataSection(train="rows.jsonl"), None)


# ----------------------------------------------------------------------------------------------- check


def config(*rewards: Any, **data: Any) -> GrpoConfig:
    source = {"model": {"path": "tiny"}, "data": {"train": "rows.jsonl", **data}, "rewards": list(rewards)}
    return load_config(source, [], GrpoConfig)


def report(use: str, **spec: Any):
    (found,) = check(config({"use": use, **spec}), 3)
    return found


def test_a_sound_reward_has_nothing_wrong():
    found = report("math")
    assert (found.wrong, found.odd) == ([], [])
    assert found.best == {"good": 1.0, "bad": 0.0, "empty": 0.0, "truncated": 0.0, "non-ASCII": 0.0}


@pytest.mark.parametrize(
    ("use", "wrong"),
    [
        ("rewards.py:raises", "fails on 3 of"),
        ("rewards.py:text", 'returned "1" (str)'),
        ("rewards.py:constant", "constant: gives 0.5 to all of"),
        ("rewards.py:silent", "has no opinion on any of"),
        (
            "rewards.py:backwards",
            "scores a completion with a wrong answer, or none, above one with the right answer",
        ),
    ],
)
def test_check_finds(use, wrong):
    found = report(use)
    assert len(found.wrong) == 1 and wrong in found.wrong[0]


def test_which_completions_a_reward_fails_on():
    assert (
        "completions (empty): rewards.py:4: rewards.py:4 raises() raised ZeroDivisionError"
        in report("rewards.py:raises").wrong[0]
    )


@pytest.mark.parametrize(
    ("use", "odd"),
    [
        ("rewards.py:penalty", "never above 0: right for a penalty"),
        ("rewards.py:slow", "slow: 0.02"),
        ("rewards.py:chance", "gives another score the second time"),
    ],
)
def test_check_remarks(use, odd, monkeypatch):
    monkeypatch.setattr("covey.rl.reward_trials.SLOW_SECONDS", 0.01)
    found = report(use)
    assert found.wrong == [] and any(odd in line for line in found.odd)


def test_a_hang_costs_its_limit():
    Path("hangs.py").write_text(
        "import time\ndef f(completion): time.sleep(0 if completion else 60); return 1.0 * len(completion)"
    )
    found = report("hangs.py:f", timeout=0.3)
    assert "fails on 3 of" in found.wrong[0] and "took longer than its limit of 0.3 s" in found.wrong[0]


def test_what_is_made_up():
    rows = given(None, [""], DataSection(train="rows.jsonl"), 3)
    assert [tried.prompt.columns["answer"] for tried in rows] == ["2", "4", "6"]
    from covey.rl.data import load_rows

    tried = made_up(load_rows("rows.jsonl", DataSection(train="rows.jsonl")))
    first = [t for t in tried if t.where.endswith(":1")]
    assert {t.kind for t in first} == {"good", "bad", "empty", "truncated", "non-ASCII"}
    assert any(t.text == "So it is \\boxed{2}." for t in first if t.kind == "good")
    assert any(t.text == "So it is \\boxed{4}." for t in first if t.kind == "bad")  # another row's answer
    (cut,) = [t for t in first if t.kind == "truncated"]
    assert cut.finish == "length" and "</think>" not in cut.text
    assert all(
        math.isclose(len(t.ids), len(t.text.split()), abs_tol=20) for t in first if t.kind != "truncated"
    )


def test_check_on_the_command_line(run):
    Path("my.yaml").write_text(
        "model: {path: tiny}\ndata: {train: rows.jsonl}\n"
        "rewards:\n  - {use: math, weight: 2}\n  - {use: 'rewards.py:constant', name: same}\n"
    )
    code, out, _ = run("check", "my.yaml")
    assert code == 1
    assert "math: math() (built in), weight 2, " in out and "nothing looks wrong" in out
    assert "same: rewards.py:5 constant(), weight 1, " in out and "   wrong: constant: gives 0.5" in out
    assert run("check", "my.yaml", "rewards=[{use: math}]", "--rows", "2")[0] == 0
    code, _, err = run("check", "my.yaml", "rewards=[{use: exact}]", "data.answer=quest")
    assert code == 2 and "quest" in err
    code, _, err = run("check", "my.yaml", "rewards=[]")
    assert code == 2 and "rewards: none is given" in err
    assert run("check", "quickstart")[0] == 0  # the recipe that comes with covey


def test_every_key_of_an_entry_reaches_the_reward():
    keys = {
        "use": "rewards.py:brevity",
        "weight": 0.5,
        "name": "short",
        "args": {"limit": 3},
        "form": "text",
        "run": "thread",
        "timeout": 7.0,
        "on_timeout": "none",
        "on_error": -1,
    }
    (section,) = config(keys).rewards
    assert set(keys) == set(type(section).model_fields)
    reward = load_reward(RewardSpec(**dict(section)))
    assert (reward.weight, reward.name, reward.args, reward.form) == (0.5, "short", {"limit": 3}, "text")
    assert (reward.lane, reward.timeout, reward.on_timeout, reward.on_error) == ("thread", 7.0, "none", -1.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("on_timeout", "skip"),
        ("on_error", True),
        ("timeout", 0),
        ("run", "gpu"),
        ("form", "chat"),
        ("timout", 3),
    ],
)
def test_keys_of_an_entry_are_checked(key, value):
    with pytest.raises(ConfigError, match=key):
        config({"use": "math", key: value})


def test_the_settings_of_a_reward_are_checked_too():
    with pytest.raises(RewardError, match="brevity"):
        list(check(config({"use": "rewards.py:brevity", "args": {"limt": 3}}), 1))
