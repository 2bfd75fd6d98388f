"""Reading weights and adapters: 4-bit checkpoints, shards, PEFT adapters to continue, and what is wrong with them."""

import json
import logging
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.policies import checkpoint
from covey.policies.checkpoint import Checkpoint
from covey.policies.decoder import DecoderPolicy
from covey.policies.linear import GROUPS
from covey.policies.load import load_policy
from covey.policies.locate import ModelError, locate_model
from covey.policies.spec import OutsideDecoder

IDS = list(range(10, 40))
LORA: dict[str, Any] = {"method": "lora", "dtype": "float32", "device": "cpu"}
QLORA: dict[str, Any] = {"method": "qlora", "dtype": "float32", "device": "cpu"}


def transformers_model(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32} | options)


def transformers_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def frozen(policy: DecoderPolicy, layer: int, name: str) -> torch.Tensor:
    """The weight of one linear out of its group."""
    group, names = next((g, names) for g, names in GROUPS.items() if name in names)
    stacked = policy.layers[layer].groups[group]
    return stacked.dense().split(stacked.sizes)[names.index(name)].clone()


# Weights that bitsandbytes stored in 4 bits


def save_quantised(model: Path, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """What transformers + bitsandbytes make of a checkpoint, saved; and read back."""
    from transformers import AutoTokenizer, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **settings)
    transformers_model(model, quantization_config=config, dtype=dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return transformers_model(folder)


def read_back(linear: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(linear.weight.data, linear.weight.quant_state).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [True, False])
def test_stored_nf4_is_read_bit_for_bit(double, dtype, tiny_llama, tmp_path):
    theirs = save_quantised(tiny_llama, tmp_path, dtype, bnb_4bit_use_double_quant=double)
    for options in ({**QLORA, "memory": "fast"}, {**QLORA, "memory": "lean"}, LORA):
        policy = load_policy(tmp_path, **options)
        for name, module in (("k_proj", "self_attn"), ("down_proj", "mlp")):
            linear = getattr(getattr(theirs.model.layers[1], module), name)
            assert torch.equal(frozen(policy, 1, name), read_back(linear)), (name, options)
    raw = load_policy(tiny_llama, **LORA)
    assert (frozen(policy, 1, "k_proj") - frozen(raw, 1, "k_proj")).abs().max() > 1e-3
    if dtype == torch.float32:  # else transformers computes in bfloat16
        logits = transformers_logits(theirs)
        torch.testing.assert_close(policy.forward_logits(IDS), logits, rtol=0, atol=1e-4)


def test_what_a_4_bit_checkpoint_left_alone_stays_as_it_is(tiny_llama, tmp_path):
    """One group is mixed (gate in 16 bits, up in 4), another is all in 16 bits."""
    skipped = ["model.layers.0.mlp.gate_proj", "model.layers.1.self_attn.o_proj", "lm_head"]
    save_quantised(tiny_llama, tmp_path, llm_int8_skip_modules=skipped)
    raw = load_policy(tiny_llama, **LORA)
    for memory in ("fast", "lean"):
        policy = load_policy(tmp_path, memory=memory, **QLORA)
        assert torch.equal(frozen(policy, 0, "gate_proj"), frozen(raw, 0, "gate_proj"))
        assert torch.equal(frozen(policy, 1, "o_proj"), frozen(raw, 1, "o_proj"))
        assert (frozen(policy, 0, "up_proj") - frozen(raw, 0, "up_proj")).abs().max() > 1e-3
        logits = transformers_logits(transformers_model(tmp_path))
        torch.testing.assert_close(policy.forward_logits(IDS), logits, rtol=0, atol=1e-4)


def test_stored_nf4_of_another_shape_is_named(tiny_llama, tmp_path):
    save_quantised(tiny_llama, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(
        ModelError, match=r"gate_proj\.weight is stored as nf4 \(48, 32\).*promises nf4 \(64, 32\)"
    ):
        load_policy(tmp_path, **QLORA)


# Shards


def test_shards_hold_the_same_model(tiny_llama, tmp_path):
    transformers_model(tiny_llama).save_pretrained(tmp_path, max_shard_size="20kB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama / name, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    whole, parts = (load_policy(folder, **LORA).forward_logits(IDS) for folder in (tiny_llama, tmp_path))
    assert torch.equal(whole, parts)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelError, match=f"{shard.name}: not a complete safetensors file"):
        load_policy(tmp_path, **LORA)
    shard.unlink()
    with pytest.raises(ModelError, match=rf"lacks 1 of its \d+ weight files \(first {shard.name}\)"):
        locate_model(str(tmp_path))
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        Checkpoint(tmp_path)


def test_a_tensor_that_is_missing_is_named(tiny_llama, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight; is it complete"):
        load_policy(tmp_path, **LORA)


def test_one_plain_matrix_at_a_time_is_in_memory(tiny_llama, monkeypatch):
    """With qlora nothing but the largest matrix of a layer is ever held besides what stays."""
    alive: dict[int, int] = {}
    most = 0
    read = Checkpoint.read

    def watched(self: Checkpoint, name: str, *args: Any) -> torch.Tensor:
        nonlocal most
        tensor = read(self, name, *args)
        if name.endswith("_proj.weight"):
            alive[id(tensor)] = tensor.numel()
            weakref.finalize(tensor, alive.pop, id(tensor))
            most = max(most, sum(alive.values()))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", watched)
    policy = load_policy(tiny_llama, memory="lean", **QLORA)
    assert most == max(n * k for n, k, _ in policy.spec.linears.values()) == 48 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gpu_gets_in_pieces_what_the_file_holds(device, dtype, tiny_llama, monkeypatch):
    """Pieces of 100 elements, which end within rows; on a GPU all pass through the same page-locked memory."""
    from safetensors.torch import load_file

    monkeypatch.setattr(checkpoint, "CHUNK", 100)
    if device == "cpu":  # which has no page-locked memory
        monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    where = torch.device(device)
    stored = load_file(tiny_llama / "model.safetensors")
    with checkpoint.open_checkpoint(tiny_llama) as opened:
        read = {name: checkpoint._upload(opened._tensor(name), dtype, where) for name in stored}
    for name, tensor in stored.items():
        assert read[name].device.type == device and torch.equal(read[name].cpu(), tensor.to(dtype)), name


# Adapters


def peft_adapter(base: Path, folder: Path, **settings: Any) -> Any:
    """An adapter that PEFT made and saved, with numbers in A and B; and the model that has it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM", **{"r": 3, "lora_alpha": 5, "target_modules": "all-linear"} | settings
    )
    model = get_peft_model(transformers_model(base), config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(str(folder))
    return model


ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "rslora": {"use_rslora": True, "r": 4, "lora_alpha": 3},
    "some": {"target_modules": ["v_proj", "up_proj"], "lora_dropout": 0.3},
    "pattern": {"target_modules": r".*\.mlp\.(gate|down)_proj"},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_peft_adapter_goes_on_as_it_is(kind, tiny_qwen2, tmp_path):
    """Its own rank, alpha, rsLoRA and targets; and the reference is that adapter, or the base model if asked."""
    model = peft_adapter(tiny_qwen2, tmp_path / "theirs", **ADAPTERS[kind]).eval()
    policy = load_policy(tiny_qwen2, adapter=tmp_path / "theirs", rank=7, alpha=99.0, **LORA)
    config = model.peft_config["default"]
    assert (policy.adapter.rank, policy.adapter.alpha) == (config.r, config.lora_alpha)
    expected = transformers_logits(model)
    torch.testing.assert_close(policy.forward_logits(IDS), expected, rtol=0, atol=1e-4)

    policy.save_adapter(tmp_path / "mine")
    from peft import PeftModel

    again = PeftModel.from_pretrained(transformers_model(tiny_qwen2), tmp_path / "mine")
    torch.testing.assert_close(transformers_logits(again), expected, rtol=0, atol=1e-4)

    with torch.no_grad():
        policy.parameters()[0].zero_()
    with policy.reference():
        torch.testing.assert_close(policy.forward_logits(IDS), expected, rtol=0, atol=1e-4)
    base = load_policy(tiny_qwen2, adapter=tmp_path / "theirs", reference="base", **LORA)
    plain = transformers_logits(transformers_model(tiny_qwen2))
    with base.reference():
        torch.testing.assert_close(base.forward_logits(IDS), plain, rtol=0, atol=1e-4)


def test_a_new_rslora_adapter_is_scaled_by_the_root_of_its_rank(tiny_llama):
    policy = load_policy(tiny_llama, rank=16, alpha=8.0, rslora=True, **LORA)
    assert policy.adapter.scale == 2.0
    assert load_policy(tiny_llama, rank=16, alpha=8.0, **LORA).adapter.scale == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, "layers_to_transform"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"holds base_model\.model\.lm_head\."),
    ],
)
def test_adapters_that_the_decoder_does_not_continue(settings, message, tiny_llama, tmp_path):
    peft_adapter(tiny_llama, tmp_path, **settings)
    with pytest.raises(OutsideDecoder, match=message):
        load_policy(tiny_llama, adapter=tmp_path, **LORA)


def test_an_adapter_for_another_base_says_whose_it_is(tiny_llama, tiny_qwen2, tmp_path, caplog):
    from transformers import LlamaConfig, LlamaForCausalLM

    peft_adapter(tiny_llama, tmp_path / "same")
    load_policy(tiny_llama, adapter=tmp_path / "same", **LORA)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    load_policy(tiny_qwen2, adapter=tmp_path / "same", **LORA)  # of the same sizes: nobody can know
    assert f"was trained on {tiny_llama}; it goes on with {tiny_qwen2}" in caplog.text

    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"intermediate_size": 48}, r"model\.layers\.2\..* is only in the adapter"),
        ({"intermediate_size": 64, "num_hidden_layers": 2}, r"is \(3, 64\), expected \(3, 48\)"),
    ]
    for changes, message in cases:
        other = tmp_path / "other"
        LlamaForCausalLM(LlamaConfig(**sizes | changes)).save_pretrained(other)
        peft_adapter(other, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
        with pytest.raises(ModelError, match=message) as caught:
            load_policy(tiny_llama, adapter=tmp_path / "adapter", **LORA)
        assert f"It was trained on {other}, and this model is {tiny_llama}" in str(caught.value)


def test_a_broken_adapter_is_named(tiny_llama, tmp_path):
    peft_adapter(tiny_llama, tmp_path)
    weights = (tmp_path / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights[:200])
    with pytest.raises(ModelError, match="the adapter cannot be read"):
        load_policy(tiny_llama, adapter=tmp_path, **LORA)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors"):
        load_policy(tiny_llama, adapter=tmp_path, **LORA)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(ModelError, match="a IA3 adapter; covey continues LoRA adapters"):
        load_policy(tiny_llama, adapter=tmp_path, **LORA)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, r"lora\.dropout: 0\.1 .* set it to 0, or train with HFPolicy"),
        ({"dora": True}, r"lora\.dora: .* train with HFPolicy"),
        ({"modules_to_save": ["embed_tokens"]}, r"lora\.modules_to_save: embed_tokens .* HFPolicy"),
    ],
)
def test_lora_options_that_the_decoder_does_not_have(options, message, tiny_llama):
    with pytest.raises(OutsideDecoder, match=message):
        load_policy(tiny_llama, **LORA | options)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["c_attn"], 'no linear "c_attn"; it has q_proj'),
        (["q_proj", "qkv_proj"], 'no linear "qkv_proj"'),
        ([], "the list is empty"),
        ("all", 'no linear "all"'),
    ],
)
def test_targets_that_match_nothing_are_named(targets, message, tiny_llama):
    with pytest.raises(ModelError, match=message):
        load_policy(tiny_llama, targets=targets, **LORA)
