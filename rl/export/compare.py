"""How far exported weights are from the policy that was trained."""

from pathlib import Path
from typing import Any

import torch

from covey.policies.hf_save import quiet_transformers
from covey.policies.open import open_policy
from covey.rl.batch import pack_documents
from covey.rl.documents import Document
from covey.rl.export.source import Source

TEXT = (
    "Natalia sold 48 clips in April, and half as many in May. How many did she sell altogether?\n"
    "In May she sold 48 / 2 = 24 clips, so altogether 48 + 24 = 72.\n"
    "def total(april: int) -> int:\n    return april + april // 2\n"
    "The answer is 72. Water boils at 100 °C at sea level; higher up, where the air is thinner, it boils earlier.\n"
)


def compare(folder: Path, source: Source, tokenizer: Any) -> str:
    """The log-probs of a short text's tokens by the exported model and by the run's policy, both in float32 on the CPU.

    Both are in memory at once.
    """
    from transformers import AutoModelForCausalLM

    ids = tokenizer.encode(TEXT)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    exported = logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    method = "qlora" if source.method == "qlora" else "lora"
    model_name = source.base_name if source.adapter else source.base
    policy = open_policy(model_name, method=method, adapter=source.adapter, dtype="float32", device="cpu")
    batch = pack_documents([Document(row=0, ids=tuple(ids), trained=(False, *[True] * (len(ids) - 1)))])
    with torch.no_grad():
        trained = policy.logprobs(batch).logp
    difference = (exported - trained).abs()
    return (
        f"Log-probs of {len(difference)} tokens of a test text differ from the trained policy's by "
        f"{difference.max():.2g} at most and {difference.mean():.2g} on average."
    )
