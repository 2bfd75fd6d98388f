"""Merged weights: what transformers reloads is the function that was trained."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from covey.rl.export.export import export
from covey.rl.export.merge import Merged
from covey.rl.export.source import ExportError, Source
from covey.rl.export.tensors import Tensors

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
Logits = Callable[..., torch.Tensor]


@pytest.mark.parametrize("base", ["llama", "tied_qwen2"])
def test_the_reloaded_model_is_the_live_policy(
    base: str, request: pytest.FixtureRequest, tmp_path: Path, train: Any, logits: Logits, ids: list[int]
) -> None:
    folder = request.getfixturevalue(base)
    policy, adapter = train(folder, tmp_path / "adapter", method="lora")
    merged = export(adapter, "merged", dtype="float32")
    assert merged == tmp_path / "adapter-merged"
    wanted = policy.forward_logits(ids)
    assert (wanted - logits(folder)).abs().max() > 1  # the adapter does something
    torch.testing.assert_close(logits(merged), wanted, rtol=0, atol=1e-5)


def test_dequantised_is_the_live_4_bit_policy_and_original_is_the_16_bit_one_with_the_adapter(
    llama: Path, tmp_path: Path, train: Any, logits: Logits, ids: list[int]
) -> None:
    policy, adapter = train(llama, tmp_path / "adapter", method="qlora")
    same = export(adapter, "merged", dtype="float32", base="dequantised", out=tmp_path / "same")
    other = export(adapter, "merged", dtype="float32", out=tmp_path / "other")
    wanted = policy.forward_logits(ids)
    torch.testing.assert_close(logits(same), wanted, rtol=0, atol=1e-5)
    on_16_bits, _ = train(llama, tmp_path / "lora", method="lora")  # draws the same adapter
    torch.testing.assert_close(logits(other), on_16_bits.forward_logits(ids), rtol=0, atol=1e-5)
    assert (logits(other) - wanted).abs().max() > 0.1
    assert "dequantised again before the merge" in (same / "README.md").read_text()


def test_a_run_in_bfloat16_is_dequantised_to_what_bitsandbytes_gave_it(llama: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    stored = load_file(llama / "model.safetensors")
    source = Source(None, llama, "llama")
    merged = Merged(source, Tensors.of_model(llama), tied=False, nf4=torch.bfloat16)
    name = "model.layers.1.mlp.up_proj.weight"
    packed, state = quantize_4bit(stored[name].bfloat16(), compress_statistics=True, quant_type="nf4")
    assert torch.equal(merged.read(name), dequantize_4bit(packed, state).float())
    head = "lm_head.weight"  # which a run holds in 16 bits
    assert torch.equal(merged.read(head), stored[head].bfloat16().float())


def write_block(folder: Path, weight: dict[str, torch.Tensor]) -> Source:
    """A base model of one matrix [1, 64], and an adapter with B A = [0, 0.03, 0.03, 0.03, 0, ...]."""
    for name in ("base", "adapter"):
        (folder / name).mkdir()
    save_file(weight, folder / "base" / "model.safetensors")
    (folder / "base" / "config.json").write_text("{}")
    key = "base_model.model.linear.lora_{}.weight"
    delta = torch.zeros(1, 64)
    delta[0, 1:4] = 0.03
    save_file(
        {key.format("A"): delta, key.format("B"): torch.ones(1, 1)},
        folder / "adapter" / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": "base"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return Source(folder / "adapter", folder / "base", "base")


def test_one_nf4_block_by_hand(tmp_path: Path) -> None:
    """Four weights are next to the NF4 levels 1, 0.160930, -0.284441 and 0.079580, so on ones the trained function is
    0.956069 + 0.09 = 1.046069. The original weights would give 0.92 + 0.09 = 1.01."""
    from bitsandbytes.functional import quantize_4bit

    block = torch.zeros(1, 64)
    block[0, :4] = torch.tensor([1.0, 0.20, -0.33, 0.05])
    packed, state = quantize_4bit(block, blocksize=64, compress_statistics=False, quant_type="nf4")
    parts = {f"linear.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    source = write_block(tmp_path, {"linear.weight": packed, **parts})
    merged = Merged(source, Tensors.of_model(source.base), tied=False)
    assert merged.names == ["linear.weight"] and merged.shape("linear.weight") == (1, 64)
    weight = merged.read("linear.weight")
    expected = torch.tensor([1.0, 0.190930, -0.254441, 0.109580])
    torch.testing.assert_close(weight[0, :4], expected, rtol=0, atol=1e-6)
    assert weight.sum().item() == pytest.approx(1.046069, abs=2e-6)

    other = tmp_path / "plain"
    other.mkdir()
    source = write_block(other, {"linear.weight": block})
    plain = Merged(source, Tensors.of_model(source.base), tied=False)
    assert plain.read("linear.weight").sum().item() == pytest.approx(1.01)


def test_a_base_that_is_stored_in_4_bits(llama: Path, tmp_path: Path, train: Any, logits: Logits) -> None:
    """transformers with bitsandbytes and PEFT on the same two folders."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    load = AutoModelForCausalLM.from_pretrained
    load(llama, quantization_config=settings, dtype=torch.float32).save_pretrained(base)
    AutoTokenizer.from_pretrained(llama).save_pretrained(base)
    train(llama, adapter, method="lora")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    merged = export(adapter, "merged", dtype="float32")
    again = export(adapter, "merged", dtype="float32", base="dequantised", out=tmp_path / "again")
    assert torch.equal(logits(again), logits(merged))  # they are dequantised already
    wanted = logits(PeftModel.from_pretrained(load(base, dtype=torch.float32), adapter))
    torch.testing.assert_close(logits(merged), wanted, rtol=0, atol=1e-5)
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    assert "dequantised 4-bit weights of the base" in (merged / "README.md").read_text()


