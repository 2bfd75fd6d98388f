"""Runs that train all weights, or a model that the decoder does not cover: saved, resumed and gone on with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import covey
from covey.policies.hf import HFPolicy
from covey.policies.locate import locate_model
from covey.rl.checkpoint import RunError, find_adapter, find_model, load_checkpoint
from covey.rl.cli import app

ROWS = [{"prompt": f"{a}{b}=", "completion": f" {a}{b}!"} for a in "abcd" for b in "vwxyz"]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no"} for row in ROWS]
FULL = {"path": "tiny", "method": "full", "device": "cpu"}


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def train(
    kind: Callable[..., Any], folder: Path, name: str, *, resume: str | None = None, **sections: Any
) -> Any:
    shared = {"run": {"dir": str(folder), "name": name, "threads": 1} | sections.pop("run", {})}
    rollout = (
        {"rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6}}
        if kind is covey.grpo
        else {}
    )
    rewards = {"rewards": [digits]} if kind is covey.grpo else {}
    data = PAIRS if kind is covey.dpo else ROWS
    return kind(data=data, plain=True, resume=resume, **shared, **rollout, **rewards, **sections)


def weights_of(run: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in run.policy.weights().items()}


def test_full_sft_is_plain_training_with_torch(tmp_path: Path) -> None:
    """Three steps on the same documents: transformers' model, cross-entropy over all trained tokens, torch's AdamW."""
    from transformers import AutoModelForCausalLM

    optim = {"steps": 3, "rows_per_step": 20, "lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.0}
    run = train(covey.sft, tmp_path, "sft", model=FULL, optim=optim, run={"save_every": 0})
    assert isinstance(run.policy, HFPolicy) and run.policy.packed

    model = AutoModelForCausalLM.from_pretrained(locate_model("tiny"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    losses = []
    for _ in range(3):
        nll, count = torch.zeros(()), 0
        for row in ROWS:
            start = len(row["prompt"])
            ids = torch.tensor([*(row["prompt"] + row["completion"]).encode(), 258])  # <|im_end|>
            logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
            nll = nll - logp[torch.arange(len(ids) - 1), ids[1:]][start - 1 :].sum()
            count += len(ids) - start
        losses.append((nll / count).item())
        (nll / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(run.metrics.column("sft/nll")) == pytest.approx(losses, abs=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(run.policy.weights()[name], weight.detach(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", [covey.sft, covey.grpo, covey.dpo])
@pytest.mark.parametrize("dtype, optimizer", [("float32", "adamw8bit"), ("bfloat16", "adamw")])
def test_full_resumes_bit_by_bit(
    kind: Callable[..., Any], dtype: Any, optimizer: str, tmp_path: Path
) -> None:
    """In bfloat16 too, whose files are rounded."""
    model, optim = FULL | {"dtype": dtype}, {"lr": 2e-3, "optimizer": optimizer}
    optim |= {"rows_per_step": 8} if kind is not covey.grpo else {}
    extra: dict[str, Any] = {"objective": {"beta": 0.1}} if kind is covey.grpo else {}
    whole = train(kind, tmp_path, "whole", model=model, optim=optim | {"steps": 4}, **extra)
    train(kind, tmp_path, "halves", model=model, optim=optim | {"steps": 2}, **extra)
    halves = train(kind, tmp_path, "halves", model=model, optim=optim | {"steps": 4}, resume="auto", **extra)
    assert all(torch.equal(w, weights_of(halves)[name]) for name, w in weights_of(whole).items())
    for name in ("loss/total", "grad/norm"):
        assert list(whole.metrics.column(name)) == list(halves.metrics.column(name))
    if kind is covey.grpo:  # the reference stays the model as it was before the first half
        assert list(halves.metrics.column("kl/reference")) == list(whole.metrics.column("kl/reference"))
        assert whole.metrics.column("kl/reference")[0] == pytest.approx(0, abs=1e-9)
    state = load_checkpoint(halves.adapter.parent).state
    assert bool(state["policy"]) == (dtype == "bfloat16")


def test_a_run_goes_on_from_a_fully_trained_one(tmp_path: Path) -> None:
    first = train(
        covey.sft, tmp_path, "first", model=FULL, optim={"steps": 2, "rows_per_step": 8, "lr": 1e-3}
    )
    assert first.adapter == tmp_path / "first/checkpoints/step-000002/model"
    assert find_model(str(tmp_path / "first")) == find_model(str(first.adapter.parent)) == str(first.adapter)
    assert find_model("tiny") == "tiny" and find_model(str(first.adapter)) == str(first.adapter)
    with pytest.raises(RunError, match=r"has no adapter: go on from it with model\.path="):
        find_adapter(tmp_path / "first")

    greedy = first.generate("ab=", max_new_tokens=5)
    policy = covey.load_policy(first.adapter, method="lora", device="cpu", dtype="float32")
    assert not isinstance(policy, HFPolicy)  # the decoder reads what transformers wrote
    model = {"path": str(tmp_path / "first"), "device": "cpu", "method": "lora"}
    second = train(
        covey.sft, tmp_path, "second", model=model, optim={"steps": 1, "rows_per_step": 8, "lr": 1e-9}
    )
    assert second.generate("ab=", max_new_tokens=5) == greedy


def test_experts_learn_an_easy_reward_by_one_command(
    random_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture of experts with DoRA, sampled by transformers."""
    monkeypatch.chdir(tmp_path)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    folder = random_model("qwen3_moe", **experts)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{letter}:"}}\n' for letter in "abcdef"))
    (tmp_path / "mine.py").write_text(
        "def digits(completion):\n    return sum(c.isdigit() for c in completion) / max(1, len(completion))\n"
    )
    (tmp_path / "empty.yaml").write_text("{}")
    words = (
        f"model.path={folder} model.device=cpu model.method=lora lora.dora=true lora.targets=[q_proj,v_proj,o_proj] "
        "data.train=rows.jsonl rewards.0.use=mine.py:digits rollout.prompts_per_step=6 rollout.group_size=8 "
        "rollout.max_new_tokens=5 optim.steps=14 optim.lr=3e-2 lora.alpha=64 run.threads=1 --name experts"
    )
    shown = CliRunner().invoke(app, ["grpo", "empty.yaml", *words.split()])
    assert shown.exit_code == 0, shown.output
    assert "transformers, packed: lora.dora is not in covey's decoder" in " ".join(shown.output.split())
    from covey.rl.metrics import Metrics

    metrics = Metrics.read(tmp_path / "runs/experts/metrics.jsonl")
    reward = metrics.column("reward/mean")
    assert reward[-2:].mean() > reward[:2].mean() + 0.3
    assert metrics.column("sampler/logp_diff_max").max() < 1e-4


