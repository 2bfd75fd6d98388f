"""Documents of supervised fine-tuning: token ids, and which of them are trained.

What is trained is marked by position, never by id, so a padding id that is also the end of sequence does no
harm. A document begins with the ids that `make_prompts` gives for its prompt; the answer is tokenised on its
own, as a sampler would have produced it, and ends with the end of the turn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from covey.rl.config import SftDataSection
from covey.rl.data import DataError, Row
from covey.rl.templates import Encoded, Encoder
from covey.rl.turns import Turns, Untrained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Document:
    """ids: [N]. trained: [N], True where token i is a target; never the first, which nothing predicts."""

    row: int
    ids: tuple[int, ...]
    trained: tuple[bool, ...]


class Documents(Encoded[Document]):
    """The documents of `rows` rows.

    split: rows of which several documents were made. untrained: rows that were dropped, as nothing in them is trained.
    """

    def __init__(
        self, items: Iterable[Document], *, rows: int, split: int, untrained: int, **facts: Any
    ) -> None:
        super().__init__(items, **facts)
        self.rows, self.split, self.untrained = rows, split, untrained


def make_documents(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    section: SftDataSection,
    eos_id: int | Sequence[int],
) -> Documents:
    """The rows in their order as documents of at most section.max_tokens ids.

    eos_id: what ends a sequence; the first of several is put behind text that has no end of its own.
    A document that is too long is an error, dropped, keeps its start, or is split, as section.overlong says; it is
    also dropped if its start has nothing to train. A row with nothing to train is an error or dropped, as
    section.untrained says. Raises DataError, also if nothing is left.
    """
    encoder = Encoder(tokenizer, section)
    turns = Turns(encoder, [eos_id] if isinstance(eos_id, int) else list(eos_id))
    documents: list[Document] = []
    too_long: list[tuple[Row, int]] = []
    untrained: list[Row] = []
    dropped = split = 0
    for row in rows:
        try:
            ids, trained = _encode(row, encoder, turns, section)
        except Untrained:
            if section.untrained == "error":
                raise
            untrained.append(row)
            continue
        if len(ids) > section.max_tokens:
            too_long.append((row, len(ids)))
        pieces = [(ids, trained)]
        if len(ids) > section.max_tokens and section.overlong != "error":
            pieces = _shortened(row, ids, trained, section)
            dropped += not pieces
            split += len(pieces) > 1
        documents += [Document(row.index, tuple(ids), tuple(trained)) for ids, trained in pieces]
    _check_lengths(len(rows), too_long, len(documents), section)
    if untrained:
        encoder.note(
            f"{untrained[0].where}: nothing of it is trained; {_of(untrained, rows)} were dropped for that."
        )
    if split:
        encoder.note(f"{split} of {len(rows)} rows are longer than data.max_tokens and were split.")
    return Documents(
        documents,
        rows=len(rows),
        split=split,
        untrained=len(untrained),
        dropped=dropped,
        truncated=0 if section.overlong == "split" else len(too_long) - dropped,
        longest=max(len(document.ids) for document in documents),
        warnings=encoder.warnings(),
    )


def documents_of(row: Row, encoder: Encoder, turns: Turns, section: SftDataSection) -> list[Document]:
    """Those of one row, as `make_documents`; none if the row is dropped."""
    try:
        ids, trained = _encode(row, encoder, turns, section)
    except Untrained:
        if section.untrained == "error":
            raise
        return []
    pieces = [(ids, trained)]
    if len(ids) > section.max_tokens:
        _check_lengths(1, [(row, len(ids))], 1, section)
        pieces = _shortened(row, ids, trained, section)
    return [Document(row.index, tuple(ids), tuple(trained)) for ids, trained in pieces]


def _of(some: Sequence[Row], rows: Sequence[Row]) -> str:
    return f"{len(some)} of {len(rows)} rows"


def _shortened(
    row: Row, ids: list[int], trained: list[bool], section: SftDataSection
) -> list[tuple[list[int], list[bool]]]:
    """What becomes of a document that is too long: nothing, its start, or several pieces.

    A piece begins with the last id of the piece before it, so every id that was a target still is one, once.
    """
    limit = section.max_tokens
    if section.overlong == "drop":
        return []
    starts = range(1)
    if section.overlong == "split":
        if row.text is None:
            raise DataError(
                f"{row.where}: has {len(ids)} tokens, more than data.max_tokens ({limit}), and only plain texts can be "
                "split: the rest of an answer would lack its question. Raise data.max_tokens, or set data.overlong: "
                "drop or truncate."
            )
        starts = range(0, len(ids) - 1, max(1, limit - 1))
    pieces = [(ids[k : k + limit], [False, *trained[k + 1 : k + limit]]) for k in starts]
    return [piece for piece in pieces if any(piece[1])]


def _check_lengths(
    rows: int, too_long: Sequence[tuple[Row, int]], kept: int, section: SftDataSection
) -> None:
    lengths = [length for _, length in too_long]
    if too_long and section.overlong == "error":
        raise DataError(
            f"{too_long[0][0].where}: has {lengths[0]} tokens, more than data.max_tokens "
            f"({section.max_tokens}); so have {len(too_long)} of {rows} rows, the longest {max(lengths)}. "
            "Raise data.max_tokens, or set data.overlong: drop, truncate or (plain texts) split."
        )
    if kept:
        return
    if len(too_long) < rows:
        raise DataError(
            f"Nothing is left of {rows} rows: {len(too_long)} are longer than data.max_tokens ({section.max_tokens}), "
            "in the others no token would be trained. Check data.loss_on and the roles of the messages."
        )
    raise DataError(
        f"All {rows} rows are longer than data.max_tokens ({section.max_tokens}) and were dropped; they "
        f"have {min(lengths, default=0)} to {max(lengths, default=0)} tokens. Raise data.max_tokens."
    )


def _encode(
    row: Row, encoder: Encoder, turns: Turns, section: SftDataSection
) -> tuple[list[int], list[bool]]:
    """Ids of the whole document, and the marks of trained ones. Raises Untrained if there are none."""
    loss_on = section.loss_on
    if row.text is not None:
        if loss_on in ("completion", "assistant", "last"):
            raise DataError(f"data.loss_on: {loss_on} needs a prompt, but {row.where} is one text. Use all.")
        ids = turns.ended(encoder.raw_ids(row.text, row))
        trained = [True] * len(ids)
    elif row.completion is not None:
        ids, trained = _completion(row, row.completion, encoder, turns, loss_on == "assistant")
    else:
        messages = encoder.messages(row)
        if messages is None or row.messages is None:
            raise DataError(f"{row.where}: has a prompt but nothing to learn after it. Set data.completion.")
        first = encoder.prompt_length(row, messages) if row.prompt_messages and loss_on != "assistant" else 0
        only_last = loss_on == "last" or (loss_on == "completion" and not row.prompt_messages)
        ids, trained = turns.conversation(row, messages, first, only_last=only_last)
    if loss_on == "all":
        trained = [True] * len(ids)
    if not any(trained[1:]):
        raise Untrained(
            f"{row.where}: no token of it would be trained. Correct or remove this row, or set data.untrained: drop."
        )
    return ids, [False, *trained[1:]]


def _completion(
    row: Row, completion: str, encoder: Encoder, turns: Turns, every_turn: bool
) -> tuple[list[int], list[bool]]:
    """The prompt, and the completion as it stands; every_turn: assistant turns of the prompt count too."""
    text, messages, ids = encoder.prompt(row)
    if messages is None:
        tail = turns.ended(encoder.ids_after(text, completion))
    elif every_turn and any(message["role"] == "assistant" for message in messages):
        answer = {"role": "assistant", "content": completion}
        return turns.conversation(row, (*messages, answer), 0, only_last=False)
    else:
        tail = turns.answer(row, messages, text, completion)
    return ids + tail, [False] * len(ids) + [True] * len(tail)
