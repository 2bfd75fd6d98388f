"""The in-process engine against closed forms (table LM) and against transformers (tiny models)."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from covey.policies.load import load_policy
from covey.rollout import memory, schedule
from covey.rollout.engine import Completion, Prompt, Sampling
from covey.rollout.inprocess import InProcessEngine

UNIFORM = torch.zeros(64)


def policy_of(folder, **settings):
    defaults = {"method": "lora", "dtype": "float32", "device": "cpu", "rank": 4}
    return load_policy(folder, **(defaults | settings))


def engine_of(folder, eos_ids=(), decode=None, **settings):
    return InProcessEngine(policy_of(folder), decode or spelled, eos_ids, **settings)


def spelled(ids):
    return " ".join(map(str, ids))


def chain(*sequences):
    """A table that follows each sequence: 50 nats ahead of everything else."""
    table = torch.zeros(64, 64)
    for ids in sequences:
        for now, then in pairwise(ids):
            table[now, then] = 50
    return table


def prompts_of(*ids):
    return [Prompt(row=i, ids=tuple(x), text="") for i, x in enumerate(ids)]


def ids_of(groups):
    return [[c.ids for c in group.completions] for group in groups]


def mixed_prompts(lengths=(1, 30, 7, 7, 16), size=96):
    generator = torch.Generator().manual_seed(1)
    return prompts_of(*(torch.randint(3, size, (n,), generator=generator).tolist() for n in lengths))


@pytest.fixture(params=["tiny_llama", "tiny_llama3", "tiny_qwen2"])
def tiny(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def uniform_lm(table_lm, tmp_path_factory):
    return table_lm(UNIFORM, tmp_path_factory.mktemp("uniform") / "model")


# Log-probs and frequencies


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, [-0.440190, -1.440190, -2.440190, -3.440190]),
        (0.5, [-0.145078, -2.145078, -4.145078, -6.145078]),
        (2.0, [-0.787342, -1.287342, -1.787342, -2.287342]),
    ],
)
def test_logprobs_are_those_of_the_sampling_temperature(temperature, expected, table_lm, tmp_path):
    row = torch.full((64,), -30.0)
    row[:4] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    engine = engine_of(table_lm(row, tmp_path / "model"))
    groups = engine.generate(prompts_of([5], [6, 7]), 100, Sampling(8, temperature))
    seen = [(i, x) for g in groups for c in g.completions for i, x in zip(c.ids, c.logprobs, strict=True)]
    assert {i for i, _ in seen} == {0, 1, 2, 3} and len(seen) == 1600
    assert all(isinstance(x, float) and abs(x - expected[i]) < 1e-5 for i, x in seen)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, range(64)),
        ({"temperature": 0.7}, range(64)),
        ({"temperature": 1.5, "top_k": 7}, None),
        ({"top_p": 0.6}, None),
        ({"temperature": 0.8, "top_k": 20, "top_p": 0.5}, None),
    ],
)
def test_frequencies_are_those_of_the_distribution(settings, kept, table_lm, tmp_path):
    row = torch.randn(64, generator=torch.Generator().manual_seed(3)).double()
    engine = engine_of(table_lm(row.float(), tmp_path / "model"), max_rows=5000)
    n, tokens = 2500, 4
    groups = engine.generate(prompts_of([5], [6, 7]), n, Sampling(tokens, seed=1, **settings))
    counts = torch.bincount(torch.tensor(ids_of(groups)).flatten(), minlength=64)
    expected = expected_probabilities(row, **settings)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    expected = expected[kept] * n * tokens * 2
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1).double()
    assert torch.special.gammaincc(freedom / 2, statistic / 2) > 1e-3


def expected_probabilities(row, temperature=1.0, top_k=64, top_p=1.0):
    """Written with a plain loop over the sorted tokens."""
    p = torch.softmax(row / temperature, 0)
    order = p.argsort(descending=True)[:top_k].tolist()
    total = sum(p[i] for i in order)
    out, reached = torch.zeros(64).double(), 0.0
    for i in order:
        out[i] = p[i]
        reached += p[i] / total
        if reached >= top_p - 1e-9:
            break
    return out / out.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_full_forward_of_transformers(temperature, tiny):
    from transformers import AutoModelForCausalLM

    groups = engine_of(tiny).generate(mixed_prompts(), 3, Sampling(40, temperature, seed=2))
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
    for group in groups:
        for completion in group.completions:
            ids = torch.tensor([group.prompt.ids + completion.ids])
            with torch.no_grad():
                logp = torch.log_softmax(model(ids).logits[0] / temperature, -1)
            start = len(group.prompt.ids)
            expected = logp[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_greedy_ids_equal_those_of_transformers(tiny):
    from transformers import AutoModelForCausalLM

    prompts = mixed_prompts()
    groups = engine_of(tiny, eos_ids=[0]).generate(prompts, 1, Sampling(30, temperature=0))
    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
    for prompt, [completion] in zip(prompts, (g.completions for g in groups), strict=True):
        ids = torch.tensor([prompt.ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30)
        assert list(completion.ids) == out[0, len(prompt.ids) :].tolist()


def test_an_adapter_is_sampled_from_and_scored_alike(tiny):
    policy = policy_of(tiny, dtype="float64")
    randomise(policy, seed=7)
    engine = InProcessEngine(policy, spelled, [])
    groups = engine.generate(mixed_prompts(), 2, Sampling(12, seed=4))
    for group in groups:
        for completion in group.completions:
            ids = group.prompt.ids + completion.ids
            logp = torch.log_softmax(policy.forward_logits(list(ids)), -1)
            start = len(group.prompt.ids)
            expected = [logp[start + i - 1, token].item() for i, token in enumerate(completion.ids)]
            assert completion.logprobs == pytest.approx(expected, abs=1e-9)


def randomise(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    new = {name: 0.3 * torch.randn(w.shape, generator=generator) for name, w in policy.weights().items()}
    policy.load_weights(new)


# A completion depends on its seed, its prompt and its index alone


@pytest.mark.parametrize("max_rows", [1, 6, 11])
def test_ids_do_not_depend_on_the_batch(max_rows, tiny):
    prompts, sampling = mixed_prompts(), Sampling(20, seed=3)
    expected = ids_of(engine_of(tiny).generate(prompts, 3, sampling))
    engine = engine_of(tiny, max_rows=max_rows)
    assert ids_of(engine.generate(prompts[::-1], 3, sampling)) == expected[::-1]
    assert ids_of(engine.generate(prompts[2:3], 2, sampling)) == [expected[2][:2]]


def test_prefill_in_several_passes(tiny_llama, monkeypatch):
    prompts, sampling = mixed_prompts(), Sampling(10, seed=3)
    expected = ids_of(engine_of(tiny_llama).generate(prompts, 3, sampling))
    monkeypatch.setattr(memory, "PREFILL_TOKENS", 16)
    assert ids_of(engine_of(tiny_llama).generate(prompts, 3, sampling)) == expected


@pytest.fixture(params=["one step at a time", "two chunks at a time"])
def pacing(request, monkeypatch):
    """On a GPU the host looks at results while the next chunk runs; here the same with chunks that are done."""
    if request.param == "two chunks at a time":
        monkeypatch.setattr(schedule, "pace", lambda device: (4, True))


def forwards_of(engine, monkeypatch):
    """Numbers of tokens of the engine's passes, as they come."""
    forwards, embed = [], engine.policy.embed
    monkeypatch.setattr(engine.policy, "embed", lambda ids: forwards.append(len(ids)) or embed(ids))
    return forwards


