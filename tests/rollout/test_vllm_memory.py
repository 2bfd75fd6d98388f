"""How much of a GPU vLLM gets beside the trainer.

The numbers of a Qwen2.5-1.5B are those that vLLM 0.26 logs on an H200, in nf4 with an adapter of rank 16: 1.19 GiB of
weights; 3,961,600 tokens of keys and values in 105.79 GiB; with 256 rows and passes of 16,384 tokens 1.11 GiB of
activations, 0.33 of CUDA graphs, and 0.06 beside torch's allocator.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.policies.memory import Sizes, read_sizes
from covey.policies.open import open_policy
from covey.rl import engines
from covey.rl.config import GrpoConfig
from covey.rl.config_file import load_config
from covey.rollout import vllm_local, vllm_versions
from covey.rollout.vllm_local import open_vllm
from covey.rollout.vllm_memory import Need, memory_arguments, needed
from covey.rollout.vllm_versions import Serving

GIB = 1 << 30
SIZES = Sizes(
    total=1000, linears=700, experts=100, per_rank=10, layers=2, hidden=16, inner=32, heads=40, vocab=64
)
ARGUMENTS = {"dtype": "bfloat16", "max_num_seqs": 3, "max_model_len": 129, "max_num_batched_tokens": 8}


def test_what_is_needed() -> None:
    need = needed(ARGUMENTS, SIZES, token_bytes=5)
    assert need.weights == 1000 * 2
    assert need.cache == (3 * 256 + 128) * 5  # rows of two blocks of 128 tokens, and vLLM's own block
    assert need.work == GIB + 8 * (4 * 16 + 3 * 32) * 2 + 3 * 3 * 64 * 4
    lora = needed({**ARGUMENTS, "max_lora_rank": 4, "quantization": "fp8"}, SIZES, token_bytes=5)
    assert lora.weights == 800 + (200 + 4 * 10) * 2
    nf4 = needed({**ARGUMENTS, "quantization": "bitsandbytes", "dtype": "float32"}, SIZES, token_bytes=5)
    assert nf4.weights == 800 * (0.5 + 4 / 64) + 200 * 4  # a scale of 32 bits for 64 weights


def test_what_a_model_needed_that_was_measured() -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    token_bytes = 2 * 28 * 2 * 128 * 2
    assert token_bytes * 3_961_600 == pytest.approx(105.79 * GIB, rel=1e-3)
    arguments = {
        "dtype": "bfloat16", "max_num_seqs": 256, "max_model_len": 1088, "max_lora_rank": 16,
        "quantization": "bitsandbytes",
    }  # fmt: skip
    need = needed(arguments, read_sizes(config), token_bytes)
    assert need.weights == pytest.approx(1.19 * GIB, rel=0.05)
    assert need.cache == pytest.approx(256 * 1152 * token_bytes, rel=0.001)
    assert 1.5 * GIB < need.work < 3 * GIB


def test_no_more_than_the_share(caplog: pytest.LogCaptureFixture) -> None:
    need = Need(weights=GIB, cache=7 * GIB, work=2 * GIB)
    with caplog.at_level(logging.INFO):
        assert memory_arguments(need, 64.0 * GIB, 100 * GIB) == {
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": 7 * GIB,
        }
        assert memory_arguments(need, 8.0 * GIB, 100 * GIB) == {"gpu_memory_utilization": 0.08}
    assert memory_arguments(None, 64.0 * GIB, 100 * GIB) == {"gpu_memory_utilization": 0.64}
    detail = "(1.0 of weights, 7.0 of keys and values, 2.0 to work in)"
    assert caplog.messages == [
        f"vLLM takes 10.0 GiB {detail}; its share of the GPU would be 64.0 GiB",
        f"vLLM takes its share of the GPU, 8.0 GiB; all rows need 10.0 GiB {detail}",
    ]


class Started(Exception):
    """With these arguments."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 100 GiB of which 84 are free, and a vLLM that only says what it would be started with."""

    def started(**arguments: Any) -> None:
        raise Started(arguments)

    module = type("vllm", (), {"LLM": staticmethod(started), "__version__": "0.32.0"})
    monkeypatch.setattr(vllm_versions, "import_vllm", lambda: module)
    monkeypatch.setattr(vllm_local, "available", lambda device: 84 * GIB)
    monkeypatch.setattr(vllm_local, "_total", lambda device: 100 * GIB)


def start(folder: Path, args: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    needs = Serving(folder, "bfloat16", "unquantised", 200, 24, 8, args or {})
    options = {"reserve": 4 * GIB, "token_bytes": 1000, **options}
    with pytest.raises(Started) as failure:
        open_vllm(needs, str, [], adapter={}, device=torch.device("cuda"), **options)
    names = ("gpu_memory_utilization", "kv_cache_memory_bytes")
    return {name: failure.value.args[0][name] for name in names if name in failure.value.args[0]}


@pytest.mark.usefixtures("gpu")
def test_who_sets_the_share(tiny_llama: Path) -> None:
    rows = (24 * 256 + 128) * 1000
    found = start(tiny_llama)
    assert (
        found["kv_cache_memory_bytes"] == rows
        and rows < found["gpu_memory_utilization"] * 100 * GIB < 3 * GIB
    )
    # All that is free in advance, if there is not enough for all rows, or if it is not known what these need.
    whole = {"gpu_memory_utilization": pytest.approx(0.8 * 80 / 100)}
    assert start(tiny_llama, token_bytes=1 << 30) == whole
    assert start(tiny_llama, token_bytes=None) == whole
    # What is set wins.
    assert start(tiny_llama, share=0.5) == {"gpu_memory_utilization": pytest.approx(0.5 * 80 / 100)}
    assert start(tiny_llama, {"gpu_memory_utilization": 0.3}) == {"gpu_memory_utilization": 0.3}
    assert start(tiny_llama, {"kv_cache_memory_bytes": 5}) == whole | {"kv_cache_memory_bytes": 5}


@pytest.mark.parametrize(
    ("family", "sizes", "expected"),
    [
        ("llama", {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16}, 2 * 3 * 2 * 16 * 4),
        (
            "gpt2",
            {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": None},
            2 * 3 * 32 * 4,
        ),
        ("mamba", {"num_hidden_layers": 2}, None),
    ],
)
def test_keys_and_values_of_a_token(
    family: str,
    sizes: dict[str, int],
    expected: int | None,
    random_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = random_model(family, **sizes)
    policy = open_policy(folder, method="full", dtype="float32", device="cpu", reference="none")

    def started(*_: Any, **options: Any) -> None:
        raise Started(options)

    monkeypatch.setattr(engines, "open_vllm", started)
    given = {
        "model": {"path": str(folder), "method": "full"},
        "data": {"train": "x"},
        "rollout": {"engine": "vllm"},
    }
    config = load_config(given, [], GrpoConfig)
    with pytest.raises(Started) as failure:
        engines.make_engine(config, policy, folder, None, [0], 8, 64)
    assert failure.value.args[0]["token_bytes"] == expected
