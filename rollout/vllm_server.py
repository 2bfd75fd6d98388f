"""vLLM servers as a sampler: prompts go to all of them over HTTP, new weights by way of a folder that they can read.

A server that goes away is reported at once and its prompts go to the others; the next update takes it back if it
answers again. Weights have a name of their own at every update, and replies are checked for it.
"""

import asyncio
import json
import logging
import queue
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from covey.rollout.engine import Group, Prompt, Sampling
from covey.rollout.sampling import check_request
from covey.rollout.vllm_http import HOW, OURS, Refused, Server, ServerGone
from covey.rollout.vllm_requests import Requests
from covey.rollout.vllm_versions import VllmError

FILE_BYTES = 4 << 30  # of all weights, in one file
Result = TypeVar("Result")
log = logging.getLogger(__name__)


class VllmServers:
    """A RolloutEngine on one or several vLLM servers that serve the same base model.

    names: what the base model may be called there. decode: ids to text, without special tokens.
    adapter: the content of adapter_config.json; None where all weights are trained.
    max_length: tokens of a prompt with its completion, at most. dtype: of all weights, when they are handed over.
    exchange: a folder that servers on other machines see under the same path; default: one of this machine.
    together: where several processes train, calls what it is given in the first one and returns the result in all of
    them; each samples its share, and the first one sends the weights.

    VllmError if one of them does not answer, or serves something else.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        names: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        eos_ids: Iterable[int],
        *,
        adapter: Mapping[str, Any] | None,
        max_length: int,
        dtype: torch.dtype,
        exchange: str | None = None,
        together: Callable[[Callable[[], Any]], Any] = lambda make: make(),
    ):
        self._together = together
        self.servers, self.decode, self.eos_ids = list(servers), decode, frozenset(eos_ids)
        self.adapter, self.max_length, self.dtype = adapter, max_length, dtype
        self.version = 0
        self._loop = asyncio.new_event_loop()  # in a thread: a notebook has a loop of its own
        threading.Thread(target=self._loop.run_forever, name="vllm-servers", daemon=True).start()
        self._base = self._check(names)
        self._folder = tempfile.TemporaryDirectory(prefix="covey-weights-", dir=_visible(exchange))
        Path(self._folder.name).chmod(0o755)  # servers may run as somebody else
        self._run_name, self._updates = f"{OURS}{uuid.uuid4().hex[:8]}", 0
        self._name: str | None = None  # of the present weights

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        finished: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """n completions for each of P prompts: P groups in the prompts' order (see RolloutEngine).

        ValueError for what cannot be sampled, or what vLLM would quietly sample otherwise; VllmError if no server is
        left, or for a reply that is wrong.
        """
        check_request(prompts, n, sampling, self.max_length)
        requests = Requests(n, sampling, self.decode, self.eos_ids)
        done: queue.SimpleQueue[tuple[int, Group] | None] = queue.SimpleQueue()
        groups: dict[int, Group] = {}
        work = asyncio.run_coroutine_threadsafe(self._sample_all(requests, prompts, done), self._loop)
        work.add_done_callback(lambda _: done.put(None))
        try:
            while (item := done.get()) is not None:
                place, groups[place] = item
                if finished is not None:
                    finished(place, groups[place])
            work.result()
        finally:
            work.cancel()  # closes connections, at which vLLM gives the requests up
        return [groups[place] for place in range(len(prompts))]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Writes the weights, and has every server that answers read them; VllmError if none does."""
        self._name, states = self._together(lambda: self._send(weights))
        self.version = version
        for server, (alive, base) in zip(self.servers, states, strict=True):
            server.alive, server.weights = alive, base

    def _send(self, weights: Mapping[str, Tensor]) -> tuple[str, list[tuple[bool, str | None]]]:
        """What the weights are called now, and of each server whether it has them and what its base weights are."""
        previous, self._updates = self._name, self._updates + 1
        name = f"{self._run_name}-{self._updates}"
        folder = Path(self._folder.name) / name
        write_weights(weights, folder, self.adapter, self.dtype)
        self._run(self._update_all(name, str(folder), previous))
        if previous is not None:
            shutil.rmtree(folder.with_name(previous), ignore_errors=True)
        return name, [(server.alive, server.weights) for server in self.servers]

    def sleep(self) -> None:
        """Nothing to give back here."""

    def wake(self) -> None:
        """Nothing to take."""

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def _check(self, names: Sequence[str]) -> str:
        """What all servers call the base model."""

        full = self.adapter is None

        async def check_all() -> list[str]:
            checks = [server.check(names, self.max_length, full=full) for server in self.servers]
            return await asyncio.gather(*checks)

        try:
            bases = set(self._run(check_all()))
        except ServerGone as error:
            raise VllmError(f"{error}: {HOW}") from error
        if len(bases) > 1:
            raise VllmError(
                f"the servers call the base model by different names: {', '.join(sorted(bases))}. Start them alike"
            )
        return bases.pop()

    # Sampling

    async def _sample_all(
        self, requests: Requests, prompts: Sequence[Prompt], done: "queue.SimpleQueue[Any]"
    ) -> None:
        async def sample(place: int, prompt: Prompt) -> None:
            done.put((place, await self._sample(requests, prompt)))

        tasks = [asyncio.ensure_future(sample(*item)) for item in enumerate(prompts)]
        try:
            await asyncio.gather(*tasks)
            await asyncio.gather(*map(self._check_weights, self._living()))
        finally:
            for task in tasks:
                task.cancel()

    async def _sample(self, requests: Requests, prompt: Prompt) -> Group:
        """The completions of a prompt, from the server with the least to do; from another one if that goes away."""
        settings = requests.settings(prompt)
        model = self._base if self.adapter is None else str(self._name)
        while True:
            server = min(self._living(), key=lambda server: server.pending)
            server.pending += 1
            try:
                replies = await server.complete(prompt.ids, settings, model)
                break
            except ServerGone as error:
                self._mourn(server, error)
            finally:
                server.pending -= 1
        if len(replies) != requests.n:
            raise VllmError(
                f"{server.url} gave {len(replies)} of {requests.n} completions of row {prompt.row}"
            )
        return Group(prompt, tuple(requests.completion(prompt, *reply, self.version) for reply in replies))

    async def _check_weights(self, server: Server) -> None:
        """Replies say which adapter they come from, and not which base weights."""
        try:
            await server.check_weights()
        except ServerGone as error:
            self._mourn(server, error)

    def _living(self) -> list[Server]:
        living = [server for server in self.servers if server.alive]
        if not living:
            raise VllmError(
                f"no vLLM server is left of {', '.join(s.url for s in self.servers)}: {HOW}, and resume the run"
            )
        return living

    def _mourn(self, server: Server, error: ServerGone) -> None:
        if server.alive:
            server.alive = False
            log.warning(
                "%s; %d of %d servers are left", error, sum(s.alive for s in self.servers), len(self.servers)
            )

    # New weights

    async def _update_all(self, name: str, folder: str, previous: str | None) -> None:
        async def update(server: Server) -> None:
            try:
                if self.adapter is None:
                    await server.reload_weights(folder, name)
                else:
                    await server.load_adapter(name, folder, previous)
            except ServerGone as error:
                self._mourn(server, error)
                return
            except Refused as error:
                raise VllmError(
                    f"{error}. Does {server.url} see {folder}, and was it started for this recipe?"
                ) from error
            if not server.alive:
                log.warning("%s is back", server.url)
            server.alive = True

        await asyncio.gather(*map(update, self.servers))
        self._living()


