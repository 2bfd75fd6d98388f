"""`covey serve`: what it answers is what the engine samples, whole or in pieces, and what it refuses."""

import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from starlette.testclient import TestClient

from covey.policies.load import load_policy
from covey.policies.tokenizer import load_tokenizer
from covey.rl import cli
from covey.rl.checkpoint import save_checkpoint
from covey.rl.serving.cli import ServeError, _bind, _check_server
from covey.rl.serving.model import Speaker, TextStream
from covey.rl.serving.requests import Limits
from covey.rl.serving.server import make_app
from covey.rl.serving.worker import Event, Finished, Job, Worker
from covey.rollout.engine import Completion, Prompt, Sampling
from covey.rollout.inprocess import InProcessEngine

LIMITS = Limits(prompt_tokens=100, new_tokens=50)
HELLO = [{"role": "user", "content": "hello"}]


def client_of(speaker: Speaker, **settings: Any) -> TestClient:
    return TestClient(make_app(speaker, LIMITS, **settings), base_url="http://localhost")


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return Speaker("tiny", ["model.device=cpu"])


@pytest.fixture(scope="module")
def client(tiny: Speaker) -> Iterator[TestClient]:
    with client_of(tiny) as made:
        yield made


@pytest.fixture
def follow(table_lm: Callable[..., Path], tmp_path: Path) -> Callable[[str], Speaker]:
    """follow(text): a model that writes one character of `text` after the other, all different; 50 nats ahead."""

    def make(text: str) -> Speaker:
        folder = table_lm(torch.zeros(64, 64), tmp_path / "letters")
        ids = load_tokenizer(folder).encode(text)
        table = torch.zeros(64, 64)
        for now, then in pairwise([*ids, 0]):
            table[now, then] = 50
        return Speaker(str(table_lm(table, tmp_path / "model")), ["model.device=cpu"])

    return make


def sampled(path: Any, ids: Any, n: int, sampling: Sampling, **settings: Any) -> tuple[Completion, ...]:
    """What the engine makes of the weights in `path`, without anything of the server."""
    policy = load_policy(
        path, **{"method": "lora", "dtype": "float32", "device": "cpu", "rank": 1} | settings
    )
    engine = InProcessEngine(
        policy, lambda x: bytes(i for i in x if i < 256).decode(errors="replace"), [256, 258]
    )
    return engine.generate([Prompt(0, tuple(ids), "")], n, sampling)[0].completions


