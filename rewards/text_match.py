"""Rewards that compare text as it stands: an exact answer, the first number, a required format."""

import re
from decimal import Decimal
from typing import Any

from covey.rewards.reward import RewardError

# Digits with an optional sign, thousands commas (between a digit and exactly three digits) and decimals.
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|[-+]?\.\d+")

# One reasoning block, closed, with something after it; a second tag anywhere is a mistake.
THINK_THEN_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*(?=\S)(?:(?!</?think>).)*"


def exact(completion: str, answer: Any, first_line: bool = False, ignore_case: bool = False) -> float | None:
    """1.0 if the completion is the answer (blanks around both ignored), else 0.0; None if answer is None.

    Settings: first_line compares only the first line that is not blank (base models write on);
    ignore_case does what it says.

    >>> exact(" Paris\\n", answer="Paris"), exact("It is Paris", answer="Paris")
    (1.0, 0.0)
    >>> exact("Paris\\nRome", answer="paris", first_line=True, ignore_case=True)
    1.0
    """
    if answer is None:
        return None
    text, gold = completion.strip(), given_answer(answer)
    if first_line:
        text = text.partition("\n")[0].strip()
    if ignore_case:
        text, gold = text.casefold(), gold.casefold()
    return float(text == gold)


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


def format(completion: str, pattern: str = THINK_THEN_ANSWER) -> float:
    """1.0 if the whole completion matches the regular expression, else 0.0. A dot also matches a newline.

    The default wants one block <think>...</think> and then something that is not blank. Where the chat
    template has already opened the block, give your own, for example '.*</think>\\\\s*\\\\S.*'.

    >>> format("<think>\\n6 * 7\\n</think>\\n42"), format("<think>6 * 7</think> "), format("42")
    (1.0, 0.0, 0.0)
    >>> format("Answer: 42", pattern=r"Answer: \\d+")
    1.0
    """
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)


def given_answer(answer: Any) -> str:
    """The answer of a data row as text without blanks around it; RewardError if nothing is left."""
    text = str(answer).strip()
    if not text:
        raise RewardError(
            "the answer is empty: a mistake in the data (None means that the reward does not apply)"
        )
    return text


def _ascii_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def _first_number(text: str) -> Decimal | None:
    match = NUMBER.search(_ascii_minus(text))
    return Decimal(match.group().replace(",", "")) if match else None
