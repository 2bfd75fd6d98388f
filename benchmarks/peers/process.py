"""Peers run in processes of their own, because some of them patch the others; a crash costs its own lines alone."""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]
QUIET = {  # nothing is fetched, reported or drawn
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What one process measures."""

    peer: str
    memory: str  # of covey
    work: list[str]

    @property
    def name(self) -> str:
        return f"{self.peer} {self.memory}".strip()


def gather(
    cases: list[Case],
    module: str,
    options: list[str],
    needs: Mapping[str, tuple[str, ...]],
    setting: Record,
    args: argparse.Namespace,
    say: Callable[[Record], str],
) -> list[Record]:
    """All records of these cases, each with the setting and its peer; `say` puts one into a few words.

    A case is `python -m MODULE PEER OPTIONS`; needs: by peer, the modules without which it cannot run.
    args.json: JSON lines to append to. What it holds of the same setting comes too, unless it is measured again.
    """
    records, file = {}, args.json
    if file and file.exists():
        earlier = [json.loads(line) for line in file.read_text().splitlines()]
        records = {(r["work"], r["peer"]): r for r in earlier if setting.items() <= r.items()}
    for case in cases:
        started = time.perf_counter()
        for result in run(case, module, options, needs[case.peer], args.root, args.limit):
            record = setting | {"peer": case.name} | result
            records[record["work"], case.name] = record
            print(f"# {case.name} {record['work']}: {record.get('error') or say(record)}", flush=True)
            if file:
                with file.open("a") as lines:
                    lines.write(json.dumps(record) + "\n")
        print(f"# {case.name}: {time.perf_counter() - started:.0f} s", flush=True)
    return list(records.values())


def run(
    case: Case, module: str, options: list[str], needs: tuple[str, ...], root: Path, limit: float
) -> Iterator[Record]:
    """A record of every work as soon as it is measured; one with `error` where there is no number.

    limit: seconds for all of them, loading included.
    """
    if missing := [name for name in needs if find_spec(name) is None]:
        yield from ({"work": work, "error": f"not installed: {missing[0]}"} for work in case.work)
        return
    log = root / re.sub(r"[^\w.+]+", "-", f"{case.name} {case.work[0]}.log")
    command = [sys.executable, "-m", module, case.peer, *options]
    command += ["--memory", case.memory or "auto", "--work", *case.work]
    env = os.environ | QUIET | {"UNSLOTH_COMPILE_LOCATION": str(root / "unsloth")}
    env.pop("PYTHONSAFEPATH", None)  # `benchmarks` is found beside the working directory
    left = list(case.work)
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=CHECKOUT,
            start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    late = threading.Event()

    def stop() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, stop)
    timer.start()
    try:
        for line in process.stdout:
            record = json.loads(line)
            left.remove(record["work"])
            yield record
            if not left:  # a compiler's workers may hold the pipe open after the process itself has ended
                break
    finally:
        timer.cancel()
        _end(process)
    if late.is_set():
        reason = f"not done in {limit:g} s"
    elif process.returncode < 0:
        reason = f"ended by signal {-process.returncode}"
    else:
        reason = _last_line(log)
    yield from ({"work": work, "error": reason} for work in left)


def number(value: float | None, form: str) -> str:
    """For a table: "-" where there is none."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def _end(process: subprocess.Popen) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "ended without a word"
