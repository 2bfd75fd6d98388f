"""The folder of a run: where everything that a run leaves behind is found.

runs/NAME/
    config.yaml         the resolved configuration
    environment.json    versions and device
    metrics.jsonl       one line a step (rl/metrics.py)
    samples/            step-000123.parquet, every completion of a step (rl/metrics.py)
    checkpoints/        step-000100/ (rl/checkpoint.py)
    report.html         curves, completions and costs on one page (rl/report/)
"""

import json
import logging
import platform
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from covey.rl.checkpoint import MANIFEST, RunError, list_checkpoints, remove_leftovers
from covey.rl.config import RunSection

logger = logging.getLogger(__name__)

PACKAGES = ("covey", "torch", "triton", "transformers", "peft", "bitsandbytes", "datasets", "vllm", "numpy")


class RunFolderError(ValueError):
    """The user has to choose another name, another folder or another checkpoint; the message says which."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """path: the run's folder. checkpoint: what to resume from, or None for a run that starts at step 0."""

    path: Path
    checkpoint: Path | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def samples(self, step: int, kind: str = "step") -> Path:
        """The file for the completions of a step; kind "eval" for those of an evaluation after it."""
        return self.path / "samples" / f"{kind}-{step:06d}.parquet"

    def kept_samples(self, kind: str = "[a-z]+") -> list[tuple[int, Path]]:
        """(step, file) of the completions of a kind, by default of all, in the order of the steps."""
        found = (
            (re.fullmatch(rf"{kind}-(\d+)", path.stem), path) for path in self.path.glob("samples/*.parquet")
        )
        return sorted((int(match[1]), path) for match, path in found if match)

    @classmethod
    def create(
        cls,
        section: RunSection,
        default_name: str,
        config_text: str,
        *,
        resume: str | None = None,
        device: str = "cpu",
        cuda: str | None = None,
    ) -> "RunFolder":
        """Make the run's folder, or find the one to resume.

        default_name: how a run without `run.name` is called, COMMAND-MODEL; the time is added to it.
        config_text: the resolved configuration as YAML.
        resume: None starts a run. "auto" picks the newest checkpoint of the run called `run.name`, else of
            the newest run with that default name; where there is none, a run is started. Anything else is a
            run's folder or name, or the folder of a checkpoint.
        device, cuda: the device's name and torch's CUDA version, for environment.json.
        Raises RunFolderError when the user has to choose, RunError when the folder cannot be written.
        """
        root = Path(section.dir)
        if resume is None:
            found = None
        elif resume == "auto":
            found = _newest(root, section.name, default_name)
        else:
            found = _named(root, section.name, resume)
        try:
            run = found or cls(_new_folder(root, section.name, default_name, may_exist=resume is not None))
            for part in ("samples", "checkpoints"):
                (run.path / part).mkdir(exist_ok=True)
            remove_leftovers(run.path)
            _replace(run.config, config_text)
            _replace(run.path / "environment.json", json.dumps(_environment(device, cuda), indent=1) + "\n")
        except OSError as error:
            where = error.filename or root
            raise RunError(
                f"cannot write to {where}: {(error.strerror or str(error)).lower()}. "
                "Set run.dir to a folder that can be written to, or free some space"
            ) from error
        return run

    def rewind(self, step: int) -> None:
        """Call after the checkpoint of `step` was loaded: what the run wrote after it will be written again.

        Sample files of later steps are removed, as lines of metrics.jsonl are. Later checkpoints (there are
        some when an older one was picked) are kept as checkpoints/abandoned-step-NNNNNN.
        """
        for kept, path in self.kept_samples():
            if kept > step:
                path.unlink()
        for later, path in list_checkpoints(self.path):
            if later > step:
                target = _free_name(path.with_name(f"abandoned-{path.name}"))
                path.rename(target)
                logger.warning(
                    "the checkpoint of step %d is later than the resumed one: now %s", later, target
                )


