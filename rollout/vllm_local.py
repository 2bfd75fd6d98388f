"""vLLM in the trainer's process and on its GPU: weights reach it in memory, and it sleeps while there is training.

An adapter is applied beside the base weights, which vLLM holds itself, in 4 or in more bits; it is never merged. Where
all weights are trained they are put in the place of vLLM's. Either comes in before the next request, an adapter under a
number that none had before, and what the prefix cache holds of earlier weights is dropped.
"""

import gc
import itertools
import json
import logging
import random
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.policies.memory import read_sizes
from covey.policies.open import causal_config
from covey.rollout import vllm_versions
from covey.rollout.engine import Group, Prompt, Sampling
from covey.rollout.memory import PLENTY, available
from covey.rollout.sampling import check_request
from covey.rollout.vllm_memory import SETTINGS, SHARE, memory_arguments, needed
from covey.rollout.vllm_requests import Requests
from covey.rollout.vllm_versions import Serving, VllmError

log = logging.getLogger(__name__)


class VllmEngine:
    """A RolloutEngine on a vllm.LLM of this process.

    decode: ids to text, without special tokens. eos_ids: any of them ends a completion.
    adapter: the content of adapter_config.json; None where all weights are trained.
    max_length: tokens of a prompt with its completion, at most.
    device: that of the trainer; on a GPU vLLM sleeps during training unless there is memory in plenty.

    `update` keeps the tensors that it is given, not copies, until they are handed over: at once, or when vLLM wakes up.
    """

    def __init__(
        self,
        llm: Any,
        decode: Callable[[Sequence[int]], str],
        eos_ids: Iterable[int],
        *,
        adapter: Mapping[str, Any] | None,
        max_length: int,
        device: torch.device,
    ):
        self.llm: Any = llm
        self.decode, self.eos_ids = decode, frozenset(eos_ids)
        self.max_length, self.device = max_length, device
        self.version = 0
        self._folder: tempfile.TemporaryDirectory | None = None
        if adapter is not None:
            self._folder = tempfile.TemporaryDirectory(prefix="covey-adapter-")
            (Path(self._folder.name) / "adapter_config.json").write_text(json.dumps(adapter), "utf-8")
        self._weights: Mapping[str, Tensor] | None = None  # not handed over yet
        self._trained: Mapping[str, Tensor] | None = None  # all weights, which vLLM loses in its sleep
        self._adapter: Any = None  # what requests name the adapter by
        self._asleep = False
        # An engine that is dropped ends too: vLLM hides its objects from Python's search for garbage.
        self._end = weakref.finalize(self, vllm_versions.shut_down, llm)
        self._end.atexit = False  # the process's memory goes with the process
        self._updates, self._requests = itertools.count(1), itertools.count()

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        finished: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """n completions for each of P prompts: P groups in the prompts' order (see RolloutEngine).

        ValueError for what cannot be sampled, or what vLLM would quietly sample otherwise.
        """
        if not self._end.alive:
            raise VllmError(
                "a later run of this process has its own vLLM now, and there can be only one in a process"
            )
        check_request(prompts, n, sampling, self.max_length)
        requests = Requests(n, sampling, self.decode, self.eos_ids)
        self.wake()
        groups: dict[int, Group] = {}
        running: dict[str, int] = {}  # places of the prompts, by the names of their requests
        try:
            for place, prompt in enumerate(prompts):
                name = str(next(self._requests))
                running[name] = place
                settings = requests.settings(prompt)
                vllm_versions.add_request(self.llm, name, list(prompt.ids), settings, self._adapter)
            while running:
                for output in self.llm.llm_engine.step():
                    if output.finished:
                        place = running.pop(output.request_id)
                        groups[place] = self._group(requests, prompts[place], output)
                        if finished is not None:
                            finished(place, groups[place])
        finally:
            if running:
                self.llm.llm_engine.abort_request(list(running))
        return [groups[place] for place in range(len(prompts))]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Later samples come from these weights."""
        self._weights, self.version = weights, version
        if self._folder is None:
            self._trained = weights
        if not self._asleep:
            self._hand_over()

    def sleep(self) -> None:
        """Gives memory back, unless there is plenty: weights go to the host, or away where all of them are trained."""
        if self._asleep or not short_of_memory(self.device):
            return
        self.llm.sleep(level=1 if self._trained is None else 2)
        self._asleep = True

    def wake(self) -> None:
        """Takes the memory again, with the newest weights."""
        if not self._asleep:
            return
        torch.cuda.empty_cache()  # vLLM's memory does not come from torch's allocator
        self.llm.wake_up(tags=["weights"])
        if self._trained is not None:
            self._weights = self._trained
        self._hand_over()
        self.llm.wake_up(tags=["kv_cache"])
        self._asleep = False

    def close(self) -> None:
        """Ends it. vLLM's state is the process's: a second one would break when the first one goes."""
        self._end()
        self.llm = None
        gc.collect()  # its weights

    def _hand_over(self) -> None:
        if self._weights is None:
            return
        if self._folder is not None:
            number = next(self._updates)
            folder = Path(self._folder.name)
            self._adapter = vllm_versions.load_adapter(self.llm, folder, self._weights, number)
        else:
            vllm_versions.send_weights(self.llm, self._weights)
        vllm_versions.reset_prefix_cache(self.llm)
        self._weights = None

    def _group(self, requests: Requests, prompt: Prompt, output: Any) -> Group:
        completions = []
        for one in sorted(output.outputs, key=lambda one: one.index):
            ids = list(one.token_ids)
            logprobs = [entry[token].logprob for token, entry in zip(ids, one.logprobs, strict=True)]
            completions.append(
                requests.completion(prompt, ids, logprobs, one.finish_reason, one.text, self.version)
            )
        if len(completions) != requests.n:
            raise VllmError(f"vLLM gave {len(completions)} of {requests.n} completions of row {prompt.row}")
        return Group(prompt, tuple(completions))


_open: "weakref.ref[VllmEngine] | None" = None  # the one of this process


def open_vllm(
    serving: Serving,
    decode: Callable[[Sequence[int]], str],
    eos_ids: Iterable[int],
    *,
    adapter: Mapping[str, Any] | None,
    device: torch.device,
    share: float | None = None,
    reserve: int = 0,
    token_bytes: int | None = None,
) -> VllmEngine:
    """Starts vLLM in this process, and ends one that was started before.

    share: of the GPU memory that is free now, after `reserve` bytes are set aside for what training will hold all the
    time; default: what the rows need, and SHARE at most. token_bytes: keys and values of one token, in all layers;
    None if that is not known. VllmError if vLLM is not there or does not start.
    """
    global _open
    vllm = vllm_versions.import_vllm()
    if _open is not None and (before := _open()) is not None:
        before.close()
    gc.collect()  # what is left of one that was dropped
    arguments = vllm_versions.engine_arguments(serving, vllm.__version__, on_cpu=device.type == "cpu")
    if device.type == "cuda":
        if device.index:
            raise VllmError(
                f"model.device {device}: vLLM takes the first GPU it sees; choose with CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.empty_cache()
        most = (SHARE if share is None else share) * max(0, available(device) - reserve)
        need = None
        if share is None and token_bytes is not None and not SETTINGS & arguments.keys():
            need = needed(arguments, read_sizes(causal_config(serving.folder)), token_bytes)
        arguments = {"enable_sleep_mode": True} | memory_arguments(need, most, _total(device)) | arguments
    if serving.rank is None:
        arguments |= vllm_versions.transfer_arguments()
    log.info("starting vLLM %s with %s weights; this takes about a minute", vllm.__version__, serving.base)
    start = time.monotonic()
    # Not under a name here: some modules keep the frames that they were imported from, and all that had a name there.
    engine = VllmEngine(
        _start(vllm, arguments, serving, device), decode, eos_ids, adapter=adapter, max_length=serving.max_length,
        device=device,
    )  # fmt: skip
    log.info("vLLM is there after %.0f s", time.monotonic() - start)
    _open = weakref.ref(engine)
    if serving.rank is None:
        vllm_versions.connect(engine.llm)
    return engine


def _start(vllm: Any, arguments: Mapping[str, Any], serving: Serving, device: torch.device) -> Any:
    rounding = nullcontext()
    if serving.base == "nf4":
        rounding = vllm_versions.rounded_before_quantised(getattr(torch, serving.dtype), device)
    with _kept_random_state(), rounding:
        try:
            return vllm.LLM(**arguments, use_tqdm_on_load=False)
        except (ValueError, RuntimeError, TypeError, AssertionError) as error:
            raise VllmError(f"vLLM {vllm.__version__} does not start with this model: {error}") from error


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """vLLM seeds every generator of the process when it starts."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def short_of_memory(device: torch.device) -> bool:
    """Whether training is short of a GPU's memory while vLLM has its share; on a CPU there is nothing to give back."""
    return device.type == "cuda" and available(device) <= PLENTY * _total(device)


def _total(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
