"""Symbolic equality of two answers by math-verify, in a process of its own (worker.py).

Sympy takes unbounded time and memory on some of what a model writes: (x+y+z)^{99}, 9^{9^{9^9}}.
"""

import functools
from typing import Any

from covey.rewards.worker import Worker, serve

CPU_SECONDS = 1.0  # nearly all take milliseconds

_worker = Worker("covey.rewards.symbolic", CPU_SECONDS)


@functools.lru_cache(maxsize=4096)  # the completions of a group repeat one another
def equal(gold: str, found: str) -> bool:
    """Are two LaTeX expressions equal? math-verify follows the form of gold. False if it takes too long."""
    return _worker.ask((gold, found)) is True


def _compare(question: tuple[str, str]) -> bool:
    from math_verify import verify

    golds, targets = map(_parse, question)
    same = verify(golds, targets, allow_set_relation_comp=True, timeout_seconds=None)
    return same and _close(golds[0], targets[0])


def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(f"\\boxed{{{text}}}", config, parsing_timeout=None)  # type: ignore[arg-type]


def _close(gold: Any, target: Any) -> bool:
    """math-verify rounds, so that 1/500! and 1/502! are equal to it. Here two expressions must agree to 300 digits,
    each symbol being some fraction, or to 12 digits if one of them is a decimal. A smaller difference that is seen not
    to be 0, such as e^{-1000}, counts too."""
    from sympy import Expr, Float, Rational, simplify
    from sympy.core.relational import Relational
    from sympy.matrices import MatrixBase

    if isinstance(gold, Relational) and isinstance(target, Relational) and gold.lhs != target.lhs:
        return True
    gold, target = (side.rhs if isinstance(side, Relational) else side for side in (gold, target))
    if all(isinstance(side, MatrixBase) for side in (gold, target)):
        return gold.shape == target.shape and all(map(_close, gold, target))
    if gold == target or not all(isinstance(side, Expr) for side in (gold, target)):
        return True
    symbols = sorted(gold.free_symbols | target.free_symbols, key=str)
    values = {symbol: Rational(5 + 3 * i, 7) for i, symbol in enumerate(symbols)}
    difference = (target.doit() - gold.doit()).expand().subs(values)
    if isinstance(difference, Rational):
        return difference == 0
    digits = 12 if gold.has(Float) or target.has(Float) else 300
    size = abs(gold.subs(values).evalf(digits))
    if size == 0:
        return simplify(difference) == 0
    if abs(difference.evalf(digits, maxn=2 * digits)) > size * Rational(1, 10) ** digits:
        return False
    return digits == 12 or not _is_seen(difference)


def _is_seen(difference: Any) -> bool:
    """Whether one digit of it can be told for certain. Of what is 0, but not plainly so, none ever can."""
    try:
        return difference.evalf(1, maxn=1000, strict=True) != 0
    except Exception:  # PrecisionExhausted, or there is no value
        return False


def _main() -> None:
    from math_verify import grader, parser

    # Its own time limits stay off, and so does its warning about that: the worker has one.
    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True
    _compare(("x^2+2x+1", "(x+1)^2"))  # the first one builds the parser's tables, which must not count
    serve(_compare)


if __name__ == "__main__":
    _main()
