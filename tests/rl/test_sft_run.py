"""SFT from a configuration to a trained adapter, through `covey.sft`; transformers says what the loss is."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import covey
from covey.policies.locate import locate_model

END = 258  # <|im_end|>, which ends every text that is learned
CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Chad": "N'Djamena", "Denmark": "Copenhagen", "Egypt": "Cairo",
    "France": "Paris", "Ghana": "Accra", "Hungary": "Budapest", "India": "New Delhi", "Japan": "Tokyo",
    "Kenya": "Nairobi", "Laos": "Vientiane", "Mali": "Bamako", "Norway": "Oslo", "Oman": "Muscat", "Peru": "Lima",
    "Qatar": "Doha", "Rwanda": "Kigali", "Sweden": "Stockholm", "Togo": "Lomé",
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model": {"path": "tiny", "method": "lora", "dtype": "float32", "device": "cpu"},
    "optim": {"lr": 1e-2, "rows_per_step": 4},
    "run": {"name": "run", "threads": 1, "save_every": 0, "keep": 100},
}
VARYING = ("time/", "memory/", "train/tokens_per_s")


def train(folder: Path, rows: Any, resume: str | None = None, **sections: Any):
    config = {name: {**CONFIG.get(name, {}), **sections.get(name, {})} for name in {*CONFIG, *sections}}
    config["run"]["dir"] = str(folder)
    return covey.sft(config, data=rows, resume=resume, plain=True)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def base_nll(prompt: str, completion: str) -> float:
    """Summed over the completion's bytes and the end, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(locate_model("tiny"), dtype=torch.float32)
    start, ids = len(prompt.encode()), [*(prompt + completion).encode(), END]
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return -sum(logp[at - 1, ids[at]].item() for at in range(start, len(ids)))


@pytest.fixture
def uneven() -> list[dict[str, str]]:
    """1, 3, 9 and 27 trained tokens with the end."""
    text = "the quick brown fox jumps over"
    return [{"prompt": f"{n}>", "completion": text[: n - 1]} for n in (1, 3, 9, 27)]


def test_twenty_rows_are_learned_by_heart(tmp_path: Path) -> None:
    rows = [{"prompt": f"{land}: ", "completion": city} for land, city in CAPITALS.items()]
    run = train(
        tmp_path, rows, optim={"steps": 100, "rows_per_step": 20, "schedule": "cosine", "warmup_steps": 5}
    )
    loss = run.metrics.column("loss/total")
    # The final norm bounds the logits of "tiny": with the best direction for each byte about 0.06 is left.
    assert loss[0] > 5 and loss[-5:].max() < 0.08
    answers = {land: run.generate(f"{land}: ", max_new_tokens=20) for land in CAPITALS}
    assert answers == CAPITALS


def test_the_first_loss_is_the_mean_over_all_trained_tokens(uneven: Any, tmp_path: Path) -> None:
    run = train(tmp_path, uneven, optim={"steps": 1})
    assert run.metrics[0]["tokens/trained"] == 40
    expected = sum(base_nll(**row) for row in uneven) / 40
    assert run.metrics[0]["sft/nll"] == run.metrics[0]["loss/total"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_how_a_step_is_split_changes_no_result(method: str, uneven: Any, tmp_path: Path) -> None:
    """eps is so large that AdamW's update is the gradient: without, it would amplify rounding to lr."""
    runs = [
        train(
            tmp_path,
            uneven,
            model={"method": method},
            optim={"steps": 2, "lr": 1.0, "eps": 1.0, "tokens_per_pass": tokens},
            run={"name": f"{tokens}"},
        )
        for tokens in (100_000, 16, 1)
    ]
    whole = adapter(runs[0].adapter)
    assert max(tensor.abs().max().item() for name, tensor in whole.items() if "lora_B" in name) > 1e-3
    for run in runs[1:]:
        for name, tensor in adapter(run.adapter).items():
            torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-6)
        for name in ("loss/total", "grad/norm"):
            assert run.metrics.column(name) == pytest.approx(runs[0].metrics.column(name), rel=1e-5), name


def test_an_epoch_shows_every_row_once_and_its_last_step_is_short(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}:", "completion": "x" * n} for n in range(10)]
    run = train(tmp_path, rows, optim={"epochs": 2.0})
    trained = run.metrics.column("tokens/trained")
    assert len(trained) == 6
    assert trained[:3].sum() == trained[3:].sum() == sum(n + 1 for n in range(10))


def test_evaluations_are_free_of_training_and_scored_by_rewards(uneven: Any, tmp_path: Path) -> None:
    def says_nothing(completion: str) -> float:
        return float(completion == "")

    config = {
        **CONFIG,
        "optim": {**CONFIG["optim"], "steps": 40},
        "eval": {"max_new_tokens": 4},
        "run": {**CONFIG["run"], "dir": str(tmp_path)},
    }
    silent = {"prompt": "1>", "completion": ""}
    run = covey.sft(
        config, data=uneven[:1], eval_data=[silent, {**silent}], rewards=[says_nothing], plain=True
    )
    assert [row["step"] for row in run.metrics] == list(range(41))
    assert run.metrics[0]["eval/nll"] == pytest.approx(base_nll("1>", ""), rel=1e-5)
    assert run.metrics[40]["eval/nll"] < 0.1
    assert (run.metrics[0]["eval/reward"], run.metrics[40]["eval/reward"]) == (0.0, 1.0)


def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    rows = [{"prompt": f"{land}: ", "completion": city} for land, city in CAPITALS.items()][:6]
    settings: dict[str, Any] = {"optim": {"steps": 5, "schedule": "linear", "warmup_steps": 1}}
    whole = train(tmp_path / "whole", rows, **settings, run={"save_every": 2})
    copied = tmp_path / "copied" / "run"
    shutil.copytree(whole.folder, copied)
    resumed = train(copied.parent, rows, resume=str(copied / "checkpoints/step-000002"), **settings)

    final = adapter(whole.adapter)
    assert all(torch.equal(tensor, final[name]) for name, tensor in adapter(resumed.adapter).items())
    kept = [
        [{k: v for k, v in row.items() if not k.startswith(VARYING)} for row in run.metrics]
        for run in (resumed, whole)
    ]
    assert kept[0] == kept[1] and [row["step"] for row in kept[0]] == [1, 2, 3, 4, 5]
    assert (copied / "checkpoints/abandoned-step-000004").is_dir()
