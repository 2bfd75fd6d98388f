"""Recorded passes against the same layers run one by one. CUDA graphs are played by a recorder of torch operations."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covey.policies import layer, recorded
from covey.policies.load import load_policy
from covey.policies.policy import Batch


class Operations(TorchDispatchMode):
    """Keeps the operations that it sees, with their results. What they write over is put back: none has run yet."""

    def __init__(self):
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        written = [
            given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write
        ]
        before = [(x, x.clone()) for x in tree_leaves(written) if isinstance(x, torch.Tensor)]
        result = func(*args, **kwargs)
        for x, kept in before:
            x.copy_(kept)
        self.seen.append((func, args, kwargs, result))
        return result


class PlayedGraph:
    """Like a CUDA graph: the same operations on the same memory, whatever Python does meanwhile."""

    def __init__(self, memory):
        self._operations = Operations()

    def begin(self):
        self._operations.__enter__()

    def end(self):
        self._operations.__exit__(None, None, None)

    def replay(self):
        for func, args, kwargs, recorded_result in self._operations.seen:
            result = func(*args, **kwargs)
            for there, here in zip(tree_leaves(recorded_result), tree_leaves(result), strict=True):
                if isinstance(there, torch.Tensor) and there.data_ptr() != here.data_ptr():
                    there.copy_(here)


def batch_of(*lengths, shared=0, seed=0):
    """Documents, or completions behind one prompt of `shared` tokens."""
    random = torch.Generator().manual_seed(seed)
    segments = [(0, shared, 0, 0)] if shared else []
    positions = list(range(shared))
    for length in lengths:
        start = len(positions)
        segments.append((start, start + length, 0, shared))
        positions += range(shared, shared + length)
    tokens = len(positions)
    source = torch.arange(shared, tokens - 1)
    return Batch(
        input_ids=torch.randint(3, 96, (tokens,), generator=random),
        positions=torch.tensor(positions, dtype=torch.int32),
        segments=torch.tensor(segments, dtype=torch.int32),
        source=source,
        target=torch.randint(3, 96, (len(source),), generator=random),
        row=torch.zeros(len(source), dtype=torch.int32),
        advantage=torch.ones(len(source)),
        weight=torch.ones(len(source)),
    )


BATCHES = [
    batch_of(30, 40, 11, seed=1),
    batch_of(9, 12, shared=20, seed=2),
    batch_of(64, seed=3),
    batch_of(50, 60, seed=4),
    batch_of(3, 3, 3, shared=70, seed=5),
]


def policy_of(folder, device="cpu", **settings) -> Any:
    defaults: dict[str, Any] = {"method": "lora", "dtype": "float64" if device == "cpu" else "float32"}
    policy = load_policy(folder, rank=4, device=device, memory="fast", **(defaults | settings))
    random = torch.Generator().manual_seed(9)
    weights = policy.weights()
    policy.load_weights({name: 0.1 * torch.randn(w.shape, generator=random) for name, w in weights.items()})
    return policy


def moved(batch, policy):
    fields: dict[str, Any] = {k: getattr(batch, k) for k in batch.__slots__}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and name != "segments":
            fields[name] = value.to(policy.device)
    return Batch(**fields)


def trained(policy, batch):
    """Log-probs and the adapter's gradient of a sum of them."""
    policy.zero_grad()
    batch = moved(batch, policy)
    logp = policy.logprobs(batch).logp
    (logp * torch.linspace(-1, 1, len(logp), device=logp.device)).sum().backward()
    return logp.detach().clone(), policy.parameters()[0].grad.clone()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(recorded, "Graph", PlayedGraph)
    return request.param


def with_and_without(folder, device, **settings):
    """The same policy twice, the second one without recordings."""
    policy, plain = (policy_of(folder, device, **settings) for _ in range(2))
    policy.recorded, plain.recorded = recorded.RecordedPasses(policy, 512), None
    return policy, plain


def close(found, expected, device):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11 if device == "cpu" else 2e-4)


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen2"])
def test_gradients_equal_those_without(model, device, request):
    """Whatever was recorded first, and however the tokens are divided."""
    policy, plain = with_and_without(request.getfixturevalue(model), device)
    for batch in [*BATCHES, *BATCHES[::-1]]:
        close(trained(policy, batch), trained(plain, batch), device)
    assert sorted(policy.recorded.places) == [64, 128]  # of 81, 41, 64, 110 and 79 tokens


def test_gradients_are_added(device, tiny_llama):
    policy, plain = with_and_without(tiny_llama, device)
    for p in (policy, plain):
        for batch in BATCHES[:2]:
            p.logprobs(moved(batch, p)).logp.sum().backward()
    close([policy.parameters()[0].grad], [plain.parameters()[0].grad], device)


def test_updates_are_seen(device, tiny_llama):
    policy, plain = with_and_without(tiny_llama, device)
    for factor in (1.0, -2.0, 0.5):
        for p in (policy, plain):
            p.parameters()[0].data.mul_(factor)
        close(trained(policy, BATCHES[0]), trained(plain, BATCHES[0]), device)


