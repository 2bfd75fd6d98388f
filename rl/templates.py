"""Prompts as token ids: with the chat template or as raw text, with exactly one BOS, and not too long.

The template is the authority: what it writes is tokenised as it stands and nothing is added. Raw text gets
what the tokenizer puts in front of any text (often a BOS). The ids made here are the ids that are sampled
from, trained on and evaluated with; nobody tokenises a prompt a second time.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from covey.rl.config import DataSection
from covey.rl.data import DataError, Message, Row
from covey.rl.messages import with_text_arguments

if TYPE_CHECKING:  # both are slow to import, and a mistake in the data should show at once
    from transformers import PreTrainedTokenizerBase

    from covey.rollout.engine import Prompt

Item = TypeVar("Item")


class Encoded(list[Item], Generic[Item]):
    """What was made of the rows, and what happened to the rest.

    dropped, truncated: rows that were too long. longest: ids in the longest item that was kept.
    warnings: sentences to show before the run starts.
    """

    def __init__(
        self, items: Iterable[Item], *, dropped: int, truncated: int, longest: int, warnings: Sequence[str]
    ) -> None:
        super().__init__(items)
        self.dropped, self.truncated, self.longest = dropped, truncated, longest
        self.warnings = list(warnings)


def make_prompts(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", section: DataSection
) -> "Encoded[Prompt]":
    """The rows' prompts in their order, none longer than section.max_prompt_tokens.

    A prompt that is too long is an error, dropped, or keeps its last ids, as section.overlong says; its text
    and messages stay whole. Raises DataError, also if nothing is left and for a prompt without any token.
    """
    from covey.rollout.engine import Prompt

    encoder = Encoder(tokenizer, section)
    encoded = [encoder.prompt(row) for row in rows]
    lengths = [len(ids) for _, _, ids in encoded]
    limit = section.max_prompt_tokens
    too_long = [i for i, length in enumerate(lengths) if length > limit]
    if too_long and section.overlong == "error":
        raise DataError(
            f"{rows[too_long[0]].where}: the prompt has {lengths[too_long[0]]} tokens, more than "
            f"data.max_prompt_tokens ({limit}); so have {len(too_long)} of {len(rows)} prompts, the longest "
            f"{max(lengths)}. Raise data.max_prompt_tokens, or set data.overlong: drop or truncate."
        )
    if len(too_long) == len(rows) and section.overlong == "drop":
        raise DataError(
            f"All {len(rows)} prompts are longer than data.max_prompt_tokens ({limit}) and were dropped; "
            f"they have {min(lengths, default=0)} to {max(lengths, default=0)} tokens. "
            "Raise data.max_prompt_tokens."
        )
    skip = set(too_long) if section.overlong == "drop" else set()
    prompts = [
        Prompt(row.index, tuple(ids[-limit:]), text, messages, row.columns)
        for i, (row, (text, messages, ids)) in enumerate(zip(rows, encoded, strict=True))
        if i not in skip
    ]
    return Encoded(
        prompts,
        dropped=len(skip),
        truncated=len(too_long) - len(skip),
        longest=max(len(prompt.ids) for prompt in prompts),
        warnings=encoder.warnings(),
    )


def check_context(max_prompt: int, max_new: int, limit: int | None) -> None:
    """Raises DataError if a prompt and its completion do not fit into the model's `limit` positions."""
    if limit is not None and max_prompt + max_new > limit:
        room = (
            f"Lower rollout.max_new_tokens to at most {limit - max_prompt}"
            if limit > max_prompt
            else f"Lower rollout.max_new_tokens, and data.max_prompt_tokens below {limit}"
        )
        raise DataError(
            f"Prompts of up to {max_prompt} tokens and completions of up to {max_new} need "
            f"{max_prompt + max_new} positions, the model has {limit}. {room}, or use shorter prompts."
        )


