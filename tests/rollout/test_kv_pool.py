"""Places of the pool: none twice, none lost."""

import random

import torch

from covey.rollout.kv_pool import NOWHERE, FreePlaces, KVPool, Places, place_bytes


def test_places_are_given_once_and_come_back():
    draw, free, taken = random.Random(3), FreePlaces(97), []
    for _ in range(3000):
        if taken and draw.random() < 0.5:
            free.give(taken.pop(draw.randrange(len(taken))))
        else:
            places = free.take(draw.randrange(1, 30))
            if places is not None:
                taken.append(places)
        used = [place for places in taken for place in range(places.start, places.end)]
        assert len(used) == len(set(used)) and set(used) <= set(range(97))
        assert free.free == 97 - len(used)
        gap = longest_gap(set(used), 97)
        assert free.take(gap + 1) is None
    for places in taken:
        free.give(places)
    assert free.take(97) == Places(0, 97) and free.free == 0


def longest_gap(used, size):
    longest = length = 0
    for place in range(size):
        length = 0 if place in used else length + 1
        longest = max(longest, length)
    return longest


def test_the_first_gap_that_is_long_enough_is_taken():
    free = FreePlaces(10)
    a, b, c = free.take(3), free.take(2), free.take(3)
    assert (a, b, c) == ((0, 3), (3, 2), (5, 3))
    free.give(Places(3, 2))
    assert free.take(3) is None and free.take(2) == (3, 2) and free.take(2) == (8, 2)
    free.give(Places(0, 3))
    free.give(Places(3, 2))
    assert free.take(5) == (0, 5)
    assert free.take(0) == NOWHERE and free.free == 0


class Sizes:
    num_layers, num_kv_heads, head_dim = 3, 2, 4


def test_moved_places_hold_what_they_held():
    pool = KVPool(12, Sizes, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    assert place_bytes(Sizes, torch.float32) * 12 == 4 * (pool.keys.numel() + pool.values.numel())  # type: ignore[arg-type]
    for tensor in (pool.keys, pool.values):
        tensor.copy_(torch.randn(tensor.shape))
    keys, values = pool.keys.clone(), pool.values.clone()
    pool.move(Places(2, 3), Places(6, 6))
    for now, before in ((pool.keys, keys), (pool.values, values)):
        assert torch.equal(now[:, 6:9], before[:, 2:5])
        rest = [0, 1, 2, 3, 4, 5, 9, 10, 11]
        assert torch.equal(now[:, rest], before[:, rest])
    layer_keys, layer_values = pool.layers()
    assert [tuple(x.shape) for x in (*layer_keys, *layer_values)] == [(12, 2, 4)] * 6
    layer_keys[1][0] = 7
    assert (pool.keys[1, 0] == 7).all()
