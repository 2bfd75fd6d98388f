"""Runs of several processes do what the same run does in one: every number, and every weight on every rank."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as parquet
import pytest
import torch

from covey.rl.distributed import RanksError, balanced

HERE = Path(__file__).parent
NAMES = ("grpo", "kl", "supply", "short", "sft", "full", "dpo", "longer")
VARYING = ("time/", "memory/", "rollout/tokens_per_s", "train/tokens_per_s")
# Sums over tokens in another order, in float64, after as many updates; AdamW divides by the root of small squares.
NEAR = 1e-7


def ranks_environment(world: int) -> list[dict[str, str]]:
    """What torchrun gives its processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    both = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    both |= {
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONSAFEPATH": "1",
    }
    return [os.environ | both | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def runs_of(world: int, folder: Path, device: str = "cpu") -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the runs of so many processes, and what each of them has seen."""
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "ranks_run.py", folder / "runs", folder / f"{rank}.json", device],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, environment in enumerate(ranks_environment(world))
    ]  # fmt: skip
    for process in processes:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    return folder / "runs", [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder, [seen] = runs_of(1, tmp_path_factory.mktemp("alone"))
    return folder, seen


def check_metrics(name: str, rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(rows) == len(expected) > 1
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for key in (key for key in row if not key.startswith(VARYING)):
            near = pytest.approx(other[key], rel=NEAR, abs=NEAR, nan_ok=True)
            assert row[key] == near, (name, row["step"], key)


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def samples_of(folder: Path, name: str) -> list[tuple[int, str]]:
    rows = parquet.read_table(folder / name / "samples/step-000002.parquet").to_pylist()
    return [(row["row"], row["completion"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_several_processes_do_what_one_does(world: int, alone: Any, tmp_path: Path) -> None:
    """Three have unequal shares, and none of what is little."""
    folder, everyone = runs_of(world, tmp_path)
    where, expected = alone
    assert [mine["first"] for mine in everyone] == [True] + [False] * (world - 1)
    for name in NAMES:
        for mine in everyone:
            assert mine["world"] == world
            check_metrics(name, mine["metrics"][name], expected["metrics"][name])
            assert mine["weights"][name] == everyone[0]["weights"][name]  # bit by bit
        for key, matrix in everyone[0]["weights"][name].items():
            difference = torch.tensor(matrix) - torch.tensor(expected["weights"][name][key])
            assert difference.abs().max() < 1e-6, (name, key)
    assert files_of(folder) == files_of(where)  # the first one has written them, and once
    for name in ("grpo", "supply"):
        assert samples_of(folder, name) == samples_of(where, name) != []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_do_what_one_does(tmp_path: Path) -> None:
    """Through NCCL, in float32: the first step is that of one GPU, and the ranks stay bit by bit the same."""
    _, [alone] = runs_of(1, tmp_path / "alone", "cuda")
    _, everyone = runs_of(2, tmp_path / "both", "cuda")
    for name in NAMES:
        assert everyone[0]["weights"][name] == everyone[1]["weights"][name]
        first, expected = (
            next(row for row in runs["metrics"][name] if "grad/norm" in row) for runs in (everyone[0], alone)
        )
        assert first.keys() == expected.keys()
        for key in (key for key in first if not key.startswith(VARYING)):
            assert first[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5, nan_ok=True), (name, key)


def test_the_run_that_replaces_groups_does_so(alone: Any) -> None:
    """Or the run named supply would show nothing."""
    rows = alone[1]["metrics"]["supply"]
    assert any(row.get("groups/sampled", 0) > 4 for row in rows)
    assert any(0 < row.get("groups/no_spread", 0) < 1 for row in rows)


def scripts(world: int, *command: Any, **environment: str) -> list[str]:
    """What each of so many processes says that run a script."""
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=own | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for own in ranks_environment(world)
    ]  # fmt: skip
    said = [process.communicate(timeout=240) for process in processes]
    assert not any(process.returncode for process in processes), said
    return [out for out, _ in said]


CONVERSIONS = """
import sys, time
from covey.policies import gguf_file
from covey.policies.locate import locate_model
from covey.rl.distributed import gather_objects, is_first, join_ranks

write, made = gguf_file.write_converted, []

def slow(file, folder):
    made.append(file.name)
    time.sleep(0.5)  # the other one has come by then
    write(file, folder)

gguf_file.write_converted = slow
join_ranks()
if not is_first():
    locate_model(sys.argv[1])
gather_objects(None)
for file in sys.argv[1:]:
    print((locate_model(file) / "model.safetensors").stat().st_size > 0)
print(sorted(name for names in gather_objects(made) for name in names))
"""


def test_one_process_converts_and_any_can(tmp_path: Path) -> None:
    """The second alone, whose files transformers would not write; then both at the same time, with an empty cache."""
    spec = importlib.util.spec_from_file_location("test_locate", HERE.parent / "policies/test_locate.py")
    assert spec is not None and spec.loader is not None
    locate_tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(locate_tests)
    files = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for file in files:
        locate_tests.write_gguf(file, "F32")
    for said in scripts(2, "-c", CONVERSIONS, *files, COVEY_CACHE=str(tmp_path / "cache")):
        assert said.split("\n")[:3] == ["True", "True", "['a.gguf', 'b.gguf']"]
    assert not list(tmp_path.glob("cache/*.unfinished"))


CHAIN = """
import sys, time
import covey
from covey.rewards.reward import RewardSpec
from covey.rl import loop
from covey.rl.distributed import RanksError, is_first

save = loop.save_checkpoint

def slow(*args, **kwargs):
    time.sleep(0.5)
    return save(*args, **kwargs)

loop.save_checkpoint = slow
model = {"path": "tiny", "method": "lora", "device": "cpu"}
common = {"optim": {"rows_per_step": 2, "steps": 1}, "run": {"dir": sys.argv[1], "threads": 1}}
rows = [{"prompt": f"{i}:", "completion": f" {i}"} for i in range(4)]
first = covey.sft(common, model=model, data=rows, plain=True)
then = covey.sft(common, model=model | {"adapter": str(first.folder)}, data=rows, plain=True)
print(covey.export(then.folder, "adapter", out=sys.argv[1] + "/out").name)
for mine, streaming in ((rows[::-1], False), (rows[1:], False), (rows[::-1], True)):
    given = {"data": rows if is_first() else mine}
    try:
        covey.sft({**common, "data": {"streaming": streaming}}, model=model, **given, plain=True)
    except RanksError as error:
        print(error)
rollout = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4}
checked = [row | {"check": lambda completion: float(len(completion))} for row in rows]
reward = RewardSpec(lambda completion, check: check(completion), name="check", run="thread")
common["optim"] = {"steps": 1}
covey.grpo(common, model=model, rollout=rollout, data=checked, rewards=[reward], plain=True)
print("a column that no process can send")
"""


def test_a_script_of_several_processes(tmp_path: Path) -> None:
    """What a run returns is on the disk for all; exports are written once; other rows are noticed before a step."""
    for said in scripts(2, "-c", CHAIN, tmp_path):
        lines = said.split("\n")
        assert "out" in lines and "a column that no process can send" in lines
        assert sum(line.startswith("process 1 has other rows than process 0") for line in lines) == 3
    assert (tmp_path / "out/adapter_model.safetensors").is_file()


RECIPE = """
model: {{path: tiny, method: lora, device: cpu}}
data: {{train: "task:addition"}}
rewards: [{{use: "{reward}"}}]
rollout: {{prompts_per_step: 4, group_size: 2, max_new_tokens: 4}}
optim: {{steps: {steps}, lr: 1e-3}}
run: {{name: cli, dir: {folder}, threads: 1, save_every: {save_every}}}
"""


def torchrun(
    folder: Path, steps: int, reward: str = "first_number", save_every: int = 0
) -> "subprocess.Popen[str]":
    recipe = RECIPE.format(steps=steps, folder=folder, reward=reward, save_every=save_every)
    (folder / "recipe.yaml").write_text(recipe)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, "-m", "covey", "grpo", str(folder / "recipe.yaml")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_torchrun_starts_the_command_line(tmp_path: Path) -> None:
    process = torchrun(tmp_path, 2)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.count("2 of 2 steps") == 1 and "2 processes" in out
    assert sorted(path.name for path in (tmp_path / "cli/checkpoints").iterdir()) == ["step-000002"]


def test_one_signal_stops_all_after_the_step(tmp_path: Path) -> None:
    process, metrics = torchrun(tmp_path, 1000), tmp_path / "cli/metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    ranks = [child for child in psutil.Process(process.pid).children() if "covey" in child.cmdline()]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    steps = metrics.read_text().count("\n")
    assert steps < 1000 and (tmp_path / f"cli/checkpoints/step-{steps:06d}").is_dir()


def test_a_mistake_on_one_rank_ends_all_and_keeps_the_steps_before(tmp_path: Path) -> None:
    metrics = tmp_path / "cli/metrics.jsonl"
    (tmp_path / "mine.py").write_text(
        "import os\nfrom pathlib import Path\n\n\ndef score(completion):\n"
        f"    steps = Path({str(metrics)!r}).read_text().count('\\n')\n"
        "    if steps >= 2 and os.environ['RANK'] == '1':\n        raise ValueError('not this one')\n"
        "    return len(set(completion))\n"
    )
    process = torchrun(tmp_path, 1000, f"{tmp_path / 'mine.py'}:score")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1 and "not this one" in err
    assert "error: another process of this run has ended" in err and "gloo" not in err
    steps = metrics.read_text().count("\n")
    assert 2 <= steps <= 4 and (tmp_path / f"cli/checkpoints/step-{steps:06d}").is_dir()


def test_a_disk_that_fails_the_first_process_ends_all(tmp_path: Path) -> None:
    checkpoints = tmp_path / "cli/checkpoints"
    (tmp_path / "mine.py").write_text(
        "from contextlib import suppress\nfrom pathlib import Path\n\n\ndef score(completion):\n"
        f"    folder = Path({str(checkpoints)!r})\n"
        "    if any(folder.glob('step*')):\n        with suppress(OSError):\n"
        "            folder.rename(folder.with_name('gone'))\n            folder.touch()\n"
        "    return len(set(completion))\n"
    )
    process = torchrun(tmp_path, 1000, f"{tmp_path / 'mine.py'}:score", save_every=1)
    _, err = process.communicate(timeout=240)
    said = [line for line in err.split("\n") if line.startswith("error:")]
    assert process.returncode == 1 and f"could not be written to {checkpoints}" in "".join(said)
    assert len(said) == 2 and "gloo" not in err


@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo"])
def test_gradients_are_summed_after_the_numbers(algorithm: str, tmp_path: Path, monkeypatch: Any) -> None:
    """gloo says at once that a process has failed on its share; NCCL, which sums, would wait for it."""
    import covey

    def failed(_: Any) -> None:
        raise RanksError("gone")

    summed: list[Any] = []
    module = importlib.import_module(f"covey.rl.{algorithm}")
    monkeypatch.setattr(module, "over_ranks", failed)
    monkeypatch.setattr(module, "sum_gradients", summed.append)
    rows = {
        "grpo": [{"prompt": "one"}, {"prompt": "two"}],
        "sft": [{"prompt": "one", "completion": "two"}],
        "dpo": [{"prompt": "one", "chosen": "two", "rejected": "three"}],
    }
    config: dict[str, Any] = {
        "model": {"path": "tiny", "method": "lora", "device": "cpu"},
        "optim": {"steps": 1} if algorithm == "grpo" else {"steps": 1, "rows_per_step": 1},
        "run": {"dir": str(tmp_path), "threads": torch.get_num_threads()},
    }
    if algorithm == "grpo":
        config["rollout"] = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 4}
    with pytest.raises(RanksError, match="gone"):
        rewards = {"rewards": [letters]} if algorithm == "grpo" else {}
        getattr(covey, algorithm)(config, data=rows[algorithm], plain=True, **rewards)
    assert summed == []


def letters(completion: str) -> float:
    return float(sum(map(ord, completion)))


def test_the_processes_of_a_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 cores and 512 GiB for 8 processes: 8 processes for rewards each, which have 4 GiB each, half of the memory."""
    from covey.policies.load import free_memory
    from covey.rewards import lanes

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    memory = SimpleNamespace(total=512 * 2**30, available=400 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    pool = lanes.pool.__wrapped__()
    assert (pool._free._value, pool._most_bytes) == (8, 4 * 2**30)
    assert free_memory(torch.device("cpu")) == 50 * 2**30


def test_a_numbered_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.policies.locate import ModelError
    from covey.rl import sampler
    from covey.rl.config import GrpoConfig

    monkeypatch.setattr(sampler, "world_size", lambda: 2)
    monkeypatch.setattr(sampler, "pick_device", lambda device: torch.device(device))
    config = GrpoConfig.model_validate(
        {"model": {"path": "tiny", "device": "cuda:0"}, "data": {"train": "task:addition"}}
    )
    with pytest.raises(ModelError, match=r"model.device: cuda:0 would be that of every process"):
        sampler.Sampler(config)


def test_parts_are_of_about_equal_size() -> None:
    assert balanced([1, 9, 2, 3, 3], 2) == [[1], [0, 2, 3, 4]]
    assert balanced([7, 0, 7], 3) == [[0], [2], [1]]
    assert balanced([5.0], 2) == [[0], []] and balanced([], 2) == [[], []]
    sizes = np.random.default_rng(0).lognormal(size=64)
    sums = [sizes[part].sum() for part in balanced(sizes.tolist(), 8)]
    assert max(sums) < 1.1 * sizes.sum() / 8 and max(sizes) < sizes.sum() / 8
    contiguous = [part.sum() for part in np.split(sizes, 8)]
    assert max(contiguous) > 1.5 * sizes.sum() / 8
