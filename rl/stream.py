"""SFT on a source that is read while it is used, for what does not fit into memory (data.streaming).

Rows come in the source's order through a window of data.shuffle_buffer rows: a random row of it leaves, the next one
takes its place. The order follows from the seed, the epoch and the rows alone, so a position is two numbers, the epoch
and how many rows have left the window; a resumed run reads the epoch again up to there, without tokenising anything.
"""

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from covey.rewards.reward import RewardSpec, check_columns, load_reward
from covey.rewards.runner import Scorer
from covey.rl.config import SftConfig, SftDataSection
from covey.rl.data import Row, make_row, source_key
from covey.rl.documents import Document, documents_of
from covey.rl.files import DataError
from covey.rl.loop import Results
from covey.rl.rows import held_out_rows
from covey.rl.sampler import Sampler
from covey.rl.sft import sft_step
from covey.rl.shapes import find_columns
from covey.rl.sources import open_stream
from covey.rl.templates import Encoder, check_context
from covey.rl.trainers import SftTrainer
from covey.rl.turns import Turns

logger = logging.getLogger(__name__)
LOOKED_AT = 100  # first rows, whose columns say what is what


class RowStream:
    """The rows of a source, epoch after epoch. name: what the source is called, and which columns are what."""

    def __init__(self, source: Any, section: SftDataSection):
        self.section = section
        name, self._open = open_stream(source, source_key(False))
        first = [row for row in islice(self._open(), LOOKED_AT) if not isinstance(row, DataError)]
        names = list(dict.fromkeys(key for _, row in first for key in row))
        self.columns = find_columns(names, section) if first else None
        self.first = next(self._in_order(), None)
        if self.first is None or self.columns is None:
            raise DataError(f"{source_key(False)}: {name} has no rows. Give a data set with at least one.")
        self.name = f"{name}, streamed: {self.columns.describe()}"

    def epoch(self, number: int) -> Iterator[Row]:
        """The rows in the order of epoch `number`."""
        if not self.section.shuffle:
            yield from self._in_order(warn=number == 0)
            return
        draw = random.Random(f"{self.section.seed}:{number}")
        window: list[Row] = []
        for row in self._in_order(warn=number == 0):
            if len(window) < self.section.shuffle_buffer:
                window.append(row)
                continue
            place = draw.randrange(len(window))
            yield window[place]
            window[place] = row
        draw.shuffle(window)
        yield from window

    def _in_order(self, *, warn: bool = False) -> Iterator[Row]:
        """The rows as they stand in the source. If malformed ones are skipped, the first of them is logged."""
        warned = not warn
        for index, raw in enumerate(self._open()):
            try:
                if isinstance(raw, DataError):
                    raise raw
                assert self.columns is not None
                row = make_row(index, *raw, self.columns, self.section)
            except DataError as error:
                if self.section.malformed == "error":
                    raise
                if not warned:
                    logger.warning("malformed rows are skipped; the first: %s", error)
                warned = True
            else:
                yield row


class DocumentStream:
    """Steps of `batch` documents, for ever. `state` and `restore` as those of Cursor (rl/data.py)."""

    def __init__(self, rows: RowStream, encode: Callable[[Row], list[Document]], batch: int):
        self.rows, self.encode, self.batch = rows, encode, batch
        self._start(0)

    def _start(self, epoch: int) -> None:
        self.epoch, self.taken, self.found = epoch, 0, 0
        self._left = self.rows.epoch(epoch)
        self._pending: list[Document] = []  # of the last row taken

    def next(self) -> list[Document]:
        """The documents of the next step. Raises DataError if a whole epoch has none."""
        step: list[Document] = []
        while len(step) < self.batch:
            if not self._pending:
                self._read()
            step.append(self._pending.pop(0))
        return step

    def _read(self) -> None:
        """Take rows until one has documents."""
        while not self._pending:
            row = next(self._left, None)
            if row is None:
                if not self.found:
                    raise DataError(
                        f"{source_key(False)}: no row of {self.rows.name} has anything to train. Check "
                        "data.loss_on and data.max_tokens"
                    )
                self._start(self.epoch + 1)
                continue
            self.taken += 1
            self._pending = self.encode(row)
            self.found += len(self._pending)

    def state(self) -> dict[str, Any]:
        """Where the stream is, for a checkpoint."""
        section = self.rows.section
        order = {"seed": section.seed, "shuffle": section.shuffle, "shuffle_buffer": section.shuffle_buffer}
        return {
            **order,
            "epoch": self.epoch,
            "taken": self.taken,
            "found": self.found,
            "pending": len(self._pending),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken, from the same rows. Raises DataError if the order is another one."""
        now = self.state()
        for key in ("seed", "shuffle", "shuffle_buffer"):
            if state.get(key) != now[key]:
                raise DataError(
                    f"The checkpoint was made with data.{key} = {state.get(key)}, it is {now[key]} now. Resume with "
                    "the same data settings, or start a new run."
                )
        self._start(state["epoch"])
        last: Row | None = None
        for row in islice(self._left, state["taken"]):
            last, self.taken = row, self.taken + 1
        if self.taken < state["taken"]:
            raise DataError(
                "The data has fewer rows than when the checkpoint was made. Resume with the same data."
            )
        self.found = state["found"]
        if last is not None and state["pending"]:
            self._pending = self.encode(last)[-state["pending"] :]


class StreamedSftTrainer(SftTrainer):
    """SftTrainer on a stream: nothing is known of the data but what has been read."""

    def __init__(
        self, config: SftConfig, rewards: Sequence[RewardSpec], rows: Any = None, eval_rows: Any = None
    ):
        loaded = [load_reward(spec) for spec in rewards]
        stream = RowStream(config.data.train if rows is None else rows, config.data)
        assert stream.first is not None
        for reward in loaded:
            check_columns(reward, stream.first.columns)
        held_out = held_out_rows(config, loaded, eval_rows)
        if config.eval.patience is not None and not held_out:
            raise DataError("eval.patience needs held-out rows: set data.eval")
        Sampler.__init__(self, config)
        self.config: SftConfig
        self.scorer = Scorer(loaded)
        self.prepare_evaluation(held_out)
        check_context(config.data.max_tokens, 0, self.route.max_positions)
        encoder = Encoder(self.tokenizer, config.data)
        turns = Turns(encoder, list(self.eos))
        self.stream = DocumentStream(
            stream, lambda row: documents_of(row, encoder, turns, config.data), config.optim.rows_per_step
        )
        self.cursor: Any = self.stream
        assert config.optim.steps is not None
        self.steps = self.check_steps(config.optim.steps, self.held_out)
        self.found = stream.name

    def sketch(self) -> str:
        first = self.stream.rows.first
        assert first is not None
        return f"{super().sketch()} {(first.text, first.prompt, first.messages, first.completion)!r}"

    def step(self, index: int) -> Results:
        return sft_step(self.machine, self.stream.next(), self.config, index, self.steps), []

    def data_in_words(self) -> str:
        window = (
            f", shuffled in a window of {self.config.data.shuffle_buffer} rows"
            if self.config.data.shuffle
            else ""
        )
        return f"{self.found}{window}"


def sft_trainer(config: SftConfig) -> type[SftTrainer]:
    """The trainer for this configuration."""
    return StreamedSftTrainer if config.data.streaming else SftTrainer
