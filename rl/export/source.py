"""What is exported: an adapter and the model below it or a model alone, and the run that made it."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.policies.locate import ModelError, locate_model
from covey.rl.checkpoint import find_model, find_trained, step_of
from covey.rl.config_yaml import parse_yaml

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


class ExportError(ValueError):
    """Something that the user can mend before exporting again; the message says what."""


@dataclass(frozen=True, slots=True)
class Source:
    """adapter: a folder in PEFT's format; None: the weights in `base` go out as they are.

    base: the folder of the base model, or of a model that was trained whole. base_name: what the base model was called.
    run, step, config: the run that made it, the step of the checkpoint, and the run's configuration; None, None and {}
    where there is no run.
    """

    adapter: Path | None
    base: Path
    base_name: str
    run: Path | None = None
    step: int | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How the exported model is called: as its run, its adapter's folder, or the model itself."""
        if (folder := self.run or self.adapter) is not None:
            return folder.name
        return re.split(r"[/\\:]", self.base_name.rstrip("/\\"))[-1]

    @property
    def method(self) -> str | None:
        """model.method of the run: qlora, lora or full; None where there is no run."""
        return self.config.get("model", {}).get("method")

    @property
    def chat_template(self) -> str | None:
        """The template file that the run used instead of the tokenizer's own."""
        return self.config.get("model", {}).get("chat_template")

    @property
    def system(self) -> str | None:
        """The system message that the run put in front of its prompts."""
        return self.config.get("data", {}).get("system")

    @property
    def on_hub(self) -> bool:
        """Whether the base model was called by its name on the hub."""
        return bool(HUB_ID.fullmatch(self.base_name)) and not Path(self.base_name).exists()


def find_source(path: str | Path, base: str | None = None) -> Source:
    """What `path` means: a run's folder or name, a checkpoint, an adapter, or a model.

    Of a run it is the best checkpoint where evaluations are compared, else the last. `base` is the base model to use
    instead of the one that the adapter names.
    """
    given = Path(path).expanduser()
    folder = next((place for place in (given, Path("runs") / given) if place.is_dir()), None)
    trained = None if folder is None else find_trained(folder).resolve()
    run, step, config = (None, None, {}) if trained is None else _run_of(trained)
    if (
        trained is None or (trained / "config.json").is_file()
    ):  # a model, perhaps one that a run trained whole
        if base is not None:
            raise ExportError(f"{path} has no adapter, so there is no base model to name with --base")
        name = config.get("model", {}).get("path") or str(path)
        return Source(None, _located(str(trained or path)), name, run, step, config)

    for name in ADAPTER_FILES:
        if not (trained / name).is_file():
            raise ExportError(
                f"{trained}: no {name}; give a run, a checkpoint, or an adapter that covey or PEFT saved"
            )
    named = base or read_json(trained / ADAPTER_FILES[0]).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ExportError(f"{trained / ADAPTER_FILES[0]} names no base model; say which it is with --base")
    says = f" ({trained / ADAPTER_FILES[0]} names it as the base model; --base can name another place)"
    return Source(trained, _located(named, "" if base else says), named, run, step, config)


def _run_of(trained: Path) -> tuple[Path | None, int | None, dict[str, Any]]:
    """The run, the step and the configuration of what lies in RUN/checkpoints/step-N/; None, None and {} elsewhere."""
    step = step_of(trained.parent)
    file = trained.parents[2] / "config.yaml" if step is not None else None
    if file is None or not file.is_file():
        return None, None, {}
    return file.parent, step, parse_yaml(file.read_text("utf-8"), str(file)).value or {}


def _located(name: str, advice: str = "") -> Path:
    try:
        return locate_model(find_model(name))
    except ModelError as error:
        raise ExportError(str(error).removeprefix("model.path: ") + advice) from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ExportError for anything else."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{file} cannot be read ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise ExportError(f"{file}: not a JSON object; copy or download it again")
    return value
