"""Entropies of the whole policy: differentiable when asked for, with autograd's gradient, and detached otherwise."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.policies.decoder import DecoderPolicy
from covey.policies.load import load_policy
from covey.policies.policy import Batch


def neighbour(name: str) -> ModuleType:
    """Another file of this folder; the folder is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle = neighbour("test_decoder")


def policy_of(folder: Path) -> DecoderPolicy:
    policy = load_policy(folder, method="lora", dtype="float64", rank=3, alpha=5.0, device="cpu")
    oracle.randomise(policy)
    return policy


def plain_entropy(plain: Any, batch: Batch) -> Tensor:
    """[M] by log_softmax on each segment behind a copy of its prefix, differentiable by autograd."""
    entropies = torch.empty(len(batch.source), dtype=torch.float64)
    for start, end, prefix_start, prefix_end in batch.segments.tolist():
        ids = torch.cat((batch.input_ids[prefix_start:prefix_end], batch.input_ids[start:end]))
        table = (plain.logits(ids) / batch.temperature).log_softmax(-1)
        for m, source in enumerate(batch.source.tolist()):
            if start <= source < end:
                row = table[prefix_end - prefix_start + source - start]
                entropies[m] = -(row.exp() * row).sum()
    return entropies


@pytest.mark.parametrize("logp_too", [False, True])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2"])
def test_adapter_gradient_of_the_entropy_equals_autograd(family, logp_too, request):
    policy = policy_of(request.getfixturevalue(family))
    batch = oracle.shared_prefix_batch(temperature=0.7)
    c = torch.randn(13, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    c[2] = 0
    plain = oracle.PlainDecoder(policy)
    expected = plain_entropy(plain, batch)
    scored = policy.logprobs(batch, entropy=True, entropy_gradient=True)
    assert scored.entropy is not None
    torch.testing.assert_close(scored.entropy.detach(), expected.detach(), rtol=0, atol=1e-10)
    with_logp = batch.weight * batch.advantage * logp_too
    ((with_logp * scored.logp).sum() + (c * scored.entropy).sum()).backward()
    ((with_logp * plain.logprobs(batch)).sum() + (c * expected).sum()).backward()
    reference = torch.cat([oracle.grad_of(tensor).flatten() for tensor in plain.lora.values()])
    assert reference.abs().max() > 1e-2
    torch.testing.assert_close(oracle.gradient(policy), reference, rtol=0, atol=1e-10)


def test_entropy_is_detached_unless_asked_for(tiny_llama):
    policy = policy_of(tiny_llama)
    batch = oracle.shared_prefix_batch()
    asked = policy.logprobs(batch, entropy=True, entropy_gradient=True)
    plain = policy.logprobs(batch, entropy=True)
    assert asked.entropy is not None and plain.entropy is not None
    assert asked.entropy.requires_grad and plain.logp.requires_grad and not plain.entropy.requires_grad
    assert torch.equal(asked.entropy, plain.entropy) and torch.equal(asked.logp, plain.logp)
    with torch.no_grad():
        quiet = policy.logprobs(batch, entropy=True, entropy_gradient=True)
    assert quiet.entropy is not None and not quiet.entropy.requires_grad
    assert policy.logprobs(batch, entropy_gradient=True).entropy is None
    # A differentiable entropy that the loss does not use changes no gradient.
    asked.logp.sum().backward()
    unused = oracle.gradient(policy).clone()
    policy.zero_grad()
    plain.logp.sum().backward()
    assert torch.equal(oracle.gradient(policy), unused)


def test_entropy_gradient_scales_and_accumulates(tiny_llama):
    policy = policy_of(tiny_llama)
    batch = replace(oracle.shared_prefix_batch(), temperature=1.3)
    for factor in (1.0, 3.0):
        entropy = policy.logprobs(batch, entropy=True, entropy_gradient=True).entropy
        assert entropy is not None
        (factor * entropy.sum()).backward()
        if factor == 1.0:
            once = oracle.gradient(policy).clone()
    torch.testing.assert_close(oracle.gradient(policy), 4 * once)
