"""Work lists of the Triton attention kernels: which tile sees what, longest first.

Axes: S segments, as rows (start, end, prefix_start, prefix_end) that tile the tokens in order.

A query tile is some tokens of one segment with all query heads of one key-value head. A key tile is some tokens
that exactly the same queries see: it crosses no segment's and no prefix's boundary. The queries that see it are runs
of tokens (start, end, shift): query i sees key j where i - j + shift >= 0. With a sliding window i - j + shift is their
distance, counted through the prefix; without one, runs are joined. As completions follow their prompt, a prompt's own
queries and those of all its completions are then one run.

The lists are made on the CPU when a kernel first asks for them and kept: one copy to the device without a wait.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Run = tuple[int, int, int]  # query start, query end, shift

SPLIT_BLOCKS = (
    16  # a key tile's queries are not split into pieces of less: parts have to be written and summed
)
LONGEST_SHARE = 2 / 3  # of the mean work of a multiprocessor: what one piece may have


class KeyWork(NamedTuple):
    """What the dk, dv kernel works off, and what is left to sum after it."""

    items: Tensor  # int32 [I, 5]: key_start, key_end, first run, last run, place of the partial sums or -1
    runs: Tensor  # int32 [R, 3]
    sums: Tensor  # int32 [K, 4]: key_start, key_end, first place, last place
    places: int


@dataclass(slots=True)
class TileLists:
    """Lists for segments `rows` on `device`, by tile size."""

    rows: list[list[int]]
    device: torch.device
    _queries: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _keys: dict[tuple[int, ...], KeyWork] = field(default_factory=dict)

    def queries(self, tokens: int, window: int = 0) -> Tensor:
        """int32 [tiles, 5]: (start, end, segment start, prefix start, prefix end) of at most `tokens` queries each."""
        if (tokens, window) not in self._queries:
            tiles = [
                (at, min(at + tokens, end), start, prefix, prefix_end)
                for start, end, prefix, prefix_end in self.rows
                for at in range(start, end, tokens)
            ]

            def work(tile: tuple[int, ...]) -> int:
                _, end, own, prefix, prefix_end = tile
                seen = end - own + prefix_end - prefix
                return min(seen, window + tokens) if window else seen

            tiles.sort(key=work, reverse=True)
            self._queries[tokens, window] = self._placed(tiles, 5)
        return self._queries[tokens, window]

    def keys(self, tokens: int, query_tokens: int, heads: int, processors: int, window: int = 0) -> KeyWork:
        """Key tiles of at most `tokens` keys, their queries in pieces of a multiple of `query_tokens`.

        heads and processors (key-value heads, multiprocessors): how much work at a time makes one piece too long.
        """
        call = tokens, query_tokens, heads, processors, window
        if call not in self._keys:
            self._keys[call] = self._key_work(*call)
        return self._keys[call]

    def _key_work(self, tokens: int, query_tokens: int, heads: int, processors: int, window: int) -> KeyWork:
        tiles = list(self._key_tiles(tokens, window))
        total = sum(_length(runs) for _, _, runs in tiles)
        limit = max(SPLIT_BLOCKS * query_tokens, int(LONGEST_SHARE * total * heads / processors))
        pieces, sums, places = [], [], 0
        for start, end, runs in tiles:
            length = _length(runs)
            even = _ceil(length, _ceil(length, limit))
            parts = list(_split(runs, _ceil(even, query_tokens) * query_tokens))
            if len(parts) == 1:
                pieces.append((start, end, -1, runs))
                continue
            sums.append((start, end, places, places + len(parts)))
            for part in parts:
                pieces.append((start, end, places, part))
                places += 1
        pieces.sort(key=lambda piece: _length(piece[3]), reverse=True)
        items, flat = [], []
        for start, end, place, runs in pieces:
            items.append((start, end, len(flat), len(flat) + len(runs), place))
            flat.extend(runs)
        return KeyWork(self._placed(items, 5), self._placed(flat, 3), self._placed(sums, 4), places)

    def _key_tiles(self, tokens: int, window: int) -> Iterator[tuple[int, int, list[Run]]]:
        """(start, end, runs) of every key tile, in the order of tokens."""
        for low, high, own_end, readers in self._key_ranges():
            for start in range(low, high, tokens):
                end = min(start + tokens, high)
                runs = [(start, own_end, 0), *readers]
                if window:  # the runs keep their distances, and end where nobody sees the last key any more
                    runs = [(s, min(e, end - 1 + window - shift), shift) for s, e, shift in runs]
                    yield start, end, [run for run in runs if run[0] < run[1]]
                else:
                    yield start, end, list(_merged(runs))

    def _key_ranges(self) -> Iterator[tuple[int, int, int, list[Run]]]:
        """(low, high, end of the segment, runs that see it as their prefix) for keys that the same queries see."""
        readers: dict[tuple[int, int], list[Run]] = {}
        for start, end, prefix, prefix_end in self.rows:
            if start < end and prefix < prefix_end:
                readers.setdefault((prefix, prefix_end), []).append((start, end, prefix_end - start))
        segments = [row for row in self.rows if row[0] < row[1]]
        cuts = sorted(
            {cut for row in segments for cut in row[:2]} | {cut for pair in readers for cut in pair}
        )
        seen_by: dict[int, list[Run]] = {}
        for (prefix, prefix_end), runs in readers.items():
            for low in cuts[bisect_left(cuts, prefix) : bisect_left(cuts, prefix_end)]:
                seen_by.setdefault(low, []).extend(runs)
        starts = [row[0] for row in segments]
        for low, high in pairwise(cuts):
            own_end = segments[bisect_right(starts, low) - 1][1]
            yield low, high, own_end, sorted(seen_by.get(low, []))

    def _placed(self, entries: list[tuple[int, ...]], columns: int) -> Tensor:
        table = torch.tensor(entries, dtype=torch.int32).view(-1, columns)
        if self.device.type != "cuda" or not entries:
            return table.to(self.device)
        return table.pin_memory().to(self.device, non_blocking=True)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _length(runs: list[Run]) -> int:
    return sum(end - start for start, end, _ in runs)


def _merged(runs: list[Run]) -> Iterator[Run]:
    """The same queries in as few runs as there can be where only the order counts, not the distance.

    The first run is the keys' own segment. Whoever stands behind it sees the keys with shift 0 as well.
    """
    last, own_end = runs[0], runs[0][1]
    for start, end, shift in runs[1:]:
        shift = 0 if start >= own_end else shift
        if (start, shift) == last[1:]:
            last = (last[0], end, shift)
        else:
            yield last
            last = (start, end, shift)
    yield last


def _split(runs: list[Run], size: int) -> Iterator[list[Run]]:
    """Consecutive parts of `size` queries; the last has what is left."""
    part, room = [], size
    for start, end, shift in runs:
        while start < end:
            step = min(room, end - start)
            part.append((start, start + step, shift))
            start, room = start + step, room - step
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part
