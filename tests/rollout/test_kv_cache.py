"""Decode attention with a shared prompt against attention written out row by row."""

import numpy as np
import pytest
import torch

from covey.rollout.kv_cache import KVCache

LAYERS, N, M, D, SCALE = 2, 6, 2, 4, 0.4


def attend(q_nd, keys_Lmd, values_Lmd):
    """One query, all its keys."""
    keys, values = (x.repeat_interleave(N // M, 1) for x in (keys_Lmd, values_Lmd))
    weights = torch.softmax(SCALE * torch.einsum("nd,lnd->nl", q_nd, keys), -1)
    return torch.einsum("nl,lnd->nd", weights, values)


def run(lengths, group, leaving, steps, dtype=torch.float64, device="cpu"):
    """Largest deviation over `steps` tokens; leaving[t]: the rows, by first index, that go before token t."""
    prompts = [torch.randn(LAYERS, 2, length, M, D, dtype=dtype) for length in lengths]
    cache = KVCache(LAYERS, M, D, lengths, group, steps, SCALE, dtype, torch.device(device))
    cut = len(lengths) // 2
    for layer in range(LAYERS):  # in two parts, as a long prefill would
        for first, last in ((0, cut), (cut, len(lengths))):
            if first < last:
                k, v = (torch.cat([p[layer, i] for p in prompts[first:last]]).to(device) for i in (0, 1))
                cache.store_prompts(layer, first, last, k, v)
    names = np.arange(len(lengths) * group)
    history = {name: [prompts[name // group]] for name in names}
    worst = 0.0
    for step in range(steps):
        if step in leaving:
            names = names[cache.keep(~np.isin(names, leaving[step]))]
        cache.advance()
        assert cache.positions().tolist() == [lengths[name // group] + step for name in names]
        q = torch.randn(LAYERS, len(names), N, D, dtype=dtype)
        kv = torch.randn(LAYERS, 2, len(names), M, D, dtype=dtype)
        for b, name in enumerate(names):
            history[name].append(kv[:, :, b][:, :, None])
        for layer in range(LAYERS):
            out = cache.attend(layer, q[layer].to(device), *kv[layer].to(device)).cpu()
            for b, name in enumerate(names):
                keys, values = torch.cat(history[name], 2)[layer].double()
                expected = attend(q[layer, b].double(), keys, values)
                worst = max(worst, (out[b].double() - expected).abs().max().item())
    return worst


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [1, 9, 3], [7, 2, 2, 12]])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_over_prompt_and_own_tokens(lengths, group):
    assert run(lengths, group, {}, steps=5) < 1e-12


def test_own_tokens_grow_past_the_first_room():
    assert run([3, 6], 2, {}, steps=70) < 1e-12


def test_rows_and_prompts_leave():
    # 4 prompts of 3 rows. Single rows, then all of prompt 1 (the longest), then all but one row.
    leaving = {1: [0, 7], 2: [3, 4, 5], 4: [11], 5: [1, 2, 6, 8, 9]}
    assert run([4, 9, 2, 6], 3, leaving, steps=40) < 1e-12


def test_rows_leave_when_there_is_one_per_prompt():
    assert run([4, 9, 2, 6, 6], 1, {1: [1], 2: [0, 4]}, steps=4) < 1e-12


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_dtypes(dtype, limit):
    assert run([4, 9, 2], 3, {2: [1, 3, 4, 5]}, steps=6, dtype=dtype) < limit


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_on_a_gpu(dtype, limit):
    assert run([4, 9, 2], 3, {2: [1, 3, 4, 5]}, steps=40, dtype=dtype, device="cuda") < limit


def test_no_room_beyond_what_was_asked_for():
    cache = KVCache(1, M, D, [2], 1, 3, SCALE, torch.float32, torch.device("cpu"))
    for _ in range(3):
        cache.advance()
    assert cache.own_keys[0].shape == (1, M, 3, D)
    with pytest.raises(AssertionError):
        cache.advance()