@pytest.mark.parametrize(("places", "max_rows"), [(71, 15), (80, 15), (150, 15), (150, 4), (400, 15)])
def test_rows_that_find_no_room_wait_or_leave_and_come_back(
    places, max_rows, pacing, tiny_llama, monkeypatch
):
    monkeypatch.setattr(schedule, "FIRST_ROOM", 4)
    prompts, sampling = (
        mixed_prompts(),
        Sampling(41, seed=5),
    )  # the longest prompt and a completion take 29 + 41 places
    eos = set(range(0, 96, 12))
    expected = engine_of(tiny_llama, eos_ids=eos).generate(prompts, 3, sampling)
    engine = engine_of(tiny_llama, eos_ids=eos, places=places, max_rows=max_rows)
    forwards = forwards_of(engine, monkeypatch)
    found = engine.generate(prompts, 3, sampling)
    assert ids_of(found) == ids_of(expected)
    for group, like in zip(found, expected, strict=True):
        for completion, other in zip(group.completions, like.completions, strict=True):
            assert (completion.finish, completion.text) == (other.finish, other.text)
            assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    if places < 100:  # a row had to leave: its tokens were computed again
        assert sum(forwards) > sum(len(ids) for group in ids_of(expected) for ids in group) + 56
    assert engine.generate(prompts, 3, sampling) == found  # all places are free again


def test_a_longest_prompt_that_finds_no_room_is_refused(tiny_llama):
    engine = engine_of(tiny_llama, places=69)
    with pytest.raises(MemoryError, match=r"has 69 places .* take 70"):
        engine.generate(mixed_prompts(), 1, Sampling(41))


