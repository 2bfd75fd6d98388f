"""Tokenizers in GGUF: llama.cpp's name for how text is cut, and scores that join tokens in the order of the merges."""

import heapq
import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from covey.rl.export.export import export
from covey.rl.export.gguf_vocabulary import PIECES, PROBE, _rules, name_in_file, pre_tokenizer_name
from covey.rl.export.source import ExportError

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
# What the tokenizer.json of these models says.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEXTS = [
    "The quick brown fox jumps over the lazy dog; it's 12345 o'clock.",
    "  two  spaces,\ttabs\n\n\nand lines \n x",
    "naïve café: 你好 世界 😀 €5",
    "def f(x):\n    return x ** 2  # comment",
]


def split(*patterns: str) -> Any:
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns), BYTES])


def bpe(pre_tokenizer: Any) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizer
    return core


@pytest.mark.parametrize(
    ("pre_tokenizer", "ignore_merges", "name"),
    [
        (split(LLAMA3), True, "llama-bpe"),
        (split(LLAMA3), False, "smaug-bpe"),
        (split(QWEN2), False, "qwen2"),
        (GPT2, False, "gpt-2"),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), False, "smollm"),
        (
            split(r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
            False,
            "smollm",
        ),
    ],
)
def test_known_ways_to_cut_text(pre_tokenizer: Any, ignore_merges: bool, name: str) -> None:
    assert pre_tokenizer_name(bpe(pre_tokenizer), ignore_merges) == name


def test_every_two_rules_cut_the_probe_differently() -> None:
    cuts = {name: str(rule(PROBE)) for name, rule in _rules().items()}
    assert len(set(cuts.values())) == len(cuts) == len(PIECES) + 2


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        split(LLAMA3.replace("{1,3}", "{1,2}")),
        split(LLAMA3.replace("{1,3}", "+")),
        split(LLAMA3.replace("(?i:", "(?:")),
        split(LLAMA3.replace("|'d", "")),
        split(LLAMA3.replace(r"[\r\n]*|", "|", 1)),
        split(LLAMA3.replace(r"[\r\n]*|", r"[\r\n/]*|", 1)),
        split(LLAMA3.replace(r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?\p{L}+")),
        split(LLAMA3.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|")),
        split(LLAMA3.replace(r"|\s*[\r\n]+", "")),
        split(LLAMA3.replace(r"|\s+(?!\S)", "")),
        split("[一-龥]+", LLAMA3),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), GPT2]),
        pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), GPT2]),
        pre_tokenizers.Whitespace(),
        BYTES,
        None,
    ],
)  # fmt: skip
def test_other_ways_to_cut_text_are_refused(pre_tokenizer: Any) -> None:
    core = Tokenizer(models.BPE())
    if pre_tokenizer is not None:
        core.pre_tokenizer = pre_tokenizer
    with pytest.raises(
        ExportError, match=r"no llama\.cpp name for; export --to merged and try .*convert_hf_to_gguf"
    ):
        pre_tokenizer_name(core, False)


