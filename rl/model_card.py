"""A model card (README.md): what a model is made of and how it came about, from the folder of its run."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covey.rl.config_yaml import dump_yaml
from covey.rl.metrics import Metrics

LIBRARIES = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}
WHAT = {"adapter": "A LoRA adapter for {}", "merged": "{}", "gguf": "{} in GGUF format"}
METHODS = {
    "qlora": "of a LoRA adapter, on the base model in 4 bits (NF4)",
    "lora": "of a LoRA adapter",
    "full": "of all weights",
}
TRAINED = ("reward/", "sft/nll", "dpo/loss", "dpo/accuracy", "length/mean")
WINDOW = 10  # steps that a number of the training is averaged over


def licence_of(base: Path, hub_id: str | None) -> dict[str, Any]:
    """The fields license, license_name and license_link of the base model's card; none where there is no card."""
    from huggingface_hub import ModelCard, hf_hub_download

    try:
        file = base / "README.md"
        if not file.is_file():
            file = Path(hf_hub_download(hub_id or "", "README.md"))
        card = ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # there is no card, no network, or a card that cannot be read
        return {}
    return {key: card[key] for key in ("license", "license_name", "license_link") if card.get(key)}


def model_card(
    name: str,
    *,
    form: str,
    use: str,
    notes: Sequence[str],
    base: str,
    on_hub: bool,
    with_adapter: bool,
    licence: Mapping[str, Any],
    config: Mapping[str, Any],
    run: Path | None,
    step: int | None,
) -> str:
    """The text of README.md. Of local files and folders only the last part of the name is told.

    form: "adapter", "merged" or "gguf". use: how the files are used, in Markdown. notes: sentences to put first.
    base: the base model's name; on_hub: whether that is one of the hub. licence: fields of `licence_of`.
    with_adapter: False for a model that is exported as it is.
    config, run, step: the run's configuration and folder, and the step of its checkpoint; {} and None without a run.
    """
    from huggingface_hub import ModelCardData

    method = "GRPO" if "rollout" in config else "DPO" if "objective" in config else "SFT" if config else None
    fields = ModelCardData(
        base_model=base if on_hub else None,
        datasets=_datasets(config) or None,
        library_name=LIBRARIES[form],
        pipeline_tag="text-generation",
        tags=["covey", *([method.lower()] if method else []), *(["lora"] if form == "adapter" else [])],
        **licence,
    )
    link = f"[{base}](https://huggingface.co/{base})" if on_hub else shown(base)
    what = link if form == "adapter" or not with_adapter else f"{link} with a LoRA adapter merged into it"
    trained = f", trained with covey ({method})" if method else ""
    parts = [
        f"---\n{fields.to_yaml()}\n---\n\n# {name}",
        f"{WHAT[form].format(what)}{trained}.",
        *notes,
        f"## Use\n\n{use}",
    ]
    if method:
        parts += [_training(config, run, method), _results(run, step), _settings(config)]
    return "\n\n".join(part for part in parts if part) + "\n"


def shown(path: str) -> str:
    """The name of a model, file or function without the folders it lies in; hub ids and tasks as they are.

    >>> shown("/home/me/rewards.py:length"), shown("openai/gsm8k:main"), shown("task:addition")
    ('rewards.py:length', 'openai/gsm8k:main', 'task:addition')
    """
    local = re.match(r"[~./\\]|[A-Za-z]:\\", path) or path.count("/") > 1 or Path(path).exists()
    file = re.search(r"\.(py|gguf|jsonl|json|parquet|csv|tsv|txt|gz)\b", path)
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] if local or file else path


def _sources(config: Mapping[str, Any]) -> list[str]:
    train = config.get("data", {}).get("train") or []
    return [train] if isinstance(train, str) else [str(source["path"]) for source in train]


def _datasets(config: Mapping[str, Any]) -> list[str]:
    """Hub ids among the sources of the data."""
    names = [name for name in _sources(config) if shown(name) == name]
    return [name.split(":")[0] for name in names if re.fullmatch(r"[\w.-]+/[\w.-]+(:.*)?", name)]


def _training(config: Mapping[str, Any], run: Path | None, method: str) -> str:
    data = config.get("data", {})
    lines = [f"- data: {', '.join(map(shown, _sources(config)))}"]
    lines += [f"- {key}: `{data[key]!r}`" for key in ("system", "prompt") if data.get(key)]
    for reward in config.get("rewards") or []:
        # Of its arguments the numbers: texts may be paths, or keys of somebody's account.
        numbers = [f"{k}={v}" for k, v in (reward.get("args") or {}).items() if isinstance(v, int | float)]
        named = f" ({reward['name']})" if reward.get("name") else ""
        weight = f"weight {reward.get('weight', 1):g}"
        lines.append(f"- reward: {shown(reward['use'])}{named}, {', '.join([weight, *numbers])}")
    text = (run / "config.yaml").read_text("utf-8") if run is not None else ""
    lines += [f"- reward: {given}" for given in re.findall(r"^# reward given in Python: (.+)$", text, re.M)]
    how = METHODS.get(config["model"].get("method"), "")
    lines.append(f"- method: {method} {how}".rstrip())
    return "## Training\n\n" + "\n".join(lines)


def _results(run: Path | None, step: int | None) -> str:
    """Held-out numbers before and after, and the training's own at its beginning and end, up to `step`."""
    file = run / "metrics.jsonl" if run is not None else None
    if file is None or not file.is_file():
        return ""
    metrics = Metrics([row for row in Metrics.read(file).rows if step is None or row["step"] <= step])
    rows = []
    for name in metrics.names:
        held_out = name.startswith("eval/") and name != "eval/rows"
        values = metrics.column(name)
        values = values[np.isfinite(values)]
        if (held_out or name.startswith(TRAINED)) and len(values) > 1:
            width = 1 if held_out else min(WINDOW, len(values) // 2)
            rows.append(f"| {name} | {values[:width].mean():.4g} | {values[-width:].mean():.4g} |")
    if not rows:
        return ""
    head = f"| | at the start | at step {step} |\n|---|---|---|\n"
    foot = f"\n\n`eval/` is measured on held-out rows; the rest are means of up to {WINDOW} training steps."
    return "## Results\n\n" + head + "\n".join(rows) + foot


def _settings(config: Mapping[str, Any]) -> str:
    """What the run was set to, without what depends on whose machine it was."""
    sections = {name: config[name] for name in ("lora", "rollout", "objective", "optim") if name in config}
    told = {name: {k: v for k, v in values.items() if v is not None} for name, values in sections.items()}
    return f"## Settings\n\n```yaml\n{dump_yaml(told).rstrip()}\n```"
