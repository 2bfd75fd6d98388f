"""Supervised fine-tuning against transformers + PEFT: the same rows, labels written down by hand, no packing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.policies.load import load_policy
from covey.rl.batch import pack_documents, split
from covey.rl.config import SftDataSection
from covey.rl.data import load_rows
from covey.rl.documents import make_documents
from covey.rl.objectives import sft_loss

EOS = 2
# What the families' own templates write for conversations without tools, with their own special tokens.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (  # reasoning stays behind the last question only, where the last answer always gets a think block
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c, r = m.content, '' %}"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content is string %}{% set r = m.reasoning_content %}"
    "{% elif '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1] %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or r) %}<think>\n{{ r.strip('\n') }}\n</think>\n\n{% endif %}"
    "{% endif %}{{ c }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPECIAL = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>")
SPECIAL += ("[INST]", "[/INST]")
ROWS = [["hi", "ok"], ["a b", "8", "sum 8 a", "add b"], ["b", "ok ok 8 a b"]]
REASONED = [["sum", "<think>\nadd a\n</think>\n\n8"], ["b", "<think>\nb\n</think>\n\nok"]]


def conversations(rows: list[list[str]]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(row)]} for row in rows]


def labelled(text: str, answers: list[str], tokenizer: Any) -> tuple[list[int], list[int]]:
    """ids of a rendered conversation, and labels: -100 but for the tokens of `answers`, found from left to right."""
    ids, labels, at = [], [], 0
    for answer in answers:
        start = text.index(answer, at)
        before, inside = (tokenizer.encode(t, add_special_tokens=False) for t in (text[at:start], answer))
        ids += before + inside
        labels += [-100] * len(before) + inside
        at = start + len(answer)
    rest = tokenizer.encode(text[at:], add_special_tokens=False)
    return ids + rest, labels + [-100] * len(rest)


def oracle(
    adapter: Path, base: Path, examples: list[tuple[list[int], list[int]]]
) -> tuple[float, dict[str, Any]]:
    """Token-mean cross-entropy of all examples and the adapter's gradients."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter, is_trainable=True
    )
    total = sum(label != -100 for _, labels in examples for label in labels[1:])
    loss = 0.0
    for ids, labels in examples:
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        part = torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum") / total
        part.backward()
        loss += part.item()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss, {name.replace(".default", ""): grad for name, grad in grads.items()}


@pytest.mark.parametrize(
    ("template", "rows", "end", "answers"),
    [
        (CHATML, ROWS, "<|im_end|>", [row[1::2] for row in ROWS]),
        (LLAMA3, ROWS, "<|eot_id|>", [row[1::2] for row in ROWS]),
        (GEMMA, ROWS, "<end_of_turn>", [row[1::2] for row in ROWS]),
        (MISTRAL, ROWS, "<eos>", [[f" {answer}" for answer in row[1::2]] for row in ROWS]),
        (QWEN3, REASONED, "<|im_end|>", [row[1::2] for row in REASONED]),
    ],
    ids=["chatml", "llama3", "gemma", "mistral", "qwen3"],
)
def test_loss_and_gradients_equal_transformers_and_peft(
    template: str,
    rows: list[list[str]],
    end: str,
    answers: list[list[str]],
    word_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = word_tokenizer(template=template, special=SPECIAL)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=640,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    policy = load_policy(tmp_path / "base", method="lora", dtype="float32", rank=2, alpha=4.0, device="cpu")
    (flat,) = policy.parameters()
    with torch.no_grad():
        flat.copy_(0.2 * torch.randn_like(flat))
    policy.save_adapter(tmp_path / "adapter")

    texts = [tokenizer.apply_chat_template(c["messages"], tokenize=False) for c in conversations(rows)]
    examples = [
        labelled(text, [answer + end for answer in parts], tokenizer)
        for text, parts in zip(texts, answers, strict=True)
    ]
    loss, expected = oracle(tmp_path / "adapter", tmp_path / "base", examples)

    section, stops = SftDataSection(train="unused"), [EOS, tokenizer.convert_tokens_to_ids(end)]
    documents = make_documents(load_rows(conversations(rows), section), tokenizer, section, stops)
    for document, (ids, labels) in zip(documents, examples, strict=True):
        assert ids.count(0) == 0 and document.ids[-1] == stops[1]  # no unknown word
        read = max(i for i, label in enumerate(labels) if label != -100) + 1
        assert list(document.ids[:read]) == ids[:read]
        assert [i for i, t in enumerate(document.trained) if t] == [
            i for i, x in enumerate(labels) if x != -100
        ]
    for tokens_per_pass in (1000, 9):
        policy.zero_grad()
        total = 0.0
        for part in split(pack_documents(documents), tokens_per_pass):
            value, _ = sft_loss(policy.logprobs(part).logp, part)
            value.backward()
            total += value.item()
        assert total == pytest.approx(loss, abs=1e-5)
        grads = dict(zip(policy.weights(), split_like(policy, flat.grad), strict=True))
        assert set(grads) == set(expected)
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad, expected[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def split_like(policy: Any, grad: torch.Tensor | None) -> list[torch.Tensor]:
    """The flat gradient as matrices, in the order of the adapter's weights."""
    assert grad is not None
    shapes = [w.shape for w in policy.weights().values()]
    return [g.view(s) for g, s in zip(grad.split([s.numel() for s in shapes]), shapes, strict=True)]