PEFT_KINDS = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"layers.1.mlp.up_proj": 2},
        "alpha_pattern": {"q_proj": 20, "layers.0.*down_proj": 3},
    },
    "head": {"modules_to_save": ["lm_head"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "lora on the embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "biases": {"bias": "lora_only"},
}


@pytest.mark.parametrize("base", ["llama", "tied_qwen2"])
@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_adapters_of_other_kinds_are_merged_as_peft_computes_them(
    kind: str, base: str, request: pytest.FixtureRequest, tmp_path: Path, logits: Logits
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(base)
    linears = ["q_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=4, lora_alpha=12, task_type="CAUSAL_LM", **({"target_modules": linears} | PEFT_KINDS[kind])
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(str(tmp_path / "adapter"))
    merged = export(tmp_path / "adapter", "merged", base=str(folder), dtype="float32")
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=2e-5)
    names = set(Tensors.of_model(merged).names)
    tied = json.loads((merged / "config.json").read_text())["tie_word_embeddings"]
    apart = base == "llama" or "embed" in kind or kind == "head"
    assert tied != apart and ("lm_head.weight" in names) == apart


def test_shards_are_bounded_in_size_and_in_memory(
    llama: Path, tmp_path: Path, train: Any, logits: Logits, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shards of 60 kB the largest file is one matrix (270 x 64 x 4 = 69 kB), and at no time are more bytes of
    merged weights alive than a shard and one matrix."""
    given: list[weakref.ref[torch.Tensor]] = []
    most, read = 0, Merged.read

    def counted(self: Merged, name: str) -> torch.Tensor:
        nonlocal most
        given.append(weakref.ref(tensor := read(self, name)))
        most = max(most, sum(t.numel() * 4 for ref in given if (t := ref()) is not None))
        return tensor

    policy, adapter = train(llama, tmp_path / "adapter", method="lora")
    monkeypatch.setattr(Merged, "read", counted)
    merged = export(adapter, "merged", dtype="float32", shard_gb=60e-6)
    monkeypatch.undo()
    files = sorted(merged.glob("model-*.safetensors"))
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    assert len(files) > 4 and {file.name for file in files} == set(index["weight_map"].values())
    largest = 270 * 64 * 4
    for file in files:
        with safe_open(file, "pt") as opened:
            sizes = [opened.get_tensor(name).numel() * 4 for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 60_000 or sizes == [largest]
    assert largest <= most <= 60_000 + largest
    torch.testing.assert_close(logits(merged), policy.forward_logits(ids), rtol=0, atol=1e-5)


def test_a_model_of_several_files_that_was_trained_whole(
    llama: Path, tmp_path: Path, logits: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run of method full leaves it: a folder with a model in its checkpoint."""
    from transformers import AutoModelForCausalLM

    run = tmp_path / "runs" / "whole"
    checkpoint = run / "checkpoints" / "step-000007"
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model.save_pretrained(checkpoint / "model", max_shard_size="60KB")
    for file in llama.glob("*token*"):
        (checkpoint / "model" / file.name).write_bytes(file.read_bytes())
    (run / "config.yaml").write_text("model: {path: org/base, method: full}\ndata: {train: rows.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    merged = export("whole", dtype="float32")  # the name of a run in runs/
    assert merged == run / "export" / "merged"
    assert torch.equal(logits(merged), logits(model))
    assert "base_model: org/base" in (merged / "README.md").read_text()
    out = tmp_path / "out"
    with pytest.raises(ExportError, match="is a whole model, without an adapter"):
        export("whole", "adapter", out=out)
    with pytest.raises(ExportError, match="has no adapter, so there is no base model to name"):
        export("whole", base=str(llama), out=out)
    with pytest.raises(ExportError, match="method was full, not qlora: there is nothing to dequantise"):
        export("whole", base="dequantised", out=out)


@pytest.mark.parametrize(
    ("stored", "asked", "written"),
    [("float32", None, "bfloat16"), ("float16", None, "float16"), ("bfloat16", None, "bfloat16")]
    + [("bfloat16", asked, asked) for asked in ("float32", "float16")],
)
def test_the_dtype(
    stored: str, asked: str | None, written: str, llama: Path, tmp_path: Path, train: Any
) -> None:
    """Merged in float32 and rounded once, whatever the base has."""
    from transformers import AutoModelForCausalLM

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    policy, _ = train(llama, adapter, method="lora")
    AutoModelForCausalLM.from_pretrained(llama, dtype=getattr(torch, stored)).save_pretrained(base)
    for file in llama.glob("*token*"):
        (base / file.name).write_bytes(file.read_bytes())
    merged = export(adapter, base=str(base), dtype=asked)
    name, lora = "model.layers.0.mlp.up_proj", policy.weights()
    a, b = (lora[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    weight = load_file(base / "model.safetensors")[f"{name}.weight"].double() + 3 * b.double() @ a.double()
    found = load_file(merged / "model.safetensors")[f"{name}.weight"]
    assert (
        str(found.dtype) == f"torch.{written}"
        and json.loads((merged / "config.json").read_text())["dtype"] == written
    )
    step = (
        2 * torch.finfo(found.dtype).eps if written == "float32" else torch.finfo(found.dtype).eps / 2 * 1.01
    )
    assert ((found.double() - weight).abs() <= step * weight.abs() + 1e-7).all()


def test_what_does_not_fit_or_is_not_finite_is_not_written(llama: Path, tmp_path: Path, train: Any) -> None:
    policy, adapter = train(llama, tmp_path / "adapter", method="lora")
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
    policy.weights()[name][3, 2] = 1e7
    policy.save_adapter(adapter, str(llama))
    with pytest.raises(
        ExportError, match=r"layers\.1\.self_attn\.o_proj\.weight has values too large for float16"
    ):
        export(adapter, dtype="float16")
    policy.weights()[name][3, 2] = float("nan")
    policy.save_adapter(adapter, str(llama))
    with pytest.raises(ExportError, match=r"layers\.1\.self_attn\.o_proj\.weight is not finite .* diverged"):
        export(adapter, dtype="bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_the_files_beside_the_weights(llama: Path, tmp_path: Path, train: Any) -> None:
    """The tokenizer as it was, the run's own chat template, and every id that ends a completion."""
    from transformers import AutoTokenizer, GenerationConfig

    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    train(llama, checkpoint / "adapter", method="lora")
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    (tmp_path / "run" / "config.yaml").write_text(
        f"model: {{path: {llama}, method: lora, chat_template: {template}}}\n"
    )
    base = tmp_path / "base"
    base.mkdir()
    for file in llama.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    GenerationConfig(temperature=0.6, do_sample=True, eos_token_id=[7]).save_pretrained(base)
    merged = export(tmp_path / "run", base=str(base))
    ours, theirs = AutoTokenizer.from_pretrained(merged), AutoTokenizer.from_pretrained(llama)
    text = "In the end, <|im_end|> the <think>thé</think>"
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"
    generation = GenerationConfig.from_pretrained(merged)
    assert generation.temperature == 0.6
    assert generation.eos_token_id == [7, 260]  # the file's; config.json and the tokenizer both say 260


def test_an_embedding_with_more_rows_than_tokens_keeps_them(llama: Path, tmp_path: Path) -> None:
    merged = export(llama, dtype="float32", out=tmp_path / "out")
    weights, base = load_file(merged / "model.safetensors"), load_file(llama / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (270, 64)
    assert weights.keys() == base.keys() and all(torch.equal(weights[name], base[name]) for name in base)


def test_check_says_how_far_the_export_is_from_the_policy(
    llama: Path, tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tmp_path / "run" / "checkpoints" / "step-000003" / "adapter"
    train(llama, adapter, method="qlora")
    (tmp_path / "run" / "config.yaml").write_text(
        f"model: {{path: {llama}, method: qlora, dtype: float32}}\n"
    )

    def difference(**settings: Any) -> float:
        said: list[str] = []
        export(tmp_path / "run", dtype="float32", check=True, say=said.append, **settings)
        (sentence,) = [line for line in said if line.startswith("Log-probs")]
        return float(sentence.split(" by ")[1].split()[0])

    assert difference(out=tmp_path / "a") < 2e-5
    assert difference(out=tmp_path / "b", base="dequantised") < 2e-5
    assert difference(out=tmp_path / "c", base="original") > 0.05


def test_a_head_that_is_tied_by_the_familys_default(
    tmp_path: Path, write_model: Callable[..., Path], sizes: Any, logits: Logits
) -> None:
    """Gemma's config.json need not say so; and some files hold the same matrix twice."""
    from transformers import GemmaConfig

    base = write_model(tmp_path / "base", GemmaConfig(**sizes(head_dim=16)))
    config = json.loads((base / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (base / "config.json").write_text(json.dumps(config))
    weights = load_file(base / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, base / "model.safetensors", {"format": "pt"})
    merged = export(base, dtype="float32", out=tmp_path / "out")
    assert load_file(merged / "model.safetensors").keys() == weights.keys()
    assert torch.equal(logits(merged), logits(base))


def test_the_python_interface() -> None:
    import covey

    assert covey.export is export
