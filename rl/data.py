"""The rows of a run: which column is the prompt, the answer, the text to learn; and the order of the rows."""

import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from covey.rl.config import DataSection
from covey.rl.messages import Message, read_messages, read_tools, short
from covey.rl.shapes import MESSAGES as MESSAGES
from covey.rl.shapes import Columns, find_columns
from covey.rl.sources import DataError, Found, did_you_mean, read_source
from covey.rl.tasks import task_rows


@dataclass(frozen=True, slots=True)
class Row:
    """A row and what its columns mean. Either `text`, or `messages`, or `prompt` holds what comes first.

    index: its place in the data set. where: the same for people ("train.jsonl:3").
    columns: as written, plus "answer".
    messages: a conversation without the system message of the configuration.
    prompt_messages: how many of the messages are the prompt; 0: all before the last assistant turn, if that
        is the last message.
    completion: the text to learn after prompt or messages; None in GRPO, and if messages hold it.
    text: a text to learn from its first token to its last.
    tools: what the chat template is to say about the tools there are.
    """

    index: int
    where: str
    columns: Mapping[str, Any]
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt_messages: int = 0
    completion: str | None = None
    text: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


class Rows(list[Row]):
    """found: where they come from and which columns are what, in words."""

    found: str = ""


def source_key(held_out: bool) -> str:
    return "data.eval" if held_out else "data.train"


def find_source(
    source: Any, section: DataSection, held_out: bool, of_task: Callable[..., list[dict[str, Any]]]
) -> Found:
    """The raw rows of a source, at least one; of_task(name, arguments, held_out=...) makes those of "task:NAME"."""
    key = source_key(held_out)
    if isinstance(source, str) and source.startswith("task:"):
        values = of_task(source.removeprefix("task:"), section.task, held_out=held_out)
        found = Found(source, [(f"{source} row {number}", row) for number, row in enumerate(values)])
    else:
        found = read_source(source, key, held_out, skip=section.malformed == "skip", seed=section.seed)
        if section.task:
            raise DataError(f'data.task: {key} is not a task, so these would be ignored. Use "task:NAME".')
    found.check_any(key, source)
    return found


def load_rows(source: Any, section: DataSection, *, held_out: bool = False) -> Rows:
    """The rows of `source`: a file, folder or glob, a hub id "name[:config[:split]]", "task:NAME", a list of
    SourceSection, dicts, or a Dataset (docs/data.md).

    held_out: a task gives its held-out split, a hub id without a split its test split.
    Raises DataError, which says what is wrong where, and what to do. Rows that are left out are logged as a warning.
    """
    found = find_source(source, section, held_out, task_rows)
    columns = find_columns(list(dict.fromkeys(name for _, row in found.rows for name in row)), section)
    rows = Rows(
        found.each(
            lambda i, where, row: make_row(i, where, row, columns, section),
            *(source_key(held_out), section.malformed == "skip"),
        )
    )
    rows.found = f"{found.name}: {columns.describe()}"
    return rows


# --------------------------------------------------------------------------------------------------- rows


def make_row(index: int, where: str, row: Mapping[str, Any], columns: Columns, section: DataSection) -> Row:
    values = dict(row)
    if columns.answer:
        values["answer"] = _answer(row, columns.answer, section.answer_after, where)
    if columns.text:
        key = "completion" if section.completion else "text"
        return Row(index, where, values, text=_text(row, columns.text, key, where))

    prompt, messages, prompt_messages, completion = None, None, 0, None
    if columns.messages:
        messages = read_messages(row, columns.messages, where, section.roles)
    elif columns.prompt and isinstance(row.get(columns.prompt), list | tuple):
        messages = read_messages(row, columns.prompt, where, section.roles)
        prompt_messages = len(messages)
        if messages[-1]["role"] == "assistant":
            raise DataError(f'{where}: "{columns.prompt}" ends with an assistant message. Remove it.')
    else:
        assert columns.prompt is not None
        prompt = _text(row, columns.prompt, "prompt", where)
        if columns.more and row.get(columns.more) not in (None, ""):
            prompt += "\n\n" + _text(row, columns.more, "prompt", where)

    answered = columns.completion and isinstance(row.get(columns.completion), list | tuple)
    if messages is None and (answered or columns.system or columns.tools):
        messages, prompt, prompt_messages = ({"role": "user", "content": prompt},), None, 1
    if columns.system and messages and messages[0]["role"] != "system" and row.get(columns.system):
        messages = ({"role": "system", "content": _system(row, columns.system, where)}, *messages)
        prompt_messages += prompt_messages > 0
    tools = read_tools(row, columns.tools, where) if columns.tools else ()
    if columns.completion and answered:
        assert messages is not None
        messages += read_messages(row, columns.completion, where, section.roles)
    elif columns.completion:
        completion = _text(row, columns.completion, "completion", where)
    return Row(index, where, values, prompt, messages, prompt_messages, completion, tools=tools)


