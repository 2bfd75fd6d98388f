"""Whole GRPO runs on vLLM servers that are stood in for (conftest.py)."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import covey
from covey.rl import engines
from covey.rl.cli import app
from covey.rl.config import GrpoConfig
from covey.rl.config_file import ConfigError, load_config
from covey.rl.rollout_server import serve
from covey.rl.sampler_check import SamplerMismatch
from covey.rollout.vllm_versions import VllmError

Servers = Callable[..., Any]
ROWS = [{"prompt": f"{word}:"} for word in ("one", "two", "three", "four", "five", "six")]


def digits(completion: str) -> float:
    return sum(c in "0123456789" for c in completion) / max(1, len(completion))


def train(model: Path, folder: Path, name: str, rollout: dict[str, Any], **more: Any) -> Any:
    config = {
        "model": {"path": str(model), "method": "lora", "dtype": "float32", "device": "cpu"},
        "lora": {"rank": 4},
        "data": {"max_prompt_tokens": 100},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8} | rollout,
        "optim": {"lr": 3e-2, "steps": 3},
        "run": {"name": name, "dir": str(folder), "threads": 1, "save_every": 0, "samples_every": 0},
    }
    return covey.grpo(config, rewards=[digits], data=ROWS, eval_data=ROWS, plain=True, **more)


def test_a_run_on_two_servers_one_of_which_dies(
    tiny_llama: Path, tmp_path: Path, fake_server: Servers, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    servers = [fake_server(tiny_llama, name=str(tiny_llama)) for _ in range(2)]
    servers[1].faults["/v1/completions"] = [lambda reply: reply] * 10 + ["gone"]
    vllm = {"urls": [server.url for server in servers], "timeout": 20.0}
    with caplog.at_level(logging.WARNING):
        run = train(tiny_llama, tmp_path, "run", {"engine": "vllm-server", "vllm": vllm})
    steps = [row for row in run.metrics if "sampler/logp_diff" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["sampler/logp_diff_max"] < 5e-5 for row in steps)
    assert servers[1].dead and f"{servers[1].url} is gone" in caplog.text
    assert (
        len(servers[0].said("/v1/load_lora_adapter")) == 6
    )  # as it is, shaken, as it was, and after each step
    assert "sampler    vllm-server, unquantised weights: log-probs" in capfd.readouterr().out
    assert len(run.generate("seven:", max_new_tokens=4)) > 0


SEVERAL = """
import importlib.util, json, sys
from pathlib import Path
from covey.rl.distributed import is_first

spec = importlib.util.spec_from_file_location("test_vllm_run", sys.argv[1])
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
rollout = {"engine": "vllm-server", "vllm": {"urls": sys.argv[4:], "timeout": 20.0}}
run = tests.train(Path(sys.argv[2]), Path(sys.argv[3]), "run", rollout)
if is_first():
    print(json.dumps(list(run.metrics)))
