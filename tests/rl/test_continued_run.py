"""From SFT to GRPO: training goes on from an adapter, and that adapter is the reference."""

import signal
from pathlib import Path

import pytest
import torch

import covey

ROWS = [{"prompt": f"{a}{b}=", "completion": f" {a}{b}!"} for a in "abcd" for b in "vwxyz"]
MODEL = {"path": "tiny", "device": "cpu"}


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def test_the_reference_is_the_adapter_as_it_was_loaded(tmp_path: Path):
    handler = signal.getsignal(signal.SIGINT)
    first = covey.sft(
        model=MODEL, lora={"rank": 4}, data=ROWS, plain=True,
        optim={"steps": 3, "rows_per_step": 20, "lr": 1e-2}, run={"dir": str(tmp_path / "sft")},
    )  # fmt: skip
    second = covey.grpo(
        model=MODEL | {"adapter": str(first.adapter)}, data=ROWS, rewards=[digits], plain=True,
        rollout={"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6}, objective={"beta": 0.1},
        optim={"steps": 2, "lr": 1e-2}, run={"dir": str(tmp_path / "grpo")},
    )  # fmt: skip
    assert second.policy.adapter.rank == 4  # the adapter's own, not the default of 16
    kl = second.metrics.column("kl/reference")
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[1] > 1e-6
    # Against the base model it would not be 0: the adapter has moved.
    policy = covey.load_policy("tiny", adapter=first.adapter, device="cpu")
    assert not torch.equal(
        policy.forward_logits([97, 98]), covey.load_policy("tiny").forward_logits([97, 98])
    )
    assert signal.getsignal(signal.SIGINT) == handler  # a run gives Ctrl-C back