def test_waiting_rows_enter_as_soon_as_others_end(tiny_llama, monkeypatch):
    eos = set(range(0, 96, 12))
    engine = engine_of(tiny_llama, eos_ids=eos, max_rows=4)
    forwards = forwards_of(engine, monkeypatch)
    groups = engine.generate(mixed_prompts([3, 3, 3]), 8, Sampling(40, seed=5))
    lengths = [len(ids) for group in ids_of(groups) for ids in group]
    assert max(lengths) > 2 * sum(lengths) / len(lengths)  # in waves of four rows most slots would be empty
    assert sum(forwards) == 3 * 2 + sum(lengths)  # nothing is computed for a row that is done
    assert len(forwards) < 3 + 1.2 * sum(lengths) / 4


def test_groups_are_handed_over_as_they_finish(pacing, tiny_llama):
    eos, seen = set(range(0, 96, 12)), []
    engine = engine_of(tiny_llama, eos_ids=eos, max_rows=4)
    prompts, sampling = mixed_prompts(), Sampling(40, seed=5)

    def finished(index, group):
        seen.append((index, group))

    groups = engine.generate(prompts, 2, sampling, finished)
    assert sorted(index for index, _ in seen) == [0, 1, 2, 3, 4]
    assert all(groups[index] is group for index, group in seen)
    longest = [max(len(ids) for ids in group) for group in ids_of(groups)]
    assert longest[seen[0][0]] < max(longest)  # the first to come was not the last to end


@pytest.mark.parametrize("stop", [(), ("5 6",)])
def test_chunks_change_nothing(stop, tiny, monkeypatch):
    prompts, eos = mixed_prompts(), {7, 11, 60}
    sampling = Sampling(23, temperature=1.3, top_k=40, repetition_penalty=1.2, stop=stop, seed=5)
    expected = engine_of(tiny, eos_ids=eos).generate(prompts, 4, sampling)
    monkeypatch.setattr(schedule, "pace", lambda device: (4, True))
    found = engine_of(tiny, eos_ids=eos, max_rows=7).generate(prompts, 4, sampling)
    assert ids_of(found) == ids_of(expected)
    for group, like in zip(found, expected, strict=True):
        for c, other in zip(group.completions, like.completions, strict=True):
            assert (c.finish, c.text) == (other.finish, other.text)
            assert c.full_logprobs is not None and len(c.full_logprobs) == len(c.ids)
            assert c.full_logprobs == pytest.approx(other.full_logprobs, abs=1e-5)


def test_rows_that_end_early_do_not_disturb_the_others(tiny):
    prompts, sampling = mixed_prompts(), Sampling(40, seed=5)
    whole = ids_of(engine_of(tiny).generate(prompts, 4, sampling))
    eos = set(range(0, 96, 12))
    groups = engine_of(tiny, eos_ids=eos).generate(prompts, 4, sampling)
    lengths = set()
    for group, full in zip(groups, whole, strict=True):
        for completion, ids in zip(group.completions, full, strict=True):
            end = next((i for i, token in enumerate(ids) if token in eos), 39)
            assert completion.ids == ids[: end + 1]
            assert len(completion.logprobs) == len(completion.trained) == end + 1
            assert completion.finish == ("eos" if completion.ids[-1] in eos else "length")
            lengths.add(end)
    assert len(lengths) > 5


def test_a_group_holds_different_completions(uniform_lm):
    engine, prompts = engine_of(uniform_lm), prompts_of([5], [5])
    first = ids_of(engine.generate(prompts, 4, Sampling(8, seed=1)))
    assert len({ids for group in first for ids in group}) == 8
    assert ids_of(engine.generate(prompts, 4, Sampling(8, seed=1))) == first
    second = ids_of(engine.generate(prompts, 4, Sampling(8, seed=2)))
    assert not {ids for group in first for ids in group} & {ids for group in second for ids in group}


# How completions end


def test_end_of_sequence_is_any_of_several_ids(table_lm, tmp_path):
    folder = table_lm(chain([5, 6, 7, 8], [15, 16, 9, 8]), tmp_path / "model")
    groups = engine_of(folder, eos_ids=[7, 9]).generate(prompts_of([5], [15], [7, 5]), 1, Sampling(6))
    assert [(c.ids, c.finish, c.text) for g in groups for c in g.completions] == [
        ((6, 7), "eos", "6"),
        ((16, 9), "eos", "16"),
        ((6, 7), "eos", "6"),
    ]


