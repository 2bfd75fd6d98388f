"""vLLM servers as an engine, on servers that answer as vLLM 0.32 does (conftest.py) and go wrong in every way."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from covey.policies.load import load_policy
from covey.rl.batch import pack
from covey.rollout.engine import Prompt, Sampling
from covey.rollout.vllm_http import Server
from covey.rollout.vllm_server import VllmServers, write_weights
from covey.rollout.vllm_versions import VllmError

Servers = Callable[..., Any]
ADAPTER = {"peft_type": "LORA", "r": 1, "lora_alpha": 1.0, "target_modules": ["down_proj"], "bias": "none"}
CHAIN = torch.zeros(64, 64)
for now, then in pairwise(range(64)):
    CHAIN[now, then] = 50  # nats ahead of everything else


def spelled(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def prompts_of(*ids: Sequence[int]) -> list[Prompt]:
    return [Prompt(row=i, ids=tuple(x), text="") for i, x in enumerate(ids)]


def engine_of(*servers: Any, eos: Sequence[int] = (), timeout: float = 20.0, **settings: Any) -> VllmServers:
    options = {"adapter": ADAPTER, "max_length": 64, "dtype": torch.float32} | settings
    clients = [Server(server.url, timeout=timeout, tries=3, pause=0.001) for server in servers]
    return VllmServers(clients, ["model"], spelled, eos, **options)


@pytest.fixture(scope="module")
def chain(table_lm: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token t is followed by t + 1."""
    return table_lm(CHAIN, tmp_path_factory.mktemp("chain") / "model")


@pytest.fixture(scope="module")
def towards(chain: Path) -> Callable[[int], dict[str, torch.Tensor]]:
    """An adapter that writes the embedding of a token over that of 5 behind the MLP: its successor follows 5.

    In the table LM token t enters the MLP as 8 e_t, and the final norm and head make the next token of what is largest.
    """
    weights = load_file(chain / "model.safetensors")
    gate, up = (8 * weights[f"model.layers.0.mlp.{name}_proj.weight"][:, 5] for name in ("gate", "up"))
    seen = torch.nn.functional.silu(gate) * up
    a, b = (f"base_model.model.model.layers.0.mlp.down_proj.lora_{x}.weight" for x in "AB")

    def adapter(token: int) -> dict[str, torch.Tensor]:
        column = torch.zeros(64, 1)
        column[token] = 100.0 * (token != 5)
        return {a: (seen / seen.square().sum())[None], b: column}

    return adapter


def next_tokens(engine: VllmServers) -> set[tuple[int, int]]:
    groups = engine.generate(prompts_of([9, 5], [3, 4, 5]), 2, Sampling(1))
    return {(c.ids[0], c.version) for group in groups for c in group.completions}


def test_of_several_processes_one_sends_the_weights(
    chain: Path, towards: Callable[[int], Any], fake_server: Servers
) -> None:
    servers = [fake_server(chain) for _ in range(2)]
    sent: list[Any] = []

    def in_the_first(make: Callable[[], Any]) -> Any:
        sent.append(make())
        return sent[-1]

    first = engine_of(*servers, together=in_the_first)
    other = engine_of(*servers, together=lambda _: sent[-1])
    for version, token in enumerate((5, 6, 7)):
        first.update(towards(token), version)
        other.update({}, version)
        assert next_tokens(first) == next_tokens(other) == {(token + 1, version)}
    assert all(len(server.said("/v1/load_lora_adapter")) == 3 for server in servers)
    servers[0].faults["/v1/load_lora_adapter"] = ["gone"]
    first.update(towards(8), 3)
    other.update({}, 3)
    assert [server.alive for server in other.servers] == [False, True] and next_tokens(other) == {(9, 3)}


# What is asked and answered


