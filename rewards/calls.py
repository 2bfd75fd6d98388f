"""What a reward is called with. P prompts, G completions per prompt, N = P * G rows.

Everything mutable is a copy, so that no reward can change the prompts and ids that are trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from covey.rewards.reward import GROUND_TRUTH, Reward, RewardError


class PromptLike(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def messages(self) -> Sequence[Mapping[str, Any]] | None: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...


class CompletionLike(Protocol):
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def finish(self) -> str: ...


class GroupLike(Protocol):
    @property
    def prompt(self) -> PromptLike: ...
    @property
    def completions(self) -> Sequence[CompletionLike]: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One completion. place: what messages call it, "row 3 (prompt 0, completion 3)"."""

    place: str
    prompt: PromptLike
    completion: CompletionLike

    @property
    def columns(self) -> Mapping[str, Any]:
        """Those of the data, and those that an environment wrote of this completion."""
        return {**self.prompt.columns, **getattr(self.completion, "columns", {})}


def make_rows(group: GroupLike, p: int) -> list[Row]:
    """The rows of the step's p-th group."""
    G = len(group.completions)
    return [
        Row(f"row {p * G + g} (prompt {p}, completion {g})", group.prompt, completion)
        for g, completion in enumerate(group.completions)
    ]


def call_arguments(reward: Reward, rows: Sequence[Row]) -> dict[str, Any]:
    """Keyword arguments for one call: of a batch function for all the rows, of the others for one row.

    Raises RewardError if a row lacks a column that the reward needs.
    """
    if reward.batch:
        return _batch_arguments(reward, rows)
    (row,) = rows
    engine = _verl(reward, row) if reward.style == "solution_str" else _engine(reward, row)
    return _columns(reward, row) | dict(reward.args) | {name: engine[name] for name in reward.engine}


def _batch_arguments(reward: Reward, rows: Sequence[Row]) -> dict[str, Any]:
    singles = [_engine(reward, row) for row in rows]
    plural = {"completion": "completions", "prompt": "prompts"}
    engine = {plural.get(name, name): [single[name] for single in singles] for name in singles[0]}
    given = engine if reward.all_columns else {name: engine[name] for name in reward.engine}
    cells = [_columns(reward, row) for row in rows]
    # A column that some rows lack cannot be a list of N values: None stands for the missing ones.
    names = dict.fromkeys(name for cell in cells for name in cell)
    return {name: [cell.get(name) for cell in cells] for name in names} | dict(reward.args) | given


def _engine(reward: Reward, row: Row) -> dict[str, Any]:
    text, chat = row.prompt.text, reward.form == "messages"
    messages = None if row.prompt.messages is None else _copied(list(row.prompt.messages))
    return {
        "completion": _said(row) if chat else row.completion.text,
        "prompt": (messages or [{"role": "user", "content": text}]) if chat else text,
        "messages": messages,
        "completion_ids": list(row.completion.ids),
        "finish": row.completion.finish,
    }


def _said(row: Row) -> list[dict[str, Any]]:
    """The completion as messages: of an episode all that followed the prompt."""
    transcript = getattr(row.completion, "columns", {}).get("transcript")
    return _copied(list(transcript or [{"role": "assistant", "content": row.completion.text}]))


def _verl(reward: Reward, row: Row) -> dict[str, Any]:
    """What verl's compute_score is called with; its ground_truth may also stand in reward_model or answer."""
    columns = row.columns
    nested = columns.get("reward_model")
    found = {"answer": columns["answer"]} if "answer" in columns else {}
    found |= dict(nested) if isinstance(nested, Mapping) else {}
    found |= {"ground_truth": columns["ground_truth"]} if "ground_truth" in columns else {}
    if "ground_truth" in reward.engine and not {"ground_truth", "answer"} & set(found):
        listed = ", ".join(columns) or "there are none"
        raise RewardError(
            f"{reward.where} needs ground_truth; {row.place} has it in none of {', '.join(GROUND_TRUTH)} "
            f"(its columns: {listed})."
        )
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": row.completion.text,
        "ground_truth": _copied(found.get("ground_truth", found.get("answer"))),
        "extra_info": _copied(columns.get("extra_info", dict(columns))),
    }


def _columns(reward: Reward, row: Row) -> dict[str, Any]:
    """The cells of a row that the reward asks for; what `args` sets is left to `args`."""
    columns = row.columns
    for name in reward.required:
        if name not in columns:
            has = f"has only the columns {', '.join(columns)}" if columns else "has no columns"
            raise RewardError(f'{reward.where} needs "{name}"; {row.place} {has}.')
    if reward.all_columns:
        return {name: _copied(value) for name, value in columns.items() if name not in reward.engine}
    return {name: _copied(columns[name]) for name in (*reward.required, *reward.optional) if name in columns}


def _copied(value: Any) -> Any:
    """Dicts, lists and tuples as copies, all the way down."""
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