"""


@pytest.mark.slow
def test_several_processes_share_the_servers(tiny_llama: Path, tmp_path: Path, fake_server: Servers) -> None:
    """Two processes that train, and two servers: numbers and requests are those of one process."""
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)
    found, asked = [], []
    for world in (1, 2):
        servers = [fake_server(tiny_llama, name=str(tiny_llama)) for _ in range(2)]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            world,
            script,
        ]
        command += [__file__, tiny_llama, tmp_path / str(world), *(server.url for server in servers)]
        done = subprocess.run(
            list(map(str, command)),
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
        asked.append([len(server.said("/v1/load_lora_adapter")) for server in servers])
    assert asked == [[6, 6], [6, 6]]  # as it is, shaken, as it was, and after each step
    for one, both in zip(*found, strict=True):
        for key in ("reward/mean", "loss/policy", "grad/norm", "length/mean", "eval/reward"):
            assert (key in one) == (key in both)
            if key in one:
                assert both[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6), key
        assert both.get("sampler/logp_diff_max", 0.0) < 5e-5


def test_a_server_with_other_weights_stops_the_run_before_it_starts(
    random_model: Callable[..., Path], tiny_llama: Path, tmp_path: Path, fake_server: Servers
) -> None:
    other = random_model("llama", tie_word_embeddings=True)
    server = fake_server(other, name=str(tiny_llama))
    vllm = {"urls": [server.url]}
    with pytest.raises(
        SamplerMismatch, match=r"are [\d.]+ nats from the trainer's on average \(the bound is 0.001\)"
    ):
        train(tiny_llama, tmp_path, "run", {"engine": "vllm-server", "vllm": vllm})


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"vllm": {"memory": 0.5}}, "rollout.vllm: has no meaning for the engine inprocess"),
        (
            {"engine": "vllm", "vllm": {"timeout": 5}},
            "rollout.vllm.timeout: has no meaning for the engine vllm",
        ),
        (
            {"engine": "vllm", "vllm": {"exchange": "/x"}},
            "rollout.vllm.exchange: has no meaning for the engine vllm",
        ),
        ({"engine": "vllm-server"}, "rollout.vllm.urls: give the servers' addresses with engine vllm-server"),
        ({"engine": "vllm", "vllm": {"urls": ["http://a"]}}, "rollout.vllm.urls: .*, and only with it"),
        ({"engine": "vllm", "vllm": {"base": "int3"}}, "rollout.vllm.base"),
        ({"engine": "trt"}, "rollout.engine"),
    ],
)
def test_settings_that_contradict_each_other(rollout: dict[str, Any], message: str) -> None:
    given = {"model": {"path": "tiny"}, "data": {"train": "x"}, "rollout": rollout}
    with pytest.raises(ConfigError, match=message):
        load_config(given, [], GrpoConfig)


def test_what_cannot_start_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(rollout: dict[str, Any]) -> str:
        with pytest.raises(VllmError) as caught:
            train(Path("no/such/model"), tmp_path, "run", rollout)
        return str(caught.value)

    monkeypatch.setitem(sys.modules, "vllm", None)
    assert said({"engine": "vllm"}).startswith("rollout.engine: vLLM is not installed. Run pip install")
    urls = {"engine": "vllm-server", "vllm": {"urls": ["127.0.0.1:8000"]}}
    assert said(urls).startswith('rollout.vllm.urls: "127.0.0.1:8000" is no address')
    monkeypatch.setattr(engines, "world_size", lambda: 2)
    assert "vllm samples for one training process" in said({"engine": "vllm"})


def test_all_weights_are_not_quantised() -> None:
    given = {"model": {"path": "tiny", "method": "full"}, "data": {"train": "x"}}
    overrides = ["rollout.engine=vllm", "rollout.vllm.base=nf4"]
    with pytest.raises(ConfigError, match=r"with model.method full all weights are sent as they are"):
        load_config(given, overrides, GrpoConfig)


def test_the_command_for_a_model_or_a_recipe(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.rollout.vllm_versions.installed", lambda: "0.32.0")
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        f"model: {{path: {tiny_llama}, method: lora, device: cpu}}\ndata: {{train: x, max_prompt_tokens: 300}}\n"
        "rollout: {max_new_tokens: 100, max_rows: 32, engine: vllm-server, vllm: {urls: [http://elsewhere:1]}}\n"
    )
    expected = {
        "--served-model-name": str(tiny_llama), "--host": "127.0.0.1", "--port": "8000", "--dtype": "float32",
        "--max-model-len": "400", "--max-num-seqs": "32", "--max-lora-rank": "16",
        "--logprobs-mode": "processed_logprobs", "--generation-config": "vllm",
    }  # fmt: skip
    overrides = [
        "model.method=lora",
        "model.device=cpu",
        "data.max_prompt_tokens=300",
        "rollout.max_new_tokens=100",
    ]
    url = "http://127.0.0.1:8000"
    for command, environment in (
        serve(str(recipe), [], url, "127.0.0.1", 8000),
        serve(str(tiny_llama), [*overrides, "rollout.max_rows=32"], url, "127.0.0.1", 8000),
    ):
        flags = dict(pairwise(command))
        assert {flag: flags.get(flag) for flag in expected} == expected
        assert "--enable-lora" in command and str(tiny_llama) in command
        assert int(environment["VLLM_MAX_STOP_STRINGS"]) > 100
        assert environment["VLLM_SERVER_DEV_MODE"] == environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in serve(str(tiny_llama), ["model.method=full"], url, "h", 1)[0]


def test_memory_is_set_in_one_place(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.rollout.vllm_versions.installed", lambda: "0.32.0")
    given = ["model.method=lora", "rollout.vllm.memory=0.5"]
    both = [*given, "rollout.vllm.args={gpu_memory_utilization: 0.3}"]
    with pytest.raises(VllmError, match=r"memory: rollout.vllm.args has gpu_memory_utilization too: remove"):
        serve(str(tiny_llama), both, "http://h:1", "h", 1)


def test_the_command_line(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "rollout-server",
        str(tiny_llama),
        "model.device=cpu",
        "--port",
        "8123",
        "--dry-run",
        "--",
        "--uvicorn-log-level",
        "error",
    ]
    monkeypatch.setattr("covey.rollout.vllm_versions.installed", lambda: "0.32.0")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and "vLLM 0.32.0 loads 4-bit weights with a plugin" in result.stderr
    result = CliRunner().invoke(app, [*arguments[:2], "model.method=lora", *arguments[2:]])
    assert result.exit_code == 0 and "VLLM_SERVER_DEV_MODE=1" in result.stdout
    assert result.stdout.rstrip().endswith("--uvicorn-log-level error") and "--port 8123" in result.stdout
    monkeypatch.setattr("covey.rollout.vllm_versions.installed", lambda: None)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and "vLLM is not installed: run pip install 'covey[vllm]'" in result.stderr
    result = CliRunner().invoke(app, [*arguments[:2], "lora.rnk=3"])
    assert result.exit_code == 2 and "Did you mean lora.rank" in result.stderr
