"""The reward `choice`: which option of a multiple-choice question a completion decides for."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from covey.rewards.exact_value import plain
from covey.rewards.find import RewardError
from covey.rewards.math_answer import last_box
from covey.rewards.settings import settings
from covey.rewards.text_match import after_thinking, given_answer, last_tagged


def _check(letters: str, **_: Any) -> None:
    if len(letters) < 2 or len(set(letters)) < len(letters) or not letters.isalnum():
        raise ValueError(
            f"args.letters is {letters!r}: give two or more different letters or digits, as in ABCD."
        )


@settings(_check)
def choice(
    completion: str, answer: Any, choices: Any = None, *, letters: str = "ABCDEFGHIJ"
) -> dict[str, Any] | None:
    """1.0 if the completion decides for the option that is the answer, else 0.0; no opinion if answer is None.

    answer: an option's letter ("B", "(b)"), its place counted from 0 (1, as MMLU has it), or its text.
    choices: the texts of the options, if the data has them: a list, or a dict of lists "label" and "text" (ARC).
    letters: the names of the options in their order; the labels of `choices` come first.

    Read is, of what stands behind </think>, the first of these that is there: the last \\boxed{}; the last <answer>;
    the last "answer is B" or "Answer: B"; a first line that is a letter; a last line "B", "(B)", "B. Paris" or an
    option's text, with or without "answer is". Two options at once are no answer. The note `read` is the letter, ""
    for none. Raises RewardError if the answer is none of the options.

    >>> choice("The answer is (B), since ...", answer="B"), choice("A or B", answer="B")
    ({'score': 1.0, 'read': 'B'}, {'score': 0.0, 'read': ''})
    >>> choice("<think>A?</think>Paris", answer=1, choices=["Rome", "Paris"])
    {'score': 1.0, 'read': 'B'}
    """
    if answer is None:
        return None
    labels, texts = _options(choices, letters)
    gold = _gold(answer, labels, texts)
    read = _read(plain(after_thinking(completion)), labels, texts)
    return {"score": float(read == gold), "read": read or ""}


def _options(choices: Any, letters: str) -> tuple[list[str], list[str]]:
    """Labels and texts of the options; no texts if the data has none."""
    if choices is None:
        return list(letters), []
    if isinstance(choices, Mapping):
        return [str(label) for label in choices["label"]], [_folded(text) for text in choices["text"]]
    texts = [_folded(text) for text in choices]
    if len(texts) > len(letters):
        raise RewardError(
            f"choice: there are {len(texts)} choices and {len(letters)} letters; set more letters"
        )
    return list(letters[: len(texts)]), texts


def _folded(text: Any) -> str:
    return " ".join(str(text).casefold().split()).strip(" .*_\"'")


def _gold(answer: Any, labels: Sequence[str], texts: Sequence[str]) -> str:
    text = given_answer(answer)
    bare = text.strip("().:* ")
    for label in (bare, bare.upper()):
        if label in labels:
            return label
    if _folded(text) in texts:
        return labels[texts.index(_folded(text))]
    if text.isdecimal() and int(text) < len(labels):
        return labels[int(text)]
    raise RewardError(f"choice: the answer {text[:80]!r} is none of the options {', '.join(labels)}")


_SAID = (
    r"\b(?:[Aa]nswer|ANSWER|(?:[Cc]orrect|[Rr]ight)\s+(?:[Oo]ption|[Cc]hoice))s?[^\w.]{0,6}"
    r"(?:(?:is|be|would be|should be|must be)\b[^\w.]{0,4})?(?:(?:[Oo]ption|[Cc]hoice)[^\w.]{0,3})?"
)
_DRESSING = re.compile(r"[{}$*()\[\]\s]")
# Between two options: "A or B", "A; B", "A (or maybe B)", "A B". Not a full stop or a new line: reasons may follow.
_BETWEEN = r"(?:[ \t,;/|&+()\[\]*-]|\b(?:or|and|then|maybe|perhaps|possibly)\b)+"


def _read(text: str, labels: Sequence[str], texts: Sequence[str]) -> str | None:
    marked = last_box(text)
    if marked is None:
        marked = last_tagged(text, "answer")
    if marked is not None:
        return _option(marked, labels, texts)
    either = "|".join(map(re.escape, labels))
    another = rf"(?:{_BETWEEN}(?:{either})(?![\w'])(?!(?<=[AI])\s+[a-z]))"  # "A dog" and "I think" are prose
    said = list(re.finditer(rf"{_SAID}(?P<label>{either})(?![\w'])(?!\s*\?)(?P<more>{another})?", text))
    if said:
        return None if said[-1]["more"] else said[-1]["label"]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    bare = [bare for line in lines if (bare := _DRESSING.sub("", line).rstrip(".:")) in labels]
    if len(set(bare)) > 1:
        return None
    first = _DRESSING.sub("", lines[0]).rstrip(".:")
    return first if first in labels else _option(re.sub(f"^.*{_SAID}", "", lines[-1]), labels, texts)


def _option(text: str, labels: Sequence[str], texts: Sequence[str]) -> str | None:
    """The option that the whole text names: "B", "(b)", "B. Paris" or "Paris"."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    bare = _DRESSING.sub("", text).rstrip(".:,")
    for label in (bare, bare.upper()):
        if label in labels:
            return label
    if _folded(text) in texts:
        return labels[texts.index(_folded(text))]
    named = re.match(r"[\s*(\[]*(\w)[)\]*]*[.:)]\s+(?=\S)", text)
    if named is None or named[1] not in labels:
        return None
    either = "|".join(map(re.escape, labels))
    second = rf"(?:^|\b(?:or|and)\s+)[\s*(\[]*(?:{either})(?:[)\]*]*[.:)]|$)"  # "B. Paris or A. Rome"
    return None if re.search(second, text[named.end() :]) else named[1]
