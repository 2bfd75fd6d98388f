"""The rows of a run: which column is the prompt, the answer, the text to learn; and the order of the rows."""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.rl.config import DataSection, SftDataSection
from covey.rl.sources import DataError, Raw, did_you_mean, read_raw

Message = Mapping[str, Any]

# Names that are recognised; the first of a list wins over the others, which must not compete.
PROMPT = ("prompt", "question", "problem", "instruction", "input", "query")
ANSWER = ("answer", "solution", "target", "label", "ground_truth", "final_answer")
MESSAGES = ("messages", "conversations", "conversation")
COMPLETION = ("completion", "response", "output")
TEXT = ("text",)

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}


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
    """

    index: int
    where: str
    columns: Mapping[str, Any]
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt_messages: int = 0
    completion: str | None = None
    text: str | None = None


def load_rows(source: Any, section: DataSection, *, held_out: bool = False) -> list[Row]:
    """The rows of `source`: a file, a hub id "name[:config[:split]]", "task:NAME", dicts, or a Dataset.

    held_out: a task gives its held-out split, a hub id without a split its test split.
    Raises DataError, which says what is wrong where, and what to do.
    """
    key = "data.eval" if held_out else "data.train"
    if isinstance(source, str) and source.startswith("task:"):
        from covey.rl.tasks import task_rows

        name = source.removeprefix("task:")
        columns = task_rows(name, section.task, held_out=held_out)
        raw: list[Raw] = [(f"{source} row {number}", row) for number, row in enumerate(columns)]
    else:
        raw = read_raw(source, key, held_out)
        if section.task:
            raise DataError(f'data.task: {key} is not a task, so these would be ignored. Use "task:NAME".')
    if not raw:
        name = source if isinstance(source, str) else "the data set"
        raise DataError(f"{key}: {name} has no rows. Give a data set with at least one.")
    names = list(dict.fromkeys(name for _, row in raw for name in row))
    columns = find_columns(names, section)
    return [_row(index, where, row, columns, section) for index, (where, row) in enumerate(raw)]


# ------------------------------------------------------------------------------------------------ columns


@dataclass(frozen=True, slots=True)
class Columns:
    """The column, or template, that each part of a row is taken from."""

    prompt: str | None
    messages: str | None
    completion: str | None
    answer: str | None
    text: str | None


def find_columns(names: Sequence[str], section: DataSection) -> Columns:
    """Which of the columns `names` is what: as the section says, else by name."""
    if section.prompt and section.messages:
        raise DataError("data.prompt and data.messages: both are set. Keep one of them.")
    for key in ("messages", "answer"):
        _check_column(getattr(section, key), key, names)
    for key in ("prompt", "completion"):
        if not _is_template(getattr(section, key), names):
            _check_column(getattr(section, key), key, names)

    learns = isinstance(section, SftDataSection)
    completion = section.completion or (_pick("completion", COMPLETION, names) if learns else None)
    prompt, messages = section.prompt, section.messages
    if not prompt and not messages:
        prompt = _pick("prompt", PROMPT, [n for n in names if n not in (section.completion, section.answer)])
        messages = _pick("messages", MESSAGES, names)
        if prompt and messages:
            raise DataError(
                f"Both {prompt} and {messages} could be the prompt (columns: {', '.join(names)}). "
                f"Set data.prompt: {prompt}, or data.messages: {messages}"
            )
    answer = section.answer or _pick("answer", ANSWER, [n for n in names if n not in (prompt, completion)])
    if section.answer_after and not answer:
        raise DataError(
            f"data.answer_after: no column looks like an answer ({', '.join(names)}). Set data.answer."
        )
    text = None
    if learns:
        text, completion = _text_or_completion(names, section, prompt, messages, completion or answer)
    if not prompt and not messages and not text:
        raise DataError(
            f"No column looks like a prompt ({', '.join(names)}). Set data.prompt to a column, "
            f'or to a template like "Q: {{{names[0] if names else "question"}}}\\nA:"'
        )
    return Columns(None if text else prompt, messages, completion, answer, text)


def _text_or_completion(
    names: Sequence[str], section: DataSection, prompt: str | None, messages: str | None, target: str | None
) -> tuple[str | None, str | None]:
    """For SFT: (the column that is learnt as a whole, the column that is learnt after the prompt)."""
    if messages:
        if section.completion:
            raise DataError("data.completion: the messages already hold the text to learn. Remove this key.")
        return None, None
    if prompt and target:
        return None, target
    if not prompt and section.completion:
        return section.completion, None
    text = None if section.prompt else _pick("completion", TEXT, names)
    if prompt and not text:
        raise DataError(
            f"No column looks like the text to learn after {prompt} ({', '.join(names)}). "
            "Set data.completion."
        )
    return text, None


def _check_column(name: str | None, key: str, names: Sequence[str]) -> None:
    if name is not None and name not in names:
        hint = did_you_mean(name, names)
        raise DataError(f'data.{key}: no column "{name}". Columns: {", ".join(names)}.{hint}')


def _pick(key: str, known: Sequence[str], names: Sequence[str]) -> str | None:
    found = [name for name in names if name.lower() in known]
    first = [name for name in found if name.lower() == known[0]]
    if first or not found:
        return first[0] if first else None
    if len(found) > 1:
        both = "\\n".join(f"{{{name}}}" for name in found)
        either = f'one of them, or to a template like "{both}"' if key == "prompt" else "one of them"
        raise DataError(
            f"data.{key}: {' and '.join(found)} are all possible (columns: {', '.join(names)}). "
            f"Set data.{key} to {either}."
        )
    return found[0]


def _is_template(text: str | None, names: Sequence[str]) -> bool:
    return text is not None and text not in names and re.search(r"\{[^{}]+\}", text) is not None


# --------------------------------------------------------------------------------------------------- rows


def _row(index: int, where: str, row: Mapping[str, Any], columns: Columns, section: DataSection) -> Row:
    values = dict(row)
    if columns.answer:
        values["answer"] = _answer(row, columns.answer, section.answer_after, where)
    if columns.text:
        return Row(index, where, values, text=_text(row, columns.text, "completion", where))

    prompt, messages, prompt_messages, completion = None, None, 0, None
    if columns.messages:
        messages = _messages(row.get(columns.messages), columns.messages, where)
    elif columns.prompt and isinstance(row.get(columns.prompt), list | tuple):
        messages = _messages(row[columns.prompt], columns.prompt, where)
        prompt_messages = len(messages)
        if messages[-1]["role"] == "assistant":
            raise DataError(f'{where}: "{columns.prompt}" ends with an assistant message. Remove it.')
    else:
        assert columns.prompt is not None
        prompt = _text(row, columns.prompt, "prompt", where)

    if columns.completion and isinstance(row.get(columns.completion), list | tuple):
        if messages is None:
            messages, prompt = ({"role": "user", "content": prompt},), None
            prompt_messages = 1
        messages += _messages(row[columns.completion], columns.completion, where)
    elif columns.completion:
        completion = _text(row, columns.completion, "completion", where)
    return Row(index, where, values, prompt, messages, prompt_messages, completion)


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
            raise DataError(f'{where}: "{name}" is {_short(row[name])}, which cannot stand in data.{key}.')
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
        raise DataError(f'{where}: "{source}" is {_short(value)}, not text. {fix}')
    return value


def _messages(value: Any, column: str, where: str) -> tuple[Message, ...]:
    """Messages with role and content; ShareGPT's from and value are renamed, keys that are None left out."""
    if not isinstance(value, list | tuple) or not value:
        raise DataError(
            f'{where}: "{column}" is {_short(value)}. '
            'It must be a list like [{"role": "user", "content": "..."}].'
        )
    messages = []
    for number, message in enumerate(value):
        place = f'{where}: "{column}", message {number}'
        if not isinstance(message, Mapping):
            raise DataError(f'{place} is {_short(message)}. Write {{"role": "user", "content": "..."}}.')
        if "from" in message and "value" in message and "role" not in message:
            role = SHAREGPT_ROLES.get(message["from"], message["from"])
            message = {"role": role, "content": message["value"]}
        message = {key: part for key, part in message.items() if part is not None}
        if not isinstance(message.get("role"), str):
            raise DataError(f'{place} has no "role". It must say who speaks: system, user or assistant.')
        if "tool_calls" not in message and not isinstance(message.get("content"), str | list):
            raise DataError(f'{place} has no text in "content". Correct or remove this row.')
        messages.append({"content": "", **message} if "tool_calls" in message else message)
    return tuple(messages)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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

    def next(self) -> list[int]:
        """The rows of the next step."""
        taken: list[int] = []
        while len(taken) < self.batch:
            if self.position == self.rows:
                if taken and not self.wrap:
                    break
                self.epoch, self.position = self.epoch + 1, 0
                self.carried = taken if len(taken) < self.batch <= self.rows else []
                self._order = self._make_order()
            more = self._order[self.position : self.position + self.batch - len(taken)]
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

    def _make_order(self) -> list[int]:
        order = list(range(self.rows))
        if self.shuffle:
            random.Random(f"{self.seed}:{self.epoch}").shuffle(order)
        # Rows that already stand in the step under way come later.
        others = [row for row in order if row not in self.carried]
        fill = others[: self.batch - len(self.carried)] if self.carried else []
        first = set(fill)
        return fill + [row for row in order if row not in first]
