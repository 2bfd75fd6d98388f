"""The rewards `math` and `gsm8k`: find the final answer of a solution and compare it with the gold answer, exactly.

Numbers are compared as rationals (exact_value.py), lists, sets, tuples and intervals item by item, and what
is left symbolically by math-verify (symbolic.py). There is no tolerance: 0.333333 is not 1/3.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

from covey.rewards import symbolic
from covey.rewards.exact_value import MAX_CHARACTERS, plain, read_number
from covey.rewards.find import RewardError
from covey.rewards.settings import settings
from covey.rewards.text_match import after_thinking, given_answer, given_answers


@settings()
def math(completion: str, answer: Any) -> dict[str, Any] | None:
    """1.0 if the final answer of the completion equals the answer, else 0.0; no opinion if answer is None.

    The note `read` holds what was taken for the final answer. `answer` may be a list of accepted answers.

    >>> math("so we get \\\\boxed{\\\\frac{1}{2}}", answer="0.5")
    {'score': 1.0, 'read': '\\\\frac{1}{2}'}
    >>> math("I do not know.", answer=18)
    {'score': 0.0, 'read': ''}
    """
    if answer is None:
        return None
    right = max(score(gold, completion) for gold in given_answers(answer))
    return {"score": right, "read": final_answer(completion) or ""}


@settings()
def gsm8k(completion: str, answer: Any, *, marked: bool = True) -> dict[str, Any] | None:
    """1.0 if the number in the last \\boxed{}, or else behind the last "####", equals the answer, else 0.0.

    No opinion if answer is None. answer: a number, or a solution of the data set, which ends in "#### 72".
    Setting: marked, whether a number counts only in a box or behind "####"; if not, it is looked for as by `math`.
    Raises RewardError if the answer is not a number.

    >>> gsm8k("48 + 24 = 72\\n#### 72", answer="... clips.\\n#### 72")
    {'score': 1.0, 'read': '72'}
    >>> gsm8k("The answer is 72.", answer=72), gsm8k("The answer is 72.", answer=72, marked=False)
    ({'score': 0.0, 'read': ''}, {'score': 1.0, 'read': '72'})
    """
    if answer is None:
        return None
    gold = read_number(_gold(given_answer(answer)))
    if gold is None:
        raise RewardError(f"gsm8k: the answer {str(answer)[-80:]!r} is not a number")
    found = final_answer(completion, marked=marked) or ""
    number = read_number(_tidy(found))
    return {"score": float(number is not None and gold.equals(number)), "read": found}


def score(gold: Any, text: str) -> float:
    """1.0 if the final answer in `text` equals `gold`, else 0.0. Same text, same score; no text raises.

    gold: a number, an answer in plain text or LaTeX, or a whole solution that ends in a box or "#### ...".
    Raises RewardError if gold is empty.

    >>> score("1/2", "0.5"), score(18, "#### $18.00"), score("{1,2}", "\\\\boxed{\\\\{2,1\\\\}}")
    (1.0, 1.0, 1.0)
    >>> score("(1,2)", "\\\\boxed{(2,1)}"), score("1/3", "0.333333")
    (0.0, 0.0)
    """
    gold = _gold(given_answer(gold))
    found = final_answer(text)
    return float(found is not None and any(_same(gold, _tidy(side)) for side in _sides(found)))


@functools.lru_cache(maxsize=4096)
def _gold(text: str) -> str:
    marked = "\\boxed" in text or "\\fbox" in text or _HASHES.search(plain(text))
    gold = _tidy((final_answer(text) or "") if marked else plain(text))
    if not gold:
        raise RewardError(f"no answer can be read from the gold answer {text[:80]!r}: a mistake in the data")
    return gold


# --- Finding the answer -------------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_HASHES = re.compile(r"(?<!#)####(?!#)(?=\s*[-+*$(\\.\d\[{])")  # not a heading of words
_PHRASE = re.compile(
    r"\b(?:answer|result)s?(?:\s+is|\s+are|\s*=|\W{0,3}:)|答案\s*(?:是|为|:)?", re.IGNORECASE
)
_SPAN = re.compile(
    r"\$\$(?P<a>[^$]{1,300})\$\$|\$(?P<b>[^\s$](?:[^$\n]{0,300}[^\s$])?)\$(?!\d)"
    r"|\\\((?P<c>.{1,300}?)\\\)|\\\[(?P<d>.{1,300}?)\\\]",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.\\{^])(?:\\pm\s*)?(?:[-+](?=[\d.$€£]))?[$€£]?-?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+(?:\.\d+)?|:\d\d)?"
    r"(?:\s*(?:\\times|\*|x)\s*10\^\{?[-+]?\d+\}?)?(?:\s*\\?%)?"
    r"(?!\d|[.,]\d|/\d|\s*(?:[\\{]|\^(?!\{?\\circ))|(?:st|nd|rd|th)\b)(?:\^\{?\\circ\}?)?"
)


def final_answer(text: str, marked: bool = False) -> str | None:
    """What a solution gives as its final answer, or None. Of what stands behind the last </think>, if there is one,
    the first of these that is there:

    1. the last \\boxed{}; one that is empty or never closed is no answer;
    2. what follows the last "####" or "answer is" or "Answer:";
    3. the whole text if it is a formula or a number;
    4. the last formula in $ $, \\( \\) or \\[ \\], or the last number, whichever comes later.

    marked: only a box, or what follows "####".
    """
    text = plain(after_thinking(text))
    box = last_box(text)
    if box is not None:
        return box or None
    marks = [*_HASHES.finditer(text), *(() if marked else _PHRASE.finditer(text))]
    if marks:
        rest = text[max(mark.end() for mark in marks) :]
        return _leading(rest) if marked else _leading(rest) or _last(rest) or _last(text)
    if marked:
        return None
    return text.strip() if _is_answer(text) else _last(text)


def last_box(text: str) -> str | None:
    """What is in the last \\boxed{}: "" if that is nothing or if it was never closed; None if there is no box."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    at = boxes[-1].end()
    if not text.startswith("{", at):
        return re.compile(r"\S*").match(text, at)[0].rstrip(".,;$")  # type: ignore[index]
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[at + 1 : brace.start()].strip()
    return ""


