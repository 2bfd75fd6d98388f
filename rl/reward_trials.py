"""Rewards without a model: scores of given completions, and what looks wrong with the functions of a recipe."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from covey.rewards.calls import Row as Call
from covey.rewards.lanes import Caller, Outcome
from covey.rewards.reward import Reward, RewardSpec, check_columns, load_reward
from covey.rl.config import DataSection, GrpoConfig
from covey.rl.data import Row, load_rows
from covey.rl.sources import DataError, read_source

COMPLETIONS = (
    "completion",
    "completions",
    "response",
    "responses",
    "output",
    "text",
)  # columns that hold them
SLOW_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class TriedPrompt:
    text: str
    messages: Sequence[Mapping[str, Any]] | None
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tried:
    """A completion to be scored. kind: "good", "bad", ...; where: its prompt, for people."""

    prompt: TriedPrompt
    text: str
    ids: Sequence[int]
    finish: str = "eos"
    kind: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """score: NaN is no opinion. problem: what went wrong, else ""."""

    tried: Tried
    score: float
    seconds: float
    notes: Mapping[str, Any]
    problem: str = ""


def score(reward: Reward, tried: Sequence[Tried]) -> list[Scored]:
    """The scores of the completions; a call that fails is a problem of its completions and does not stop the rest."""
    rows = [Call(f"completion {n}", t.prompt, t) for n, t in enumerate(tried)]  # type: ignore[arg-type]
    outcomes = [future.result() for future in Caller(reward).start(rows)] if rows else []
    if reward.batch:
        (outcome,) = outcomes
        return [_scored(t, outcome, i) for i, t in enumerate(tried)]
    return [_scored(t, outcome, 0) for t, outcome in zip(tried, outcomes, strict=True)]


def _scored(tried: Tried, outcome: Outcome, i: int) -> Scored:
    if outcome.status != "ok":
        return Scored(tried, math.nan, outcome.seconds, {}, outcome.message)
    value, notes = outcome.scores[i]
    return Scored(tried, value, outcome.seconds, notes)


# ------------------------------------------------------------------------------------- completions to try


def given(file: str | None, texts: Sequence[str], data: DataSection | None, rows: int | None) -> list[Tried]:
    """Completions from a file, or the texts for each of the first rows of the data (1 by default).

    A row of the file has a completion, or a list of them, and belongs to the data row that its `row` names, else to
    that of its own place. Its other columns are added to those of the data. Raises DataError.
    """
    prompts = [] if data is None else load_rows(data.train, data)
    if file is None:
        found = [(_prompt(row), row.where) for row in prompts[: rows or 1]] or [
            (TriedPrompt("", None, {}), "")
        ]
        return [Tried(prompt, text, _pieces(text), where=where) for prompt, where in found for text in texts]
    tried = []
    for i, (where, values) in enumerate(read_source(file, "--completions", False).rows[:rows]):
        column = next((name for name in COMPLETIONS if name in values), None)
        if column is None:
            raise DataError(f"{where}: no completion. Name its column {' or '.join(COMPLETIONS)}.")
        place = values["row"] if isinstance(values.get("row"), int) else i
        if prompts and place >= len(prompts):
            raise DataError(f"{where}: belongs to row {place} of the data, which has {len(prompts)} rows.")
        row = _prompt(prompts[place]) if prompts else TriedPrompt(str(values.get("prompt", "")), None, {})
        prompt = TriedPrompt(row.text, row.messages, {**_more(values, column), **row.columns})
        texts = values[column] if isinstance(values[column], list) else [values[column]]
        finish = str(values.get("finish", "eos"))
        tried += [
            Tried(prompt, str(t), values.get("ids") or _pieces(str(t)), finish, where=where) for t in texts
        ]
    return tried


def _more(values: Mapping[str, Any], column: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != column and not name.startswith("reward")}


def _prompt(row: Row) -> TriedPrompt:
    text = row.prompt if row.prompt is not None else row.text or ""
    if row.messages:
        text = "\n".join(str(message.get("content", "")) for message in row.messages)
    return TriedPrompt(text, row.messages, row.columns)


def _pieces(text: str) -> range:
    """Stands for the token ids where there is no tokenizer: one for each word and sign."""
    return range(len(re.findall(r"\w+|[^\w\s]", text)))


def made_up(rows: Sequence[Row]) -> list[Tried]:
    """For each row good, bad, empty, truncated and non-ASCII completions, as far as its answer lets them be made."""
    answers = [row.columns.get("answer") for row in rows]
    tried = []
    for row, answer in zip(rows, answers, strict=True):
        wrong = next((a for a in answers if a not in (None, answer)), None)
        known = isinstance(answer, str | int | float) and "\n" not in str(answer)
        good = _phrased(answer) if known else [row.completion or "This is a short and plain answer."]
        bad = _phrased(wrong) if known and isinstance(wrong, str | int | float) else []
        long = f"<think>\n{'We look at it step by step. ' * 40}\n</think>\n{good[0]}"
        texts = [("good", text) for text in good] + [("bad", text) for text in [*bad, "I do not know."]]
        texts += [("empty", ""), ("truncated", long[: len(long) // 2])]
        texts += [("non-ASCII", "答案是４２。 Ответ: «½» 🙂\u200b\ufffd")]
        for kind, text in texts:
            finish = "length" if kind == "truncated" else "eos"
            tried.append(Tried(_prompt(row), text, _pieces(text), finish, kind, row.where))
    return tried


def _phrased(answer: Any) -> list[str]:
    """Ways in which models are asked to give an answer."""
    return [
        f"{answer}",
        f"The answer is {answer}.",
        f"So it is \\boxed{{{answer}}}.",
        f"#### {answer}",
        f"<think>\nIt follows.\n</think>\n\\boxed{{{answer}}}",
        f"<think>\nIt follows.\n</think>\n<answer>{answer}</answer>",
        f"```json\n{answer}\n```",
    ]


# ---------------------------------------------------------------------------------------- what looks wrong


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found of one function. wrong: to be mended; odd: worth a look."""

    reward: Reward
    best: dict[str, float]  # kind of completion -> the highest score, NaN for no opinion
    seconds: float  # of a call, on average
    wrong: list[str]
    odd: list[str]


