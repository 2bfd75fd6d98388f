"""Preference pairs: a prompt with the completion that was preferred and the one that was not.

Rows have the columns `prompt`, `chosen` and `rejected`. A completion is text, or a list of messages that begins with
the assistant; a list that begins with anybody else is the whole conversation, and the prompt is what both conversations
begin with. Both sides are written as documents of supervised fine-tuning (rl/documents.py): same template, same end of
turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from covey.rl.config import DpoDataSection, SftDataSection
from covey.rl.data import MESSAGES, Columns, DataError, Row, find_columns, find_source, make_row, source_key
from covey.rl.documents import Document, make_documents
from covey.rl.messages import role_of
from covey.rl.sources import did_you_mean
from covey.rl.tasks import preference_rows
from covey.rl.templates import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIDES = ("chosen", "rejected")  # also the names of the columns


@dataclass(frozen=True, slots=True)
class Preference:
    """A row that is not tokenised yet: each side as the row of SFT that it would be. `where` names the row."""

    where: str
    chosen: Row
    rejected: Row


class Preferences(list[Preference]):
    """found: where they come from and which columns are what, in words."""

    found: str = ""


class Pair(NamedTuple):
    """Two documents that begin with the same prompt. Their targets are the completions' tokens, the end included."""

    chosen: Document
    rejected: Document


# ---------------------------------------------------------------------------------------------------- rows


def load_pairs(source: Any, section: DpoDataSection, *, held_out: bool = False) -> Preferences:
    """The rows of `source`: a file, a hub id "name[:config[:split]]", "task:NAME", dicts, or a Dataset.

    held_out: a task gives its held-out split, a hub id without a split its test split.
    Raises DataError, which says what is wrong where, and what to do.
    """
    found = find_source(source, section, held_out, preference_rows)
    reader = _Reader(list(dict.fromkeys(name for _, row in found.rows for name in row)), section)
    pairs = Preferences(found.each(reader.preference, source_key(held_out), section.malformed == "skip"))
    pairs.found = f"{found.name}: {reader.describe()}"
    return pairs