def _is_answer(text: str) -> bool:
    """Is all of it one number or formula (no prose)?"""
    line = text.strip()
    if not line or "\n" in line or len(line) > MAX_CHARACTERS:
        return False
    line = _tidy(line)
    words = re.sub(r"\\(?:text|mathrm|textbf|mbox)\{[^{}]*\}|\\[A-Za-z]+", " ", _AND.sub(",", line))
    return read_number(line) is not None or not re.search(r"[^\W\d_]{2,}|\w\s+[A-Za-z]\s+\w", words)


def _leading(rest: str) -> str | None:
    """The answer right after a mark such as "####"."""
    rest = rest.lstrip(" \t\r\n*_:=")
    span = _SPAN.match(rest)
    if span and _is_formula(span):
        return _content(span)
    line = rest.partition("\n")[0].strip().rstrip("*_.").strip()
    if _is_answer(line):
        return line
    number = _NUMBER.match(rest)
    if number:
        return number[0].strip()
    return line if 0 < len(line.split()) <= 3 else None  # "Answer: Tuesday"


def _last(text: str) -> str | None:
    spans = [span for span in _SPAN.finditer(text) if _is_formula(span)]
    after = spans[-1].end() if spans else 0
    numbers = list(_NUMBER.finditer(text, after))
    if numbers or spans:
        return numbers[-1][0].strip() if numbers else _content(spans[-1])
    line = text.strip().rpartition("\n")[2]
    return line if len(line) <= MAX_CHARACTERS and re.search(r"[\\=]", line) else None


def _content(span: re.Match[str]) -> str:
    return next(group for group in span.groups() if group is not None).strip()


def _is_formula(span: re.Match[str]) -> bool:
    """ "$5 and $" is money, not a formula."""
    return _content(span) != "" and not re.search(r"(?<![\\A-Za-z{])[A-Za-z]{2,}\s", _content(span))


# --- Comparing ----------------------------------------------------------------------------------------------

_DROPPED = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|textstyle|limits)(?![A-Za-z])"
    r"|\\(?:underline|(?:text)?color\{\w*\})(?![A-Za-z])"
    r"|(?<!\\)\\[,!;: ()\[\]]|\\(?=\$)|[$€£¥]|\*\*"
)
_SYMBOLIC_CHARACTERS = 300
# What may stand left of an answer: x, f(x), (x, y), \text{Area}, Total cost.
_NAME = re.compile(
    r"[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?|\([a-z](?:,\s*[a-z])+\)|\\text\{[^{}]*\}|[A-Za-z][A-Za-z ]{2,}"
)
_APPROX = re.compile(r"\\approx(?![a-z])")
_EQUALS = re.compile(r"(?<![<>!])=(?!=)|\\approx(?![a-z])|\\in(?![a-z])")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")  # not of a command
_AND = re.compile(r"\\text\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")  # 10 000
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")


