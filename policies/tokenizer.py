"""Text to ids and back, exactly as the checkpoint's files say."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.policies.locate import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)


def load_tokenizer(
    folder: Path, chat_template: str | None = None, template_options: Mapping[str, Any] | None = None
) -> "PreTrainedTokenizerFast":
    """The fast tokenizer of a model folder.

    chat_template: a file with a Jinja template to use instead of the tokenizer's own.
    template_options: what its template is always rendered with, such as {"enable_thinking": False} for Qwen3.

    tokenizer.json is taken at its word: AutoTokenizer replaces its pre-tokenizer, normaliser and decoder with
    those that the model's architecture usually has (so a Llama tokenizer in a Qwen2 checkpoint, such as those
    of the DeepSeek distillations, would cut text into other tokens than the model was trained on).
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    has_file = (folder / "tokenizer.json").is_file()
    loader = PreTrainedTokenizerFast if has_file else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(folder)
    except Exception as error:  # of many kinds: parsers, missing packages, wrong keys
        raise ModelError(
            f"{folder}: the tokenizer does not load ({error}); copy its files again or write them with "
            "transformers' save_pretrained"
        ) from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"{folder}: there is only a slow tokenizer; convert it to a tokenizer.json, because supervised "
            "fine-tuning needs the character offsets of tokens"
        )
    if chat_template is not None:
        tokenizer.chat_template = _read_template(Path(chat_template).expanduser())
    if template_options:
        _set_options(tokenizer, template_options, chat_template or folder)
    _check_template(tokenizer, chat_template or folder)
    return tokenizer


def _set_options(tokenizer: Any, options: Mapping[str, Any], source: str | Path) -> None:
    """Renders with these options from here on. They belong to this object: nothing of them is saved with it."""
    for name in options:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template or "")):
            raise ModelError(
                f'model.template_options: the chat template of {source} does not read "{name}"; check its spelling '
                "or leave it out"
            )
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **options)


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model.chat_template: cannot read {file} ({error}); give a Jinja file") from error


def _check_template(tokenizer: Any, source: str | Path) -> None:
    """Jinja reports a syntax error when a template is first rendered, so this renders one."""
    if not tokenizer.chat_template:
        return
    import jinja2

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"{source}: chat template, line {error.lineno}: {error.message}") from error
    except Exception as error:  # a template may refuse this message and still take the user's
        log.debug("chat template of %s does not render a lone user message: %s", source, error)


def eos_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: those of generation_config.json, config.json and the tokenizer.

    In that order, without repeats. Chat models often end a turn with one id and a text with another.
    """
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for level in (settings, settings.get("text_config") or {}):
            value = level.get("eos_token_id")
            found += value if isinstance(value, list) else [value]
    found.append(tokenizer.eos_token_id)
    ids = tuple(dict.fromkeys(int(i) for i in found if i is not None))
    if not ids:
        log.warning("%s names no end-of-sequence token: every completion runs to max_new_tokens", folder)
    return ids


def decode_completion(tokenizer: Any, ids: Sequence[int], eos_ids: Iterable[int]) -> str:
    """The text of a completion without EOS and special tokens; bytes that are not UTF-8 become U+FFFD.

    The ids are decoded behind a letter, since a completion goes on from a prompt: the decoders of
    SentencePiece vocabularies drop the space in front of the first word of a text.
    """
    ends = set(eos_ids)
    kept = [i for i in ids if i not in ends]
    if not kept:
        return ""
    letter = tokenizer.encode("a", add_special_tokens=False)
    before, text = (
        tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for part in (letter, letter + kept)
    )
    return text.removeprefix(before)


def check_vocabulary(tokenizer: Any, embedding_rows: int) -> None:
    """Refuses a tokenizer with ids beyond the embedding. Spare rows are fine: their ids decode to nothing."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= embedding_rows:
        raise ModelError(
            f"the tokenizer goes up to id {largest} ({token!r}), but the embedding has {embedding_rows} rows "
            f"(ids 0..{embedding_rows - 1}); use the tokenizer that belongs to this model, or remove the "
            "tokens that were added to it"
        )
