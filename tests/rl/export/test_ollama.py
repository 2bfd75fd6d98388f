"""Modelfiles: the Go template writes what the Jinja template writes, or there is none."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.policies.tiny import CHAT_TEMPLATE
from covey.rl.export.export import export
from covey.rl.export.ollama import modelfile

CHATML_WITH_SYSTEM = (  # as SmolLM2's and Qwen2.5's: a system message of its own where none is given
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set t = '<|start|>' + m.role + '<|mid|>\n\n' + m.content | trim + '<|eot|>' %}"
    "{% if loop.first %}{% set t = bos_token + t %}{% endif %}{{ t }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|mid|>\n\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + eos_token }}"
    "{% elif m.role == 'system' %}{{ '<|system|>\n' + m.content + eos_token }}"
    "{% else %}{{ '<|assistant|>\n' + m.content + eos_token }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
OPENS_THINKING = CHAT_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content + '<end_of_turn>\n' }}{% endfor %}"
)
MISTRAL = (  # the system message inside of the first user's
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% endif %}{% endfor %}"
)
CHATS = [
    [("user", "What is 2 + 3?")],
    [("system", "Think {first}."), ("user", "hi")],
    [("user", "a"), ("assistant", "b"), ("user", "c\n\nd")],
    [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
]


def go(template: str, chat: list[tuple[str, str]]) -> str:
    """Renders the part of Go's template language that is used: if .System, range .Messages, eq .Role, else, end."""
    system = next((content for role, content in chat if role == "system"), "")
    pieces = re.split(r"\{\{ (.*?) \}\}", template)
    written, at, keep, item = [], 0, [True], None
    loop, messages = 0, list(chat)
    while at < len(pieces):
        if all(keep):
            written.append(pieces[at])
        at += 1
        if at == len(pieces):
            break
        action = pieces[at]
        at += 1
        if action == "if .System":
            keep.append(bool(system))
        elif action == "range .Messages":
            loop, item = at, messages.pop(0)
            keep.append(True)
        elif match := re.fullmatch(r'if eq \.Role "(\w+)"', action):
            keep.append(item is not None and item[0] == match[1])
        elif match := re.fullmatch(r'else if eq \.Role "(\w+)"', action):
            keep[-1] = item is not None and not keep[-1] and item[0] == match[1]
        elif action == "else":
            keep[-1] = not keep[-1]
        elif action == "end":
            keep.pop()
            if len(keep) == 1 and item is not None:  # the end of the range
                item = messages.pop(0) if messages else None
                if item is not None:
                    keep.append(True)
                    at = loop
        else:
            written.append(
                {".System": system, ".Content": item[1] if item else ""}[action] if all(keep) else ""
            )
    return "".join(written)


def template_in(text: str) -> str | None:
    match = re.search(r'^TEMPLATE """(.*?)"""$', text, re.S | re.M)
    return match and match[1]


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, CHATML_WITH_SYSTEM, LLAMA3, ZEPHYR, MISTRAL, OPENS_THINKING]
)
@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_go_template_writes_what_the_jinja_template_writes(
    template: str, adds_bos: bool, word_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = word_tokenizer(template=template)
    written = template_in(modelfile("m.gguf", tokenizer, [2], adds_bos=adds_bos))
    assert written is not None
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert go(written, chat) == (wanted.removeprefix("<bos>") if adds_bos else wanted)


@pytest.mark.parametrize("template", [GEMMA, "{{ messages[-1].content }}", CHAT_TEMPLATE + "{{ '{{' }}"])
def test_a_template_that_is_more_than_pieces_is_left_to_ollama(
    template: str, word_tokenizer: Callable[..., Any]
) -> None:
    text = modelfile("m.gguf", word_tokenizer(template=template), [2], adds_bos=True)
    assert template_in(text) is None and "# The chat template is in the GGUF file" in text


def test_a_modelfile_beside_its_file(llama: Path, tmp_path: Path, word_tokenizer: Callable[..., Any]) -> None:
    out = export(llama, "gguf", quant="q4_0", out=tmp_path / "out")
    lines = (out / "Modelfile").read_text().splitlines()
    name = lines[0].removeprefix("FROM ./")
    assert (out / name).is_file() and name.endswith("-Q4_0.gguf")
    assert lines[-1] == "PARAMETER stop " + json.dumps("<|im_end|>")
    told = modelfile("m.gguf", word_tokenizer(), [], adds_bos=True, system="Think.\nThen say it.")
    assert told == 'FROM ./m.gguf\nSYSTEM """Think.\nThen say it."""\n'
    bare = modelfile("m.gguf", word_tokenizer(), [2, 4], adds_bos=True)
    assert bare == 'FROM ./m.gguf\nPARAMETER stop "<eos>"\nPARAMETER stop "<|im_end|>"\n'
