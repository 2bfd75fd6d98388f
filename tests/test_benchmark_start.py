"""The benchmark of a start: it sees every phase of `covey grpo`, in their order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_phase_of_a_start_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    from benchmarks.start import PHASES

    command = [sys.executable, "-m", "benchmarks.start", "--shape", "tiny", "--starts", "1", "--new", "4"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([*command, "--root", tmp_path], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()[2:-1]]
    assert [words for words, _, _ in lines] == list(PHASES.values())
    ends, took = ([float(line[i]) for line in lines] for i in (1, 2))
    assert ends[0] > 0 and ends == sorted(ends)
    assert sum(took) == pytest.approx(ends[-1], abs=0.01 * len(lines))
