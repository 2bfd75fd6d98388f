"""Rewards that look at text as it stands: an exact answer, the first number, a pattern, the tags of a format."""

import functools
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

from covey.rewards.find import RewardError
from covey.rewards.settings import settings

# Digits with an optional sign, thousands commas (between a digit and exactly three digits) and decimals.
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|[-+]?\.\d+")
MATCH_SECONDS = 1.0  # for one search with a user's pattern


@settings()
def exact(
    completion: str, answer: Any, *, first_line: bool = False, ignore_case: bool = False
) -> float | None:
    """1.0 if what stands behind </think>, or all of the completion, is the answer, else 0.0; None if answer is None.

    Blanks around both are ignored. answer may be a list of accepted answers.
    Settings: first_line compares only the first line that is not blank (base models write on);
    ignore_case does what it says.

    >>> exact(" Paris\\n", answer="Paris"), exact("It is Paris", answer="Paris")
    (1.0, 0.0)
    >>> exact("Paris\\nRome", answer="paris", first_line=True, ignore_case=True)
    1.0
    >>> exact("<think>A city ...</think>Rome", answer=["Paris", "Rome"])
    1.0
    """
    if answer is None:
        return None
    text, golds = after_thinking(completion).strip(), given_answers(answer)
    if first_line:
        text = text.partition("\n")[0].strip()
    if ignore_case:
        text, golds = text.casefold(), [gold.casefold() for gold in golds]
    return float(text in golds)


@settings()
def first_number(completion: str, answer: Any) -> float | None:
    """1.0 if the first integer or decimal of the completion equals the answer as a number, else 0.0.

    For models that continue "47 + 25 =". No opinion if answer is None.

    >>> first_number(" 72\\n48 + 3 = 51", answer="72"), first_number(" 72.50 or so", answer=72.5)
    (1.0, 1.0)
    >>> first_number(" 1,072", answer=1072), first_number(" 7 72", answer=72), first_number("x", answer=72)
    (1.0, 0.0, 0.0)
    """
    if answer is None:
        return None
    gold_text = given_answer(answer)
    gold = _first_number(gold_text) if NUMBER.fullmatch(_ascii_minus(gold_text)) else None
    if gold is None:
        raise RewardError(f"first_number: the answer {gold_text!r} is not an integer or a decimal")
    return float(_first_number(completion) == gold)


def _check_regex(pattern: str, **_: Any) -> None:
    _compiled(pattern)


@settings(_check_regex)
def regex(completion: str, answer: Any = "", *, pattern: str, full: bool = False) -> dict[str, Any] | None:
    """1.0 if the pattern is found in the completion, else 0.0. With a group named `answer`, (?P<answer>...), what it
    holds in the last match must also be the answer; no opinion if that is None.

    Patterns are those of the package `regex`, a superset of Python's; (?s) lets a dot match a newline, (?i) ignores
    case. Setting: full, whether the pattern must match all of the completion. A search that takes longer than
    MATCH_SECONDS is given up: score 0.0 and the note `gave_up`.

    >>> regex("Total: 18 eggs.", pattern=r"Total: \\d+"), regex("Total: 18 eggs.", pattern=r"Total: \\d+", full=True)
    ({'score': 1.0}, {'score': 0.0})
    >>> regex("Total: 17. No. Total: 18", "18", pattern=r"Total: (?P<answer>\\d+)")
    {'score': 1.0, 'read': '18'}
    """
    compiled = _compiled(pattern)
    compares = "answer" in compiled.groupindex
    if compares and answer is None:
        return None
    try:
        if full:
            last = compiled.fullmatch(completion, timeout=MATCH_SECONDS)
        else:
            last = None
            for last in compiled.finditer(completion, timeout=MATCH_SECONDS):  # noqa: B007
                if not compares:
                    break
    except TimeoutError:
        return {"score": 0.0, "gave_up": True}
    if not compares:
        return {"score": float(last is not None)}
    read = (last["answer"] or "").strip() if last else ""
    return {"score": float(read in given_answers(answer)), "read": read}


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> Any:
    import regex as engine  # unlike re it has a time limit, which works in any thread

    try:
        return engine.compile(pattern)
    except engine.error as error:
        raise RewardError(f"the pattern {pattern!r} is not a regular expression: {error}") from error


