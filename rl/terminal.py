"""Text for a terminal: curves from characters, safe lines, durations and counts."""

import codecs
import math
import sys
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
MARK = "◆"
_LOOKALIKES = dict(zip("▁▂▃▄▅▆▇█◆━╸╺─│└→…⏎", "_..--==#o----|`>.|", strict=True))


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The curve of `values` in at most `width` characters, from ▁ to █; a gap for what is not finite.

    >>> sparkline([0, 1, 2, 7])
    '▁▂▃█'
    """
    bins = bin_means(values, width)
    finite = [value for value in bins if math.isfinite(value)]
    if not finite:
        return " " * len(bins)
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * scale)] if math.isfinite(v) else " " for v in bins)


def block_chart(
    values: Sequence[float],
    marks: Sequence[tuple[float, float]] = (),
    *,
    width: int = 60,
    height: int = 8,
) -> list[str]:
    """Bars of `values` with `marks` on top, and an axis; `height` + 1 lines.

    values: one per step, from step 1; means of neighbours where there are more than columns.
    marks: (step, value) of single measurements, drawn as ◆ on the same axis.
    """
    bins = bin_means(values, width)
    heights = [v for v in (*bins, *(v for _, v in marks)) if math.isfinite(v)]
    low, high = (min(heights), max(heights)) if heights else (0.0, 0.0)
    bins = [value for value in bins for _ in range(min(3, width // len(bins)))]
    if 0.0 <= low < 0.5 * high:
        low = 0.0  # bars that start at 0 can be compared by eye
    span = (high - low) or 1.0

    def eighths(value: float) -> int:
        """Of a character, from the chart's bottom; the lowest value still shows."""
        return max(1, round((value - low) / span * height * 8))

    cells = [[" "] * len(bins) for _ in range(height)]
    for column, value in enumerate(bins):
        filled = eighths(value) if math.isfinite(value) else 0
        for level in range(height):
            part = min(8, filled - 8 * level)
            if part > 0:
                cells[level][column] = BLOCKS[part - 1]
    for step, value in marks:
        if bins and math.isfinite(value):
            column = round(max(0.0, step - 1) / max(1, len(values) - 1) * (len(bins) - 1))
            cells[(eighths(value) - 1) // 8][min(column, len(bins) - 1)] = MARK
    labels = [""] * height
    labels[0], labels[-1] = f"{low:.3g}", f"{high:.3g}"
    margin = max(len(label) for label in labels)
    lines = [f"{labels[level]:>{margin}} │{''.join(cells[level])}" for level in reversed(range(height))]
    end = str(len(values))
    return [*lines, f"{'':>{margin}} └1{'─' * max(1, len(bins) - 1 - len(end))}{end}"]


def bin_means(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means of neighbours; NaN where none of them is finite."""
    count = min(width, len(values))
    bins = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        finite = [value for value in part if math.isfinite(value)]
        bins.append(sum(finite) / len(finite) if finite else math.nan)
    return bins


def clean(text: str) -> str:
    """One line that is safe to print: control characters, which could drive the terminal, become visible."""
    text = text.replace("\r\n", "\n").replace("\n", "⏎ ").replace("\t", " ")
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def duration(seconds: float) -> str:
    """
    >>> duration(4.2), duration(75.1), duration(2460), duration(12000)
    ('4.2 s', '75 s', '41 min', '3 h 20 min')
    """
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def count(number: int) -> str:
    """
    >>> count(960), count(4_884_480), count(8_030_000_000)
    ('960', '4.88 M', '8.03 G')
    """
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def shorten(text: str, length: int) -> str:
    """One safe line of at most `length` characters; what is left out lies nearer to the start.

    >>> shorten("abcdefghij", 7)
    'ab…ghij'
    """
    line = clean(text.strip())
    if len(line) <= length:
        return line
    start = (length - 1) * 2 // 5
    return f"{line[:start]}…{line[len(line) - (length - 1 - start) :]}"


def print_anything() -> None:
    """Let stdout replace what its encoding lacks: no completion can end a run, and curves keep their form."""

    def lookalike(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        text = error.object[error.start : error.end]
        return "".join(_LOOKALIKES.get(character, "?") for character in text), error.end

    codecs.register_error("lookalike", lookalike)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="lookalike")