def _tidy(text: str) -> str:
    """One spelling for what LaTeX can spell in several ways; the left side of "x = 5" is left out."""
    text = text.replace("{,}", ",").replace("\\%", "%").replace("~", " ")
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\\pi|\w)\s*(\\pi|\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<=\d)\s*x\s*(?=10\^)", r"\\times ", text)
    text = re.sub(r"(?<=\d)\\[,!;: ](?=\d{3}(?!\d))", "", text)  # 1\,234
    text = _DROPPED.sub(" ", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi\b", r"\\pi", text)
    text = " ".join(text.split()).rstrip(".,;: ").strip("*_ ").strip()
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    return _named(text.replace("\\varnothing", "\\emptyset"))[1]


def _named(text: str) -> tuple[str, str]:
    """The name x and the value 7 of "x = 3 + 4 = 7"; without a name "". An equation in unknowns, as x^2 + y = 1, is a
    value of its own, and so is 17 = 18."""
    *left, right = (part.strip() for part in _EQUALS.split(text))
    known = all(_NAME.fullmatch(part) or not _LETTER.search(part) for part in left)
    if left and known and not _APPROX.search(text) and not _LETTER.search(right):
        number = read_number(right)
        numbers = [read_number(part) for part in left if not _LETTER.search(part)]
        known = not number or all(other.equals(number) for other in numbers if other)
    return (left[0] if left else "", right) if known else ("", text)


def _sides(text: str) -> list[str]:
    """The answer; of 10/3 \\approx 3.33 both sides, if they are within 1%: either may be what was asked for."""
    exact, *rough = _APPROX.split(text)
    if len(rough) == 1:
        numbers = [read_number(_tidy(side)) for side in (exact, *rough)]
        left, right = (number.face if number else None for number in numbers)
        if left is not None and right is not None and 100 * abs(left - right) <= abs(left):
            return [exact, *rough]
    return [text]


def _same(gold: str, found: str) -> bool:
    if not found or len(found) > MAX_CHARACTERS:
        return False
    if _key(gold) == _key(found):
        return True
    gold_number, number = read_number(gold), read_number(found)
    if gold_number and number:
        return gold_number.equals(number)
    gold_items, items = _items(gold), _items(found)
    if gold_items and items:
        return gold_items[0] == items[0] and _same_items(gold_items[0] == "set", gold_items[1], items[1])
    if (gold_items and number) or (items and gold_number):
        return False
    if any(side and side[0].startswith(":") for side in (gold_items, items)):
        return False  # a time or ratio, and what is neither
    return _same_symbolically(gold, found)


def _key(text: str) -> str:
    """Equal keys mean the same answer. A space between digits stays: 1 1/2 is not 11/2."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    text = re.sub(r"^\((.)\)$", r"\1", text)  # the choice (B)
    return text.casefold() if re.fullmatch(r"[^\W\d_]{2,}", text) else text


def _items(text: str) -> tuple[str, Sequence[str]] | None:
    """Kind and items of a set, list, tuple, interval, time or ratio, or of a \\pm b.

    The kind is "set" where order does not matter, the names of "x = 1, y = 2", else the brackets or ":".
    """
    if "\\begin" in text:
        return None
    if "\\pm" in text:
        return "set", [re.sub(r"\\pm(?![a-z])\s*", sign, text) for sign in "+-"]
    clock = re.fullmatch(r"(\d+)\s*:\s*(\d+)(?:\s*:\s*(\d+))?\s*([AaPp]\.?[Mm]\.?)?", _key(text))
    if clock:
        half = (clock[4] or "").replace(".", "").lower()
        return f":{half}", [part for part in clock.groups()[:3] if part]
    text = text.replace("\\{", "⟨").replace("\\}", "⟩")  # one character each, unlike the braces of LaTeX
    if len(text) > 2 and text[0] in "([⟨{" and _closing(text) == len(text) - 1:
        items = _split(text[1:-1])
        if len(items) > 1 or text[0] == "⟨":
            kind = "set" if text[0] in "⟨{" else text[0] + text[-1]
            return kind, [_named(item)[1] for item in items]
        return None
    items = _split(_AND.sub(",", _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)))
    named = sorted(map(_named, items))  # "x = 1 or x = 2" are two values of one name, and a set
    names = [name for name, _ in named]
    kind = ", ".join(names) if len(set(names)) > 1 else "set"
    return (kind, [value for _, value in named]) if len(items) > 1 else None


def _closing(text: str) -> int:
    """Index of the bracket that closes the first one; half-open intervals mix round and square ones."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([⟨{") - (character in ")]⟩}")
        if depth == 0:
            return i
    return -1


def _split(text: str) -> list[str]:
    """Split at the commas outside all brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([⟨{") - (character in ")]⟩}")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts = [part.strip().replace("⟨", "\\{").replace("⟩", "\\}") for part in [*parts, text[start:]]]
    return [part for part in parts if part]


def _same_items(as_set: bool, gold: Sequence[str], found: Sequence[str]) -> bool:
    if len(gold) != len(found):
        return False
    if not as_set:
        return all(_same(g, f) for g, f in zip(gold, found, strict=True))
    left = list(found)
    for item in gold:
        match = next((other for other in left if _same(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_symbolically(gold: str, found: str) -> bool:
    prose = re.search(r"(?:(?<![\\{A-Za-z])[A-Za-z]{3,}\s+){3}", found)
    if max(len(gold), len(found)) > _SYMBOLIC_CHARACTERS or prose:
        return False
    if _EQUALS.search(found) and not _EQUALS.search(gold):
        return False  # math-verify would take x^2 + y = 1 for 1
    return symbolic.equal(gold, found)