def test_length_ends_a_completion_and_eos_at_the_last_token_is_eos(table_lm, tmp_path):
    folder = table_lm(chain([5, 6, 7, 8, 9, 10]), tmp_path / "model")
    [group] = engine_of(folder, eos_ids=[9]).generate(prompts_of([5]), 2, Sampling(3))
    assert [(c.ids, c.finish, c.text) for c in group.completions] == [((6, 7, 8), "length", "6 7 8")] * 2
    [group] = engine_of(folder, eos_ids=[8]).generate(prompts_of([5]), 1, Sampling(3))
    assert group.completions[0].finish == "eos"


PIECES = {
    10: b"42", 11: b"\n#", 12: b"##", 13: b" x",
    20: b"42", 21: b"\n#", 22: b"### x",
    30: b"42", 31: b"\n##", 0: b"",
    40: b"\n###", 41: b"42", 42: b"7",
    50: b"a\xc3", 51: b"\xa9#", 52: b"b\xc3", 53: b"\xa9#\xe2", 54: b"c",
}  # fmt: skip


def pieced(ids):
    return b"".join(PIECES[i] for i in ids).decode("utf-8", errors="replace")


def test_stop_strings_that_straddle_tokens(table_lm, tmp_path):
    table = chain([9, 10, 11, 12, 13, 13], [19, 20, 21, 22, 13], [29, 30, 31, 0], [40, 41, 42, 0])
    engine = engine_of(table_lm(table, tmp_path / "model"), eos_ids=[0], decode=pieced)
    prompts = prompts_of([9], [19], [29], [40])
    groups = engine.generate(prompts, 2, Sampling(8, stop=("\n###",)))
    expected = [
        ((10, 11, 12), "stop", "42"),
        ((20, 21, 22), "stop", "42"),
        ((30, 31, 0), "eos", "42\n##"),
        ((41, 42, 0), "eos", "427"),
    ]
    for group, (ids, finish, text) in zip(groups, expected, strict=True):
        for c in group.completions:
            assert (c.ids, c.finish, c.text) == (ids, finish, text)
            assert len(c.logprobs) == len(c.trained) == 3 and all(c.trained)


def test_a_stop_string_within_multi_byte_characters(table_lm, tmp_path):
    folder = table_lm(chain([5, 50, 51, 54], [6, 52, 53, 54]), tmp_path / "model")
    groups = engine_of(folder, decode=pieced).generate(prompts_of([5], [6]), 1, Sampling(5, stop=("é#",)))
    assert [(c.ids, c.finish, c.text) for g in groups for c in g.completions] == [
        ((50, 51), "stop", "a"),
        ((52, 53), "stop", "b"),
    ]


def test_a_stop_string_completed_by_the_last_token_allowed(table_lm, tmp_path):
    folder = table_lm(chain([9, 10, 11, 12, 13]), tmp_path / "model")
    [group] = engine_of(folder, decode=pieced).generate(prompts_of([9]), 1, Sampling(3, stop=("\n###",)))
    assert group.completions[0].finish == "stop"


def test_the_first_of_several_stop_strings_cuts(table_lm, tmp_path):
    folder = table_lm(chain([9, 10, 11, 12, 13]), tmp_path / "model")
    [group] = engine_of(folder, decode=pieced).generate(prompts_of([9]), 1, Sampling(4, stop=("##", "2\n")))
    assert (group.completions[0].ids, group.completions[0].text) == ((10, 11), "4")


# What the engine is given


def test_weights_are_the_current_ones(table_lm, tmp_path):
    # Chain t -> t + 1. The adapters write the embedding of token 6, then of 7, over that of 5 behind the MLP.
    policy = policy_of(table_lm(chain(range(64)), tmp_path / "model"), rank=1, alpha=1.0, targets="down_proj")
    engine = InProcessEngine(policy, spelled, [])

    def next_token():
        [group] = engine.generate(prompts_of([9, 5]), 2, Sampling(1))
        return {(c.ids[0], c.version) for c in group.completions}

    assert next_token() == {(6, 0)}
    activation = mlp_activation(policy, token=5)
    [a] = [name for name in policy.weights() if "lora_A" in name]
    [b] = [name for name in policy.weights() if "lora_B" in name]
    weights = {a: (activation / activation.square().sum())[None], b: torch.zeros(64, 1)}
    weights[b][6] = 100
    policy.load_weights(weights)  # as the optimiser does: in place
    engine.update(policy.weights(), 1)
    assert next_token() == {(7, 1)}
    weights[b] = weights[b].roll(1)
    engine.update(weights, 2)  # from elsewhere: copied in
    assert next_token() == {(8, 2)}
    assert torch.equal(policy.weights()[b], weights[b])


