"""Which completions are in slots and which wait, and what the slots' steps bring them.

The host launches a chunk of steps, and while it runs looks at what the one before it brought. Rows that end make room
for rows that wait. Where memory runs out (rollout/kv_pool.py) rows wait, or leave and come back later: what they have
drawn stays, and is computed again.

Axes: K steps of a chunk, B rows in slots, E rows that enter.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from covey.rollout.engine import Sampling
from covey.rollout.kv_pool import NOWHERE
from covey.rollout.prefill import prefill
from covey.rollout.rows import Family, Row
from covey.rollout.slots import ALIVE, DRAW, LIMIT, STEP, TOKEN, Chunk, Slots, pace
from covey.rollout.stops import StopStrings

FIRST_ROOM = 128  # places of a row before its first growth, where not all can have all that they may need
SPARE = 16  # rows wait while less than one in so many places would stay free

log = logging.getLogger(__name__)


class Generation:
    """One call of `generate`: which rows are in the slots, which wait, and where everything lies."""

    def __init__(
        self,
        slots: Slots,
        sampling: Sampling,
        *,
        decode: Callable[[Sequence[int]], str],
        eos_ids: frozenset[int],
        max_rows: int,
        roomy: bool,
        done: Callable[[Family], None],
        tokens: Callable[[int, int, Sequence[int]], None] | None = None,
    ):
        """roomy: every row gets all the places that it can need at once. done: told of prompts with no row left.
        tokens: told of new tokens (see InProcessEngine.generate)."""
        self.policy, self.slots, self.pool = slots.policy, slots, slots.pool
        self.limit, self.max_rows, self.roomy, self.done = sampling.max_new_tokens, max_rows, roomy, done
        self.tokens = tokens
        self.decode, self.eos_ids = decode, frozenset() if sampling.ignore_eos else eos_ids
        self.stops = StopStrings(sampling.stop, decode) if sampling.stop else None
        self.sampler = slots.begin(sampling)
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []  # by slot
        self.chunk, self.overlap = pace(self.policy.device)
        self.ahead = 0  # steps launched whose results the host has not seen

    def run(self, families: Sequence[Family]) -> None:
        """Until every row is finished."""
        self.waiting.extend(row for family in families for row in family.rows)
        running: tuple[Chunk, list[Row]] | None = None
        try:
            while self.rows or self.waiting:
                self._arrange([], self._admit())
                launched = self._launch()
                if running is not None:
                    self._settle(*running)
                if launched is not None and not self.overlap:
                    self._settle(*launched)
                    launched = None
                running = launched
        finally:
            for row in self.rows:
                self._leave(row)

    # Who is in the slots

    def _admit(self) -> list[Row]:
        """Takes rows that wait and for whom there is room."""
        entering: list[Row] = []
        while self.waiting and len(self.rows) + len(entering) < self.max_rows:
            row, alone = self.waiting[0], not self.rows and not entering
            family = row.family
            prefix = 0 if family.running else len(family.prompt.ids) - 1
            own = self._first_room(row, alone)
            if not (alone or self.roomy or self.pool.free - prefix - own >= self.pool.size // SPARE):
                break
            if not family.running:
                places = self.pool.take(prefix)
                if places is None:
                    break
                family.prefix = places
            places = self.pool.take(own)
            if places is None:
                if not family.running:
                    self.pool.give(family.prefix)
                break
            row.own = places
            family.running += 1
            entering.append(self.waiting.popleft())
        assert self.rows or entering or not self.waiting, "an empty pool has room for any row"
        return entering

    def _first_room(self, row: Row, alone: bool) -> int:
        if self.roomy or alone:
            return self.limit
        return min(self.limit, max(FIRST_ROOM, 2 * (len(row.ids) + 1)))

    def _leave(self, row: Row) -> None:
        """Gives back a row's places, and its prompt's with the last row."""
        family = row.family
        self.pool.give(row.own)
        row.own = NOWHERE
        family.running -= 1
        if not family.running:
            self.pool.give(family.prefix)

    def _arrange(self, leaving: Sequence[Row], entering: list[Row]) -> None:
        """Rows leave and enter. Those that stay keep their slots unless there are gaps before them."""
        if not leaving and not entering:
            return
        for row in leaving:
            self._leave(row)
        if entering:
            prefill(self.policy, self.pool, entering, self.slots.room.prefill_tokens())
        before, gone = self.rows, set(leaving)
        stay = [i for i, row in enumerate(before) if row not in gone]
        count = len(stay) + len(entering)
        newcomers = [(len(before) + i, row) for i, row in enumerate(entering)]
        fillers = iter(newcomers + [(i, before[i]) for i in stay if i >= count][::-1])
        places: list[tuple[int, Row]] = [
            (i, before[i]) if i < len(before) and before[i] not in gone else next(fillers)
            for i in range(count)
        ]
        source = np.array([s for s, _ in places], dtype=np.int64)
        self.rows = [row for _, row in places]
        self.slots.arrange(source, len(before), self._states(entering), self._tables())
        self._arrange_sampler(source, len(before))

    def _arrange_sampler(self, source: np.ndarray, before: int) -> None:
        to = np.arange(len(source))
        moved, new = (source != to) & (source < before), source >= before
        device = self.policy.device
        if moved.any():
            self.sampler.move(
                *(torch.from_numpy(x[moved]).to(device, non_blocking=True) for x in (to, source))
            )
        if new.any():
            rows = [self.rows[i] for i in to[new]]
            slot = torch.from_numpy(to[new]).to(device, non_blocking=True)
            self.sampler.admit(slot, [row.family.prompt.ids for row in rows], [row.ids for row in rows])

    def _states(self, entering: Sequence[Row]) -> np.ndarray:
        """int64 [5, E]."""
        states = np.zeros((5, len(entering)), dtype=np.int64)
        for i, row in enumerate(entering):
            states[TOKEN, i] = row.ids[-1] if row.ids else row.family.prompt.ids[-1]
            states[STEP, i], states[ALIVE, i], states[LIMIT, i] = len(row.ids), 1, self.limit
            states[DRAW, i] = row.draws
        return states

    def _tables(self) -> list[np.ndarray]:
        """own_start, group_of_row, prefix_start, prefix_length, rows_of_group, as the tables want them."""
        room = self.slots.room
        own_start, group_of_row = np.zeros(room.rows, np.int64), np.full(room.rows, -1)
        prefix_start, prefix_length = np.zeros((2, room.groups), np.int64)
        seats, slots_of = np.full((room.groups, room.seats), -1), {}
        for slot, row in enumerate(self.rows):
            own_start[slot] = row.own.start
            if row.family.prefix.size:
                slots_of.setdefault(row.family, []).append(slot)
        for group, (family, slots) in enumerate(slots_of.items()):
            prefix_start[group], prefix_length[group] = family.prefix
            group_of_row[slots] = group
            seats[group, : len(slots)] = slots
        return [own_start, group_of_row, prefix_start, prefix_length, seats]

    # Chunks of steps

    def _launch(self) -> tuple[Chunk, list[Row]] | None:
        """Starts the next chunk, if there is a row that it can bring further."""
        left = max((self.limit - len(row.ids) for row in self.rows), default=0) - self.ahead
        steps = min(self.chunk, left)
        if steps <= 0 or not self._grow(steps):
            return None
        chunk = self.slots.run(len(self.rows), steps)
        self.ahead += steps
        return chunk, list(self.rows)

    def _grow(self, steps: int) -> bool:
        """Sees to it that every row has the places of its next tokens. False: results have to be looked at first."""
        grown = False
        for row in self.rows:
            wanted = min(self.limit, len(row.ids) + self.ahead + steps)
            while row.own.size < wanted:
                places = self.pool.take(min(self.limit, 2 * row.own.size))
                if places is not None:
                    self.pool.move(row.own, places)
                    self.pool.give(row.own)
                    row.own, grown = places, True
                elif self.ahead:
                    break  # rows may have ended
                else:
                    self._evict(self.rows[-1])
                    return self._grow(steps)
        if grown:
            self.slots.arrange(np.arange(len(self.rows)), len(self.rows), self._states([]), self._tables())
        return all(row.own.size >= min(self.limit, len(row.ids) + self.ahead + steps) for row in self.rows)

    def _evict(self, row: Row) -> None:
        """Sends a row back to those that wait; what it has drawn stays."""
        log.debug("no room for more tokens: sample %d of row %d waits", row.sample, row.family.prompt.row)
        self._arrange([row], [])
        self.waiting.appendleft(row)

    def _settle(self, chunk: Chunk, rows: Sequence[Row]) -> None:
        """Notes what a chunk brought; rows that it finished leave."""
        ids_KB, logp_KB, full_KB = chunk.wait()
        self.ahead -= chunk.steps
        for slot, row in enumerate(rows):
            if row.finish is None:
                full = None if full_KB is None else full_KB[:, slot].tolist()
                self._extend(row, ids_KB[:, slot].tolist(), logp_KB[:, slot].tolist(), full)
        ended = [row for row in self.rows if row.finish is not None]
        self._arrange(ended, [])
        for family in dict.fromkeys(row.family for row in ended):
            if all(row.finish is not None for row in family.rows):
                self.done(family)

    def _extend(self, row: Row, ids: list[int], logprobs: list[float], full: list[float] | None) -> None:
        checked = len(row.ids)
        count = min(len(ids), self.limit - checked)
        end = next((i for i in range(count) if ids[i] in self.eos_ids), None)
        if end is not None:
            count, row.finish = end + 1, "eos"
        elif checked + count == self.limit:
            row.finish = "length"
        if any(map(math.isnan, logprobs[:count])):
            raise FloatingPointError(
                f"the logits after the prompt of row {row.family.prompt.row} and {checked} to {checked + count} "
                "tokens are not finite: the weights have diverged; go back to an earlier checkpoint and lower the "
                "learning rate"
            )
        row.ids += ids[:count]
        row.logprobs += logprobs[:count]
        if full is not None:
            row.full_logprobs += full[:count]
        spoken = row.ids[:-1] if row.finish == "eos" else row.ids
        found = self.stops.first_stop(spoken, checked) if self.stops else None
        if found is not None:
            length, row.text = found
            row.finish = "stop"
            del row.ids[length:], row.logprobs[length:], row.full_logprobs[length:]
        elif row.finish is not None:
            row.text = self.decode(spoken)
        if self.tokens is not None:
            self.tokens(row.family.index, row.sample, row.ids[checked:])
