"""The benchmark against the peers compares like with like: other libraries are the oracle of its numbers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])


@pytest.mark.slow
def test_covey_and_transformers_do_the_same_work(tmp_path: Path) -> None:
    """The same NF4 weights, adapter and tokens: one loss and one gradient, though covey packs and shares prompts."""
    work = ["sft:2x32", "grpo:2x8+8", "logp:2x8+8"]
    command = [sys.executable, "-m", "benchmarks.peers", "--shape", "tiny", "--reps", "1", "--work", *work]
    command += ["--peers", "hf", "covey", "--root", tmp_path, "--json", tmp_path / "peers.jsonl"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    records = [json.loads(line) for line in (tmp_path / "peers.jsonl").read_text().splitlines()]
    assert [r.get("error") for r in records] == [None] * 9, records
    by = {(r["work"], r["peer"]): r for r in records}
    for spec in work:
        hf = by[spec, "hf"]
        for mode in ("fast", "lean"):
            covey = by[spec, f"covey {mode}"]
            assert covey["loss"] == pytest.approx(hf["loss"], rel=1e-5)
            if not spec.startswith("logp"):
                assert covey["grad_norm"] == pytest.approx(hf["grad_norm"], rel=1e-4)
    assert by["grpo:2x8+8", "hf"]["grad_norm"] > 0.1 and by["sft:2x32", "hf"]["grad_norm"] > 0.1
    # Advantages -1 and 1.5 at ratio 1: the loss is minus their mean.
    assert by["grpo:2x8+8", "hf"]["loss"] == pytest.approx(-0.25)
    assert "!" not in done.stdout  # the mark of what does not agree


@pytest.mark.slow
def test_more_processes_do_the_same_work(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.ranks",
        "--shape",
        "tiny",
        "--method",
        "lora",
        "--root",
        tmp_path,
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--work", "grpo:2x3x8", "--steps", "3"],
        cwd=ROOT, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    one, two = (dict(zip(head, row, strict=True)) for row in rows)
    assert (one["processes"], two["processes"]) == ("1", "2") and float(one["grad"]) > 0.01
    for name in ("loss", "grad", "reward"):
        assert float(one[name]) == pytest.approx(float(two[name]), rel=1e-3, abs=1e-6), name


def test_lengths_of_packed_documents_are_log_normal() -> None:
    from benchmarks.packed import packed_documents

    (documents,) = packed_documents("packed:1x1000000/600", 1, 512)
    logs = np.log([len(d.ids) for d in documents[:-1]])
    assert sum(len(d.ids) for d in documents) == 1_000_000
    # exp(mu + 1/2) = 600; the standard errors of mean and deviation of 1,700 logarithms are 0.024 and 0.017.
    assert logs.mean() == pytest.approx(math.log(600) - 0.5, abs=0.08)
    assert logs.std() == pytest.approx(1.0, abs=0.06)


def test_steps_of_packed_documents_have_their_tokens() -> None:
    from benchmarks.packed import packed_documents
    from benchmarks.peers.inputs import FIRST_ID

    steps = packed_documents("packed:4x64/20", 5, 512)
    assert all(sum(len(d.ids) for d in step) in (255, 256) for step in steps)
    flat = [d for step in steps for d in step]
    assert [d.row for d in flat] == list(range(len(flat)))
    assert {len(d.ids) for d in flat} <= set(range(2, 65))
    assert all(FIRST_ID <= i < 512 for d in flat for i in d.ids)
    assert all(d.trained == (False, *[True] * (len(d.ids) - 1)) for d in flat)
    assert packed_documents("packed:4x64/20", 3, 512) == steps[:3]


@pytest.mark.parametrize(
    "spec", ["packed:4x64", "packed:4x64/0", "packed:4x64/65", "packed:0x64/20", "packed:64/20"]
)
def test_packed_work_that_is_none(spec: str) -> None:
    from benchmarks.packed import parse_packed

    with pytest.raises(ValueError, match=f"^{spec}: "):
        parse_packed(spec)


def test_packed_steps_lose_what_transformers_loses_on_each_document_alone(tmp_path: Path) -> None:
    from benchmarks.packed import packed_documents
    from benchmarks.peers.inputs import as_downloaded
    from benchmarks.peers.models import load
    from benchmarks.peers.trainers import run_covey
    from benchmarks.shapes import SHAPES, model_folder

    folder = as_downloaded(model_folder("tiny", tmp_path))
    steps = packed_documents("packed:2x32/10", 2, SHAPES["tiny"].vocab)
    watch = run_covey(load("covey", folder, "lora", "fast", 32), steps, tokens_per_pass=32)
    hf = load("hf", folder, "lora", "", 32)
    hf.fill_adapter()
    for documents, tokens, loss in zip(steps, watch.tokens, watch.losses, strict=True):
        with torch.no_grad():
            alone = [(len(d.ids) - 1, float(hf.sft(torch.tensor([d.ids]))())) for d in documents]
        assert tokens == sum(n for n, _ in alone)
        assert loss == pytest.approx(sum(n * mean for n, mean in alone) / tokens, rel=1e-5)


def test_record_of_steps_leaves_out_warm_up_and_tail() -> None:
    from benchmarks.peers.trainers import Watch

    watch = Watch(torch.device("cpu"))
    watch.seconds, watch.tokens = [9.0, 8.0, 7.0, 2.0, 4.0, 1.0, 0.5], [10, 10, 10, 10, 30, 8, 2]
    watch.losses = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    record = watch.record(reps=3)
    assert record["ms"] == 2000.0  # of 2, 4 and 1 s
    assert record["tokens_per_s"] == 7.5  # of 5, 7.5 and 8
    assert record["loss"] == pytest.approx((10 * (1 + 2 + 3 + 4) + 30 * 5 + 8 * 6 + 2 * 7) / 80)
    with pytest.raises(ValueError, match="7 steps were run, and not 8"):
        watch.record(reps=5)


def test_packed_work_is_for_trainers_and_alone_in_a_process() -> None:
    from benchmarks.peers.__main__ import PEERS, cases

    chosen = cases(list(PEERS), ["fast", "lean"], ["sft:2x8", "packed:2x8/4"])
    packed = [case.name for case in chosen if case.work == ["packed:2x8/4"]]
    assert packed == ["covey fast", "covey lean", "trl", "trl-flex", "unsloth"]
    others = [case.name for case in chosen if case.work == ["sft:2x8"]]
    assert others == ["covey fast", "covey lean", "hf", "liger", "unsloth"]
    assert len(chosen) == len(packed) + len(others)
