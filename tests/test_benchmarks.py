"""The benchmark against the peers compares like with like: other libraries are the oracle of its numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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
