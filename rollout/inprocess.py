"""Sampling with the weights that are being trained, in the trainer's own process.

Completions run side by side, each in a slot (rollout/slots.py); one that ends makes room for one that waits
(rollout/schedule.py). The last token of a prompt is a row's first own token: the tokens before it are computed and
stored once per group (rollout/prefill.py), and the first token is drawn like all others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from covey.rollout.engine import Completion, Group, Prompt, Sampling
from covey.rollout.memory import Room, keeps_asleep, make_room
from covey.rollout.rows import Family, Row
from covey.rollout.sampling import check_request, draw_states
from covey.rollout.schedule import Generation
from covey.rollout.slots import Slots

if TYPE_CHECKING:
    from covey.policies.decoder import DecoderPolicy


class InProcessEngine:
    """A RolloutEngine on a DecoderPolicy.

    decode: ids to text, without special tokens. eos_ids: any of them ends a completion.
    max_rows: completions that run at a time; the others wait.
    places: tokens that keys and values are stored for at most; by default as many as are of use, or as memory has room
    for. A prompt and one completion of it fit in any case, or `generate` raises MemoryError.
    """

    def __init__(
        self,
        policy: "DecoderPolicy",
        decode: Callable[[Sequence[int]], str],
        eos_ids: Iterable[int],
        *,
        max_rows: int = 256,
        places: int | None = None,
    ):
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}: set it to at least 1")
        self.policy = policy
        self.decode = decode
        self.eos_ids = frozenset(eos_ids)
        self.max_rows = max_rows
        self.places = places
        self.version = 0
        self._slots: Slots | None = None
        self._most = 0  # places that its pool was made for, if memory had them

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        finished: Callable[[int, Group], None] | None = None,
        tokens: Callable[[int, int, Sequence[int]], None] | None = None,
    ) -> list[Group]:
        """n completions for each of P prompts: P groups in the prompts' order (see RolloutEngine).

        tokens: called with a prompt's place, a sample's index in its group and its newest ids, as they come.
        What it or `finished` raises ends the call, and the engine can be used again.
        ValueError for an empty prompt, or one whose completion could leave the model's positions.
        """
        check_request(prompts, n, sampling, self.policy.spec.max_positions)
        if not prompts:
            return []
        families = [Family(index, prompt) for index, prompt in enumerate(prompts)]
        samples = list(range(n)) * len(prompts)
        draws = draw_states(sampling.seed, [prompt.row for prompt in prompts for _ in range(n)], samples)
        for i, draw in enumerate(draws.tolist()):
            families[i // n].rows.append(Row(families[i // n], samples[i], draw))
        groups: dict[int, Group] = {}

        def done(family: Family) -> None:
            group = groups[family.index] = Group(family.prompt, tuple(map(self._completion, family.rows)))
            if finished is not None:
                finished(family.index, group)

        with torch.no_grad():
            self.policy.refresh()
            slots, needed = self._room_for(prompts, n, sampling)
            try:
                Generation(
                    slots, sampling, decode=self.decode, eos_ids=self.eos_ids, max_rows=self.max_rows,
                    roomy=slots.pool.size >= needed, done=done, tokens=tokens,
                ).run(families)  # fmt: skip
            finally:
                if slots.pool.free < slots.pool.size:  # an error came between taking places and using them
                    self._slots = None
        return [groups[i] for i in range(len(prompts))]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Later samples come from these weights. The policy's own are in place; others are copied into it.

        No keys or values outlive a call of `generate`, so none can be stale.
        """
        own = self.policy.weights()
        if weights.keys() != own.keys() or not all(_same(own[name], w) for name, w in weights.items()):
            self.policy.load_weights(weights)
        self.version = version

    def sleep(self) -> None:
        """Gives back what sampling took, unless there is memory in plenty."""
        if self._slots is not None and not keeps_asleep(self.policy):
            self._slots = None
            self.policy.release()

    def wake(self) -> None:
        """Nothing to take yet: `generate` knows how much it needs."""

    def _room_for(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> tuple[Slots, int]:
        """Slots and a pool that do for this call, from an earlier one if they do; and how many places it can need."""
        lengths = sorted((len(prompt.ids) - 1 for prompt in prompts), reverse=True)
        rows = min(self.max_rows, len(prompts) * n)
        groups = min(rows, len(prompts))
        room = Room(rows, groups, min(n, rows), sampling.max_new_tokens, max(1, lengths[0]))
        needed, least = sum(lengths[:groups]) + rows * room.max_own, lengths[0] + room.max_own
        if self.places is not None and self.places < least:
            raise MemoryError(
                f"sampling has {self.places} places for keys and values, but the longest prompt and a completion of it "
                f"take {least}: raise `places`, or lower max_new_tokens"
            )
        most = needed if self.places is None else min(needed, self.places)
        if self._slots is None or not self._slots.room.holds(room) or self._most < most:
            self._slots, self._most = None, most  # the memory of the old ones goes first
            self._slots = Slots(self.policy, make_room(self.policy, room, least, most), room, self.eos_ids)
        return self._slots, needed

    def _completion(self, row: Row) -> Completion:
        assert row.finish is not None
        trained = (True,) * len(row.ids)
        full = tuple(row.full_logprobs) or None
        return Completion(
            tuple(row.ids), tuple(row.logprobs), trained, row.text, row.finish, self.version, full
        )


def _same(a: Tensor, b: Tensor) -> bool:
    """True if the two are one piece of memory."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
