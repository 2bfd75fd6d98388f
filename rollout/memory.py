"""How much memory sampling takes: weights read back from 4 bits, and a pool of keys and values, by what is free."""

import logging
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch

from covey.policies.decode import holding_pays
from covey.policies.load import free_memory
from covey.rollout.kv_pool import KVPool, place_bytes

if TYPE_CHECKING:
    from covey.policies.decoder import DecoderPolicy

USABLE = 0.9  # of the memory that is free: allocators do not use all of it
ENOUGH_ROWS = 64  # more rows than these are worth less than weights that need not be read back at every step
PREFILL_TOKENS = 16384  # of one pass over prompts, at most; bounds its activations, not what is computed
PLENTY = 0.5  # of a device that has so much left, nothing is given back before training

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """What the tables of a running batch are made for, at most."""

    rows: int
    groups: int  # prompts at a time
    seats: int  # rows of a prompt
    max_own: int  # tokens that a row stores
    max_prefix: int  # tokens of a prompt that are stored

    def prefill_tokens(self, come_back: bool = True) -> int:
        """Of one pass over prompts, or over a row that left for want of room and its prompt."""
        prompts = max(self.max_prefix, min(PREFILL_TOKENS, self.groups * self.max_prefix))
        return max(prompts, self.max_prefix + self.max_own) if come_back else prompts

    def holds(self, other: "Room") -> bool:
        return all(mine >= wanted for mine, wanted in zip(astuple(self), astuple(other), strict=True))


def make_room(policy: "DecoderPolicy", room: Room, least: int, most: int) -> KVPool:
    """A pool of `most` places, or as many as memory has room for, and the policy's weights held if that pays.

    MemoryError if there are not even `least` places.
    """
    place = place_bytes(policy.spec, policy.dtype)
    free = int(USABLE * _room_beside(policy)) - work_bytes(policy, room, come_back=False)
    unheld = policy.unheld_bytes
    wanted = min(most, max(least, most * ENOUGH_ROWS // room.rows)) * place
    if 0 < unheld <= free - wanted and holding_pays(policy, room.rows):
        policy.hold()
        free -= unheld
    if most * place > free:
        free -= work_bytes(policy, room) - work_bytes(policy, room, come_back=False)
    pool = _pool(policy, least, min(most, free // place))
    held = (
        ""
        if not unheld
        else f", {unheld / 2**30:.2f} GiB of weights "
        + ("held" if policy.unheld_bytes == 0 else "read from 4 bits at each step")
    )
    log.info(
        "sampling: keys and values of %d tokens (%.2f GiB; %d rows at a time can need %d)%s",
        pool.size, pool.size * place / 2**30, room.rows, most, held,
    )  # fmt: skip
    return pool


def _pool(policy: "DecoderPolicy", least: int, places: int) -> KVPool:
    """With so many places, or with fewer if memory is in pieces that are too small. MemoryError below `least`."""
    size = place_bytes(policy.spec, policy.dtype)
    while places >= least:
        try:
            return KVPool(places, policy.spec, policy.dtype, policy.device)
        except torch.OutOfMemoryError:
            places = max(least, places * 3 // 4) if places > least else 0
    raise MemoryError(
        f"sampling needs keys and values of at least {least} tokens, {least * size / 2**30:.2f} GiB, and there is "
        f"room for {max(0, places)}: lower rollout.max_new_tokens or rollout.max_rows, or use a smaller model"
    )


def available(device: torch.device) -> int:
    """Bytes that can be taken, those included that torch holds without using them.

    Gaps between tensors are not: nothing that is large fits there.
    """
    unused = 0
    if device.type == "cuda":
        gaps = torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - gaps
    return free_memory(device) + max(0, unused)


def _room_beside(policy: "DecoderPolicy") -> int:
    """What is available, less the memory that torch holds for the trainer's recordings."""
    return available(policy.device) - (policy.recorded.memory_bytes if policy.recorded is not None else 0)


def work_bytes(policy: "DecoderPolicy", room: Room, come_back: bool = True) -> int:
    """About what a pass over prompts, or a step with its logits, takes for a moment."""
    s = policy.spec
    token = 4 * s.hidden_size + 3 * s.intermediate_size + 2 * (s.num_heads + s.num_kv_heads) * s.head_dim
    return room.prefill_tokens(come_back) * token * policy.dtype.itemsize + 3 * room.rows * s.vocab_size * 4


def keeps_asleep(policy: "DecoderPolicy") -> bool:
    """True if training is not short of memory though nothing is given back."""
    if policy.device.type != "cuda":
        return False
    return _room_beside(policy) > PLENTY * torch.cuda.get_device_properties(policy.device).total_memory