def _system(row: Mapping[str, Any], column: str, where: str) -> str:
    if not isinstance(row[column], str):
        raise DataError(
            f'{where}: "{column}" is {short(row[column])}, not a system message. Correct or remove this row.'
        )
    return row[column]


def _answer(row: Mapping[str, Any], column: str, mark: str | None, where: str) -> Any:
    value = row.get(column)
    if mark is None:
        return value
    if not isinstance(value, str):
        raise DataError(f'{where}: "{column}" is {value!r}, not text. data.answer_after needs text.')
    if mark not in value:
        raise DataError(f'{where}: no "{mark}" in "{column}". Correct the row or data.answer_after.')
    return value.rsplit(mark, 1)[1].strip()


def _text(row: Mapping[str, Any], source: str, key: str, where: str) -> str:
    """The column `source`, or the template `source` with {column} filled in ({{ and }} stand for braces)."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if name not in row:
            hint = did_you_mean(name, row)
            raise DataError(
                f'{where}: data.{key} has {{{name}}}, but there is no column "{name}". '
                f"Columns: {', '.join(row)}.{hint} Write {{{{ and }}}} for braces that are text."
            )
        if not isinstance(row[name], str | int | float):
            raise DataError(f'{where}: "{name}" is {short(row[name])}, which cannot stand in data.{key}.')
        return str(row[name])

    if source not in row and "{" in source:
        return re.sub(r"\{\{|\}\}|\{([^{}]+)\}", fill, source)
    value = row.get(source)
    if not isinstance(value, str):
        number = isinstance(value, int | float)
        fix = (
            f'Set data.{key}: "{{{source}}}" to write it as text.'
            if number
            else "Correct or remove this row."
        )
        raise DataError(f'{where}: "{source}" is {short(value)}, not text. {fix}')
    return value


# -------------------------------------------------------------------------------------------------- order


class Cursor:
    """Says which rows come next: every row once per epoch, in an order that follows from (seed, epoch) alone.

    wrap: every step has `batch` rows, so a step may span epochs (GRPO). If there are enough rows, none stands
    twice in such a step; with fewer rows than `batch`, rows are repeated until the step is full.
    Without wrap the last step of an epoch is short: 10 rows in batches of 4 come as 4, 4, 2 (SFT).
    """

    def __init__(self, rows: int, batch: int, seed: int, shuffle: bool, *, wrap: bool = True) -> None:
        if rows < 1 or batch < 1:
            raise DataError(f"{rows} rows in batches of {batch}: there must be at least one of each.")
        self.rows, self.batch, self.seed, self.shuffle, self.wrap = rows, batch, seed, shuffle, wrap
        self.epoch, self.position = 0, 0
        self.carried: list[int] = []  # rows of the step that this epoch began in, taken from the epoch before
        self._order = self._make_order()

    def steps(self, epochs: float) -> int:
        """Steps that show every row `epochs` times; rounded up."""
        per_epoch = self.rows / self.batch if self.wrap else -(-self.rows // self.batch)
        return max(1, math.ceil(epochs * per_epoch - 1e-9))

    def next(self, count: int | None = None) -> list[int]:
        """The rows of the next step, or `count` rows, at most a step's."""
        taken: list[int] = []
        count = count or self.batch
        while len(taken) < count:
            if self.position == len(self._order):
                if taken and not self.wrap:
                    break
                self.epoch, self.position = self.epoch + 1, 0
                self.carried = taken if len(taken) < self.batch <= self.rows else []
                self._order = self._make_order()
            more = self._order[self.position : self.position + count - len(taken)]
            self.position += len(more)
            taken = taken + more
        return taken

    def state(self) -> dict[str, Any]:
        """What `restore` needs, for a checkpoint."""
        return {
            "rows": self.rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
            "carried": list(self.carried),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken. Raises DataError if it belongs to other rows or another order."""
        for key in ("rows", "seed", "shuffle"):
            if state[key] != getattr(self, key):
                raise DataError(
                    f"The checkpoint was made with {key} = {state[key]}, the data has {getattr(self, key)}. "
                    "Resume with the same data and data settings, or start a new run."
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self.carried = list(state["carried"])
        self._order = self._make_order()

    def rows_of_epoch(self) -> list[int]:
        """The rows of this epoch in their order."""
        order = list(range(self.rows))
        if self.shuffle:
            random.Random(f"{self.seed}:{self.epoch}").shuffle(order)
        return order

    def _make_order(self) -> list[int]:
        order = self.rows_of_epoch()
        # Rows that already stand in the step under way come later.
        others = [row for row in order if row not in self.carried]
        fill = others[: self.batch - len(self.carried)] if self.carried else []
        first = set(fill)
        return fill + [row for row in order if row not in first]