def events(response: Any) -> list[Any]:
    """The events of a stream, without the last one, which says that it is."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# What is sampled


def test_a_completion_is_what_the_engine_samples(client: TestClient) -> None:
    asked = {"prompt": "ab", "n": 2, "max_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    answer = client.post("/v1/completions", json=asked).json()
    expected = sampled("tiny", b"ab", 2, Sampling(30, 0.8, 0.9, seed=5))
    assert [choice["text"] for choice in answer["choices"]] == [c.text for c in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    new = sum(len(c.ids) for c in expected)
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": new, "total_tokens": 2 + new}
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"


def test_a_chat_is_written_with_the_template(client: TestClient) -> None:
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    asked = {
        "messages": messages,
        "max_completion_tokens": 20,
        "seed": 1,
        "model": "tiny",
        "user": "u",
        "n": None,
    }
    answer = client.post("/v1/chat/completions", json=asked).json()
    start, end = 257, 258
    ids = [start, *b"system\nbe", end, 10, start, *b"user\nhi", end, 10, start, *b"assistant\n"]
    [expected] = sampled("tiny", ids, 1, Sampling(20, seed=1))
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert answer["usage"]["prompt_tokens"] == len(ids) and answer["object"] == "chat.completion"


def test_several_prompts_and_token_ids(client: TestClient) -> None:
    def texts(prompt: Any) -> list[str]:
        asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        return [choice["text"] for choice in client.post("/v1/completions", json=asked).json()["choices"]]

    expected = [sampled("tiny", ids, 1, Sampling(12, 0.0))[0].text for ids in (b"ab", b"xyz")]
    assert texts(["ab", "xyz"]) == texts([[97, 98], [120, 121, 122]]) == expected
    assert texts([120, 121, 122]) == expected[1:]


def test_without_a_seed_no_two_requests_are_alike(client: TestClient) -> None:
    asked = {"prompt": "ab", "max_tokens": 30}
    assert (
        len({client.post("/v1/completions", json=asked).json()["choices"][0]["text"] for _ in range(3)}) == 3
    )


def test_reasons_to_end(follow: Callable[[str], Speaker]) -> None:
    with client_of(follow("abcdef")) as client:

        def ended(**asked: Any) -> tuple[str, str, int]:
            answer = client.post("/v1/completions", json={"prompt": "a", "temperature": 0, **asked}).json()
            [choice] = answer["choices"]
            return choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]

        assert ended() == ("bcdef", "stop", 6)  # the end-of-sequence token counts
        assert ended(max_tokens=3) == ("bcd", "length", 3)
        assert ended(stop="de") == ("bc", "stop", 4)
        assert ended(stop=["x", "e"]) == ("bcd", "stop", 4)


def test_logprobs_are_those_of_the_sampled_tokens(table_lm: Callable[..., Path], tmp_path: Path) -> None:
    """After every token "a" has log 63 more than the 63 others: log-probs log(1/2) and log(1/126)."""
    row = torch.zeros(64)
    letter = load_tokenizer(table_lm(row, tmp_path / "letters")).encode("a")[0]
    row[letter] = math.log(63)
    with client_of(Speaker(str(table_lm(row, tmp_path / "model")), ["model.device=cpu"])) as client:
        asked = {"max_tokens": 40, "seed": 2, "top_p": 0.9, "ignore_eos": True}
        text = client.post("/v1/completions", json={"prompt": "b", "logprobs": 0, **asked}).json()
        chat = client.post("/v1/chat/completions", json={"messages": HELLO, "logprobs": True, **asked}).json()
    [text] = text["choices"]
    kept = text["logprobs"]
    assert "".join(kept["tokens"]) == text["text"] and "a" in kept["tokens"]
    for i, (token, value) in enumerate(zip(kept["tokens"], kept["token_logprobs"], strict=True)):
        assert value == pytest.approx(math.log(1 / 2 if token == "a" else 1 / 126), abs=1e-5)
        assert text["text"][kept["text_offset"][i] :].startswith(token)
    content = chat["choices"][0]["logprobs"]["content"]
    assert "".join(x["token"] for x in content) == chat["choices"][0]["message"]["content"]
    assert all(bytes(x["bytes"]).decode() == x["token"] for x in content)
    assert all(
        x["logprob"] == pytest.approx(math.log(1 / 2 if x["token"] == "a" else 1 / 126), abs=1e-5)
        for x in content
    )


# Streams


@pytest.mark.parametrize("n", [1, 3])
def test_the_pieces_of_a_stream_are_the_whole(n: int, client: TestClient) -> None:
    asked = {"prompt": ["ab", "xyz"], "max_tokens": 40, "seed": 3, "n": n}
    whole = client.post("/v1/completions", json=asked).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = events(client.post("/v1/completions", json=asked | options))
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == choice["index"]]
        assert "".join(p["text"] for p in own) == choice["text"] and len(own) > 10
        assert [p["finish_reason"] for p in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]


def test_the_pieces_of_a_chat(client: TestClient) -> None:
    asked = {"messages": HELLO, "max_tokens": 40, "seed": 3}
    whole = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
    first, *pieces = events(client.post("/v1/chat/completions", json=asked | {"stream": True}))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == whole["message"]["content"]
    assert pieces[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_a_stream_shows_nothing_of_a_stop_string(follow: Callable[[str], Speaker]) -> None:
    with client_of(follow("abcdef")) as client:
        asked = {"prompt": "a", "temperature": 0, "stream": True, "stop": ["dex", "ef"]}
        choices = [piece["choices"][0] for piece in events(client.post("/v1/completions", json=asked))]
    # "d" may be the beginning of "dex" until "f" comes, which completes "ef".
    expected = [("b", None), ("c", None), ("d", None), ("", "stop")]
    assert [(c["text"], c["finish_reason"]) for c in choices] == expected


def test_characters_and_stop_strings_stay_whole() -> None:
    def pieces(text: str, *stop: str) -> list[str]:
        stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), stop)
        return [stream.add([byte]) for byte in text.encode()]

    assert pieces("aé€😀") == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    assert pieces("a--b->", "->") == ["a", "", "-", "-b", "", ""]
    assert pieces("aab", "ab", "b") == ["", "a", ""]
    assert pieces("ab€", "€c") == ["a", "b", "", "", ""]
    broken = TextStream(lambda ids: bytes(ids).decode(errors="replace"), ())
    assert [broken.add([0x61]), broken.add([0xE2]), broken.end("a\ufffd")] == ["a", "", "\ufffd"]


def test_a_decoder_that_breaks_what_came_before() -> None:
    """With byte fallback a run of bytes is broken as a whole until its last character is complete."""

    def decode(ids: Any) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    stream = TextStream(decode, ())
    assert [stream.add([byte]) for byte in "éè".encode()] == ["", "é", "", "è"]


def test_models_without_a_stream_come_in_one_piece() -> None:
    speaker = Speaker("tiny", ["model.device=cpu", "model.method=full"])  # which transformers samples
    with client_of(speaker) as client:
        asked = {"prompt": "ab", "max_tokens": 10, "temperature": 0}
        [whole] = client.post("/v1/completions", json=asked).json()["choices"]
        [piece] = events(client.post("/v1/completions", json=asked | {"stream": True}))
    [expected] = sampled("tiny", b"ab", 1, Sampling(10, 0.0))
    assert whole["text"] == expected.text == piece["choices"][0]["text"]
    assert piece["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"


def test_tokens_are_told_once_each_also_where_memory_is_short(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six rows of up to 30 places and three prompts of 10: with 90 places rows leave and come back."""
    monkeypatch.setattr("covey.rollout.schedule.FIRST_ROOM", 4)
    policy = load_policy("tiny", method="lora", dtype="float32", device="cpu", rank=1)
    engine = InProcessEngine(policy, lambda ids: "", [], places=90)
    prompts = [Prompt(i, (97 + i,) * 11, "") for i in range(3)]
    sampling = Sampling(30, seed=1)
    told: dict[tuple[int, int], list[int]] = {}
    with caplog.at_level(logging.DEBUG, "covey.rollout.schedule"):
        groups = engine.generate(
            prompts, 2, sampling, tokens=lambda i, k, ids: told.setdefault((i, k), []).extend(ids)
        )
    assert "no room for more tokens" in caplog.text
    assert told == {(i, k): list(c.ids) for i, g in enumerate(groups) for k, c in enumerate(g.completions)}

    def stop(*_: Any) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        engine.generate(prompts, 2, sampling, tokens=stop)
    again = engine.generate(prompts, 2, sampling)
    assert [[c.ids for c in g.completions] for g in again] == [[c.ids for c in g.completions] for g in groups]