class _Reader:
    """Knows which column is what."""

    def __init__(self, names: Sequence[str], section: DpoDataSection) -> None:
        self.section, self.names = section, names
        self.sides = tuple(self._side(key, getattr(section, key)) for key in SIDES)
        # Hubs often add a column `messages` with the chosen conversation: no prompt.
        self.others = [n for n in names if n not in self.sides and n.lower() not in MESSAGES]
        self._found: dict[bool, Columns] = {}

    def preference(self, index: int, where: str, row: Mapping[str, Any]) -> Preference:
        whole = [_is_conversation(row.get(column), self.section.roles) for column in self.sides]
        if whole[0] != whole[1]:
            raise DataError(
                f'{where}: of "{self.sides[0]}" and "{self.sides[1]}" one is a whole conversation and the other '
                "is not. Write both in the same way."
            )
        found = self._columns(conversation=whole[0])
        if whole[0]:
            sides = [
                make_row(index, where, row, replace(found, prompt=None, messages=c, more=None), self.section)
                for c in self.sides
            ]
            shared = self._shared(where, row, found, *sides)
            sides = [replace(side, prompt_messages=shared) for side in sides]
        else:
            assert found.prompt is not None
            sides = [
                make_row(index, where, row, replace(found, completion=c), self.section) for c in self.sides
            ]
        named = (replace(s, where=f'{where} "{c}"') for s, c in zip(sides, self.sides, strict=True))
        return Preference(where, *named)

    def describe(self) -> str:
        """'prompt from "question", chosen from "chosen", rejected from "rejected"', once rows have been read."""
        columns = next(iter(self._found.values()))
        if columns.prompt == "prompt" and "prompt" not in self.names:  # it is a part of whole conversations
            columns = replace(columns, prompt=None)
        sides = [f'{key} from "{column}"' for key, column in zip(SIDES, self.sides, strict=True)]
        return ", ".join(filter(None, [columns.describe(), *sides]))

    def _side(self, key: str, given: str | None) -> str:
        name = given or next((n for n in self.names if n.lower() == key), None)
        columns = ", ".join(self.names)
        if name is None:
            raise DataError(
                f"No column is called {key} ({columns}). Set data.{key} to the column with the "
                f"{'preferred completion' if key == 'chosen' else 'completion that was not preferred'}."
            )
        if name not in self.names:
            raise DataError(
                f'data.{key}: no column "{name}". Columns: {columns}.{did_you_mean(name, self.names)}'
            )
        return name

    def _columns(self, *, conversation: bool) -> Columns:
        """Where prompt and answer are; conversations need no column for their prompt."""
        if conversation not in self._found:
            names = self.others
            if not conversation and not names and not self.section.prompt:
                raise DataError(
                    f"No column is left for the prompt ({', '.join(self.names)}). Add one, or write whole "
                    f'conversations (lists of messages) into "{self.sides[0]}" and "{self.sides[1]}".'
                )
            if conversation and "prompt" not in names and not self.section.prompt:
                names = ["prompt", *names]
            self._found[conversation] = find_columns(names, self.section)
        return self._found[conversation]

    def _shared(self, where: str, row: Mapping[str, Any], found: Columns, chosen: Row, rejected: Row) -> int:
        """How many messages the two conversations begin with together; at least one of each is left over."""
        assert chosen.messages and rejected.messages
        longest = min(len(chosen.messages), len(rejected.messages)) - 1
        both = zip(chosen.messages[:longest], rejected.messages[:longest], strict=True)
        shared = next((k for k, (a, b) in enumerate(both) if a != b), longest)
        if not shared:
            raise DataError(
                f'{where}: "{self.sides[0]}" and "{self.sides[1]}" do not begin with the same message, so they are no '
                "answers to one prompt. Correct or remove this row."
            )
        if found.prompt and isinstance(row.get(found.prompt), list | tuple):
            prompt = make_row(0, where, row, replace(found, answer=None, more=None), self.section).messages
            assert prompt is not None
            if chosen.messages[: len(prompt)] != prompt or rejected.messages[: len(prompt)] != prompt:
                raise DataError(
                    f'{where}: "{self.sides[0]}" and "{self.sides[1]}" are whole conversations, but do not begin with '
                    f'the messages of "{found.prompt}". Correct this row, or leave the prompt out of both.'
                )
        return shared


def _is_conversation(value: Any, roles: Mapping[str, str]) -> bool:
    """A list of messages that does not begin with the assistant."""
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, Mapping) and role_of(first, roles) != "assistant"


# -------------------------------------------------------------------------------------------------- tokens


def make_pairs(
    preferences: Sequence[Preference],
    tokenizer: "PreTrainedTokenizerBase",
    section: DpoDataSection,
    eos_id: int | Sequence[int],
) -> Encoded[Pair]:
    """The preferences in their order, as pairs of documents of at most section.max_tokens ids.

    eos_id: what ends a sequence; the first of several is put behind text that has no end of its own.
    A pair that is too long is an error, dropped, or keeps the start of both documents, as section.overlong says; it
    is also dropped if that leaves nothing to compare. A pair that prefers nothing is an error, or dropped with a
    warning (section.unusable). Raises DataError.
    """
    written = [p for p in preferences if not (_is_empty(p.chosen) or _is_empty(p.rejected))]
    # How a side is tokenised is SFT's business; how long it may be is not.
    as_sft = SftDataSection(train=section.train, chat=section.chat, system=section.system, max_tokens=1 << 40)
    documents = [
        make_documents([getattr(p, side) for p in written], tokenizer, as_sft, eos_id) if written else []
        for side in SIDES
    ]
    pairs = [(p, Pair(*pair)) for p, *pair in zip(written, *documents, strict=True)]
    usable = [(p, pair) for p, pair in pairs if not _equal(pair)]
    warnings = [warning for side in documents for warning in getattr(side, "warnings", [])]
    if len(usable) < len(preferences):
        warnings.append(_report_unusable(preferences, {id(p) for p, _ in usable}, section))
    for preference, pair in usable:
        if pair.chosen.ids[0] != pair.rejected.ids[0]:
            raise DataError(
                f"{preference.where}: the chat template begins the two conversations with different tokens. "
                "Set model.chat_template to one that writes messages in their order."
            )
    return _limit(usable, section, list(dict.fromkeys(warnings)))


