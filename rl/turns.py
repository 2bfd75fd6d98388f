"""Where the assistant's turns lie in a conversation that a chat template has written.

Few templates say which tokens are the assistant's. Here the turns are found by rendering the conversation up
to each of them, and a turn counts only if everything that it says is there: some templates cut the reasoning
(`<think>`) out of the turns before the last, or of all. The last turn is then written without the template,
behind the prompt that a sampler would get; earlier ones are not trained.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from covey.rl.data import DataError, Message, Row
from covey.rl.messages import called
from covey.rl.templates import Encoder

OPEN, CLOSE = "<think>", "</think>"
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message, each known to some templates
PROBE = "covey probe"

Span = tuple[int, int]


class Untrained(DataError):
    """A row with nothing to learn."""


class Turns:
    """Assistant turns of one tokenizer's chat template. eos_ids: what ends a sequence."""

    def __init__(self, encoder: Encoder, eos_ids: list[int]) -> None:
        self.encoder, self.eos_ids = encoder, eos_ids
        self._ending: tuple[str, str] | None = None

    def ended(self, ids: list[int]) -> list[int]:
        """The ids with an end of sequence behind them, if there is none yet."""
        return ids if ids and ids[-1] in self.eos_ids else [*ids, self.eos_ids[0]]

    def answer(self, row: Row, prompt: Sequence[Message], text: str, content: str) -> list[int]:
        """Ids of an answer as it stands, behind the prompt whose rendered text is `text`."""
        opened = text.rstrip().endswith(OPEN)
        if opened and content.lstrip().startswith(OPEN):
            content = content.lstrip().removeprefix(OPEN).lstrip("\n")
        if opened and CLOSE not in content:
            raise DataError(
                f"{row.where}: the chat template opens {OPEN} for the model, but the answer never closes it. "
                f"Write reasoning and {CLOSE} into it, or set model.chat_template to one without {OPEN}."
            )
        ending, end = self._end_of_turn(row, prompt)
        complete = end and content.rstrip().endswith(end)
        ids = self.encoder.ids_after(text, content.rstrip() if complete else content + ending)
        return ids if end else self.ended(ids)

    def conversation(
        self, row: Row, messages: Sequence[Message], first: int, *, only_last: bool
    ) -> tuple[list[int], list[bool]]:
        """Ids up to the end of the last assistant turn; marks of assistant turns from message `first` on."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not turns:
            raise Untrained(
                f"{row.where}: no assistant message, so nothing to learn. Correct or remove this row, or set "
                "data.untrained: drop."
            )
        messages = messages[: turns[-1] + 1]
        context = self.encoder.render(messages[:-1], row, generation=True)
        context_ids = self.encoder.ids(context)
        wanted = turns[-1:] if only_last else turns
        if marked := self._marked_by_template(row, messages, context_ids, wanted):
            return marked
        tail = self._last_turn(row, messages, context)
        trained = [False] * len(context_ids)
        if len(wanted) > 1:
            spans = self._earlier_turns(row, messages, context, wanted[:-1])
            offsets = self._offsets(context) if spans else []
            for k, (a, b) in enumerate(offsets):
                trained[k] = any(start <= a < b <= end for start, end in spans)
        return context_ids + tail, trained + [True] * len(tail)

    # ------------------------------------------------------------------------------------------ one turn

    def _last_turn(self, row: Row, messages: Sequence[Message], context: str) -> list[int]:
        """Ids of the last message: as the template writes it, or as it stands if the template changes it."""
        message, prompt = messages[-1], messages[:-1]
        whole = self.encoder.render(messages, row, generation=False)
        end = self._find_turn(row, prompt, whole, context, message)
        if end is not None:
            tail = whole[len(context) : end]
            opened = tail.count(OPEN) + context.rstrip().endswith(OPEN)
            if opened == tail.count(CLOSE):
                ids = self.encoder.ids_after(context, tail)
                return ids if self._end_of_turn(row, prompt)[1] else self.ended(ids)
        if not {"tool_calls", *REASONING}.isdisjoint(message) or isinstance(message["content"], list):
            raise DataError(
                f"{row.where}: the chat template leaves out a part of the last message "
                f"({', '.join(message)}). Set model.chat_template to a template that writes it."
            )
        self.encoder.note(
            "has an answer that the chat template would change (it cuts or adds reasoning); "
            "trained on the answer as it stands in the data",
            row,
        )
        return self.answer(row, prompt, context, message["content"])

    def _earlier_turns(
        self, row: Row, messages: Sequence[Message], context: str, wanted: Sequence[int]
    ) -> list[Span]:
        """Where the turns lie in `context`; none if the template has changed one of them."""
        spans = []
        for i in wanted:
            before = self.encoder.render(messages[:i], row, generation=True) if i else ""
            end = self._find_turn(row, messages[:i], context, before, messages[i]) if i else None
            if end is None or not self.encoder.tokenizer.is_fast:
                self._note_changed(row, messages[i])
                return []
            spans.append((len(before), end))
        return spans

    def _note_changed(self, row: Row, message: Message) -> None:
        """Said once for all rows: a turn before the last is not written as it is in the data."""
        reasoned = not set(REASONING).isdisjoint(message) or OPEN in str(message["content"])
        what = (
            f"reasoning ({OPEN} ... {CLOSE}) in assistant turns before the last, which the chat template cuts out"
            if reasoned or CLOSE in str(message["content"])
            else "assistant turns before the last that the chat template does not write as they are in the data"
        )
        then = (
            "these turns are trained as the template writes them"
            if getattr(self.encoder.section, "loss_on", None) == "all"
            else "only the last turn is trained"
        )
        self.encoder.note(f"has {what}; {then}", row)

    def _find_turn(
        self, row: Row, prompt: Sequence[Message], text: str, before: str, message: Message
    ) -> int | None:
        """Where in `text` the message behind `before` ends, its end-of-turn included.

        None if `text` does not begin with `before`, or a part of the message is missing.
        """
        end = self._end_of_turn(row, prompt)[1]
        at = len(before)
        stop = text.find(end, at) if end else len(text)
        if stop < 0 or not text.startswith(before):
            return None
        for piece in _pieces(message):
            at = text.find(piece, at, stop)
            if at < 0:
                return None
            at += len(piece)
        return stop + len(end) if end else at

    def _end_of_turn(self, row: Row, prompt: Sequence[Message]) -> tuple[str, str]:
        """What the template writes behind an assistant's content up to the end-of-turn, and the end-of-turn.

        Both are "" if it ends a turn without a special token.
        """
        if self._ending is None:
            text = self.encoder.render(
                [*prompt, {"role": "assistant", "content": PROBE}], row, generation=False
            )
            behind = text.rpartition(PROBE)[2] if PROBE in text else ""
            found = [(behind.find(token), token) for token in self._special_tokens() if token in behind]
            at, end = min(found, default=(0, ""))
            self._ending = (behind[: at + len(end)] if end else "", end)
            if end and self.encoder.ids(end)[-1] not in self.eos_ids:
                self.encoder.note(
                    f"The chat template ends a turn with {end}, which does not end a completion in this run "
                    f"(ids {self.eos_ids} do): the model would go on after it. Set it as the eos token."
                )
        return self._ending

    def _special_tokens(self) -> set[str]:
        tokenizer = self.encoder.tokenizer
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        return added | {str(token) for token in tokenizer.all_special_tokens}

    def _offsets(self, text: str) -> list[Span]:
        tokenizer = self.encoder.tokenizer
        return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
            "offset_mapping"
        ]

    # ------------------------------------------------------------------------- templates that say it

    def _marked_by_template(
        self, row: Row, messages: Sequence[Message], context_ids: list[int], wanted: Sequence[int]
    ) -> tuple[list[int], list[bool]] | None:
        """Ids and marks from the template's {% generation %} blocks, if these hold every turn."""
        tokenizer = self.encoder.tokenizer
        if not (isinstance(tokenizer.chat_template, str) and tokenizer.is_fast):
            return None
        if not re.search(r"\{%-?\s*generation", tokenizer.chat_template):
            return None
        encoded: Any = self.encoder.apply_template(
            messages, row, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, runs = list(encoded["input_ids"]), _runs(encoded["assistant_masks"])
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if (
            len(runs) != len(turns)
            or ids[: len(context_ids)] != context_ids
            or runs[-1][0] < len(context_ids)
        ):
            return None
        prompt = messages[:-1]
        end = self._end_of_turn(row, prompt)[1]
        stops = {*self.eos_ids, *self.encoder.ids(end)[-1:]}
        trained = [False] * len(ids)
        last = 0
        for (start, behind), i in zip(runs, turns, strict=True):
            ends = [k for k in range(start, behind) if ids[k] in stops]
            text = "".join(tokenizer.decode(ids[start:behind]).split())
            if not ends or not all("".join(piece.split()) in text for piece in _pieces(messages[i])):
                return None
            last = ends[-1] + 1
            if i in wanted:
                trained[start:last] = [True] * (last - start)
        opened = tokenizer.decode(context_ids).rstrip().endswith(OPEN)
        tail = tokenizer.decode(ids[len(context_ids) :])
        if tail.count(OPEN) + opened != tail.count(CLOSE):
            return None
        return ids[:last], trained[:last]


def _pieces(message: Mapping[str, Any]) -> list[str]:
    """What a rendered message must contain, in this order: reasoning and answer, without the tags, and calls."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    texts = [*(str(message[key]) for key in REASONING if key in message), *parts]
    pieces = [piece.strip() for text in texts for piece in re.split(f"{OPEN}|{CLOSE}", text)]
    pieces += called(message)
    return [piece for piece in pieces if piece]


def _runs(mask: Sequence[int]) -> list[Span]:
    """Start and end of each run of ones."""
    edges = [
        k for k in range(len(mask) + 1) if (mask[k] if k < len(mask) else 0) != (mask[k - 1] if k else 0)
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))