def sentencepiece_like(prefix: bool) -> Tokenizer:
    """A BPE tokenizer with byte fallback and every split of a token among its merges, as SentencePiece's become."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    core.normalizer = normalizers.Sequence(steps)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False)
    core.train_from_iterator(
        [*TEXTS[:2], TEXTS[3], "the then there other this thin lather over cover"] * 3, trainer
    )
    data = json.loads(core.to_str())
    vocabulary = data["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    data["model"]["merges"] = [
        [token[:at], token[at:]]
        for token in tokens
        if token not in specials
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    data["added_tokens"] = [added for added in data["added_tokens"] if added["id"] < 3]
    core = Tokenizer.from_str(json.dumps(data))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


def by_scores(text: str, tokens: list[str], scores: list[float], prefix: bool) -> list[int]:
    """SentencePiece's own algorithm, as in llama.cpp: those neighbours are joined whose union scores highest."""
    ids = {token: i for i, token in enumerate(tokens)}
    pieces: list[str | None] = list(("▁" if prefix else "") + text.replace(" ", "▁"))
    heap: list[tuple[float, int, str, int]] = []

    def consider(left: int) -> None:
        right = next((i for i in range(left + 1, len(pieces)) if pieces[i] is not None), None)
        if right is not None and (union := f"{pieces[left]}{pieces[right]}") in ids:
            heapq.heappush(heap, (-scores[ids[union]], left, union, right))

    for i in range(len(pieces)):
        consider(i)
    while heap:
        _, left, union, right = heapq.heappop(heap)
        if pieces[left] is None or pieces[right] is None or f"{pieces[left]}{pieces[right]}" != union:
            continue
        pieces[left], pieces[right] = union, None
        consider(left)
        if (before := next((i for i in reversed(range(left)) if pieces[i] is not None), None)) is not None:
            consider(before)
    kept = [piece for piece in pieces if piece is not None]
    parts = ([ids[p]] if p in ids else [ids[f"<0x{byte:02X}>"] for byte in p.encode()] for p in kept)
    return list(itertools.chain.from_iterable(parts))


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_join_tokens_in_the_order_of_the_merges(
    prefix: bool, tmp_path: Path, write_model: Callable[..., Path], sizes: Any
) -> None:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    core = sentencepiece_like(prefix)
    folder = write_model(tmp_path / "model", LlamaConfig(**sizes(vocab_size=430, eos_token_id=2)))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    (file,) = export(folder, "gguf", quant="f16", out=tmp_path / "out").glob("*.gguf")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
    part = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    assert part["model"] == "llama" and part["add_space_prefix"] == prefix and part["add_bos_token"]
    assert part["token_type"][:4] == [
        gguf.TokenType.UNKNOWN,
        *[gguf.TokenType.CONTROL] * 2,
        gguf.TokenType.BYTE,
    ]
    assert part["tokens"][10 + 3] == "<0x0A>" and len(part["tokens"]) == 430
    joined = 0
    for text in TEXTS:
        wanted = core.encode(text, add_special_tokens=False).ids
        assert by_scores(text, part["tokens"], part["scores"], prefix) == wanted
        joined += len(text) - len(wanted)
    assert joined > 50
    if importlib.util.find_spec("llama_cpp") is not None:
        assert llama_cpp_ids(file, TEXTS) == [core.encode(text).ids for text in TEXTS]


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs the module llama_cpp")
@pytest.mark.parametrize("name", [*PIECES, "gpt-2", "smollm"])
def test_llama_cpp_cuts_text_as_its_name_says(
    name: str, tmp_path: Path, write_model: Callable[..., Path], sizes: Any
) -> None:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
    core = bpe(split(PIECES[name]) if name in PIECES else GPT2 if name == "gpt-2" else digits)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([PROBE, *TEXTS] * 2, trainer)
    folder = write_model(tmp_path / "model", LlamaConfig(**sizes(vocab_size=900, eos_token_id=0)))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(folder)
    (file,) = export(folder, "gguf", quant="f16", out=tmp_path / "out").glob("*.gguf")
    # Upper and lower case are known to llama.cpp in these two for English letters alone.
    texts = TEXTS if name in ("tekken", "gpt-4o") else [PROBE, *TEXTS]
    assert llama_cpp_ids(file, texts) == [core.encode(text).ids for text in texts]


def llama_cpp_ids(file: Path, texts: list[str]) -> list[list[int]]:
    module: Any = importlib.import_module("llama_cpp")
    reader = module.Llama(str(file), vocab_only=True, verbose=False)
    try:
        return [reader.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
    finally:
        reader.close()


def test_tokenizers_that_gguf_does_not_hold(
    tmp_path: Path, write_model: Callable[..., Path], sizes: Any, word_tokenizer: Callable[..., Any]
) -> None:
    from transformers import LlamaConfig

    folder = write_model(tmp_path / "model", LlamaConfig(**sizes(vocab_size=700)))
    word_tokenizer().save_pretrained(folder)
    with pytest.raises(ExportError, match="the tokenizer is a WordLevel model; covey writes BPE tokenizers"):
        export(folder, "gguf", out=tmp_path / "words")
    with pytest.raises(ExportError, match="the tokenizer has no merges"):
        export("tiny", "gguf", out=tmp_path / "bytes")


def test_a_name_with_phi_3_in_it_is_for_tokenizers_like_phi_3(word_tokenizer: Callable[..., Any]) -> None:
    from tokenizers import AddedToken

    plain = word_tokenizer()
    assert name_in_file("grpo-Phi-3-mini", plain) == "grpo-phi 3-mini"
    assert name_in_file("grpo-Qwen2", plain) == "grpo-Qwen2"
    strips = word_tokenizer()
    strips.add_special_tokens(
        {"additional_special_tokens": ["<s>", "</s>", AddedToken("<|endoftext|>", special=True, rstrip=True)]}
    )
    assert name_in_file("low-lr", strips) == "low-lr (phi-3)"
    assert name_in_file("grpo-Phi-3-mini", strips) == "grpo-Phi-3-mini"
