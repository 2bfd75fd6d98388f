"""SFT from a configuration to a trained adapter, through `covey.sft`; transformers says what the loss is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import covey
from covey.policies.locate import locate_model
from covey.rl.cli import app
from covey.rl.config import SftDataSection
from covey.rl.data import DataError, load_rows
from covey.rl.sft import hold_out

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
    """B01. eps is so large that AdamW's update is the gradient: without, it would amplify rounding to lr."""
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


# ------------------------------------------------------------------------------------ what will be trained


def command(tmp_path: Path, rows: Any, *arguments: str) -> list[str]:
    """Arguments of `covey` for SFT of the model "tiny" on a file with these rows."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sft.yaml").write_text("model: {path: tiny, device: cpu}\ndata: {train: rows.jsonl}\n")
    return ["sft", str(tmp_path / "sft.yaml"), f"data.train={tmp_path / 'rows.jsonl'}", *arguments]


def test_dump_batch_shows_what_is_trained_without_weights(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("covey.rl.sampler.open_policy", lambda *_, **__: pytest.fail("weights were loaded"))
    rows = [{"prompt": "a>", "completion": "é b"}, {"prompt": "b>", "completion": "c" * 9}]
    settings = ["optim.steps=1", "data.shuffle=false", "data.max_tokens=8", "data.overlong=drop"]
    printed = CliRunner().invoke(app, [*command(tmp_path, rows, *settings), "--dump-batch", "5"])
    assert printed.exit_code == 0, printed.output
    assert printed.output == (
        "--- row 0: 7 tokens, 5 trained\n"  # é is two bytes
        "a>⟦é b<|im_end|>⟧\n"
        "---\n"
        f'data       {tmp_path}/rows.jsonl: prompt from "prompt", text to learn from "completion"\n'
        "rows       2\ndocuments  1\nheld out   0\ntokens     7\ntrained    5 (71.4%)\nlongest    7\n"
        "truncated  0\nsplit      0\ndropped    1 (1 too long, 0 with nothing to train)\nsteps      1\n"
        "warning: 1 of 2 documents were too long and were dropped\n"
    )


def test_dump_batch_marks_every_run_of_trained_tokens_and_nothing_dangerous(tmp_path: Path) -> None:
    turns = [("user", "hi"), ("assistant", "yes"), ("user", "so?"), ("assistant", "\x1b[2Jno")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    arguments = command(tmp_path, rows, "optim.steps=1")
    printed = CliRunner().invoke(app, [*arguments, "--dump-batch", "1", "--dry-run"]).output
    assert "# data     " in printed and "\x1b" not in printed
    assert "<|im_start|>assistant\n⟦yes<|im_end|>⟧\n" in printed
    assert "<|im_start|>assistant\n⟦\ufffd[2Jno<|im_end|>⟧" in printed


# ---------------------------------------------------------------------------------------- held-out share


def test_a_held_out_share_is_reproducible_and_keeps_copies_together() -> None:
    rows = load_rows(
        [{"prompt": f"{n % 40}", "completion": "x"} for n in range(60)],  # 0 to 19 stand twice
        SftDataSection(train="unused"),
    )
    train, held = hold_out(rows, 0.1, seed=3)
    assert len(held) == 6 and len(train) == 54
    assert not {row.prompt for row in train} & {row.prompt for row in held}
    assert [row.index for row in train] == sorted({*range(60)} - {row.index for row in held})
    assert hold_out(rows, 0.1, seed=3) == (train, held)
    assert hold_out(rows, 0.1, seed=4) != (train, held)
    with pytest.raises(DataError, match=r"eval\.share: 0\.5 of 1 rows"):
        hold_out(rows[:1], 0.5, seed=0)
    with pytest.raises(DataError, match="1 of them different"):
        hold_out([rows[0], rows[40]], 0.5, seed=0)


def test_a_held_out_share_is_evaluated_and_never_trained_on(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "x" * n} for n in range(1, 11)]
    run = train(tmp_path, rows, optim={"epochs": 2.0}, eval={"share": 0.3})
    sizes = [row.completion for row in hold_out(load_rows(rows, SftDataSection(train="-")), 0.3, 0)[1]]
    held = sum(len(text or "") + 1 for text in sizes)
    assert len(sizes) == 3
    assert run.metrics.column("tokens/trained")[1:].sum() == 2 * (sum(range(2, 12)) - held)
    expected = sum(base_nll("p", text or "") for text in sizes) / held
    assert run.metrics[0]["eval/nll"] == pytest.approx(expected, rel=1e-5)


def test_a_share_and_held_out_rows_exclude_each_other(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "x"}] * 4
    with pytest.raises(ValueError, match=r"eval\.share: takes the held-out rows from data\.train"):
        train(tmp_path, rows, optim={"steps": 1}, eval={"share": 0.5}, data={"eval": "rows.jsonl"})
    config: dict[str, Any] = {**CONFIG, "optim": {"steps": 1}, "eval": {"share": 0.5}}
    with pytest.raises(DataError, match="leave it or eval_data out"):
        covey.sft(config, data=rows, eval_data=rows, plain=True)


@pytest.mark.parametrize("recipe", ["chat-sft", "reasoning-sft"])
def test_shipped_recipes_run_on_a_small_file(recipe: str, tmp_path: Path) -> None:
    answer = "<think>\nadd\n</think>\n\n{}" if recipe == "reasoning-sft" else "{}"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": answer.format(n)},
            ]
        }
        for n in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small: dict[str, Any] = {
        "model": {"path": "tiny", "device": "cpu"},
        "data.train": str(tmp_path / "rows.jsonl"),
        "optim": {"steps": 2, "epochs": None, "rows_per_step": 4},
        "eval": {"share": 0.25, "every": 1},
        "run": {"dir": str(tmp_path), "name": "run", "threads": 1},
    }
    run = covey.sft(recipe, plain=True, **small)
    trained = len(answer.format(0)) + 1  # bytes, and the end of the turn
    assert run.metrics[1]["tokens/trained"] == 4 * trained
    assert [row["step"] for row in run.metrics if "eval/nll" in row] == [0, 1, 2]
