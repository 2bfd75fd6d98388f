"""Small word-level tokenizers: every word, space and line break is one token whose id the tests know."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

# Ids 0 to 7, then words. The order fixes the ids.
SPECIAL = ["<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<pad>"]
WORDS = ["\n", " ", ":", "U", "A", "user", "assistant", "system", "hi", "ok", "add", "8", "sum", "a", "b"]
MODEL = ["model"]  # as Gemma calls the assistant
NUMBERS = [f"w{i}" for i in range(600)]


@pytest.fixture(scope="session")
def word_id() -> Callable[[str], int]:
    """The id of a word of the tokenizers below."""
    return {word: i for i, word in enumerate([*SPECIAL, *WORDS, *NUMBERS, *MODEL])}.__getitem__


@pytest.fixture(scope="session")
def word_tokenizer() -> Callable[..., Any]:
    """Makes a tokenizer. add_bos: raw text gets <bos>. skip_spaces: spaces make no token. special: more of them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(
        *,
        template: str | None = None,
        add_bos: bool = True,
        eos: str = "<eos>",
        pad: str = "<pad>",
        skip_spaces: bool = False,
        special: Sequence[str] = (),
    ) -> PreTrainedTokenizerFast:
        vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS, *NUMBERS, *MODEL])}
        raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        raw.pre_tokenizer = (
            pre_tokenizers.WhitespaceSplit()
            if skip_spaces
            else pre_tokenizers.Split(Regex(r"\s|[A-Z]|[a-z0-9]+|[^\sA-Za-z0-9]"), "isolated")
        )
        raw.decoder = decoders.Fuse()
        raw.add_tokens(["<think>", "</think>"])  # like Qwen's: added, but not special
        if add_bos:
            raw.post_processor = processors.TemplateProcessing(
                single="<bos> $A", special_tokens=[("<bos>", 1)]
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=raw,
            bos_token="<bos>",
            eos_token=eos,
            pad_token=pad,
            unk_token="<unk>",
            additional_special_tokens=["<|im_start|>", "<|im_end|>", *special],
            chat_template=template,
        )

    return make
