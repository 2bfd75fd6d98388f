"""How much memory sampling takes, where it is scarce or in pieces."""

import pytest
import torch

from covey.policies.load import load_policy
from covey.rollout import memory
from covey.rollout.kv_pool import KVPool
from covey.rollout.memory import Room


@pytest.fixture
def policy(tiny_llama):
    return load_policy(tiny_llama, method="lora", dtype="float32", device="cpu", rank=4)


@pytest.fixture
def in_pieces(monkeypatch):
    """Sets how many places the largest free piece of memory has; what was asked for."""
    asked = []

    def limit(most):
        def make(places, *rest):
            asked.append(places)
            if places > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return KVPool(places, *rest)

        monkeypatch.setattr(memory, "KVPool", make)
        return asked

    return limit


def test_a_pool_shrinks_to_what_memory_has_in_one_piece(policy, in_pieces, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda _: 1 << 40)
    asked = in_pieces(600)
    pool = memory.make_room(policy, Room(8, 1, 8, 100, 30), least=130, most=1000)
    assert asked == [1000, 750, 562] and pool.size == 562


def test_a_pool_never_has_less_than_one_row_needs(policy, in_pieces, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda _: 1 << 40)
    asked = in_pieces(129)
    with pytest.raises(MemoryError, match=r"at least 130 tokens.*lower rollout\.max_new_tokens"):
        memory.make_room(policy, Room(8, 1, 8, 100, 30), least=130, most=200)
    assert asked == [200, 150, 130]
    assert in_pieces(130) and memory.make_room(policy, Room(8, 1, 8, 100, 30), 130, 200).size == 130


def test_rows_that_come_back_are_counted_where_they_can_leave(policy, monkeypatch):
    room = Room(rows=8, groups=2, seats=4, max_own=100, max_prefix=30)
    assert room.prefill_tokens(come_back=False) == 60 and room.prefill_tokens() == 130
    assert Room(8, 2, 4, 5, 30).prefill_tokens() == 60  # two prompts are more than a row with its own
    monkeypatch.setattr(memory, "PREFILL_TOKENS", 50)
    assert room.prefill_tokens(come_back=False) == 50
    place = memory.place_bytes(policy.spec, policy.dtype)
    asleep, back = (memory.work_bytes(policy, room, come_back) for come_back in (False, True))
    monkeypatch.setattr(memory, "USABLE", 1.0)
    monkeypatch.setattr(memory, "available", lambda _: asleep + 900 * place)
    assert memory.make_room(policy, room, 130, 900).size == 900  # all fit, so none leaves
    assert memory.make_room(policy, room, 130, 901).size == 900 - -(-(back - asleep) // place)
