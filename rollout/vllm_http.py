"""One vLLM server over HTTP: tokens in, tokens and log-probs out, and new weights between them.

It is `vllm serve` as it is, with the switches that `covey rollout-server` sets.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from covey.rollout.vllm_versions import VllmError, check_version, has, require

TRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0  # seconds between tries; the pause doubles with each
CONNECT_S = 5.0  # for a connection, and for the question whether the server is alive
TRY_AGAIN = (408, 409, 425, 429)  # and all from 500 on
HOW = "start it with `covey rollout-server`"
ANEW = "start it anew, with the recipe of this run"
EXAMPLE = "http://127.0.0.1:8000"
OURS = "covey-"  # begins the names of weights that a run sends
VERSIONS = "weight versions of a server"


class ServerGone(VllmError):
    """A server that does not answer, or that has started anew and forgot the weights."""


class Refused(VllmError):
    """A request that the server does not take, however often it is asked."""

    def __init__(self, status: int, what: str):
        super().__init__(what)
        self.status = status


class Server:
    """A server, seen from one event loop. timeout: seconds until a request is given up. The key is $VLLM_API_KEY.

    VllmError for what is no address.
    """

    def __init__(self, url: str, *, timeout: float, tries: int = TRIES, pause: float = FIRST_PAUSE):
        import httpx2

        try:
            parts = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise VllmError(
                f'rollout.vllm.urls: "{url}" is no address ({error}). One is {EXAMPLE}'
            ) from error
        if parts.scheme not in ("http", "https") or not parts.host:
            raise VllmError(f'rollout.vllm.urls: "{url}" is no address. One is {EXAMPLE}')
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        self.tries, self.pause = tries, pause
        key = os.environ.get("VLLM_API_KEY")
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None),  # as many as there are prompts; vLLM lets them wait
        )
        self.alive, self.pending = True, 0
        self.weights: str | None = None  # what its base weights are called; None: it does not say

    async def call(self, method: str, path: str, body: Any = None, *, parsed: bool = True) -> Any:
        """The reply, parsed if it is to be. Overload, server errors, broken connections and broken replies are tried
        again.

        ServerGone, at once, if the server is not alive; Refused for a request that is wrong, or that has no good reply
        in the end; VllmError if there is none in time.
        """
        import httpx2

        status = 0
        for attempt in range(self.tries):
            if attempt:
                await asyncio.sleep(min(self.pause * 2 ** (attempt - 1), LONGEST_PAUSE))
            try:
                response = await self._client.request(method, self.url + path, json=body)
                if response.is_success:
                    return response.json() if parsed and response.content else None
                status = response.status_code
                failure = f"{status} {_message(response)}"
                if status < 500 and status not in TRY_AGAIN:
                    raise Refused(status, f"{self.url}{path} answered {failure}")
            except httpx2.TransportError as error:
                failure = f"{type(error).__name__} {error}".rstrip()
            except ValueError as error:
                failure = f"no JSON ({error})"
            if not await self._answers():
                raise ServerGone(f"{self.url} is gone ({path}: {failure})")
            if failure.startswith("ReadTimeout"):  # the same work would take as long again
                raise VllmError(
                    f"{self.url}{path} did not answer within {self.timeout:g} s, though the server is alive: raise "
                    "rollout.vllm.timeout, or lower rollout.max_new_tokens"
                )
        raise Refused(status, f"{self.url}{path} failed {self.tries} times, at last with: {failure}")

    async def _answers(self) -> bool:
        import httpx2

        try:
            return (await self._client.get(self.url + "/health", timeout=CONNECT_S)).is_success
        except httpx2.TransportError:
            return False

    async def check(self, names: Sequence[str], max_length: int, *, full: bool) -> str:
        """What it calls its base model, if that is one of `names` and is served as a run needs it.

        full: whether all weights are trained, and not an adapter.
        """
        try:
            version = (await self.call("GET", "/version"))["version"]
            models = (await self.call("GET", "/v1/models"))["data"]
            [base] = [model for model in models if not model.get("parent")]
        except Refused as error:
            closed = error.status in (401, 403)
            mend = "set VLLM_API_KEY to what the server was started with" if closed else f"is it vLLM? {HOW}"
            raise VllmError(f"{error}: {mend}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise VllmError(f"{self.url} is no vLLM server: {HOW}") from error
        where = f"vLLM at {self.url}"
        check_version(version, where)
        if not {base["id"], base["root"]} & set(names):
            raise VllmError(
                f"{self.url} serves {base['id']} ({base['root']}), and the run trains {names[0]}: {HOW} {names[0]}"
            )
        if base["max_model_len"] < max_length:
            raise VllmError(
                f"{self.url} takes {base['max_model_len']} tokens, and a prompt with its completion can have "
                f"{max_length}: {HOW} and the recipe of this run"
            )
        try:
            await self.call("GET", "/is_paused")
        except Refused as error:
            raise VllmError(f"{self.url} lets nobody update its weights ({error}): {HOW}") from error
        if full:
            require(VERSIONS, version, where)
        if has(VERSIONS, version):
            self.weights = await self._weights()
        # Adapters lie on the weights that the server was started with, and whoever samples with one would not notice
        # that others take their place.
        if full and len(models) > 1:
            raise VllmError(
                f"{self.url} has adapters of another run, and this one trains all weights: {ANEW}"
            )
        if not full and (self.weights or "").startswith(OURS):
            raise VllmError(f"{self.url} has the weights of a run with model.method full: {ANEW}")
        return base["id"]

    async def complete(
        self, ids: Sequence[int], settings: Mapping[str, Any], model: str
    ) -> list[tuple[list[int], list[float], str, str]]:
        """(token ids, their log-probs, finish reason, text) of every completion.

        VllmError for a reply from other weights than `model`, to another prompt, or that is no reply.
        """
        body = {"model": model, "prompt": list(ids), "return_token_ids": True, **settings}
        try:
            reply = await self.call("POST", "/v1/completions", body)
        except Refused as error:
            if error.status == 404:
                raise ServerGone(
                    f"{self.url} has forgotten the weights, it must have been started anew ({error})"
                ) from error
            raise
        try:
            if reply["model"] != model:
                raise VllmError(f"{self.url} answered with the weights {reply['model']} instead of {model}")
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
            if any(choice["prompt_token_ids"] != list(ids) for choice in choices):
                raise VllmError(f"{self.url} answered to another prompt than it was asked for")
            return [
                (
                    c["token_ids"],
                    [_number(x) for x in c["logprobs"]["token_logprobs"]],
                    c["finish_reason"],
                    c["text"],
                )
                for c in choices
            ]
        except (LookupError, TypeError) as error:
            raise VllmError(
                f"{self.url}/v1/completions answered what is no completion: {str(reply)[:200]}"
            ) from error

    # New weights

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """While entered nothing is sampled. What the prefix cache holds is dropped at the end."""
        await self.call("POST", "/pause?mode=keep")
        try:
            yield
            reply = await self.call("POST", "/reset_prefix_cache")
            if isinstance(reply, dict) and not reply.get("success", True):
                raise VllmError(
                    f"{self.url} could not empty its prefix cache: somebody else's requests are running in it. Give "
                    "every run servers of its own"
                )
        finally:
            await self.call("POST", "/resume")

    async def load_adapter(self, name: str, folder: str, previous: str | None) -> None:
        """Later requests for the model `name` get the adapter in `folder`; `previous` is dropped."""
        async with self.paused():
            try:
                adapter = {"lora_name": name, "lora_path": folder}
                await self.call("POST", "/v1/load_lora_adapter", adapter, parsed=False)
            except Refused as error:
                if "already been loaded" not in str(error):  # by a try whose reply was lost
                    raise
            if previous is not None:
                try:
                    await self.call("POST", "/v1/unload_lora_adapter", {"lora_name": previous}, parsed=False)
                except Refused as error:
                    if error.status != 404:  # it was started anew in between
                        raise

    async def reload_weights(self, folder: str, version: str) -> None:
        """Later requests get the weights in `folder`, which are called `version`."""
        async with self.paused():
            call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            await self.call("POST", "/collective_rpc", call)
            await self.call("POST", "/update_weight_version", {"new_version": version})
        self.weights = version

    async def check_weights(self) -> None:
        """VllmError if the base weights are not those of the last update; for adapters, not those of the start."""
        if self.weights is not None and (found := await self._weights()) != self.weights:
            raise VllmError(
                f"{self.url} answered with the weights {found} instead of {self.weights}: another run updates it, or "
                "it was started anew. Give every run servers of its own, and resume this one"
            )

    async def _weights(self) -> str:
        return (await self.call("GET", "/weight_info"))["weight_version"]


def _number(value: float | None) -> float:
    """JSON has no NaN."""
    return float("nan") if value is None else value


def _message(response: Any) -> str:
    """What an error reply says, in a line."""
    try:
        body = response.json()
        said = body["error"]["message"] if "error" in body else body["detail"]
    except (ValueError, LookupError, TypeError):
        said = response.text
        if said.lstrip().startswith("<"):  # a page of whatever stands between
            said = response.reason_phrase
    return " ".join(str(said).split())[:300]
