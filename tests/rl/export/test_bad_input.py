"""What is wrong is said in a sentence that names the file or key, and nothing half-written is left."""

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import covey.rl.export.export as module
import covey.rl.export.forms as forms
import covey.rl.export.gguf_file as gguf_file
from covey.policies.locate import ModelError
from covey.rl import cli
from covey.rl.checkpoint import RunError
from covey.rl.export.export import export
from covey.rl.export.source import ExportError


@pytest.fixture(scope="module")
def trained(llama: Path, train: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(llama, tmp_path_factory.mktemp("trained") / "adapter", method="lora")[1]


@pytest.fixture
def adapter(trained: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged, alone in its folder."""
    return shutil.copytree(trained, tmp_path / "adapter")


@pytest.fixture
def base(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the base model that may be damaged."""
    return shutil.copytree(llama, tmp_path_factory.mktemp("copy") / "base")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def refused(adapter: Path, match: str, to: Any = "merged", kind: Any = ExportError, **settings: Any) -> None:
    """The export is refused with one sentence or two, and leaves nothing beside the adapter."""
    with pytest.raises(kind, match=match) as caught:
        export(adapter, to, **settings)
    assert "\n" not in str(caught.value)
    assert [path.name for path in adapter.parent.iterdir()] == [adapter.name]


def test_a_missing_base_model(adapter: Path) -> None:
    change(adapter / "adapter_config.json", base_model_name_or_path="gone/for/ever")
    refused(
        adapter,
        r"'gone/for/ever'.*adapter_config\.json names it as the base model; --base can name another place",
    )
    change(adapter / "adapter_config.json", base_model_name_or_path=None)
    refused(adapter, r"adapter_config\.json names no base model; say which it is with --base")
    refused(adapter, r"'also/not/here'", base="also/not/here")


def test_truncated_and_missing_files(adapter: Path, base: Path, llama: Path) -> None:
    size = (base / "model.safetensors").stat().st_size
    for left in (size - 1, size // 2, 100, 3):
        shutil.copy(llama / "model.safetensors", base)
        cut(base / "model.safetensors", left)
        for to in ("adapter", "merged", "gguf"):
            refused(
                adapter, r"base/model\.safetensors is not a complete safetensors file", to, base=str(base)
            )
    cut(adapter / "adapter_model.safetensors", 5000)
    refused(adapter, r"adapter/adapter_model\.safetensors is not a complete safetensors file")
    (adapter / "adapter_model.safetensors").unlink()
    refused(adapter, r"adapter: no adapter_model\.safetensors")
    cut(adapter / "adapter_config.json", 20)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    refused(adapter, r"adapter/adapter_config\.json cannot be read")


def test_a_missing_shard_and_a_wrong_index(adapter: Path, base: Path) -> None:
    weights = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    head = weights.pop("lm_head.weight")
    save_file(weights, base / "one.safetensors")
    index = {"weight_map": {**dict.fromkeys(weights, "one.safetensors"), "lm_head.weight": "two.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(adapter, r"lacks 1 of its 2 weight files \(first two\.safetensors\)", base=str(base))
    save_file({"other": head}, base / "two.safetensors")
    refused(
        adapter, r"two\.safetensors has no tensor lm_head\.weight, though the index says so", base=str(base)
    )


def test_an_adapter_for_another_base(
    adapter: Path, tied_qwen2: Path, write_model: Callable[..., Path], sizes: Any, tmp_path_factory: Any
) -> None:
    from transformers import LlamaConfig

    wider = write_model(tmp_path_factory.mktemp("wider"), LlamaConfig(**sizes(intermediate_size=128)))
    fewer = write_model(tmp_path_factory.mktemp("fewer"), LlamaConfig(**sizes(num_hidden_layers=1)))
    for to in ("adapter", "merged", "gguf"):
        key = r"base_model\.model\.model\.layers\.0\.mlp\.down_proj\.lora_A\.weight"
        refused(
            adapter, rf"{key} is for a weight of \(64, 96\), and model\.layers\.0\.mlp\.down_proj\.weight of "
            rf"{wider} has \(64, 128\): it belongs to another base model", to, base=str(wider),
        )  # fmt: skip
        refused(adapter, rf"layers\.1\..*, but {fewer} has no model\.layers\.1\.", to, base=str(fewer))
    exported = export(
        adapter, base=str(tied_qwen2)
    )  # the same shapes: nothing tells that it is another model
    assert exported.is_dir()


def test_adapters_that_compute_something_else(adapter: Path) -> None:
    change(adapter / "adapter_config.json", init_lora_weights="pissa_niter_4")
    refused(adapter, r"adapter_config\.json: init_lora_weights is 'pissa_niter_4', .* changed base")
    change(
        adapter / "adapter_config.json",
        init_lora_weights=True,
        target_parameters=["mlp.experts.gate_up_proj"],
    )
    refused(adapter, r"adapter_config\.json: target_parameters is set, which cannot be merged here")
    change(adapter / "adapter_config.json", target_parameters=None, peft_type="LOHA")
    refused(adapter, r"adapter_config\.json: peft_type is 'LOHA'; only LORA adapters")
    weights = load_file(adapter / "adapter_model.safetensors")
    del weights["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    save_file(weights, adapter / "adapter_model.safetensors")
    refused(
        adapter,
        r"has base_model.*\.layers\.0\.self_attn\.q_proj\.lora_A\.weight, but not the other half of it",
    )


def test_a_tokenizer_that_exceeds_the_embedding(adapter: Path, base: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(9)])  # 262 + 9 tokens, 270 rows
    tokenizer.save_pretrained(base)
    refused(adapter, r"goes up to id 270 .* the embedding has 270 rows", kind=ModelError, base=str(base))


def test_a_base_that_reads_images(adapter: Path, base: Path) -> None:
    change(adapter / "adapter_config.json", base_model_name_or_path=str(base))
    change(base / "config.json", model_type="gemma3")
    for to in ("merged", "gguf"):
        refused(adapter, "reads images too; .* export the adapter", to)


def test_options(adapter: Path) -> None:
    refused(adapter, r'to: "onnx" is not one of adapter, merged, gguf', to="onnx")
    refused(adapter, r'dtype: "int8" is not one of float32, bfloat16, float16', dtype="int8")
    refused(adapter, r"dtype is for merged weights, not for gguf", to="gguf", dtype="float32")
    refused(adapter, r"quant is for gguf, not for merged", quant="q8_0")
    refused(adapter, r'quant: "q9" is not one of f32, f16, bf16, q8_0', to="gguf", quant="q9")
    refused(adapter, r"shard_gb: 0 must be above 0", shard_gb=0)
    refused(adapter, r"public is for what is pushed", public=True)
    refused(adapter, r"check is for merged weights, not for adapter", to="adapter", check=True)


@pytest.mark.parametrize("kind", [OSError, SafetensorError, KeyboardInterrupt])
@pytest.mark.parametrize("to", ["adapter", "merged", "gguf"])
def test_a_full_disk(to: Any, kind: Any, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the writing is done when the disk is full, or somebody presses Ctrl-C."""
    full = (
        OSError(errno.ENOSPC, "No space left on device")
        if kind is OSError
        else kind("no space left on device")
    )

    def fail(*_: Any, **__: Any) -> None:
        assert any(adapter.parent.glob(".adapter-*.unfinished/*"))  # it is being written, under another name
        raise full

    if to == "merged":
        monkeypatch.setattr(forms, "eos_ids", fail)
    elif to == "gguf":
        monkeypatch.setattr(gguf_file.gguf.GGUFWriter, "write_tensor_data", fail)
    else:
        monkeypatch.setattr(module, "model_card", fail)
    said = RunError if kind is not KeyboardInterrupt else KeyboardInterrupt
    refused(
        adapter,
        rf"adapter-{to} failed \(no space left on device\), and nothing of it is left|^no space",
        to,
        said,
    )


def test_a_disk_that_is_known_to_be_too_small(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(adapter)
    monkeypatch.setattr(gguf_file.shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    for to in ("merged", "gguf"):  # 93,000 weights in two bytes each, or in 34 / 32
        refused(adapter, r"needs 0\.\d GB, and .* has 0\.\d GB left", to, RunError)


def test_a_folder_that_is_there_is_left_alone(adapter: Path) -> None:
    there = adapter.with_name("adapter-merged")
    there.mkdir()
    (there / "mine.txt").write_text("mine")
    with pytest.raises(ExportError, match="adapter-merged exists already; remove it"):
        export(adapter)
    assert (there / "mine.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made(adapter: Path) -> None:
    (adapter.parent / "file").write_text("")
    with pytest.raises(RunError, match=r"file/out failed \((not a directory|file exists)\)"):
        export(adapter, out=adapter.parent / "file" / "out")


@pytest.mark.parametrize(("name", "code"), [("adapter", 0), ("nothing", 2)])
def test_the_command(
    name: str, code: int, adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(adapter.parent)
    monkeypatch.setattr(
        sys, "argv", ["covey", "export", name, "--to", "merged", "--out", "made", "--dtype", "float16"]
    )
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code
    said = capsys.readouterr()
    if code:
        assert said.err.startswith("error: ") and "'nothing'" in said.err
    else:
        assert said.out.splitlines()[-1] == "merged   made"
        assert load_file("made/model.safetensors")["lm_head.weight"].dtype == torch.float16
