"""Line charts as SVG for a page that needs nothing else; a plotting library would add megabytes of script to it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from covey.rl.terminal import bin_means

WIDTH, HEIGHT = 560, 210
LEFT, RIGHT, TOP, BOTTOM = 60, 10, 8, 24  # margins
COLOURS = 8  # of page.html; then they come again
POINTS = 400  # of a curve, at most; beyond them it shows means of neighbours
SMOOTH = 25  # a curve of more steps that goes up and down all the time also shows its moving average


@dataclass(frozen=True, slots=True)
class Series:
    """values [N] at steps [N], float64; NaN is a gap. marks: single measurements, drawn as dots."""

    name: str
    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    marks: bool = False

    @property
    def last(self) -> float:
        """The last value that there is, or NaN."""
        known = self.values[np.isfinite(self.values)]
        return float(known[-1]) if len(known) else math.nan


@dataclass(frozen=True, slots=True)
class Chart:
    """svg is markup; points is what the page's script reads to say the values under the pointer."""

    title: str
    series: Sequence[Series]  # as they are drawn
    svg: Markup
    points: dict[str, Any]


def line_chart(title: str, series: Sequence[Series], *, stacked: bool = False) -> Chart | None:
    """A chart of the curves, or None if no curve has a value. stacked: areas on each other, of the same steps."""
    series = [_thinned(one) for one in series if np.isfinite(one.values).any()]
    if not series:
        return None
    drawn = _stacked(series) if stacked else list(series)
    steps = np.concatenate([one.steps for one in drawn])
    x = _Axis(float(steps.min()), float(steps.max()), LEFT, WIDTH - RIGHT)
    finite = np.concatenate([one.values[np.isfinite(one.values)] for one in drawn])
    y = _Axis(*_limits(float(finite.min()), float(finite.max()), stacked), HEIGHT - BOTTOM, TOP)
    parts = [_grid(x, y)]
    below = np.full(len(drawn[0].values), y.low) if stacked else None
    for number, one in enumerate(drawn):
        colour = number % COLOURS
        if below is not None:
            parts.append(_area(one, below, x, y, colour))
            below = one.values
        elif one.marks:
            parts.append(_curve(one, x, y, f"c{colour} thin"))
            parts.extend(_dots(one, x, y, colour))
        else:
            smooth = _moving_average(one)
            if smooth is not None:
                parts.append(_curve(one, x, y, f"c{colour} faint"))
            parts.append(_curve(smooth or one, x, y, f"c{colour}"))
    label = escape(title)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    points = {
        "left": LEFT / WIDTH,
        "right": (WIDTH - RIGHT) / WIDTH,
        "low": x.low,
        "high": x.high,
        "series": [{"name": one.name, "x": _rounded(one.steps), "y": _rounded(one.values)} for one in series],
    }
    return Chart(title, series, Markup(svg), points)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values from low to high at pixels from start to end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between low and high: about `count` multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0.0, 1.0), ticks(1, 40)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [10.0, 20.0, 30.0, 40.0])
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _limits(low: float, high: float, stacked: bool) -> tuple[float, float]:
    if stacked or 0.0 <= low < 0.5 * high:
        low = 0.0  # heights that start at 0 can be compared by eye
    if high == low:
        space = abs(high) * 0.1 or 1.0
        return low - space, high + space
    return low, high + 0.04 * (high - low)


def _thinned(series: Series) -> Series:
    if len(series.steps) <= POINTS:
        return series
    steps, values = (bin_means(one.tolist(), POINTS) for one in (series.steps, series.values))
    return replace(series, steps=np.array(steps), values=np.array(values))


def _moving_average(series: Series) -> Series | None:
    """Over a twelfth of the steps around each; None for a short curve and for a smooth one."""
    known = np.isfinite(series.values)
    changes = np.sign(np.diff(series.values[known]))
    turns = np.count_nonzero(changes[1:] * changes[:-1] < 0)
    if len(series.values) <= SMOOTH or turns < len(series.values) / 4:
        return None
    window = np.ones(len(series.values) // 12 | 1)
    total = np.convolve(np.where(known, series.values, 0.0), window, "same")
    counted = np.convolve(known.astype(float), window, "same")
    values = np.divide(total, counted, out=np.full(len(total), math.nan), where=counted > 0.5)
    return replace(series, values=values)


def _stacked(series: Sequence[Series]) -> list[Series]:
    total = np.cumsum([np.nan_to_num(one.values) for one in series], axis=0)
    return [replace(one, values=values) for one, values in zip(series, total, strict=True)]


def _grid(x: _Axis, y: _Axis) -> str:
    lines, values = [], ticks(y.low, y.high, 4)
    digits = next((n for n in range(4, 7) if len({f"{v:.{n}g}" for v in values}) == len(values)), 7)
    for value in values:
        at = y(value)
        lines.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{at + 3.5}" text-anchor="end">{value:.{digits}g}</text>')
    for value in ticks(x.low, x.high, 6):
        if value == int(value):  # steps
            lines.append(f'<text x="{x(value)}" y="{HEIGHT - 6}" text-anchor="middle">{value:g}</text>')
    return "".join(lines)


def _curve(series: Series, x: _Axis, y: _Axis, style: str) -> str:
    path, pen = [], "M"
    for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
        if math.isfinite(value):
            path.append(f"{pen}{x(step)} {y(value)}")
            pen = "L"
        else:
            pen = "M"
    return f'<path class="curve {style}" d="{"".join(path)}"/>'


def _dots(series: Series, x: _Axis, y: _Axis, colour: int) -> list[str]:
    return [
        f'<circle class="dot c{colour}" cx="{x(step)}" cy="{y(value)}" r="3.5"/>'
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True)
        if math.isfinite(value)
    ]


def _area(series: Series, below: NDArray[np.float64], x: _Axis, y: _Axis, colour: int) -> str:
    there = [f"{x(s)} {y(v)}" for s, v in zip(series.steps.tolist(), series.values.tolist(), strict=True)]
    back = [f"{x(s)} {y(v)}" for s, v in zip(series.steps.tolist(), below.tolist(), strict=True)]
    return f'<path class="area c{colour}" d="M{"L".join([*there, *reversed(back)])}Z"/>'


def _rounded(values: NDArray[np.float64]) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]
