import io
import math
import sys

import pytest

from covey.rl.terminal import (
    bin_means,
    block_chart,
    clean,
    count,
    duration,
    print_anything,
    shorten,
    sparkline,
)


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([-1, math.nan, 1]) == "▁ █"
    assert sparkline([]) == "" and sparkline([math.nan]) == " "
    assert sparkline([0, 2, 7, 7], width=2) == "▁█"  # means 1 and 7


def test_means_of_neighbours() -> None:
    assert bin_means([1, 2, 3, 4, 5], 2) == [1.5, 4.0]
    assert bin_means([1, math.nan, math.inf, 4], 2) == [1.0, 4.0]
    assert math.isnan(bin_means([math.nan, 1], 2)[0])
    assert bin_means([1, 2], 9) == [1, 2]


def test_block_chart() -> None:
    # Values 0..8 on 2 rows of 8 eighths: 2 eighths per unit; the lowest still shows.
    assert block_chart([0, 1, 2, 4, 6, 8], width=6, height=2) == [
        "8 │    ▄█",
        "0 │▁▂▄███",
        "  └1────6",
    ]


def test_block_chart_with_marks_on_the_same_axis() -> None:
    lines = block_chart([0.0] * 10, [(0, 0.5), (5, 1.0), (10, 0.0), (99, math.nan)], width=10, height=4)
    assert lines == [
        "1 │    ◆     ",
        "  │          ",
        "  │◆         ",
        "0 │▁▁▁▁▁▁▁▁▁◆",
        "  └1───────10",
    ]


def test_block_chart_far_from_zero_starts_at_the_lowest() -> None:
    assert block_chart([100, 110, 105], width=3, height=2) == ["110 │ █ ", "100 │▁██", "    └1─3"]


def test_block_chart_of_nothing() -> None:
    assert block_chart([], height=1)[0].startswith("0 │")
    assert block_chart([math.nan, math.nan], width=2, height=1)[0] == "0 │  "


def test_short_runs_get_wide_bars() -> None:
    assert block_chart([0, 1], width=60, height=1) == ["1 │▁▁▁███", "  └1────2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\tc", "a⏎ b c"),
        ("a\r\nb\rc", "a⏎ b c"),
        ("\x1b[31mred\x07\x9b", "\ufffd[31mred\ufffd\ufffd"),
        ("[bold]x[/bold] :smile:", "[bold]x[/bold] :smile:"),
        (
            "a\u202eb\u200b\ud800",
            "a\ufffdb\ufffd\ufffd",
        ),  # right-to-left override, zero width, lone surrogate
        ("Größe 漢字 😀\u00a0x", "Größe 漢字 😀 x"),
    ],
)
def test_clean(text: str, expected: str) -> None:
    assert clean(text) == expected


def test_shorten() -> None:
    assert shorten(" abcdefghij\n", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 7) == "ab…hijk"
    assert len(shorten("x" * 1000, 300)) == 300


def test_duration_and_count() -> None:
    seconds = (0.04, 9.94, 9.96, 99.4, 99.6, 2460, 5999, 12000, 360000)
    texts = ["0.0 s", "9.9 s", "10 s", "99 s", "2 min", "41 min", "1 h 40 min", "3 h 20 min", "100 h 0 min"]
    assert [duration(s) for s in seconds] == texts
    assert [count(n) for n in (0, 999, 1000, 4_884_480, 8_030_000_000)] == [
        "0",
        "999",
        "1 k",
        "4.88 M",
        "8.03 G",
    ]


def test_every_character_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_anything()
    print("▁█◆ a→b 漢 \ud800", flush=True)
    assert raw.getvalue() == b"_#o a>b ? ?\n"
