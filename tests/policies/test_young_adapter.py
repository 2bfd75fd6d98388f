"""What bfloat16 leaves of an adapter's first update, which is less than the last bit of what it is added to."""

from typing import Any

import pytest
import torch

from covey.policies.load import load_policy
from covey.rl.batch import pack_documents, to_device
from covey.rl.documents import Document

LR = 3e-4


def documents(count: int = 48, length: int = 16):
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 96, (count, length), generator=random).tolist()
    return pack_documents(
        [Document(i, tuple(x), (False, *(True,) * (length - 1))) for i, x in enumerate(ids)]
    )


def policy_of(folder, dtype: Any, device="cpu", memory: Any = "fast") -> Any:
    return load_policy(folder, method="lora", dtype=dtype, device=device, rank=8, alpha=16.0, memory=memory)


def change(policy: Any, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the log-probs."""
    batch, found = to_device(documents(), policy.device), []
    for weights in (before, after):
        policy.load_weights(weights)
        with torch.no_grad():
            found.append(policy.logprobs(batch).logp.double().cpu())
    return found[1] - found[0]


def peft_change(folder, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> torch.Tensor:
    """By transformers and PEFT: the adapter's output is added to a layer's, which is rounded already."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, config)
    batch, found = documents(), []
    ids = torch.stack([batch.input_ids[start:end] for start, end, *_ in batch.segments.tolist()])
    for weights in (before, after):
        assert not set_peft_model_state_dict(
            model, {k: w.float() for k, w in weights.items()}
        ).unexpected_keys
        with torch.no_grad():
            logp = model(input_ids=ids).logits.double().log_softmax(-1)
        found.append(logp.flatten(0, 1)[batch.source].gather(1, batch.target[:, None])[:, 0])
    return found[1] - found[0]


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_first_update_arrives(device, memory, tiny_qwen2):
    exact = policy_of(tiny_qwen2, "float64")
    (-exact.logprobs(documents()).logp.mean()).backward()
    before = {name: w.clone() for name, w in exact.weights().items()}
    flat = exact.parameters()[0]
    flat.data.sub_(LR * flat.grad.sign())  # as AdamW's first update does
    after = {name: w.clone() for name, w in exact.weights().items()}
    true = change(exact, before, after)

    def slope(found: torch.Tensor) -> float:
        return float((found * true).sum() / true.square().sum())

    assert slope(change(policy_of(tiny_qwen2, "bfloat16", device, memory), before, after)) == pytest.approx(
        1, abs=0.15
    )
    assert slope(peft_change(tiny_qwen2, before, after)) < 0.7  # so the update is one that can get lost