def mlp_activation(policy, token):
    """What down_proj sees after `token` in the table LM, whose attention adds nothing."""
    from safetensors.torch import load_file

    weights = load_file(policy.folder / "model.safetensors")
    x = torch.zeros(64)
    x[token] = 8
    gate, up = (weights[f"model.layers.0.mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
    return torch.nn.functional.silu(gate) * up


def test_updating_with_the_policys_own_weights_copies_nothing(tiny_llama, monkeypatch):
    engine = engine_of(tiny_llama)
    monkeypatch.setattr(engine.policy, "load_weights", lambda _: pytest.fail("copied"))
    engine.update(engine.policy.weights(), 3)
    [group] = engine.generate(mixed_prompts([4]), 2, Sampling(2))
    assert [c.version for c in group.completions] == [3, 3]


def test_nothing_is_computed_after_the_last_token(tiny_llama, monkeypatch):
    engine, forwards = engine_of(tiny_llama), []
    embed = engine.policy.embed
    monkeypatch.setattr(engine.policy, "embed", lambda ids: forwards.append(len(ids)) or embed(ids))
    engine.generate(mixed_prompts([4, 6]), 3, Sampling(3))
    assert forwards == [
        8,
        6,
        6,
        6,
    ]  # each prompt but its last token once per group, then a pass for each token


def test_an_error_between_taking_places_and_using_them_loses_none(tiny_llama, monkeypatch):
    engine, prompts = engine_of(tiny_llama), mixed_prompts()
    expected = ids_of(engine.generate(prompts, 3, Sampling(9, seed=1)))
    with monkeypatch.context() as broken:
        broken.setattr(schedule, "prefill", lambda *_: pytest.fail("out of memory"))
        with pytest.raises(pytest.fail.Exception, match="out of memory"):
            engine.generate(prompts, 3, Sampling(9, seed=1))
    assert ids_of(engine.generate(prompts, 3, Sampling(9, seed=1))) == expected
    assert engine._slots is not None and engine._slots.pool.free == engine._slots.pool.size


def test_no_prompts(tiny_llama):
    assert engine_of(tiny_llama).generate([], 4, Sampling()) == []


def test_groups_keep_their_prompts(tiny_llama):
    prompts = [Prompt(7, (5, 6), "ab", columns={"answer": "1"}), Prompt(2, (8,), "c")]
    groups = engine_of(tiny_llama).generate(prompts, 2, Sampling(2))
    assert [group.prompt for group in groups] == prompts
    assert all(isinstance(c, Completion) for g in groups for c in g.completions)


@pytest.mark.parametrize(
    ("ids", "n", "settings", "message"),
    [
        ((), 1, {}, "row 0 is empty"),
        ((5,) * 1000, 1, {"max_new_tokens": 25}, "row 0 has 1000 tokens"),
        ((5,), 0, {}, "at least one"),
        ((5,), 1, {"top_p": 0.0}, "top_p"),
    ],
)
def test_what_cannot_be_generated_is_refused(ids, n, settings, message, tiny_llama):
    with pytest.raises(ValueError, match=message):
        engine_of(tiny_llama).generate(prompts_of(ids), n, Sampling(**settings))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_diverged_weights_are_reported(temperature, tiny_llama):
    policy = policy_of(tiny_llama)
    policy.load_weights({name: torch.full_like(w, math.nan) for name, w in policy.weights().items()})
    with pytest.raises(FloatingPointError, match="row 0"):
        InProcessEngine(policy, spelled, []).generate(mixed_prompts([3]), 1, Sampling(2, temperature))


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_weights_that_are_not_held_are_sampled_from_alike(kernels, tiny_qwen2, monkeypatch):
    """Where memory has no room for them in 16 bits they are read back, or multiplied with the 4 bits themselves."""
    prompts, sampling = mixed_prompts([1, 6]), Sampling(4, seed=4)

    def generated(held):
        policy = policy_of(tiny_qwen2, method="qlora", memory="lean")
        randomise(policy, seed=7)
        engine = InProcessEngine(policy, spelled, [])
        if not held:
            monkeypatch.setattr(policy, "hold", lambda: None)
        groups = engine.generate(prompts, 2, sampling)
        assert (policy.unheld_bytes == 0) == held
        return groups

    expected = generated(held=True)
    monkeypatch.setenv("COVEY_KERNELS", kernels)
    found = generated(held=False)
    assert ids_of(found) == ids_of(expected)
    for group, like in zip(found, expected, strict=True):
        for c, other in zip(group.completions, like.completions, strict=True):
            assert c.logprobs == pytest.approx(other.logprobs, abs=1e-4)