class Encoder:
    """A tokenizer and how the configuration wants prompts written; counts what is worth a warning."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", section: DataSection) -> None:
        if section.chat is False and section.system is not None:
            raise DataError(
                "data.system: raw prompts have no system message. Remove it, or data.chat: false."
            )
        self.tokenizer: Any = tokenizer
        self.section = section
        self._notes: dict[str, list[str]] = {}
        # What the tokenizer puts in front of raw text: a BOS, several ids, or nothing.
        plain, whole = self.ids("a"), list(self.tokenizer("a")["input_ids"])
        starts = [k for k in range(len(whole)) if plain and whole[k : k + len(plain)] == plain]
        bos = whole[:1] if whole[:1] == [self.tokenizer.bos_token_id] else []
        self.prefix = whole[: starts[0]] if starts else bos

    def ids(self, text: str) -> list[int]:
        """Token ids of the text alone."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def ids_after(self, text: str, more: str) -> list[int]:
        """Ids of `more` where it follows `text`, whose own ids stay as they are.

        Some tokenizers put a space in front of a text; so both are tokenised together, unless a token then
        spans the border, which a sampler that is given the ids of `text` could not produce.
        """
        before, whole = self.ids(text), self.ids(text + more)
        return whole[len(before) :] if whole[: len(before)] == before else self.ids(more)

    def raw_ids(self, text: str, row: Row) -> list[int]:
        """Ids of raw text, with what the tokenizer puts in front once, even if the text has it already."""
        ids, size = self.ids(text), len(self.prefix)
        while size and ids[:size] == self.prefix:
            self.note("begins with the text of the tokenizer's BOS, which is added anyway; kept one", row)
            ids = ids[size:]
        if not self.prefix and not ids:
            raise DataError(
                f"{row.where}: the text is empty and the tokenizer adds no BOS, so nothing is there to go on "
                "from. Remove this row, or set data.prompt to a template with some text."
            )
        return self.prefix + ids

    def messages(self, row: Row) -> tuple[Message, ...] | None:
        """The row's conversation, the system message included; None if it is raw text."""
        messages, section = row.messages, self.section
        if messages is None:
            if not (section.chat or (section.chat is None and section.system is not None)):
                return None
            messages = ({"role": "user", "content": row.prompt},)
        elif section.chat is False:
            raise DataError(
                f"{row.where}: holds messages, which only a chat template can write. Remove data.chat."
            )
        if section.system is None:
            return messages
        if messages[0]["role"] == "system":
            self.note("has its own system message, which is kept instead of data.system", row)
            return messages
        return ({"role": "system", "content": section.system}, *messages)

    def prompt_length(self, row: Row, messages: Sequence[Message]) -> int:
        """How many of `messages` are the prompt."""
        if row.messages is None or not row.prompt_messages:
            return len(messages) - (messages[-1]["role"] == "assistant")
        return row.prompt_messages + len(messages) - len(row.messages)

    def prompt(self, row: Row) -> tuple[str, tuple[Message, ...] | None, list[int]]:
        """Text, messages and ids of the row's prompt."""
        messages = self.messages(row)
        if messages is None:
            if row.prompt is None:
                raise DataError(f"{row.where}: is a text to learn and has no prompt. Set data.prompt.")
            return row.prompt, None, self.raw_ids(row.prompt, row)
        messages = messages[: self.prompt_length(row, messages)]
        text = self.render(messages, row, generation=True)
        ids = self.ids(text)
        if not ids:
            raise DataError(f"{row.where}: the chat template makes an empty prompt of it. Remove this row.")
        return text, messages, ids

    def render(self, messages: Sequence[Message], row: Row, *, generation: bool) -> str:
        """The conversation as text; with generation, followed by the header of the answer to come."""
        if not self.tokenizer.chat_template:
            raise DataError(
                "The model has no chat template. Set model.chat_template to a file with one, or, for plain "
                'text, data.prompt: "Q: {question}\\nA:" without data.system and data.chat.'
            )
        if not messages:
            raise DataError(f"{row.where}: begins with the assistant. Put a user message in front of it.")
        from jinja2 import TemplateError

        try:
            return self.apply_template(messages, row, tokenize=False, add_generation_prompt=generation)
        except (TemplateError, TypeError) as error:
            raise DataError(
                f"{row.where}: the chat template refuses these messages ({error}). "
                f"Roles: {', '.join(message['role'] for message in messages)}."
            ) from None

    def apply_template(self, messages: Sequence[Message], row: Row, **how: Any) -> Any:
        """What the chat template makes of the messages, with the tools of the row."""
        if row.tools:
            how["tools"] = [dict(tool) for tool in row.tools]
            if "tools" not in str(self.tokenizer.chat_template):
                self.note("has tools, which the chat template does not describe to the model", row)
        try:
            return self.tokenizer.apply_chat_template([dict(message) for message in messages], **how)
        except TypeError:  # some templates, such as DeepSeek's, want the arguments of a call as text
            if not any("tool_calls" in message for message in messages):
                raise
            texts = [with_text_arguments(m) if "tool_calls" in m else dict(m) for m in messages]
            return self.tokenizer.apply_chat_template(texts, **how)

    def note(self, what: str, row: Row | None = None) -> None:
        """Remembers a warning; the same one about many rows becomes one sentence."""
        places, place = self._notes.setdefault(what, []), row.where if row else ""
        if place not in places[-1:]:  # a row may be rendered several times
            places.append(place)

    def warnings(self) -> list[str]:
        return [_sentence(what, places) for what, places in self._notes.items()]


def _sentence(what: str, places: Sequence[str]) -> str:
    others = f" (so have {len(places) - 1} more rows)" if len(places) > 1 else ""
    return f"{places[0]}: {what}{others}." if places[0] else what
