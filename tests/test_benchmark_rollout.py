"""The benchmark of sampling: what it computes from its measurements, and that all samplers do the same work."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])


def test_time_of_a_step_is_the_difference_of_two_recordings() -> None:
    from benchmarks.device_time import lines, per_step

    first = [(0.0, 10.0, "prompt"), (12.0, 15.0, "layer")]
    whole = [*first, (20.0, 23.0, "layer"), (24.0, 29.0, "head"), (40.0, 43.0, "layer"), (43.0, 48.0, "head")]
    time = per_step(whole, first, steps=2)
    # Two layers of 3 and two heads of 5 in 2 steps; gaps of 5, 1, 11 and 0 after those of the prompt.
    assert time == {"kernels": [["head", 1.0, 5.0], ["layer", 1.0, 3.0]], "busy_us": 8.0, "idle_us": 8.5}
    text = lines(time, 1)
    assert text[0] == "a step takes 16 us: 8 with a kernel, 8 idle between them"
    assert text[2].split() == ["5.0", "30.3%", "1.0", "head"] and text[3].split()[-2:] == ["1", "others"]


def test_kernels_that_overlap_are_busy_once() -> None:
    from benchmarks.device_time import busy_and_idle

    assert busy_and_idle([(0.0, 10.0, "a"), (5.0, 8.0, "b"), (9.0, 12.0, "c"), (20.0, 21.0, "d")]) == (
        13.0,
        8.0,
    )
    assert busy_and_idle([]) == (0.0, 0.0)


def test_disagreement_of_known_ratios() -> None:
    from benchmarks.peers.samplers import disagreement

    ratio_M = torch.tensor([0.89, 0.91, 1.09, 1.11])
    sampler_M = torch.tensor([-1.0, -2.0, -3.0, -11.0])
    found = disagreement(sampler_M + ratio_M.log(), sampler_M)
    expected = sum(abs(math.log(r)) for r in (0.89, 0.91, 1.09, 1.11)) / 4
    assert found == {"logp_difference": pytest.approx(expected, rel=1e-5), "ratios_outside": 0.5}


def test_covey_and_transformers_sample_the_same(tmp_path: Path) -> None:
    """Greedy ids of groups with one adapter whose B is not zero, with tokens that end a row and without."""
    from benchmarks.peers.inputs import as_downloaded, ends_of, prompts_of
    from benchmarks.peers.samplers import Settings, sampler
    from benchmarks.shapes import SHAPES, model_folder

    folder, vocab = as_downloaded(model_folder("tiny", tmp_path)), SHAPES["tiny"].vocab
    prompts = prompts_of(8, 5, vocab)
    for ends in ((), ends_of(4, vocab)):
        settings = Settings(folder, tmp_path, "qlora", "auto", rows=6, longest=17, ends=ends)
        covey, hf = sampler("covey", settings), sampler("hf", settings)
        covey.start()
        hf.start()
        rows = covey.generate(prompts, 1, 12, 0, greedy=True)
        assert rows == hf.generate(prompts, 1, 12, 0, greedy=True)
        for row in rows:
            assert len(row) == 12 or row[-1] in ends
            assert not set(row[:-1]) & set(ends)
        assert (len({len(row) for row in rows}) > 1) == bool(ends)
        for peer in (covey, hf):  # drawn, not greedy: the rows of a group differ
            drawn = peer.generate(prompts, 2, 12, 0)
            assert len(drawn) == 16 and drawn[0] != drawn[1]


@pytest.mark.slow
def test_the_command_measures_sampling_and_whole_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.rollout", "--shape", "tiny", "--rows", "4", "--prompt", "8"]
    command += ["--new", "6", "--group", "2", "--reps", "1", "--grpo", "4x8+4", "--peers", "covey"]
    command += ["--root", tmp_path, "--json", tmp_path / "rollout.jsonl"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    sampled, grpo = (json.loads(line) for line in (tmp_path / "rollout.jsonl").read_text().splitlines())
    assert sampled["work"] == "sample:4x8+6" and grpo["work"] == "grpo:4x8+4"
    assert "error" not in sampled and "error" not in grpo, (sampled, grpo)
    assert sampled["mean_tokens"] == sampled["longest"] == 6
    assert sampled["tokens_per_s"] > 0 and sampled["start_s"] > sampled["first_s"] > 0
    # One set of kernels in float32: the sampler's log-probs are the trainer's up to rounding.
    assert 0 < sampled["logp_difference"] < 1e-5 and sampled["ratios_outside"] == 0
    assert grpo["step_s"] == pytest.approx(grpo["sample_s"] + grpo["reward_s"] + grpo["learn_s"])
    assert grpo["tokens_per_s"] == pytest.approx(4 * 4 / grpo["step_s"])
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("#")] == [
        "work",
        sampled["work"],
        "work",
        grpo["work"],
    ]


def test_table_compares_with_covey() -> None:
    from benchmarks.rollout import table

    known = {"version": "1", "step_ms": 2.0, "first_s": 0.1, "peak_gib": None, "load_s": 3.0, "start_s": 4.0}
    covey = {"work": "sample:2x3+4", "peer": "covey auto", "tokens_per_s": 300.0, "greedy": [[1, 2], [3, 4]]}
    covey |= {"logp_difference": 0.0125, "ratios_outside": 0.001}
    hf = {"work": "sample:2x3+4", "peer": "hf", "tokens_per_s": 100.0, "greedy": [[1, 9], [5, 4]]}
    absent = {"work": "sample:2x3+4", "peer": "vllm", "error": "not installed: vllm"}
    _, *rows = (line.split() for line in table([covey | known, hf | known, absent]))
    numbers = ["-", "3.0", "4.0"]
    assert rows[0][1:] == [
        "covey",
        "auto",
        "1",
        "300",
        "1.00",
        "2.00",
        "0.100",
        *numbers,
        "1/2",
        "1.25e-02",
        "0.10%",
    ]
    assert rows[1][1:] == ["hf", "1", "100", "3.00", "2.00", "0.100", *numbers, "2/2", "-", "-"]
    assert rows[2][1:] == ["vllm", "not", "installed:", "vllm"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--rows", "6", "--group", "4"], "sample:6x256+256: 6 rows are no whole number of groups of 4"),
        (
            ["--grpo", "64x256"],
            "grpo:64x256: work is ROWSxPROMPT+NEW in numbers above 0, for example 64x256+256",
        ),
        (
            ["--grpo", "64x256+256", "--ends-after", "8"],
            "--ends-after is for sampling alone: leave out --grpo",
        ),
        (
            ["--grpo", "64x256+256", "--peers", "vllm"],
            "none of vllm does grpo:64x256+256: add covey to --peers",
        ),
    ],
)
def test_work_that_cannot_be_measured(
    options: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import rollout

    monkeypatch.setattr(sys, "argv", ["rollout", *options])
    with pytest.raises(SystemExit) as caught:
        rollout.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(problem)
