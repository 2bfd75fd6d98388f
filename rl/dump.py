"""What SFT will train on, to read: documents in the order of the steps with their targets marked, and counters."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice

from covey.rewards.reward import RewardSpec
from covey.rl.config import SftConfig
from covey.rl.data import Cursor
from covey.rl.documents import Document
from covey.rl.stream import StreamedSftTrainer
from covey.rl.trainers import SftTrainer

MARKS = ("⟦", "⟧")
COLOURS = ("\033[1;32m", "\033[0m")


def dump_batch(config: SftConfig, count: int, *, colour: bool = False) -> Iterator[str]:
    """Lines: the first `count` documents of the run with what is trained between ⟦ and ⟧, then counters and warnings.

    colour: what is trained is green instead. Loads the tokenizer and the data, never weights.
    """
    specs = [RewardSpec(**dict(r)) for r in config.rewards]
    if config.data.streaming:
        streamed = StreamedSftTrainer(config, specs)
        documents = (document for step in iter(streamed.stream.next, None) for document in step)
        yield from _shown(islice(documents, count), streamed.tokenizer, colour)
        yield "---"
        yield f"data       {streamed.found}"
        yield "a stream: how much there is, nobody knows"
        return
    trainer = SftTrainer(config, specs)
    data = config.data
    order = Cursor(len(trainer.data), len(trainer.data), data.seed, data.shuffle, wrap=False).next()
    yield from _shown([trainer.data[place] for place in order[:count]], trainer.tokenizer, colour)
    yield "---"
    yield from counters(trainer)
    yield from (f"warning: {warning}" for warning in trainer.warnings)


def _shown(documents: Iterable[Document], tokenizer: object, colour: bool) -> Iterator[str]:
    for document in documents:
        yield f"--- row {document.row}: {len(document.ids)} tokens, {sum(document.trained)} trained"
        yield marked(tokenizer, document, COLOURS if colour else MARKS)


def counters(trainer: SftTrainer) -> list[str]:
    """One line for each count of the training data."""
    data = trainer.data
    tokens = sum(len(document.ids) for document in data)
    trained = sum(sum(document.trained) for document in data)
    counts: dict[str, int | str] = {
        "data": trainer.found,
        "rows": data.rows,
        "documents": len(data),
        "held out": trainer.held_out_rows,
        "tokens": tokens,
        "trained": f"{trained} ({trained / tokens:.1%})",
        "longest": data.longest,
        "truncated": data.truncated,
        "split": data.split,
        "dropped": f"{data.dropped + data.untrained} ({data.dropped} too long, {data.untrained} with nothing to train)",
        "steps": trainer.steps,
    }
    return [f"{name:<10} {value}" for name, value in counts.items()]


def marked(tokenizer: object, document: Document, marks: tuple[str, str]) -> str:
    """The document's text, special tokens included, with each run of targets between the marks."""
    text, at = "", 0
    for trained, run in groupby(document.trained):
        behind = at + len(list(run))
        piece = _printable(_piece(tokenizer, document.ids, at, behind))
        text += marks[0] + piece + marks[1] if trained else piece
        at = behind
    return text


def _piece(tokenizer: object, ids: Sequence[int], start: int, end: int) -> str:
    """The text that ids[start:end] add to those before: alone, some tokenizers would lose a space."""
    before, whole = _decode(tokenizer, ids[:start]), _decode(tokenizer, ids[:end])
    return whole[len(before) :] if whole.startswith(before) else _decode(tokenizer, ids[start:end])


def _decode(tokenizer: object, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)  # type: ignore[attr-defined]


def _printable(text: str) -> str:
    """Line breaks and tabs stay; other control characters, which could drive the terminal, do not."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