def test_passes_without_a_backward(device, tiny_llama):
    """With the adapter and without it, between others of the same size."""
    policy, plain = with_and_without(tiny_llama, device)
    for batch in (BATCHES[0], BATCHES[4], BATCHES[0]):
        found = []
        for p in (policy, plain):
            with torch.no_grad():
                on = p.logprobs(moved(batch, p)).logp.clone()
            with p.reference():
                off = p.logprobs(moved(batch, p)).logp.clone()
            found.append([on, off, *trained(p, batch)])
            assert (on - off).abs().max() > 0.01
        close(found[0], found[1], device)


def test_a_pass_that_waits_for_its_backward_is_left_alone(device, tiny_llama):
    """Others run meanwhile, without the recording, until its backward has run or its result is dropped."""
    policy, plain = with_and_without(tiny_llama, device)
    found = []
    for p in (policy, plain):
        first = p.logprobs(moved(BATCHES[0], p)).logp
        second = p.logprobs(moved(BATCHES[1], p)).logp
        with torch.no_grad():
            third = p.logprobs(moved(BATCHES[0], p)).logp.clone()
        second.sum().backward()
        (2 * first).sum().backward()
        found.append([first.detach().clone(), second.detach().clone(), third, p.parameters()[0].grad.clone()])
    close(found[0], found[1], device)
    dropped = policy.logprobs(moved(BATCHES[0], policy)).logp
    assert policy.recorded.size(64) == 0
    del dropped
    assert policy.recorded.size(64) == 64


def test_a_second_backward_is_refused(device, tiny_llama):
    policy, _ = with_and_without(tiny_llama, device)
    total = policy.logprobs(moved(BATCHES[0], policy)).logp.sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run already"):
        total.backward()


def test_sizes():
    """Four per power of two, and at least 64: no more than a fifth is filled in beyond that."""
    passes = recorded.RecordedPasses.__new__(recorded.RecordedPasses)
    passes.limit, passes._waiting = 4096, lambda: None
    assert [passes.size(n) for n in (1, 64, 65, 128, 129, 256, 257, 300, 513, 1000, 1025, 4096, 4097)] == [
        64, 64, 128, 128, 192, 256, 320, 320, 640, 1024, 1280, 4096, 0,
    ]  # fmt: skip
    assert all(n <= passes.size(n) < 1.25 * n + 64 for n in range(1, 4097))


def test_few_numbers_of_tokens_are_kept(device, tiny_llama, monkeypatch):
    monkeypatch.setattr(recorded, "KEPT_RECORDINGS", 2)
    policy, plain = with_and_without(tiny_llama, device)
    for length in (60, 120, 180, 60):
        batch = batch_of(length, seed=length)
        close(trained(policy, batch), trained(plain, batch), device)
    assert list(policy.recorded.places) == [192, 64]


def test_without_memory_passes_run_one_by_one(device, tiny_llama, monkeypatch, caplog):
    policy, plain = with_and_without(tiny_llama, device)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(policy.recorded, "_layers", full)
    for batch in BATCHES[:2]:
        close(trained(policy, batch), trained(plain, batch), device)
    assert caplog.text.count("not recorded any more") == 1 and not policy.recorded.places


@pytest.mark.gpu
def test_replays_are_bit_equal_and_all_recordings_share_memory(tiny_llama):
    policy, _ = with_and_without(tiny_llama, "cuda")
    first = [trained(policy, batch) for batch in BATCHES]
    for batch, (logp, grad) in zip(BATCHES, first, strict=True):
        again = trained(policy, batch)
        assert torch.equal(again[0], logp) and torch.equal(again[1], grad)
    held = torch.cuda.memory_reserved()
    for tokens in range(64, 512, 32):
        trained(policy, batch_of(tokens, seed=tokens))
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - held < 32 << 20


@pytest.mark.gpu
def test_a_policy_in_4_bits_records_its_small_passes(tiny_llama):
    policy = policy_of(tiny_llama, "cuda", method="qlora", dtype="bfloat16")
    plain = policy_of(tiny_llama, "cuda", method="qlora", dtype="bfloat16")
    plain.recorded = None
    exact = policy_of(tiny_llama, "cuda", method="qlora", dtype="float32")
    exact.recorded = None
    assert policy.recorded is not None
    for batch in [*BATCHES, *BATCHES]:
        found, like, true = (trained(p, batch) for p in (policy, plain, exact))
        for x, y, z in zip(found, like, true, strict=True):
            assert (x - z).norm() <= 1.5 * (y - z).norm() + 1e-6 * z.norm()
    assert policy.recorded.places


@pytest.mark.gpu
def test_a_graph_in_the_garbage_does_not_end_a_recording(tiny_llama, drop_graph, monkeypatch):
    forward = layer.DecoderLayer.forward

    def dropping(self, x, now):
        drop_graph()
        return forward(self, x, now)

    monkeypatch.setattr(layer.DecoderLayer, "forward", dropping)
    policy, plain = with_and_without(tiny_llama, "cuda")
    close(trained(policy, BATCHES[0]), trained(plain, BATCHES[0]), "cuda")