def default_name(command: str, model: str) -> str:
    """COMMAND-MODEL, from a hub id, a folder or a file.

    >>> default_name("grpo", "HuggingFaceTB/SmolLM2-135M-Instruct")
    'grpo-SmolLM2-135M-Instruct'
    """
    last = re.split(r"[/\\:]", model.rstrip("/\\"))[-1].removesuffix(".gguf")
    return f"{command}-{re.sub(r'[^A-Za-z0-9._]+', '-', last).strip('-.') or 'model'}"


def _new_folder(root: Path, name: str | None, default: str, *, may_exist: bool) -> Path:
    if name is None:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            path = _free_name(root / f"{default}-{time.strftime('%m%d-%H%M%S')}")
            with suppress(FileExistsError):  # by a run that was started at the same time
                path.mkdir()
                return path
    _check_name(name)
    path = root / name
    # Resuming "auto" a run that stopped before its first checkpoint starts it again.
    if not may_exist and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunFolderError(
            f"run.name: {path} exists already. Go on with that run (--resume auto) or choose another "
            "run.name; nothing is ever overwritten"
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[^/\\\0]+", name) or name in (".", "..") or name != name.strip():
        raise RunFolderError(f"run.name: {name!r} cannot be a folder's name; use letters, digits and '-'")


def _free_name(path: Path) -> Path:
    """`path`, or with -2, -3, ... behind it if that exists."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _newest(root: Path, name: str | None, default: str) -> RunFolder | None:
    """The run that "auto" means, with its newest checkpoint; None if no run of that name has one."""
    if name is not None:
        runs = [root / name]
    else:
        pattern = re.compile(re.escape(default) + r"-\d{4}-\d{6}(-\d+)?")
        runs = [path for path in root.glob("*") if pattern.fullmatch(path.name)]
    # By the time of writing: names carry no year, and an old run may have been resumed since.
    found = [(checkpoints[-1][1], run) for run in runs if (checkpoints := list_checkpoints(run))]
    if not found:
        return None
    checkpoint, run = max(found, key=lambda pair: pair[0].stat().st_mtime_ns)
    return RunFolder(run, checkpoint)


def _named(root: Path, name: str | None, resume: str) -> RunFolder:
    """The run or checkpoint at a path, or the run of a name."""
    path = next((p for p in (Path(resume), root / resume) if p.is_dir()), None)
    if path is None:
        runs = ", ".join(sorted(p.name for p in root.glob("*") if list_checkpoints(p))[-8:]) or "none"
        raise RunFolderError(f"--resume {resume}: there is no such folder. Runs with a checkpoint: {runs}")
    path = path.resolve()
    if (path / MANIFEST).is_file():
        run, checkpoint = path.parent.parent, path
    elif checkpoints := list_checkpoints(path):
        run, checkpoint = path, checkpoints[-1][1]
    else:
        raise RunFolderError(
            f"--resume {resume}: neither a checkpoint nor a run with one. A run saves its first after "
            "run.save_every steps"
        )
    if name is not None and run.name != name:
        raise RunFolderError(
            f"run.name is {name!r}, but --resume {resume} is the run {run.name!r}: leave one of them out"
        )
    return RunFolder(run, checkpoint)


def _replace(path: Path, text: str) -> None:
    """Write a file; an older one that says something else stays beside it as NAME.1, NAME.2, ..."""
    if path.exists() and path.read_text("utf-8") != text:
        number = 1 + sum(1 for _ in path.parent.glob(f"{path.stem}.*{path.suffix}"))
        path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))
    path.write_text(text, "utf-8")


def _environment(device: str, cuda: str | None) -> dict[str, object]:
    """What a result may depend on, and nothing that tells whose machine it was."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    system = f"{platform.system()} {platform.machine()}"
    return {
        "python": platform.python_version(),
        "system": system,
        "device": device,
        "cuda": cuda,
        "packages": versions,
    }
