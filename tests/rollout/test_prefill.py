"""What stands before the newest tokens, in one pass or in several, against the keys of the whole sequences."""

import pytest
import torch

from covey.policies.load import load_policy
from covey.rollout.engine import Prompt
from covey.rollout.kv_pool import KVPool, Places
from covey.rollout.prefill import prefill
from covey.rollout.rows import Family, Row


def family(index, start, prompt, *answers):
    """A prompt whose rows come back with what they had drawn, all of it from place `start` on."""
    made = Family(index, Prompt(index, tuple(prompt), ""), prefix=Places(start, len(prompt) - 1))
    at = made.prefix.end
    for i, ids in enumerate(answers):
        made.rows.append(Row(made, i, 0, ids=list(ids), own=Places(at, len(ids))))
        at += len(ids)
    made.running = len(made.rows)
    return made


@pytest.mark.parametrize(
    ("most", "passes"),
    [
        (1000, [3 + 4 + 2 + 5 + 2]),
        (12, [3 + 4 + 2, 3 + 5 + 2]),  # the rest of the first family has its prompt with it
        (8, [3 + 4, 3 + 2, 3 + 5, 2]),
        (1, [3, 3 + 4, 3 + 2, 3 + 5, 2]),
    ],
)
def test_rows_that_come_back(most, passes, tiny_llama, monkeypatch):
    policy = load_policy(tiny_llama, method="lora", dtype="float32", device="cpu", rank=4)
    policy.refresh()
    answers = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15]]
    families = [family(0, 0, [3, 4, 50, 60], *answers), family(1, 14, [20, 21, 22])]
    families[1].rows.append(Row(families[1], 0, 0))
    families[1].running = 1
    pool, tokens, embed = KVPool(16, policy.spec, policy.dtype, policy.device), [], policy.embed
    monkeypatch.setattr(policy, "embed", lambda ids: tokens.append(len(ids)) or embed(ids))
    with torch.no_grad():
        prefill(policy, pool, [row for f in families for row in f.rows], most)
        assert tokens == passes
        for f in families:
            for row in f.rows:
                before = [*f.prompt.ids, *row.ids][:-1]
                alone = KVPool(len(before), policy.spec, policy.dtype, policy.device)
                whole = Family(0, Prompt(0, (*before, 0), ""), prefix=Places(0, len(before)), running=1)
                prefill(policy, alone, [Row(whole, 0, 0)], 1000)
                places = [*range(f.prefix.start, f.prefix.end), *range(row.own.start, row.own.end)]
                torch.testing.assert_close(pool.keys[:, places], alone.keys, rtol=0, atol=1e-5)
                torch.testing.assert_close(pool.values[:, places], alone.values, rtol=0, atol=1e-5)