def _visible(exchange: str | None) -> Path | None:
    """The folder of that name, as servers have to call it."""
    if exchange is None:
        return None
    folder = Path(exchange).expanduser().resolve()
    if not folder.is_dir():
        raise VllmError(f"rollout.vllm.exchange: there is no folder {folder}: make it, or name another")
    return folder


def write_weights(
    weights: Mapping[str, Tensor], folder: Path, adapter: Mapping[str, Any] | None, dtype: torch.dtype
) -> None:
    """Writes weights for vLLM: an adapter in PEFT's format and in float32, or all weights in files of a few GiB."""
    from safetensors.torch import save_file

    folder.mkdir()
    if adapter is not None:
        (folder / "adapter_config.json").write_text(json.dumps(adapter), "utf-8")
        tensors = {
            name: weight.detach().to("cpu", torch.float32).contiguous() for name, weight in weights.items()
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return
    part: dict[str, Tensor] = {}
    size = files = 0
    for i, (name, weight) in enumerate(weights.items(), start=1):
        part[name] = weight.detach().to("cpu", dtype).contiguous()
        size += part[name].nbytes
        if size >= FILE_BYTES or i == len(weights):
            save_file(part, folder / f"model-{files:05}.safetensors", metadata={"format": "pt"})
            part, size, files = {}, 0, files + 1