def test_replies_become_groups(chain: Path, towards: Any, fake_server: Servers) -> None:
    server = fake_server(chain)
    engine = engine_of(server, eos=[22])
    engine.update(towards(5), 3)
    seen = []
    prompts = [Prompt(7, (9,), "a"), Prompt(4, (19, 20), "b"), Prompt(0, (40,), "c")]
    groups = engine.generate(
        prompts, 2, Sampling(4, stop=("42 43",), seed=11), lambda *item: seen.append(item)
    )
    assert [group.prompt for group in groups] == prompts
    assert sorted(seen, key=lambda item: item[0]) == list(enumerate(groups))
    expected = [
        ((10, 11, 12, 13), "length", "10 11 12 13"),
        ((21, 22), "eos", "21"),
        ((41, 42, 43), "stop", "41 "),
    ]
    for group, (ids, finish, text) in zip(groups, expected, strict=True):
        for c in group.completions:
            assert (c.ids, c.finish, c.text, c.version) == (ids, finish, text, 3)
            assert c.logprobs == pytest.approx([0.0] * len(ids), abs=1e-6)
            assert c.trained == (True,) * len(ids) and c.full_logprobs is None
    bodies = {tuple(body["prompt"]): body for body in server.said("/v1/completions")}
    assert bodies.keys() == {(9,), (19, 20), (40,)}
    fixed = {
        "n": 2, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None, "stop": ["42 43"],
        "stop_token_ids": [22], "ignore_eos": True, "logprobs": 0, "skip_special_tokens": True,
        "return_token_ids": True,
    }  # fmt: skip
    for body in bodies.values():
        assert {key: body[key] for key in fixed} == fixed and set(body) - set(fixed) == {
            "model",
            "prompt",
            "seed",
        }
    assert len({body["seed"] for body in bodies.values()}) == 3


def test_log_probs_are_the_trainers(tiny_llama: Path, tmp_path: Path, fake_server: Servers) -> None:
    policy = load_policy(
        tiny_llama, method="lora", dtype="float32", device="cpu", rank=2, targets=["q_proj", "up_proj"]
    )
    with torch.no_grad():
        for name, weight in policy.weights().items():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(3))
    adapter = ADAPTER | {"r": 2, "lora_alpha": 32.0, "target_modules": ["q_proj", "up_proj"]}
    engine = engine_of(fake_server(tiny_llama), fake_server(tiny_llama), adapter=adapter)
    engine.update(policy.weights(), 1)
    groups = engine.generate(
        prompts_of([5, 6, 7], range(3, 20), [9]), 3, Sampling(6, temperature=0.7, seed=2)
    )
    ones = np.ones((3, 3))
    batch = pack(
        groups,
        ones,
        ones > 0,
        aggregation="token",
        max_new_tokens=6,
        truncated="keep",
        skip_zero=False,
        temperature=0.7,
    )
    assert batch.sampler is not None
    with torch.no_grad():
        torch.testing.assert_close(policy.logprobs(batch).logp, batch.sampler, rtol=0, atol=2e-5)


def test_seeds_fix_the_draws(table_lm: Any, tmp_path: Path, fake_server: Servers) -> None:
    engine = engine_of(fake_server(table_lm(torch.zeros(64), tmp_path / "model")))
    a, b = (f"base_model.model.model.layers.0.mlp.down_proj.lora_{x}.weight" for x in "AB")
    engine.update({a: torch.zeros(1, 64), b: torch.zeros(64, 1)}, 0)

    def drawn(rows: Sequence[int], seed: int) -> list[list[tuple[int, ...]]]:
        groups = engine.generate([Prompt(row, (9,), "") for row in rows], 2, Sampling(8, seed=seed))
        return [[c.ids for c in group.completions] for group in groups]

    first = drawn([1, 2, 3], 5)
    assert drawn([3, 2, 1], 5) == first[::-1] and drawn([2], 5) == first[1:2]
    assert drawn([1, 2, 3], 6) != first
    assert len({ids for group in first for ids in group}) == 6


# New weights