def _check_format(tags: Sequence[str], **_: Any) -> None:
    if not tags or len(set(tags)) < len(tags) or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
        raise ValueError(
            f"args.tags is {list(tags)}: give one or more different names, as in [think, answer]."
        )


@settings(_check_format)
def format(
    completion: str,
    *,
    tags: Sequence[str] = ("think",),
    level: Literal["whole", "once", "share"] = "whole",
    opened: bool = False,
) -> float:
    """How well the completion keeps to blocks <think>...</think>, between 0.0 and 1.0.

    tags: the blocks in their order. With one, something that is not blank follows it; of several, as
        [think, answer], the last is the answer and must not be blank.
    level: whole: 1.0 if the completion is nothing but that, else 0.0. once: other text around the blocks is allowed,
        each tag stands exactly once and in order. share: the share of the tags, opening and closing, that stand
        exactly once, wherever that is.
    opened: the chat template has written the first tag already, so the completion begins inside the block.

    >>> format("<think>\\n6 * 7\\n</think>\\n42"), format("<think>6 * 7</think> "), format("42")
    (1.0, 0.0, 0.0)
    >>> text = "Well. <think>6 * 7</think> So: <answer>42</answer>"
    >>> [format(text, tags=["think", "answer"], level=level) for level in ("whole", "once", "share")]
    [0.0, 1.0, 1.0]
    >>> format("6 * 7</think>42", opened=True), format("6 * 7</think>42", level="share")
    (1.0, 0.5)
    """
    text = f"<{tags[0]}>{completion}" if opened else completion
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    once = [text.count(mark) == 1 for mark in marks]
    if level == "share":
        return sum(once) / len(once)
    if not all(once) or sorted(marks, key=text.index) != marks:
        return 0.0
    parts = re.split("|".join(map(re.escape, marks)), text)  # outside, inside, outside, ..., outside
    outside, inside = parts[0::2], parts[1::2]
    answer = outside.pop() if len(tags) == 1 else inside[-1]
    return float(not _is_blank(answer) and (level == "once" or _is_blank("".join(outside))))


def _is_blank(text: str) -> bool:
    """Is there nothing to see? Characters of no width are no answer."""
    return not any(character.isprintable() and character != " " for character in text)


def given_answer(answer: Any) -> str:
    """The answer of a data row as text without blanks around it; RewardError if nothing is left, or for a NaN."""
    if isinstance(answer, float) and answer != answer:  # what tables write for a missing number
        raise RewardError(
            "the answer is NaN: a mistake in the data (None means that the reward does not apply)"
        )
    text = str(answer).strip()
    if not text:
        raise RewardError(
            "the answer is empty: a mistake in the data (None means that the reward does not apply)"
        )
    return text


def given_answers(answer: Any) -> list[str]:
    """As given_answer, of an answer or of each in a list of accepted ones, which must not be empty."""
    answers = list(answer) if isinstance(answer, (list, tuple)) else [answer]
    if not answers:
        raise RewardError("the answer is an empty list: a mistake in the data")
    return [given_answer(one) for one in answers]


def after_thinking(text: str) -> str:
    """What stands behind the last </think>; all of the text if it has no such tag, "" if it opens one only.

    >>> after_thinking("<think>6 * 7</think>42"), after_thinking("42"), after_thinking("<think>it may be 42")
    ('42', '42', '')
    """
    *_, rest = text.rpartition("</think>")
    return "" if "<think>" in rest else rest


def last_tagged(text: str, tag: str) -> str | None:
    """What stands in the last <tag>...</tag>, without blanks around it; None if there is no such block.

    >>> last_tagged("<answer>41</answer> no, <answer> 42 </answer>", "answer")
    '42'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def _ascii_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def _first_number(text: str) -> Decimal | None:
    match = NUMBER.search(_ascii_minus(text))
    return Decimal(match.group().replace(",", "")) if match else None