def _limit(
    pairs: Sequence[tuple[Preference, Pair]], section: DpoDataSection, warnings: list[str]
) -> Encoded[Pair]:
    """The pairs, none with a document of more than section.max_tokens ids."""
    limit = section.max_tokens
    too_long = [(p.where, _longest(pair)) for p, pair in pairs if _longest(pair) > limit]
    lengths = [length for _, length in too_long]
    if too_long and section.overlong == "error":
        raise DataError(
            f"{too_long[0][0]}: has {lengths[0]} tokens with its longer completion, more than data.max_tokens "
            f"({limit}); so have {len(too_long)} of {len(pairs)} pairs, the longest {max(lengths)}. "
            "Raise data.max_tokens, or set data.overlong: drop or truncate."
        )
    fitting = [pair if _longest(pair) <= limit else _cut(pair, section) for _, pair in pairs]
    kept = [pair for pair in fitting if pair is not None]
    if not kept:
        raise DataError(
            f"All {len(pairs)} pairs are longer than data.max_tokens ({limit}) and were dropped; they have "
            f"{min(lengths)} to {max(lengths)} tokens. Raise data.max_tokens."
        )
    dropped = len(fitting) - len(kept)
    return Encoded(
        kept,
        dropped=dropped,
        truncated=len(too_long) - dropped,
        longest=max(map(_longest, kept)),
        warnings=warnings,
    )


def _is_empty(row: Row) -> bool:
    """True if the completion has no text."""
    if row.completion is not None:
        return not row.completion.strip()
    tail = (row.messages or ())[row.prompt_messages :]
    said = [m for m in tail if m["role"] == "assistant"]
    return bool(said) and all(
        isinstance(m["content"], str) and not m["content"].strip() and "tool_calls" not in m for m in said
    )


def _equal(pair: Pair) -> bool:
    chosen, rejected = pair
    return chosen.ids == rejected.ids and chosen.trained == rejected.trained


def _report_unusable(preferences: Sequence[Preference], usable: set[int], section: DpoDataSection) -> str:
    """A warning about pairs that were dropped; raises DataError if that is not wanted, or nothing is left."""
    bad = [p for p in preferences if id(p) not in usable]
    empty = [row.where for row in (bad[0].chosen, bad[0].rejected) if _is_empty(row)]
    what = f"{empty[0]} is empty" if empty else f"{bad[0].where}: both completions are the same"
    share = f"{len(bad)} of {len(preferences)} pairs"
    if section.unusable == "error" or not usable:
        ways = ", or set data.unusable: drop" if usable else ""
        raise DataError(f"{what}; {share} are empty or equal. Correct or remove them{ways}.")
    return f"{share} were dropped, because a completion is empty or both are the same; the first: {what}"


def _longest(pair: Pair) -> int:
    return max(len(document.ids) for document in pair)


def _cut(pair: Pair, section: DpoDataSection) -> Pair | None:
    """The start of both documents; None if they are to be dropped, or nothing is left to compare."""
    if section.overlong == "drop":
        return None
    limit = section.max_tokens
    short = Pair(*(replace(d, ids=d.ids[:limit], trained=d.trained[:limit]) for d in pair))
    return short if all(any(d.trained) for d in short) and not _equal(short) else None