def test_samples_come_from_the_newest_adapter(chain: Path, towards: Any, fake_server: Servers) -> None:
    servers = [fake_server(chain), fake_server(chain)]
    engine = engine_of(*servers)
    for version, (written, expected) in enumerate([(5, 6), (6, 7), (7, 8), (5, 6)]):
        engine.update(towards(written), version)
        assert next_tokens(engine) == {(expected, version)}
    for server in servers:
        changes = [
            path
            for path, _ in server.calls
            if "lora" in path or "prefix" in path or path in ("/pause?mode=keep", "/resume")
        ]
        update = [
            "/pause?mode=keep",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/reset_prefix_cache",
            "/resume",
        ]
        assert changes == [path for path in update if "unload" not in path] + update * 3
        names = [body["lora_name"] for body in server.said("/v1/load_lora_adapter")]
        assert len(set(names)) == 4 and len(server.policies) == 2  # the base model and the newest
        folders = [Path(body["lora_path"]) for body in server.said("/v1/load_lora_adapter")]
        assert [folder.exists() for folder in folders] == [False, False, False, True]


def test_all_weights_are_read_from_files(
    chain: Path, fake_server: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.rollout.vllm_server.FILE_BYTES", 1 << 30)
    server = fake_server(chain)
    engine = engine_of(server, adapter=None)
    weights = load_file(chain / "model.safetensors")
    for version, shift in enumerate(
        (0, 1, 2)
    ):  # t is followed by t + 1 + shift; the prompt is in the cache each time
        moved = weights | {"lm_head.weight": weights["lm_head.weight"].roll(shift, 0)}
        engine.update(moved, version)
        assert next_tokens(engine) == {(6 + shift, version)}
    assert {body["model"] for body in server.said("/v1/completions")} == {"model"}
    server.weight_version = "somebody else's"
    with pytest.raises(
        VllmError, match=r"the weights somebody else's instead of covey-.*Give every run servers of its own"
    ):
        next_tokens(engine)


def test_files_of_all_weights_are_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.rollout.vllm_server.FILE_BYTES", 100)
    weights = {f"w{i}": torch.full((30,), i + 0.001) for i in range(5)}  # 60 bytes each in 16 bits
    write_weights(weights, tmp_path / "all", None, torch.bfloat16)
    files = sorted((tmp_path / "all").iterdir())
    assert [len(load_file(file)) for file in files] == [2, 2, 1]
    found = {name: w for file in files for name, w in load_file(file).items()}
    assert all(torch.equal(found[name], w.bfloat16()) for name, w in weights.items())


def test_a_prefix_cache_that_stays_is_an_error(chain: Path, towards: Any, fake_server: Servers) -> None:
    server = fake_server(chain)
    engine = engine_of(server)
    server.faults["/reset_prefix_cache"] = [lambda reply: {"success": False}]
    with pytest.raises(VllmError, match="could not empty its prefix cache"):
        engine.update(towards(6), 1)
    assert not server.paused


@pytest.mark.parametrize("faults", [[400], [500] * 3], ids=["no such file", "rank, or not for adapters"])
def test_an_adapter_that_is_refused(
    faults: list[Any], chain: Path, towards: Any, fake_server: Servers
) -> None:
    server = fake_server(chain)
    engine = engine_of(server)
    server.faults["/v1/load_lora_adapter"] = faults
    with pytest.raises(VllmError, match=r"00 EngineCore encountered.*Does http.* see /.*covey-weights"):
        engine.update(towards(6), 1)


def test_a_server_is_for_one_run(chain: Path, towards: Any, fake_server: Servers) -> None:
    """Adapters lie on base weights that a run with all weights would replace under them."""
    server = fake_server(chain)
    engine = engine_of(server)
    engine.update(towards(6), 1)
    assert next_tokens(engine) == {(7, 1)}
    with pytest.raises(VllmError, match=r"has adapters of another run.*: start it anew"):
        engine_of(server, adapter=None)
    server.weight_version = "covey-another-1"
    with pytest.raises(
        VllmError, match="the weights covey-another-1 instead of default: another run updates"
    ):
        next_tokens(engine)
    with pytest.raises(VllmError, match=r"has the weights of a run with model\.method full: start it anew"):
        engine_of(server)
    old = fake_server(chain, version="0.26.0")  # it cannot say
    engine = engine_of(old)
    engine.update(towards(6), 1)
    assert next_tokens(engine) == {(7, 1)} and not old.said("/weight_info")


def test_a_folder_for_weights(
    chain: Path, towards: Any, fake_server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake_server(chain)
    with pytest.raises(VllmError, match=r"rollout.vllm.exchange: there is no folder /.*/nowhere: make it"):
        engine_of(server, exchange=str(tmp_path / "nowhere"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    for name in ("~/a b", "a b"):
        engine_of(server, exchange=name).update(towards(6), 1)
        path = Path(server.said("/v1/load_lora_adapter")[-1]["lora_path"])
        assert path.parent.parent == tmp_path / "a b"  # as a server with another home and folder finds it


# What goes wrong


@pytest.mark.parametrize("fault", [500, 503, 429, "drop", "half"])
def test_what_passes_is_tried_again(fault: Any, chain: Path, towards: Any, fake_server: Servers) -> None:
    server = fake_server(chain)
    engine = engine_of(server)
    engine.update(towards(6), 1)
    server.faults["/v1/completions"] = [fault, fault]
    assert next_tokens(engine) == {(7, 1)}


def test_an_update_whose_reply_was_lost_is_tried_again(
    chain: Path, towards: Any, fake_server: Servers
) -> None:
    server = fake_server(chain)
    engine = engine_of(server)
    server.faults["/v1/load_lora_adapter"] = ["lost"]  # loaded, and loaded again
    engine.update(towards(6), 1)
    server.faults["/v1/unload_lora_adapter"] = ["lost"]
    engine.update(towards(7), 2)
    assert next_tokens(engine) == {(8, 2)}
    assert [len(server.said(f"/v1/{what}load_lora_adapter")) for what in ("", "un")] == [3, 2]


def test_what_does_not_pass_is_an_error_in_the_end(chain: Path, towards: Any, fake_server: Servers) -> None:
    server = fake_server(chain)
    engine = engine_of(server)
    engine.update(towards(6), 1)
    server.faults["/v1/completions"] = [500] * 6
    with pytest.raises(
        VllmError, match="/v1/completions failed 3 times, at last with: 500 EngineCore encountered an issue"
    ):
        next_tokens(engine)


def test_a_request_without_an_answer_is_given_up(chain: Path, towards: Any, fake_server: Servers) -> None:
    server = fake_server(chain)
    engine = engine_of(server, timeout=0.2)
    engine.update(towards(6), 1)
    server.faults["/v1/completions"] = ["hang"] * 2
    with pytest.raises(
        VllmError, match=r"/v1/completions did not answer within 0.2 s, though the server is alive: raise"
    ):
        next_tokens(engine)
    assert not server.faults["/v1/completions"]  # none was asked for again
    assert server.left.acquire(timeout=5)


def test_a_dead_server_is_reported_and_its_prompts_go_to_the_others(
    chain: Path, towards: Any, fake_server: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = fake_server(chain), fake_server(chain)
    engine = engine_of(first, second)
    engine.update(towards(6), 1)
    first.faults["/v1/completions"] = ["gone"]  # with requests under way
    prompts = prompts_of(*([i, 5] for i in range(8)))
    with caplog.at_level(logging.WARNING):
        groups = engine.generate(prompts, 2, Sampling(1))
    assert [[c.ids for c in group.completions] for group in groups] == [[(7,)] * 2] * 8
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(f"{first.url} is gone") and warning.endswith("1 of 2 servers are left")
    engine.update(towards(7), 2)
    assert next_tokens(engine) == {(8, 2)}
    again = fake_server(chain, port=first.port)  # it is started anew: the next update finds it
    engine.update(towards(5), 3)
    assert engine.generate(prompts, 1, Sampling(1))[0].completions[0].ids == (6,)
    assert again.said("/v1/completions") and f"{first.url} is back" in caplog.text


@pytest.mark.parametrize(
    "path", ["/pause?mode=keep", "/v1/load_lora_adapter", "/reset_prefix_cache", "/resume"]
)
def test_a_server_that_goes_during_an_update(
    path: str, chain: Path, towards: Any, fake_server: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = fake_server(chain), fake_server(chain)
    engine = engine_of(first, second)
    first.faults[path] = ["gone"]
    engine.update(towards(6), 1)
    assert next_tokens(engine) == {(7, 1)} and f"{first.url} is gone" in caplog.text


def test_a_server_that_goes_when_all_is_sampled(chain: Path, towards: Any, fake_server: Servers) -> None:
    first, second = fake_server(chain), fake_server(chain)
    engine = engine_of(first, second)
    engine.update(towards(6), 1)
    first.faults["/weight_info"] = ["gone"]
    assert next_tokens(engine) == {(7, 1)}
    assert [server.alive for server in engine.servers] == [False, True]


def test_a_server_that_was_started_anew_gets_nothing_until_it_has_the_weights(
    chain: Path, towards: Any, fake_server: Servers
) -> None:
    first, second = fake_server(chain), fake_server(chain)
    engine = engine_of(first, second)
    engine.update(towards(6), 1)
    for name in set(first.policies) - {"model"}:
        del first.policies[name]
    assert next_tokens(engine) == {(7, 1)}
    assert [server.alive for server in engine.servers] == [False, True]


def test_no_server_left(chain: Path, towards: Any, fake_server: Servers) -> None:
    server = fake_server(chain)
    engine = engine_of(server)
    engine.update(towards(6), 1)
    server.die()
    with pytest.raises(
        VllmError, match=rf"no vLLM server is left of {server.url}: start it with `covey rollout-server`"
    ):
        next_tokens(engine)
    with pytest.raises(VllmError, match="no vLLM server is left"):
        engine.update(towards(6), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda reply: reply | {"model": "covey-other-1"},
            "with the weights covey-other-1 instead of covey-",
        ),
        (lambda reply: reply | {"choices": reply["choices"][:1]}, "gave 1 of 2 completions of row"),
        (lambda reply: {"object": "error"}, "answered what is no completion: {'object': 'error'}"),
        (lambda reply: _changed(reply, prompt_token_ids=[1, 2]), "answered to another prompt"),
        (
            lambda reply: _changed(reply, token_ids=[6, 7]),
            "gave 2 tokens and 1 log-probs for the prompt of row",
        ),
        (
            lambda reply: _changed(reply, finish_reason="abort"),
            r"gave up the completions of row \d \(abort\)",
        ),
    ],
    ids=["wrong weights", "too few", "no completion", "another prompt", "lengths", "aborted"],
)
def test_wrong_replies(change: Any, message: str, chain: Path, towards: Any, fake_server: Servers) -> None:
    server = fake_server(chain)
    engine = engine_of(server)
    engine.update(towards(6), 1)
    server.faults["/v1/completions"] = [change, change]
    with pytest.raises(VllmError, match=message):
        next_tokens(engine)


@pytest.mark.parametrize("value", [None, -9999.0])
def test_weights_that_have_diverged(value: Any, chain: Path, towards: Any, fake_server: Servers) -> None:
    server = fake_server(chain)
    engine = engine_of(server)
    engine.update(towards(6), 1)
    spoiled = {"token_logprobs": [value]}
    server.faults["/v1/completions"] = [lambda reply: _changed(reply, logprobs=spoiled)] * 2
    with pytest.raises(FloatingPointError, match=r"after the prompt of row \d are not finite"):
        next_tokens(engine)


def _changed(reply: Any, **fields: Any) -> Any:
    return reply | {"choices": [choice | fields for choice in reply["choices"]]}


def test_an_interruption_gives_requests_up(chain: Path, towards: Any, fake_server: Servers) -> None:
    """As Ctrl-C would, an error in the caller's function closes the connections of what is still sampled."""
    server = fake_server(chain)
    engine = engine_of(server)
    engine.update(towards(6), 1)
    server.faults["/v1/completions"] = ["hang"]

    def finished(place: int, group: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts_of([9, 5], [4, 5]), 1, Sampling(1), finished)
    assert server.left.acquire(timeout=5)
    assert next_tokens(engine) == {(7, 1)}


# What a server must be


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {"name": "other", "root": "/models/other"},
            r"serves other \(/models/other\), and the run trains model: start it",
        ),
        ({"max_model_len": 63}, "takes 63 tokens, and a prompt with its completion can have 64"),
        (
            {"dev": False},
            r"lets nobody update its weights \(.*404 Not Found\): start it with `covey rollout-server`",
        ),
        ({"version": "0.25.1"}, r"vLLM at http://127.0.0.1:\d+ is 0.25.1; covey needs 0.26.0 or newer"),
    ],
    ids=["other model", "too short", "no updates", "too old"],
)
def test_unsuitable_servers(facts: dict[str, Any], message: str, chain: Path, fake_server: Servers) -> None:
    with pytest.raises(VllmError, match=message):
        engine_of(fake_server(chain, **facts))


def test_the_model_may_be_known_by_its_folder(chain: Path, fake_server: Servers) -> None:
    server = fake_server(chain, name="other", root="/models/it")
    clients = [Server(server.url + "/v1/", timeout=5)]
    VllmServers(
        clients, ["x/y", "/models/it"], spelled, [], adapter=ADAPTER, max_length=64, dtype=torch.float32
    )


def test_servers_must_call_it_alike(chain: Path, fake_server: Servers) -> None:
    servers = [fake_server(chain), fake_server(chain, name="other", root="model")]
    with pytest.raises(VllmError, match="call the base model by different names: model, other"):
        engine_of(*servers)


def test_all_weights_need_versions(chain: Path, fake_server: Servers) -> None:
    server = fake_server(chain, version="0.26.0")
    engine_of(server)
    message = "is 0.26.0 and lacks weight versions of a server; 0.28.0 and newer have it"
    with pytest.raises(VllmError, match=re.escape(message)):
        engine_of(server, adapter=None)


def test_nobody_is_there(chain: Path, fake_server: Servers) -> None:
    server = fake_server(chain)
    server.die()
    with pytest.raises(
        VllmError, match=rf"{server.url} is gone .*ConnectError.*: start it with `covey rollout-server`"
    ):
        engine_of(server)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "", "http://127.0.0.1:80x", "ftp://a"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(
        VllmError, match=rf'rollout.vllm.urls: "{url}" is no address.*One is http://127.0.0.1:8000'
    ):
        Server(url, timeout=1.0)


def test_an_address_with_a_path(chain: Path, fake_server: Servers) -> None:
    server = Server("https://gate.example/vllm/one/v1/", timeout=1.0)
    assert server.url == "https://gate.example/vllm/one"


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v1/models", 401, "401 EngineCore .*: set VLLM_API_KEY to what the server was started with"),
        ("/version", 404, r"/version answered 404 .*: is it vLLM\? start it with `covey rollout-server`"),
        ("/version", lambda reply: [], "is no vLLM server: start it with `covey rollout-server`"),
    ],
    ids=["key", "other server", "other JSON"],
)
def test_what_does_not_answer_as_vllm(
    path: str, status: Any, message: str, chain: Path, fake_server: Servers
) -> None:
    server = fake_server(chain)
    server.faults[path] = [status]
    with pytest.raises(VllmError, match=message):
        engine_of(server)


def test_an_untested_version_is_a_warning(
    chain: Path, fake_server: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine_of(fake_server(chain, version="0.99.0"))
    assert "is 0.99.0, which covey was not tested with (0.26.0, 0.32.0 were)" in caplog.text


def test_the_key_comes_from_the_environment(
    chain: Path, fake_server: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "VLLM_API_KEY", "open sesame")
    server = fake_server(chain)
    engine_of(server)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer open sesame"}
