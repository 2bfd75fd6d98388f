"""The reward `language`: how much of a completion is written in one language."""

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from covey.rewards.find import RewardError
from covey.rewards.settings import settings

FEWEST_LATIN = 20  # letters of a passage; py3langid is a guess below that
FEWEST_OTHER = 4  # letters of a passage in another script, which says more by itself
_NO_PROSE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$[^$]*\$\$|\$[^$\n]*\$|\\\[(?:(?!\\[\[\]]).)*\\\]|\\\((?:(?!\\[()]).)*\\\)"
    r"|\\[A-Za-z]+|https?://\S+|<[^<>\n]{1,40}>",
    re.DOTALL,
)


def _check(language: str | None = None, among: Sequence[str] | None = None, **_: Any) -> None:
    _identifier(tuple(among or ()))
    if language is not None:
        _check_code(language, among)


@settings(_check)
def language(
    completion: str, language: str | None, *, among: Sequence[str] | None = None
) -> dict[str, Any] | None:
    """The share of the letters that stand in passages of the language, from 0.0 to 1.0; no opinion on too few letters.

    language: its ISO 639-1 code, "en"; set for all rows in `args`, or a column. None is no opinion.
    among: the codes that it chooses from; naming those that can occur makes it surer.
    A passage is what a line has in Latin letters, or in other ones; short ones are left out, and so are code,
    formulas, LaTeX commands, tags and addresses. The note `read` has the share of each language.

    >>> language("Let us add the two numbers first, and then halve the sum.", language="en", among=["en", "de", "zh"])
    {'score': 1.0, 'read': {'en': 1.0}}
    >>> language("42", language="en") is None
    True
    """
    if language is None:
        return None
    _check_code(language, among)
    identifier = _identifier(tuple(among or ()))
    letters: dict[str, int] = {}
    for passage, count in _passages(completion):
        code = identifier.classify(passage)[0]
        letters[code] = letters.get(code, 0) + count
    total = sum(letters.values())
    if not total:
        return None
    shares = {
        code: round(count / total, 4) for code, count in sorted(letters.items(), key=lambda item: -item[1])
    }
    return {"score": letters.get(language, 0) / total, "read": shares}


def _passages(text: str) -> list[tuple[str, int]]:
    """The passages of each line and their number of letters."""
    found = []
    for line in _NO_PROSE.sub(" ", text).splitlines():
        for latin, fewest in ((True, FEWEST_LATIN), (False, FEWEST_OTHER)):
            passage = "".join(c if not c.isalpha() or _is_latin(c) == latin else " " for c in line)
            count = sum(map(str.isalpha, passage))
            if count >= fewest:
                found.append((passage, count))
    return found


@functools.cache
def _is_latin(letter: str) -> bool:
    return unicodedata.name(letter, "").startswith(("LATIN", "FULLWIDTH LATIN"))


def _check_code(language: str, among: Sequence[str] | None) -> None:
    known = _identifier(tuple(among or ())).labels
    if language not in known:
        raise RewardError(f"language: {language!r} is none of the codes {', '.join(sorted(known))}")


@functools.lru_cache(maxsize=16)
def _identifier(among: tuple[str, ...]) -> Any:
    try:
        from py3langid import langid
    except ImportError as error:
        raise RewardError("language needs the package py3langid: pip install 'covey[rewards]'") from error
    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)
    try:
        identifier.set_languages(list(among) or None)
    except ValueError as error:
        raise RewardError(f"language: args.among is {list(among)}: {error}") from error
    return identifier
