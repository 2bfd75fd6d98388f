"""Stand-ins for vLLM: a server that answers as `vllm serve` 0.32 does, and real vLLM's tests left out without vLLM.

The replies have the shape, field by field, of recorded ones. What the server samples comes from covey's own sampler, on
the weights that it was given over HTTP: so log-probs are right, and stale or wrong weights show.
"""

import importlib.util
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from covey.policies.decoder import DecoderPolicy
from covey.policies.load import load_policy
from covey.rollout.engine import Completion, Prompt, Sampling
from covey.rollout.inprocess import InProcessEngine


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of real vLLM run where it can be imported."""
    if importlib.util.find_spec("vllm") is not None:
        return
    real = [item for item in items if item.get_closest_marker("vllm")]
    if real:
        config.hook.pytest_deselected(items=real)
        items[:] = [item for item in items if not item.get_closest_marker("vllm")]


class FakeServer:
    """faults: by path, what goes wrong with the next requests, one each:

    an int: that status. "drop": the connection breaks; "lost": after what was asked for is done. "half": half of the
    reply. "hang": no reply before the client goes away (`left` counts these). "gone": the server dies. A function: what
    it makes of the reply.
    """

    def __init__(self, folder: Path, *, name: str = "model", port: int = 0, **facts: Any):
        self.folder, self.name = folder, name
        self.facts = {"version": "0.32.0", "root": str(folder), "max_model_len": 512, "dev": True} | facts
        self.calls: list[tuple[str, Any]] = []
        self.headers: list[Any] = []
        self.faults: dict[str, list[Any]] = {}
        self.left, self.dead = threading.Semaphore(0), False
        self.policies: dict[str, Any] = {name: None}  # the base model's is loaded when it is asked for
        self.weight_version, self.paused = "default", False
        self.cached: dict[tuple[str, tuple[int, ...]], Any] = {}  # by model and prompt, as a prefix cache is
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(
            ("127.0.0.1", port), type("Handler", (_Handler,), {"server_of": self})
        )
        self.http.daemon_threads = True
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def die(self) -> None:
        self.dead = True
        threading.Thread(target=self.http.shutdown, daemon=True).start()
        self.http.socket.close()

    def said(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]

    def reply(self, path: str, body: Any) -> tuple[int, Any]:
        with self.lock:
            self.calls.append((path, body))
            if path == "/health":
                return 200, None
            if path == "/version":
                return 200, {"version": self.facts["version"]}
            if path == "/v1/models":
                return 200, {"object": "list", "data": [self._card(name) for name in self.policies]}
            if path == "/v1/completions":
                return self._complete(body)
            if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
                return self._adapter(path, body)
            return self._dev(path, body) if self.facts["dev"] else (404, {"detail": "Not Found"})

    def _dev(self, path: str, body: Any) -> tuple[int, Any]:
        if path in ("/pause?mode=keep", "/resume"):
            self.paused = path != "/resume"
            return 200, {"status": "paused" if self.paused else "resumed"}
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path == "/reset_prefix_cache":
            self.cached.clear()
            return 200, {"success": True}
        if path == "/weight_info":
            return 200, {"weight_version": self.weight_version}
        if path == "/update_weight_version":
            self.weight_version = body["new_version"]
            return 200, {"success": True, "new_version": self.weight_version}
        assert path == "/collective_rpc" and body["method"] == "reload_weights", path
        files = Path(body["kwargs"]["weights_path"])
        whole = files.with_name(files.name + "-with-config")  # the server knows the rest of the model
        shutil.copytree(self.folder, whole, ignore=shutil.ignore_patterns("*.safetensors"))
        for file in files.glob("*.safetensors"):
            shutil.copyfile(file, whole / "model.safetensors")
        self.policies[self.name] = policy_of(whole)
        return 200, {"results": [None]}

    def _adapter(self, path: str, body: Any) -> tuple[int, Any]:
        name = body["lora_name"]
        if path == "/v1/unload_lora_adapter":
            if self.policies.pop(name, None) is None:
                return _error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
            return 200, f"Success: LoRA adapter '{name}' removed successfully."
        if name in self.policies:
            return _error(400, "InvalidUserInput", f"The lora adapter '{name}' has already been loaded.")
        if not Path(body["lora_path"], "adapter_config.json").exists():
            message = f"Loading lora {name} failed: No adapter found for {body['lora_path']}"
            return _error(404, "NotFoundError", message)
        self.policies[name] = policy_of(self.folder, adapter=Path(body["lora_path"]))
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _complete(self, body: Any) -> tuple[int, Any]:
        assert not self.paused, "a request came in during an update"
        if body["model"] not in self.policies:
            return _error(404, "NotFoundError", f"The model `{body['model']}` does not exist.")
        present = self.policies[body["model"]] or policy_of(self.folder)
        policy = self.cached.setdefault((body["model"], tuple(body["prompt"])), present)
        keys = ["temperature", "top_p", "top_k", "min_p", "seed"]
        keys += ["repetition_penalty", "presence_penalty", "frequency_penalty"]
        bias = {int(token): value for token, value in (body["logit_bias"] or {}).items()}
        sampling = Sampling(
            body["max_tokens"], stop=tuple(body["stop"]), logit_bias=bias, **{key: body[key] for key in keys}
        )
        engine = InProcessEngine(policy, spelled, body["stop_token_ids"])
        [group] = engine.generate([Prompt(0, tuple(body["prompt"]), "")], body["n"], sampling)
        choices = [_choice(i, c, body["prompt"]) for i, c in enumerate(group.completions)]
        count = sum(len(c.ids) for c in group.completions)
        return 200, {
            "id": "cmpl-88e5e1ec76d9d9f6", "object": "text_completion", "created": 1796038008, "model": body["model"],
            "choices": choices, "service_tier": None, "system_fingerprint": "vllm-0.32.0-8dbe18ff",
            "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": count, "prompt_tokens_details": None},
            "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None,
        }  # fmt: skip

    def _card(self, name: str) -> dict[str, Any]:
        base = name == self.name
        card = {"id": name, "object": "model", "created": 1796038007, "owned_by": "vllm", "permission": []}
        root, length = (self.facts["root"], self.facts["max_model_len"]) if base else ("/adapter", None)
        return card | {"root": root, "parent": None if base else self.name, "max_model_len": length}


def policy_of(folder: Path, **options: Any) -> DecoderPolicy:
    return load_policy(folder, **{"method": "lora", "dtype": "float32", "device": "cpu", "rank": 1} | options)


def spelled(ids: Any) -> str:
    """The text of the tests' tokens."""
    return " ".join(map(str, ids))