# What is served


def test_a_run_is_served_as_it_was_trained(tmp_path: Path) -> None:
    policy = load_policy("tiny", method="lora", dtype="float32", device="cpu", rank=4)
    with torch.no_grad():
        flat = policy.parameters()[0]
        flat.copy_(0.1 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1)))
    run = tmp_path / "sums"
    save_checkpoint(run, 7, adapter_writer=lambda folder: policy.save_adapter(folder, "tiny"), state={})
    (run / "config.yaml").write_text(
        "model: {path: tiny, method: lora}\ndata: {train: x, system: be, chat: true}\n"
    )
    speaker = Speaker(str(run), ["model.device=cpu"])
    with client_of(speaker) as client:
        asked = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=asked).json()
        assert client.get("/v1/models").json()["data"][0]["id"] == answer["model"] == "sums"
        own = client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 20, "temperature": 0}).json()
    ids = [257, *b"system\nbe", 258, 10, 257, *b"user\nhello", 258, 10, 257, *b"assistant\n"]
    adapter = run / "checkpoints" / "step-000007" / "adapter"
    greedy = Sampling(20, 0.0)
    assert (
        answer["choices"][0]["message"]["content"] == sampled("tiny", ids, 1, greedy, adapter=adapter)[0].text
    )
    raw = [sampled("tiny", b"ab", 1, greedy, **settings)[0].text for settings in ({"adapter": adapter}, {})]
    assert own["choices"][0]["text"] == raw[0] != raw[1]  # raw text has no system message


# What is refused


