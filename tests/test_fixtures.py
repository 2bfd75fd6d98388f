"""The shared checkpoints are what the other tests take them for."""

import json
from pathlib import Path

import pytest
import torch


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def test_table_lm_logits_are_the_table_whatever_came_before(table_lm, tmp_path):
    table = 3 * torch.randn(64, 64)
    model = load(table_lm(table, tmp_path / "model"))
    ids = torch.randint(0, 64, (4, 33))
    logits = model(ids).logits
    torch.testing.assert_close(
        logits, table[ids], rtol=2e-7, atol=0
    )  # one rounding of table / 8 * 8: none at all


def test_table_lm_takes_one_row_for_every_token(table_lm, tmp_path):
    model = load(table_lm(torch.zeros(64), tmp_path / "model"))
    logp = model(torch.arange(64)[None]).logits.log_softmax(-1)
    torch.testing.assert_close(logp, torch.full_like(logp, -4.158883083))  # -ln 64


@pytest.mark.parametrize("loader", ["AutoTokenizer", "PreTrainedTokenizerFast"])
def test_table_lm_tokenizer_has_one_token_per_character(loader, table_lm, tmp_path):
    import transformers

    folder = table_lm(torch.zeros(64), tmp_path / "model")
    tokenizer = getattr(transformers, loader).from_pretrained(folder)
    text = "ab  12+3=?\n"
    ids = tokenizer.encode(text)
    assert (len(tokenizer), len(ids), tokenizer.decode(ids)) == (64, len(text), text)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "U:hi\nA:ok<|end|>"


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama3", "tiny_qwen2"])
def test_tiny_models_are_not_trivial(name, request):
    folder = request.getfixturevalue(name)
    model = load(folder)
    weights = dict(model.named_parameters())
    assert model(torch.randint(0, 96, (1, 20))).logits.std() > 0.5
    assert weights["model.layers.1.input_layernorm.weight"].std() > 0.1
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 96
    if name == "tiny_qwen2":
        assert weights["model.layers.0.self_attn.q_proj.bias"].abs().min() > 0
        assert model.lm_head.weight is model.model.embed_tokens.weight
    else:
        assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_llama3_scaling_keeps_blends_and_divides(tiny_llama, tiny_llama3):
    plain, scaled = (load(f).model.rotary_emb.inv_freq for f in (tiny_llama, tiny_llama3))
    ratio = (scaled / plain).tolist()
    assert ratio[0] == 1 and 1 / 8 < ratio[1] < 1 and ratio[2:] == [1 / 8, 1 / 8]