def check(config: GrpoConfig, rows: int) -> Iterator[Report]:
    """One report for each reward of the configuration, on the first `rows` of its data. Raises what a run raises."""
    rewards = [load_reward(RewardSpec(**dict(section))) for section in config.rewards]
    if not rewards:
        raise DataError("rewards: none is given. Name one, for example rewards: [{use: math}]")
    found = load_rows(config.data.train, config.data)
    for reward in rewards:
        check_columns(reward, found[0].columns)
    tried = made_up(found[:rows])
    for reward in rewards:
        yield _report(reward, score(reward, tried), score(reward, tried))


def _report(reward: Reward, scored: Sequence[Scored], again: Sequence[Scored]) -> Report:
    known = [s.score for s in scored if not math.isnan(s.score)]
    seconds = fmean(s.seconds for s in scored)
    best = {
        kind: _best(s for s in scored if s.tried.kind == kind)
        for kind in dict.fromkeys(s.tried.kind for s in scored)
    }
    wrong, odd = [], []
    problems = [s for s in scored if s.problem]
    if problems:
        kinds = ", ".join(dict.fromkeys(s.tried.kind for s in problems))
        wrong.append(
            f"fails on {len(problems)} of {len(scored)} completions ({kinds}): {problems[0].problem}"
        )
    if not known and not problems:
        wrong.append(f"has no opinion on any of {len(scored)} completions")
    elif known and max(known) == min(known) and len(known) > 1:
        wrong.append(
            f"constant: gives {known[0]:g} to all of {len(known)} completions, which teaches nothing"
        )
    elif known and max(known) <= 0:
        odd.append("never above 0: right for a penalty, else see what a good completion lacks")
    if "answer" in reward.required and known and best["good"] < max(best["bad"], best["empty"]):
        wrong.append("scores a completion with a wrong answer, or none, above one with the right answer")
    if seconds > SLOW_SECONDS:
        odd.append(f"slow: {seconds:.2g} s a call")
    changed = [(a, b) for a, b in zip(scored, again, strict=True) if not _same(a.score, b.score)]
    if changed:
        a, b = changed[0]
        odd.append(
            f"gives another score the second time ({a.score:g}, then {b.score:g}, to a {a.tried.kind} completion)"
        )
    return Report(reward, best, seconds, wrong, odd)


def _best(scored: Iterator[Scored]) -> float:
    return max((s.score for s in scored if not math.isnan(s.score)), default=math.nan)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


# ------------------------------------------------------------------------------------------------ summary


def summary(scored: Sequence[Scored]) -> list[str]:
    """Sentences about the scores of `try`: their spread, over all and within prompts, and their times."""
    known = [s.score for s in scored if not math.isnan(s.score)]
    failed = sum(bool(s.problem) for s in scored)
    lines = [
        f"{len(scored)} completions, {failed} failed, {len(scored) - failed - len(known)} without an opinion"
    ]
    if known:
        spread = f"mean {fmean(known):.3g}, std {pstdev(known):.3g}, from {min(known):g} to {max(known):g}"
        lines.append(f"scores: {spread}; above 0: {sum(value > 0 for value in known)} of {len(known)}")
    groups: dict[str, list[float]] = {}
    for s in scored:
        groups.setdefault(s.tried.where, []).append(s.score)
    several = [{g for g in group if not math.isnan(g)} for group in groups.values() if len(group) > 1]
    if several:
        lines.append(
            f"prompts whose completions differ in score: {sum(len(g) > 1 for g in several)} of {len(several)}"
        )
    times = sorted(s.seconds for s in scored)
    lines.append(f"time of a call: mean {fmean(times) * 1e3:.3g} ms, longest {times[-1] * 1e3:.3g} ms")
    return lines
