"""A tokenizer in GGUF: llama.cpp has no tokenizer.json, only tokens, their kinds, merges or scores, and a name.

Two kinds of tokenizers are known. Byte-level BPE (GPT-2, Llama 3, Qwen) keeps its merges; the way it cuts text before
merging is no data in llama.cpp but a name from a list. BPE with byte fallback (SentencePiece: Llama 2, Gemma) has
scores instead of merges: the neighbours whose union scores highest are joined first.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import gguf
from gguf import TokenType
from tokenizers import Regex, pre_tokenizers

from covey.rl.export.source import ExportError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
CASED_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PIECES = {
    "llama-bpe": rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{OTHER}",
    "qwen2": rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{OTHER}",
    "tekken": rf"{LOWER}|{UPPER}|\p{{N}}|{CASED_OTHER}",
    "gpt-4o": rf"{LOWER}{CONTRACTIONS}?|{UPPER}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{CASED_OTHER}",
}
# Cuts differently under any two of the rules above, and under most others.
# ruff: noqa: RUF001
PROBE = (
    "It's DON'T DON'Txy we'LL I'd'a I'dx x'ss 1 22 333 4444 55555 1234567 a1b22 café naïve Straße ÀÉ e\u0301a "
    "camelCase HTTPServer iPhone ABCdef __init__ a/b//c .../\n/\n\n,\r\n;\n \n  \n   x    y\t\tz \t\n  "
    "你好，世界 123年 こんにちは カタカナ 안녕 привет ПРИВЕТ ǅ ʰ ½ ² Ⅳ ٣٤٥ 😀😀 👍🏽 €100 $5.00 #1 (a) [b]{c} <|x|> -- "
    "don’t\u00a0no-break\u3000wide\n\n\n"
)  # fmt: skip


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Any, rows: int, eos: Sequence[int]) -> None:
    """Adds a fast tokenizer for an embedding of `rows` rows; rows without a token get one that is never used.

    eos: all ids that end a completion. Raises ExportError for tokenizers that GGUF cannot hold.
    """
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    model = data["model"]
    if model["type"] != "BPE":
        raise ExportError(
            f"the tokenizer is a {model['type']} model; covey writes BPE tokenizers into GGUF files"
        )
    if not model["merges"]:
        raise ExportError("the tokenizer has no merges, and llama.cpp loads no BPE tokenizer without them")
    merges = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    _add_tokens(writer, data, rows)
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(model["vocab"], merges, rows))
        first = tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).tokens[0]
        writer.add_add_space_prefix(first.startswith("▁"))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(
            pre_tokenizer_name(tokenizer.backend_tokenizer, bool(model.get("ignore_merges")))
        )
        writer.add_token_merges([f"{left} {right}" for left, right in merges])
    _add_specials(writer, tokenizer, eos)
    if template := tokenizer.chat_template:
        named = isinstance(template, dict)
        writer.add_chat_template(
            [{"name": n, "template": t} for n, t in template.items()] if named else template
        )


def name_in_file(name: str, tokenizer: Any) -> str:
    """A name with "phi-3" in it for tokenizers like Phi-3's, and without it for others.

    llama.cpp looks for it: it then needs certain tokens, and drops spaces behind special ones.
    """
    complete = {"<unk>", "<s>", "</s>", "<|endoftext|>"} <= tokenizer.get_vocab().keys()
    if complete and any(token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return name if "phi-3" in name.lower() else f"{name} (phi-3)"
    return re.sub(r"phi-?3", "phi 3", name, flags=re.IGNORECASE)


def _add_tokens(writer: gguf.GGUFWriter, data: dict[str, Any], rows: int) -> None:
    tokens = [f"[PAD{i}]" for i in range(rows)]
    kinds = [TokenType.UNUSED] * rows
    unknown, fallback = data["model"].get("unk_token"), data["model"].get("byte_fallback")
    for token, i in data["model"]["vocab"].items():
        byte = fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", token)
        tokens[i] = token
        kinds[i] = TokenType.BYTE if byte else TokenType.UNKNOWN if token == unknown else TokenType.NORMAL
    for added in data["added_tokens"]:
        i = added["id"]
        tokens[i] = added["content"]
        if kinds[i] != TokenType.UNKNOWN:
            kinds[i] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)


def _scores(vocabulary: dict[str, int], merges: list[tuple[str, ...]], rows: int) -> list[float]:
    """Minus the rank of the first merge that makes a token, so that the order of joining is that of the merges."""
    scores = [-float(len(merges))] * rows
    for rank, (left, right) in reversed(list(enumerate(merges))):
        scores[vocabulary[left + right]] = -float(rank)
    return scores


def _add_specials(writer: gguf.GGUFWriter, tokenizer: Any, eos: Sequence[int]) -> None:
    for kind in ("bos", "eos", "unk", "pad"):
        if (i := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(i)
    others = [i for i in eos if i != tokenizer.eos_token_id]
    if others:  # llama.cpp stops at this one too, and at more that it knows by their text
        writer.add_eot_token_id(others[0])
    ids = tokenizer.backend_tokenizer.encode("a").ids
    writer.add_add_bos_token(ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(ids) > 1 and ids[-1] == tokenizer.eos_token_id)


def pre_tokenizer_name(tokenizer: Any, ignore_merges: bool) -> str:
    """llama.cpp's name for the way in which a byte-level BPE tokenizer cuts text before it merges."""
    if tokenizer.pre_tokenizer is not None:
        cut = tokenizer.pre_tokenizer.pre_tokenize_str
        for name, rule in _rules().items():
            if cut(PROBE) == rule(PROBE):
                # Llama 3 also takes whole words of the vocabulary without merging; others cut like it, but do not.
                return "smaug-bpe" if name == "llama-bpe" and not ignore_merges else name
    raise ExportError(
        "the tokenizer cuts text in a way that covey has no llama.cpp name for; export --to merged and try "
        "llama.cpp's convert_hf_to_gguf.py on that"
    )


def _rules() -> dict[str, Callable[[str], list]]:
    """How the tokenizers that llama.cpp has names for cut a text."""
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    rules: dict[str, Any] = {
        name: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_of])
        for name, pattern in PIECES.items()
    }
    rules["gpt-2"] = gpt2
    rules["smollm"] = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return {name: rule.pre_tokenize_str for name, rule in rules.items()}