def _choice(index: int, completion: Completion, prompt: list[int]) -> dict[str, Any]:
    names = [str(token) for token in completion.ids]
    logprobs = list(completion.logprobs)
    tops = [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)]
    ended = completion.finish == "eos"
    return {
        "index": index, "text": completion.text,
        "logprobs": {
            "text_offset": [0] * len(names), "token_logprobs": logprobs, "tokens": names, "top_logprobs": tops
        },
        "finish_reason": "stop" if ended else completion.finish, "stop_reason": completion.ids[-1] if ended else None,
        "token_ids": list(completion.ids), "prompt_logprobs": None, "prompt_token_ids": prompt, "routed_experts": None,
    }  # fmt: skip


def _error(status: int, kind: str, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: FakeServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._answer(json.loads(body) if body else None)

    def _answer(self, body: Any) -> None:
        server = self.server_of
        faults = server.faults.get(self.path, [])
        fault = faults.pop(0) if faults else None
        server.headers.append(self.headers)
        if fault == "gone":
            server.die()
        if fault == "hang":
            self.connection.recv(1)  # nothing comes: it returns when the client goes away
            server.left.release()
        if server.dead or fault in ("drop", "hang"):
            self.close_connection = True
            return
        status, reply = server.reply(self.path, body)
        if isinstance(fault, int):
            status, reply = _error(fault, "InternalServerError", "EngineCore encountered an issue.")
        elif callable(fault):
            reply = fault(reply)
        # Only what is done with adapters is told in words.
        payload = (
            reply.encode() if isinstance(reply, str) else b"" if reply is None else json.dumps(reply).encode()
        )
        if fault == "half":
            payload = payload[: len(payload) // 2]
        if server.dead or fault == "lost":
            self.close_connection = True
            return
        self.send_response(status)
        if not isinstance(reply, str):
            self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def fake_server() -> Iterator[Callable[..., FakeServer]]:
    """fake_server(folder, **facts) starts one that stops with the test."""
    made: list[FakeServer] = []

    def make(folder: Path, **facts: Any) -> FakeServer:
        made.append(FakeServer(folder, **facts))
        return made[-1]

    yield make
    for server in made:
        if not server.dead:
            server.die()
