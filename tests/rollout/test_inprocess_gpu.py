"""The in-process engine on a GPU: recorded steps, memory, and the adapter of the moment."""

from typing import Any

import pytest
import torch

from covey.policies.decode import decode_logits
from covey.policies.load import load_policy
from covey.rollout import memory, schedule, slots
from covey.rollout.engine import Prompt, Sampling
from covey.rollout.inprocess import InProcessEngine

pytestmark = pytest.mark.gpu


def engine_of(folder, eos_ids=(), *, device="cuda", max_rows=256, places=None, **settings):
    defaults = {"method": "lora", "dtype": "float32", "device": device, "rank": 4}
    policy = load_policy(folder, **(defaults | settings))
    return InProcessEngine(
        policy, lambda ids: " ".join(map(str, ids)), eos_ids, max_rows=max_rows, places=places
    )


def mixed_prompts(lengths=(1, 30, 7, 7, 16), size=96):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, size, (n,), generator=generator).tolist() for n in lengths]
    return [Prompt(row=i, ids=tuple(x), text="") for i, x in enumerate(ids)]


def randomise(policy, seed, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    new = {name: scale * torch.randn(w.shape, generator=generator) for name, w in policy.weights().items()}
    policy.load_weights({name: w.to(policy.device) for name, w in new.items()})


@pytest.fixture(params=["tiny_llama", "tiny_llama3", "tiny_qwen2"])
def tiny(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("settings", "room"),
    [
        ({"temperature": 0.0}, {}),
        ({"temperature": 1.0}, {"max_rows": 7}),
        ({"temperature": 1.3, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2}, {}),
        ({"temperature": 1.0}, {"places": 90}),
    ],
)
def test_ids_equal_those_of_the_cpu(settings, room, tiny, monkeypatch):
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(schedule, "FIRST_ROOM", 4)
    prompts, eos, sampling = mixed_prompts(), set(range(0, 96, 24)), Sampling(41, seed=5, **settings)
    slow, fast = engine_of(tiny, eos, device="cpu"), engine_of(tiny, eos, **room)
    for engine in (slow, fast):
        randomise(engine.policy, 7, 0.1)
    expected = slow.generate(prompts, 4, sampling)
    for _ in range(2):  # the second time with what the first one recorded
        for group, like in zip(fast.generate(prompts, 4, sampling), expected, strict=True):
            for c, other in zip(group.completions, like.completions, strict=True):
                assert (c.ids, c.finish, c.text) == (other.ids, other.finish, other.text)
                assert c.logprobs == pytest.approx(other.logprobs, abs=2e-4)


def test_a_chunk_is_launched_without_a_wait(tiny_llama):
    engine = engine_of(tiny_llama, dtype="bfloat16")
    engine.generate(mixed_prompts(), 3, Sampling(9, top_p=0.9))
    recorded = engine._slots
    assert recorded is not None and recorded.graphs
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        recorded.run(15, 4)
        recorded.run(3, 2)  # a bucket that was not recorded yet
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_in_the_garbage_does_not_end_a_recording(tiny_llama, drop_graph, monkeypatch):
    def dropping(policy, step):
        drop_graph()
        return decode_logits(policy, step)

    monkeypatch.setattr(slots, "decode_logits", dropping)
    engine, sampling = engine_of(tiny_llama), Sampling(9, temperature=0)
    groups = engine.generate(mixed_prompts(), 2, sampling)
    like = engine_of(tiny_llama).generate(mixed_prompts(), 2, sampling)
    assert [c.ids for g in groups for c in g.completions] == [c.ids for g in like for c in g.completions]


@pytest.mark.parametrize("plenty", [True, False])
def test_every_update_is_sampled_from(plenty, tiny_llama, monkeypatch):
    """Recorded steps and held weights are of yesterday's adapter unless somebody sees to it."""
    monkeypatch.setattr(memory, "PLENTY", 0.0 if plenty else 2.0)
    prompts, sampling = mixed_prompts(), Sampling(12, temperature=0)
    engine = engine_of(tiny_llama, method="qlora", dtype="bfloat16", memory="lean")
    seen = []
    for seed in (6, 7, 8):
        randomise(engine.policy, seed)
        engine.wake()
        engine.update(engine.policy.weights(), seed)
        groups = engine.generate(prompts, 2, sampling)
        assert engine.policy.unheld_bytes == 0
        assert {c.version for g in groups for c in g.completions} == {seed}
        fresh = engine_of(tiny_llama, method="qlora", dtype="bfloat16", memory="lean")
        randomise(fresh.policy, seed)
        ids = [[c.ids for c in g.completions] for g in groups]
        assert ids == [[c.ids for c in g.completions] for g in fresh.generate(prompts, 2, sampling)]
        seen.append(ids)
        engine.sleep()
        assert (engine.policy.unheld_bytes == 0) == plenty
    assert seen[0] != seen[1] != seen[2]


def test_sleep_gives_the_memory_back(tiny_llama, monkeypatch):
    monkeypatch.setattr(memory, "PLENTY", 2.0)
    engine = engine_of(tiny_llama, method="qlora", dtype="bfloat16", memory="lean")
    engine.generate(
        mixed_prompts(), 8, Sampling(64)
    )  # libraries take their workspaces with the first product
    engine.sleep()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine.generate(mixed_prompts(), 8, Sampling(64))
    assert torch.cuda.memory_allocated() > before + engine.policy.spec.num_parameters
    engine.sleep()
    assert torch.cuda.memory_allocated() - before < 1 << 16


def test_without_room_for_held_weights_they_are_read_back_at_each_step(tiny_llama, monkeypatch):
    prompts, sampling = mixed_prompts(), Sampling(12, temperature=0)
    settings: dict[str, Any] = {"method": "qlora", "dtype": "float32", "memory": "lean"}
    expected = engine_of(tiny_llama, **settings).generate(prompts, 2, sampling)
    engine = engine_of(tiny_llama, **settings)
    monkeypatch.setattr(engine.policy, "hold", lambda: pytest.fail("held"))
    place = memory.place_bytes(engine.policy.spec, torch.float32)
    monkeypatch.setattr(memory, "work_bytes", lambda *_, **__: 0)
    monkeypatch.setattr(memory, "available", lambda _: int(80 * place / memory.USABLE))
    found = engine.generate(prompts, 2, sampling)
    assert [[c.ids for c in g.completions] for g in found] == [
        [c.ids for c in g.completions] for g in expected
    ]


def test_sampler_and_trainer_agree(tiny_llama):
    """In bfloat16 by what roundings of another order explain."""
    engine = engine_of(tiny_llama, method="qlora", dtype="bfloat16")
    randomise(engine.policy, 3, 0.05)
    groups = engine.generate(mixed_prompts(), 4, Sampling(24, seed=2))
    differences = []
    for group in groups:
        for c in group.completions:
            ids = group.prompt.ids + c.ids
            logits = engine.policy.forward_logits(list(ids))
            start = len(group.prompt.ids)
            logp = torch.log_softmax(logits.double(), -1)[start - 1 : -1]
            picked = logp.gather(1, torch.tensor(c.ids, device=logp.device)[:, None])[:, 0]
            differences += (picked.cpu() - torch.tensor(c.logprobs).double()).abs().tolist()
    assert sum(differences) / len(differences) < 0.02 and max(differences) < 0.2