@pytest.mark.parametrize(
    ("asked", "field", "said"),
    [
        ({"max_tokens": 51}, "max_tokens", "51 is more than the limit, 50"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "9"}, "max_tokens", "valid integer"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 129}, "n", "up to 128 completions"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"stop": 3}, "stop", "must be a text"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"logprobs": 2}, "logprobs", "less than or equal to 0"),
        ({"logprobs": 0, "stream": True}, "logprobs", "not supported in a stream"),
        ({"logit_bias": {"264": 1}}, "logit_bias", "no token 264"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids as its keys"),
        ({"echo": True}, "echo", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"prompt": ""}, "prompt", "the text is empty"),
        ({"prompt": []}, "prompt", "must be a text"),
        ({"prompt": [264]}, "prompt", "from 0 to 263"),
        ({"prompt": "x" * 101}, "prompt", "101 tokens, and the limit is 100"),
    ],
)
def test_a_field_that_is_wrong_is_named(asked: Any, field: str, said: str, client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt": "ab"} | asked)
    error = response.json()["error"]
    assert (
        response.status_code == 400 and error["param"] == field and error["type"] == "invalid_request_error"
    )
    assert error["message"].startswith(f"{field}: ") and said in error["message"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "Field required"),
        ([], "at least 1 item"),
        ([{"role": "tool", "content": "a"}], "'user'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only parts like"),
        ([*HELLO, {"role": "assistant", "content": "a"}], "end with the user's"),
    ],
)
def test_messages_that_are_wrong(messages: Any, said: str, client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"
    assert said in response.json()["error"]["message"]


def test_other_mistakes(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def post(**request: Any) -> tuple[int, str]:
        response = client.post("/v1/completions", **request)
        return response.status_code, response.json()["error"]["message"]

    assert post(json={"prompt": "a", "model": "gpt"}) == (404, 'model: "gpt" is not here; "tiny" is')
    assert post(content="{")[0] == 400 and "the body is no JSON" in post(content="{")[1]
    assert post(json=[1]) == (400, "the body must be a JSON object")
    monkeypatch.setattr("covey.rl.serving.server.MAX_BODY", 10)
    assert post(json={"prompt": "a" * 100}) == (413, "the body has more than 10 bytes")


def test_what_is_left_of_the_positions_bounds_a_completion(
    table_lm: Callable[..., Path], tmp_path: Path
) -> None:
    folder = table_lm(torch.zeros(64), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 12}))
    with client_of(Speaker(str(folder), ["model.device=cpu"])) as client:

        def post(path: str, **asked: Any) -> tuple[int, Any]:
            response = client.post(path, json={"ignore_eos": True, **asked})
            return response.status_code, response.json()

        code, answer = post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
        prompt = len("U:a\nA:")
        assert (code, answer["usage"]["completion_tokens"]) == (200, 12 - prompt)
        code, answer = post("/v1/completions", prompt="abcdefgh", max_tokens=5)
        assert (code, answer["error"]["param"]) == (400, "max_tokens") and "leave, 4" in answer["error"][
            "message"
        ]
        code, answer = post("/v1/completions", prompt="abcdefgh")
        assert (code, answer["usage"]["completion_tokens"]) == (200, 4)
        code, answer = post("/v1/completions", prompt="a" * 12)
        assert code == 400 and "leave no room" in answer["error"]["message"]


# Who is served


def test_the_api_key(tiny: Speaker) -> None:
    with client_of(tiny, api_key="open sesame") as client:

        def status(**headers: str) -> int:
            return client.get("/v1/models", headers=headers).status_code

        assert status() == status(authorization="Bearer open") == status(authorization="open sesame") == 401
        assert (
            client.post("/v1/completions", json={"prompt": "a"})
            .json()["error"]["message"]
            .startswith("the API key")
        )
        assert status(authorization="Bearer open sesame") == 200
        assert status(authorization="Bearer open sesame", host="server.example") == 200


def test_without_a_key_only_loopback_names_count(client: TestClient) -> None:
    def status(host: str) -> int:
        return client.get("/v1/models", headers={"host": host}).status_code

    assert status("evil.example:8000") == 400
    assert status("localhost:8000") == status("127.0.0.1:8000") == status("[::1]:8000") == 200


def test_other_hosts_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "server.example"):
        with pytest.raises(ServeError, match="COVEY_API_KEY"):
            _check_server(host, None)
        _check_server(host, "key")
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        _check_server(host, None)
    with pytest.raises(ServeError, match="the API key is empty"):
        _check_server("0.0.0.0", " ")


