"""vLLM in this process, on a module that stands in for it: what is handed over, when, and what becomes of replies.

The stand-in samples the token that its newest weights say. It caches it by prompt until its cache is emptied, it has
the one place where vLLM reads an adapter's tensors, and it seeds every generator when it starts, as vLLM does.
"""

import logging
import math
import random
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes import functional

from covey.rollout import vllm_local
from covey.rollout.engine import Prompt, Sampling
from covey.rollout.vllm_local import VllmEngine, open_vllm
from covey.rollout.vllm_versions import Serving, VllmError, check_version, engine_arguments, serve_command

ADAPTER = {"peft_type": "LORA", "r": 1, "lora_alpha": 1.0, "target_modules": ["down_proj"], "bias": "none"}
B = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
SENT = [("start",), ("weights", "model.norm.weight"), ("finish",)]  # all weights: this one
CPU = torch.device("cpu")


def spelled(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


class LoRAModel:
    """vLLM's: the adapter's file is read, checked and made a model of. What it holds is the sum of its tensors."""

    @classmethod
    def from_local_checkpoint(cls, lora_dir: str, expected_lora_modules: set[str], **options: Any) -> int:
        raise ValueError(f"{lora_dir} doesn't contain tensors")

    @classmethod
    def from_lora_tensors(
        cls, lora_model_id: int, tensors: dict[str, torch.Tensor], dtype: torch.dtype
    ) -> int:
        value = int(sum(tensor.to(dtype).sum() for tensor in tensors.values()))
        for tensor in tensors.values():
            tensor.mul_(2)  # the scale is multiplied in, in place
        return value


REGISTERED: dict[str, type] = {}  # ways to transfer weights, by name


class Factory:
    @staticmethod
    def register_engine(name: str, engine: type) -> None:
        if name in REGISTERED:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        REGISTERED[name] = engine


class FakeLLM:
    """LLM and its llm_engine in one. Requests come back last in, first out, one a step."""

    def __init__(self, **arguments: Any):
        self.arguments, self.log, self.requests = arguments, [], []
        self.llm_engine = self.engine_core = self
        self.token, self.cache = 0, {}
        self.logprob, self.reason, self.asleep = -0.5, "length", set()
        seed_everything(0)

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any) -> None:
        assert not self.asleep
        self.requests.append((name, tuple(prompt["prompt_token_ids"]), params, lora_request))

    def abort_request(self, names: list[str]) -> None:
        self.log.append(("abort", sorted(names)))
        self.requests = [request for request in self.requests if request[0] not in names]

    def step(self) -> list[Any]:
        name, ids, params, adapter = self.requests.pop()
        token = self.cache.setdefault(ids, self.token)
        assert adapter is None or adapter.lora_int_id == self.adapter.lora_int_id
        entry = [{token: types.SimpleNamespace(logprob=self.logprob)}]
        fields = {"text": "", "token_ids": [token], "finish_reason": self.reason, "logprobs": entry}
        outputs = [types.SimpleNamespace(index=i, **fields) for i in reversed(range(params.n))]
        self.params = params
        return [types.SimpleNamespace(request_id=name, finished=True, outputs=outputs)]

    def add_lora(self, request: LoRARequest) -> None:
        assert "weights" not in self.asleep
        folder = Path(request.lora_path)
        assert [file.name for file in folder.iterdir()] == ["adapter_config.json"]
        options = {"lora_model_id": request.lora_int_id, "dtype": torch.float32, "moe_ep_spec": None}
        self.token = LoRAModel.from_local_checkpoint(request.lora_path, {"down_proj", "qkv_proj"}, **options)
        self.adapter = request
        self.log.append(("adapter", request.lora_int_id))

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        assert request == {"init_info": {}}
        assert self.arguments["weight_transfer_config"]["backend"] in REGISTERED
        self.log.append(("connected",))

    def start_weight_update(self) -> None:
        assert "weights" not in self.asleep
        self.log.append(("start",))

    def update_weights(self, request: dict[str, Any]) -> None:
        assert self.log[-1] == ("start",)
        [(name, tensor)] = request["update_info"]["weights"]
        self.token = int(tensor.sum())
        self.log.append(("weights", name))

    def finish_weight_update(self) -> None:
        assert self.log[-1][0] == "weights"
        self.log.append(("finish",))

    def reset_prefix_cache(self) -> bool:
        self.cache.clear()
        self.log.append(("reset",))
        return not self.requests

    def shutdown(self) -> None:
        self.log.append(("shutdown",))

    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def sleep(self, level: int) -> None:
        self.asleep = {"weights", "kv_cache"}
        self.log.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)
        self.log.append(("wake", *tags))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The stand-in, as the module `vllm`."""
    kinds = types.SimpleNamespace(FINAL_ONLY="final")
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": FakeLLM, "SamplingParams": types.SimpleNamespace, "__version__": "0.32.0+cpu"},
        "vllm.inputs": {"tokens_input": lambda ids: {"type": "token", "prompt_token_ids": ids}},
        "vllm.sampling_params": {"RequestOutputKind": kinds},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.lora.lora_model": {"LoRAModel": LoRAModel},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {"WeightTransferEngineFactory": Factory},
        "vllm.distributed.weight_transfer.base": dict.fromkeys(
            ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"), object
        ),
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    REGISTERED.clear()
    unpatched = LoRAModel.__dict__["from_local_checkpoint"]
    yield sys.modules["vllm"]
    LoRAModel.from_local_checkpoint = unpatched


def engine_of(adapter: Any = ADAPTER, eos: Sequence[int] = ()) -> tuple[VllmEngine, FakeLLM]:
    llm = FakeLLM()
    return VllmEngine(llm, spelled, eos, adapter=adapter, max_length=64, device=CPU), llm


def prompts_of(*ids: Sequence[int]) -> list[Prompt]:
    return [Prompt(row=i, ids=tuple(x), text="") for i, x in enumerate(ids)]


def next_tokens(engine: VllmEngine) -> set[tuple[int, int]]:
    groups = engine.generate(prompts_of([9, 5], [3]), 2, Sampling(1))
    return {(c.ids[0], c.version) for group in groups for c in group.completions}


# Requests and replies


@pytest.mark.usefixtures("vllm")
def test_groups_come_as_they_are_finished_and_in_order() -> None:
    engine, llm = engine_of(eos=[6])
    engine.update({B: torch.full((64, 1), 6 / 64)}, 4)
    prompts, seen = prompts_of([9, 5], [3], [4, 4]), []
    groups = engine.generate(prompts, 2, Sampling(1, temperature=0.5), lambda *item: seen.append(item))
    assert [group.prompt for group in groups] == prompts
    assert seen == [(2, groups[2]), (1, groups[1]), (0, groups[0])]
    for group in groups:
        for c in group.completions:
            assert (c.ids, c.logprobs, c.trained, c.version) == ((6,), (-0.5,), (True,), 4)
            assert (c.finish, c.text, c.full_logprobs) == ("length", "6", None)
    assert llm.params.stop_token_ids == [6] and llm.params.ignore_eos and llm.params.logprobs == 0
    assert (llm.params.n, llm.params.temperature, llm.params.max_tokens) == (2, 0.5, 1)
    assert (llm.params.output_kind, llm.params.detokenize) == ("final", False)
    llm.reason = "stop"
    assert engine.generate(prompts[:1], 1, Sampling(1))[0].completions[0].finish == "eos"


@pytest.mark.usefixtures("vllm")
def test_log_probs_of_a_part_of_the_distribution_are_not_said_to_be_of_the_whole() -> None:
    engine, _ = engine_of()
    engine.update({B: torch.ones(64, 1)}, 0)
    for sampling in (
        Sampling(1, top_p=0.9),
        Sampling(1, logit_bias={3: 1.0}),
        Sampling(1, frequency_penalty=0.1),
    ):
        [group] = engine.generate(prompts_of([9]), 1, sampling)
        full = group.completions[0].full_logprobs
        assert full is not None and math.isnan(full[0])
    [group] = engine.generate(
        prompts_of([9]), 1, Sampling(1, temperature=0.0, top_p=0.9)
    )  # greedy: nothing is cut
    assert group.completions[0].full_logprobs is None


@pytest.mark.usefixtures("vllm")
def test_what_goes_wrong_leaves_no_request_behind() -> None:
    engine, llm = engine_of()
    engine.update({B: torch.ones(64, 1)}, 0)
    llm.reason = "abort"
    with pytest.raises(VllmError, match=r"gave up the completions of row 2 \(abort\)"):
        engine.generate(prompts_of([9], [8], [7]), 1, Sampling(1))
    assert llm.log[-1] == ("abort", ["0", "1"]) and not llm.requests
    llm.reason, llm.logprob = "length", math.nan
    with pytest.raises(FloatingPointError, match="after the prompt of row 1 are not finite"):
        engine.generate(prompts_of([9], [8]), 1, Sampling(1))
    assert llm.log[-1] == ("abort", ["3"])


@pytest.mark.parametrize(
    ("ids", "n", "settings", "message"),
    [
        ([], 1, {}, "the prompt of row 0 is empty"),
        (
            range(60),
            1,
            {"max_new_tokens": 5},
            "row 0 has 60 tokens; .* more than the 64 positions",
        ),
        ([3], 0, {}, "n is 0"),
        ([3], 1, {"temperature": 0.005}, "vLLM takes 0.01 instead of anything between 0 and that"),
        ([3], 1, {"logit_bias": {5: -200.0}}, "logit_bias has 5: -200.0; vLLM cuts it to 100"),
        ([3], 1, {"top_p": 0.0}, "top_p is 0.0"),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_what_vllm_would_not_do_as_asked_is_refused(
    ids: Sequence[int], n: int, settings: dict[str, Any], message: str
) -> None:
    engine, _ = engine_of()
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts_of(ids), n, replace(Sampling(1), **settings))


# New weights


@pytest.mark.usefixtures("vllm")
def test_an_adapter_arrives_in_memory_and_at_once() -> None:
    engine, llm = engine_of()
    weights = {B: torch.zeros(64, 1)}
    for version, token in enumerate((6, 7, 8, 6)):
        weights[B][0] = token  # in place, as the optimiser does
        engine.update(weights, version)
        assert float(weights[B].sum()) == token  # vLLM's scaling does not reach the policy
        assert next_tokens(engine) == {(token, version)}
    assert llm.log == [item for i in (1, 2, 3, 4) for item in (("adapter", i), ("reset",))]


@pytest.mark.usefixtures("vllm")
def test_all_weights_take_the_place_of_vllms() -> None:
    engine, llm = engine_of(adapter=None)
    weight = torch.zeros(4)
    for version, token in enumerate((6, 7, 8)):
        weight[0] = token
        engine.update({"model.norm.weight": weight}, version)
        assert next_tokens(engine) == {(token, version)}
    assert llm.log == [*SENT, ("reset",)] * 3


@pytest.mark.usefixtures("vllm")
def test_an_adapter_that_vllm_has_no_place_for() -> None:
    engine, _ = engine_of()
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"
    with pytest.raises(VllmError, match=r"does not take this adapter \(of this model it adapts no o_proj\)"):
        engine.update({name: torch.ones(4, 1)}, 1)


@pytest.mark.usefixtures("vllm")
def test_other_adapters_are_read_as_ever() -> None:
    engine, _ = engine_of()
    engine.update({B: torch.ones(64, 1)}, 1)
    with pytest.raises(ValueError, match="/elsewhere doesn't contain tensors"):
        LoRAModel.from_local_checkpoint("/elsewhere", {"down_proj"}, lora_model_id=1)


@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["adapter", "all weights"])
@pytest.mark.usefixtures("vllm")
def test_sleep_and_wake(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_local, "short_of_memory", lambda device: True)
    engine, llm = engine_of(adapter)
    name, level = (B, 1) if adapter else ("model.norm.weight", 2)
    weights = {name: torch.zeros(64, 1)}
    handed_over = [*([("adapter", 2)] if adapter else SENT), ("reset",)]
    weights[name][0] = 6
    engine.update(weights, 1)
    assert next_tokens(engine) == {(6, 1)}
    llm.log.clear()
    engine.sleep()
    engine.sleep()
    assert llm.log == [("sleep", level)]
    weights[name][0] = 7
    engine.update(weights, 2)
    assert llm.log == [("sleep", level)]  # there is no place for it yet
    assert next_tokens(engine) == {(7, 2)}  # wakes it
    assert llm.log[1:] == [("wake", "weights"), *handed_over, ("wake", "kv_cache")]
    engine.wake()
    assert len(llm.log) == 3 + len(handed_over)
    engine.sleep()
    llm.log.clear()
    llm.token = -1 if adapter is None else llm.token  # level 2 loses them
    assert next_tokens(engine) == {(7, 2)}  # without an update in between
    assert llm.log == [("wake", "weights"), *([] if adapter else handed_over), ("wake", "kv_cache")]


@pytest.mark.usefixtures("vllm")
def test_on_a_cpu_there_is_no_sleep() -> None:
    engine, llm = engine_of()
    engine.sleep()
    engine.wake()
    assert llm.log == []


# Starting it


def serving(**changes: Any) -> Serving:
    fields = {
        "dtype": "float32",
        "base": "unquantised",
        "max_length": 200,
        "max_rows": 24,
        "rank": 12,
        "args": {},
    }
    return Serving(Path("/models/it"), **(fields | changes))


def test_what_vllm_is_started_with(vllm: types.ModuleType) -> None:
    engine = open_vllm(serving(args={"block_size": 64}), spelled, [0], adapter=ADAPTER, device=CPU)
    assert engine.llm.arguments == {
        "model": "/models/it", "dtype": "float32", "max_model_len": 200, "max_num_seqs": 24, "seed": 0,
        "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "enable_prefix_caching": True,
        "enable_lora": True, "max_loras": 1, "max_lora_rank": 16, "enforce_eager": True, "block_size": 64,
        "kv_cache_memory_bytes": 1 << 30, "enable_chunked_prefill": False, "use_tqdm_on_load": False,
    }  # fmt: skip
    assert engine.max_length == 200


@pytest.mark.usefixtures("vllm")
def test_one_whose_weights_will_all_be_replaced() -> None:
    for _ in range(2):  # what is registered stays so in a process
        engine = open_vllm(serving(rank=None), spelled, [0], adapter=None, device=CPU)
        assert engine.llm.arguments["weight_transfer_config"] == {"backend": "covey"}
        assert engine.llm.log == [("connected",)] and list(REGISTERED) == ["covey"]


@pytest.mark.usefixtures("vllm")
def test_there_is_one_in_a_process() -> None:
    first = open_vllm(serving(), spelled, [0], adapter=ADAPTER, device=CPU)
    llm = first.llm
    second = open_vllm(serving(), spelled, [0], adapter=ADAPTER, device=CPU)
    assert llm.log == [("shutdown",)] and second.llm.log == [] and first.llm is None
    with pytest.raises(VllmError, match="a later run of this process has its own vLLM now"):
        next_tokens(first)
    second.update({B: torch.full((64, 1), 6 / 64)}, 1)
    assert next_tokens(second) == {(6, 1)}


@pytest.mark.usefixtures("vllm")
def test_one_that_sleeps_is_woken_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_local, "short_of_memory", lambda device: True)
    engine, llm = engine_of()
    engine.sleep()
    engine.close()
    engine.close()
    assert llm.log == [("sleep", 1), ("wake", "weights", "kv_cache"), ("shutdown",)]


@pytest.mark.usefixtures("vllm")
def test_one_that_is_dropped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_local, "short_of_memory", lambda device: True)
    kernels: Any = types.ModuleType("vllm.lora.ops.kernels")
    kernels._LORA_A_PTR_DICT, kernels.OTHER = {(1,): (torch.zeros(1), 8)}, {1: 2}
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    engine = open_vllm(serving(), spelled, [0], adapter=ADAPTER, device=CPU)
    engine.update({B: torch.full((64, 1), 6 / 64)}, 1)
    next_tokens(engine)
    engine.sleep()
    log = engine.llm.log
    del engine
    assert log[-3:] == [("sleep", 1), ("wake", "weights", "kv_cache"), ("shutdown",)]
    assert (kernels._LORA_A_PTR_DICT, kernels.OTHER) == ({}, {1: 2})


def test_four_bits_are_made_of_what_the_trainer_makes_them_of(vllm: types.ModuleType) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))

    class Loads(FakeLLM):
        def __init__(self, **arguments: Any):
            super().__init__(**arguments)
            self.packed, _ = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")

    vllm.LLM = Loads  # type: ignore[attr-defined]
    vllm.__version__ = "0.26.0"  # type: ignore[attr-defined]
    for base, expected in (("nf4", weight.bfloat16()), ("unquantised", weight)):
        engine = open_vllm(serving(base=base, dtype="bfloat16"), spelled, [0], adapter=ADAPTER, device=CPU)
        assert torch.equal(engine.llm.packed, functional.quantize_4bit(expected, quant_type="nf4")[0])
    rounded, plain = (functional.quantize_4bit(w, quant_type="nf4")[0] for w in (weight.bfloat16(), weight))
    assert not torch.equal(rounded, plain)


def test_arguments_that_depend(monkeypatch: pytest.MonkeyPatch) -> None:
    full = engine_arguments(serving(rank=None, base="fp8", dtype="bfloat16"), "0.32.0", on_cpu=False)
    assert "enable_lora" not in full and (full["quantization"], full["dtype"]) == ("fp8", "bfloat16")
    assert engine_arguments(serving(base="nf4"), "0.27.1", on_cpu=False)["quantization"] == "bitsandbytes"
    with pytest.raises(
        VllmError, match=r"vLLM 0.28.0 loads 4-bit weights with a plugin: pip install vllm-bnb-plugin"
    ):
        engine_arguments(serving(base="nf4"), "0.28.0", on_cpu=False)
    with pytest.raises(VllmError, match=r"lora.rank 513: vLLM has kernels for ranks up to 512"):
        engine_arguments(serving(rank=513), "0.32.0", on_cpu=False)
    with pytest.raises(VllmError, match=r"rollout.vllm.args: logprobs_mode follows from other keys"):
        engine_arguments(serving(args={"logprobs_mode": "raw_logprobs"}), "0.32.0", on_cpu=False)


def test_the_command_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {
        "model": "/m",
        "max_model_len": 64,
        "enable_lora": True,
        "async_scheduling": False,
        "x": None,
    }
    arguments["compilation_config"] = {"mode": 0}
    served = ["--served-model-name", "a/b", "--host", "h", "--port", "7"]
    flags = [
        "--max-model-len",
        "64",
        "--enable-lora",
        "--no-async-scheduling",
        "--compilation-config",
        '{"mode": 0}',
    ]
    for there, start in (
        (True, ["vllm.entrypoints.cli.main", "serve", "/m"]),
        (False, ["vllm.entrypoints.openai.api_server", "--model", "/m"]),
    ):
        monkeypatch.setattr("covey.rollout.vllm_versions._is_installed", lambda package, there=there: there)
        command = serve_command(arguments, name="a/b", host="h", port=7)
        assert command == [sys.executable, "-m", *start, *served, *flags]


@pytest.mark.usefixtures("vllm")
def test_starting_it_moves_no_generator_of_the_run() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_everything(5)
    expected = draw()
    seed_everything(5)
    open_vllm(serving(), spelled, [0], adapter=ADAPTER, device=CPU)
    assert draw() == expected


def test_a_start_that_fails(vllm: types.ModuleType) -> None:
    def fails(**arguments: Any) -> None:
        raise ValueError("no kernel for head size 7")

    vllm.LLM = fails  # type: ignore[attr-defined]
    with pytest.raises(
        VllmError, match=r"vLLM 0.32.0\+cpu does not start with this model: no kernel for head size 7"
    ):
        open_vllm(serving(), spelled, [0], adapter=ADAPTER, device=CPU)


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(VllmError, match=r"vLLM is not installed. Run pip install 'covey\[vllm\]', or use"):
        open_vllm(serving(), spelled, [0], adapter=ADAPTER, device=CPU)


def test_versions(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_version("0.32.0+cpu")
        check_version("0.26.0")
        assert not caplog.messages
        check_version("0.33.0rc1")
    assert caplog.messages == [
        "the installed vLLM is 0.33.0rc1, which covey was not tested with (0.26.0, 0.32.0 were)"
    ]
    with pytest.raises(
        VllmError, match=r"the installed vLLM is 0.9.2; covey needs 0.26.0 or newer: upgrade it"
    ):
        check_version("0.9.2")