def test_what_suits_an_adapter_only_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(
        covey.sft, tmp_path, "loud", model=FULL, lora={"rank": 4}, optim={"steps": 1, "rows_per_step": 8},
    )  # fmt: skip
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "optim.lr is 0.0002, which is usual for an adapter; where all weights are trained, 1e-5 or less is"
        in shown
    )
    assert "the section lora has no effect" in shown
    with pytest.raises(ValueError, match=r"model\.adapter: full finetuning has none"):
        train(covey.sft, tmp_path, "never", model=FULL | {"adapter": str(tmp_path)}, optim={"steps": 1})


def test_doctor_says_path_reason_and_memory(tmp_path: Path, random_model: Callable[..., Path]) -> None:
    def doctor(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["doctor", *words])
        return result.exit_code, result.output

    code, shown = doctor("tiny", "model.device=cpu")
    assert code == 0 and "covey: covey's decoder covers llama" in shown and "free" in shown
    folder = random_model("bloom", n_layer=2, n_head=4)
    code, shown = doctor(str(folder), "model.method=lora", "model.device=cpu")
    assert code == 0 and "transformers: " in shown and '"bloom"' in shown
    code, shown = doctor("tiny", "model.method=full", "optim.optimizer=adamw8bit")
    assert code == 0 and "model.method is full" in shown
    assert doctor("tiny", "model.methd=full")[0] == 2
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    for file in ("tokenizer.json", "model.safetensors"):
        (tmp_path / file).touch()
    code, shown = doctor(str(tmp_path))
    assert code == 2 and '"t5" is an encoder with a decoder' in shown