def test_the_command_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["covey", "serve", "tiny", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 2
        return capsys.readouterr().err

    monkeypatch.delenv("COVEY_API_KEY", raising=False)
    assert run("--host", "0.0.0.0").startswith("error: --host 0.0.0.0 lets other machines use the model")
    with _bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1, port {port} (address already in use)" in run("--port", str(port))
    monkeypatch.setattr("covey.rl.serving.cli.find_spec", lambda name: None)
    assert run() == "error: covey serve needs starlette and uvicorn: run pip install 'covey[serve]'\n"


# Many requests, and what may happen to them


class Gate:
    """Stands in for a Speaker's `generate`: notes each call and waits in the first until it is let go."""

    def __init__(self, speaker: Speaker):
        self.generate, self.calls = speaker.generate, []
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, prompts: Any, *more: Any) -> Any:
        self.calls.append(len(prompts))
        self.entered.set()
        assert self.go.wait(10)
        return self.generate(prompts, *more)


def test_requests_that_wait_run_together(tiny: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(tiny)
    monkeypatch.setattr(tiny, "generate", gate)
    worker = Worker(tiny, max_rows=4)
    results: list[tuple[str, str]] = []
    arrived = threading.Semaphore(0)

    def submit(name: str, text: bytes, sampling: Sampling, n: int = 1) -> Job:
        def tell(event: Event) -> None:
            if isinstance(event, Finished):
                results.extend((name, c.text) for c in event.group.completions)
                arrived.release()

        job = Job([Prompt(0, tuple(text), "")], n, sampling, tell)
        worker.submit(job)
        return job

    warm, cold = Sampling(10, seed=1), Sampling(10, 0.0)
    submit("first", b"a", warm)
    assert gate.entered.wait(10)
    for name, sampling, n in (("b", warm, 2), ("c", cold, 1), ("d", warm, 2), ("e", warm, 2)):
        submit(name, name.encode(), sampling, n)
    submit("gone", b"f", warm).gone = True
    gate.go.set()
    assert all(arrived.acquire(timeout=10) for _ in range(5))
    worker.close()
    assert gate.calls == [1, 2, 1, 1]  # first; b and d, of which four rows are room enough; c; e
    expected = [("first", b"a", warm, 1), ("b", b"b", warm, 2), ("d", b"d", warm, 2), ("c", b"c", cold, 1)]
    expected.append(("e", b"e", warm, 2))
    assert sorted(results) == sorted(
        (name, c.text) for name, text, sampling, n in expected for c in sampled("tiny", text, n, sampling)
    )


def test_an_engine_that_fails_is_an_answer(tiny: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, failures = (
        tiny.generate,
        [MemoryError("sampling has 3 places"), FloatingPointError("not finite")],
    )

    def fails(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return generate(*arguments)

    monkeypatch.setattr(tiny, "generate", fails)
    with client_of(tiny) as client:
        response = client.post("/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        stream = client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert json.loads(stream.text.removeprefix("data: "))["error"]["type"] == "server_error"
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_too_many_requests(tiny: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.rl.serving.worker.MAX_WAITING", 0)
    with client_of(tiny) as client:
        response = client.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_the_server(
    stream: bool, tiny: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a real connection: its completion is not sampled to the end, and the next one is answered."""
    generate, ended, entered = tiny.generate, [], threading.Event()

    def watched(*arguments: Any) -> Any:
        entered.set()
        try:
            groups = generate(*arguments)
        except RuntimeError as error:
            ended.append(type(error).__name__)
            raise
        ended.append(len(groups[0].completions[0].ids))
        return groups

    monkeypatch.setattr(tiny, "generate", watched)
    app = make_app(tiny, Limits(100, 4000))
    listener = _bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        address = listener.getsockname()

        def post(**body: Any) -> socket.socket:
            data = json.dumps({"prompt": "a", "ignore_eos": True, **body}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            connection = socket.create_connection(address, timeout=20)
            connection.sendall(head.encode() + data)
            return connection

        with post(max_tokens=4000, stream=stream) as leaving:
            if stream:
                assert b"200 OK" in leaving.recv(100)
            assert entered.wait(10)
        with post(max_tokens=3) as staying:
            assert b"200 OK" in staying.recv(100)
    finally:
        server.should_exit = True
        thread.join(20)
    assert ended == ["Stopped", 3]
