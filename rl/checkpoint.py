"""Checkpoints of a run: written whole or not at all, read back bit for bit.

    checkpoints/step-000100/
        adapter/            what `adapter_writer` writes (PEFT format); called model/ if that is a whole model
        state.safetensors   the tensors of `state`, and torch's random number generators
        state.json          the plain values of `state`; a tensor is {"__tensor__": its name there}
        rng.json            the random number generators of Python and NumPy
        checkpoint.json     step, best step (or null), format, and the size of every file; written last

A checkpoint is written under a temporary name, flushed to the disk and renamed. No pickle is involved, so a
checkpoint from somebody else can be loaded without running their code.
"""

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "checkpoint.json"
TEMPORARY = ".tmp-"
_STEP_NAME = re.compile(r"step-(\d{6,})")


class RunError(RuntimeError):
    """The run cannot go on; the message says what happened and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as it was read. `state` has the tensors (on the CPU) and plain values that were saved."""

    path: Path
    step: int
    state: dict[str, Any]
    rng: dict[str, Any]

    @property
    def adapter(self) -> Path:
        """The folder that `adapter_writer` filled."""
        return weights_folder(self.path)

    def restore_rng(self) -> None:
        """Put the generators of Python, NumPy, torch and (as far as there are that many) the GPUs back."""
        import torch

        version, words, gauss = self.rng["python"]
        random.setstate((version, tuple(words), gauss))
        numpy_state = self.rng["numpy"]
        key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
        np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
        torch.set_rng_state(self.rng["torch"])
        if torch.cuda.is_available():
            for i, generator in enumerate(self.rng["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(generator, i)


def list_checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint of a run, oldest step first."""
    folder = run_folder / "checkpoints"
    if not folder.is_dir():
        return []
    matches = ((_STEP_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def best_step(path: Path) -> int | None:
    """Step of the best checkpoint of the run when `path` was written; None if nobody compared them."""
    try:
        return json.loads((path / MANIFEST).read_text("utf-8")).get("best")
    except (OSError, ValueError, AttributeError):  # damaged: load_checkpoint says so
        return None


def weights_folder(path: Path) -> Path:
    """What was trained, in the checkpoint `path`: an adapter, or a whole model."""
    return path / "model" if (path / "model").is_dir() else path / "adapter"


def find_trained(path: Path) -> Path:
    """What a run or checkpoint has trained: of a run the best if it knows that, else the last; of a checkpoint its own.

    An adapter's folder or a model's. Any other path is returned as it is. Raises RunError for a run that has saved
    nothing.
    """
    if (path / "adapter_config.json").is_file():
        return path
    if (path / MANIFEST).is_file():
        return weights_folder(path)
    if checkpoints := list_checkpoints(path):
        newest = checkpoints[-1][1]
        return weights_folder(dict(checkpoints).get(best_step(newest) or 0, newest))
    if (path / "checkpoints").is_dir():
        raise RunError(f"{path} is a run without a checkpoint, so there is nothing in it to go on from")
    return path


def find_adapter(path: Path) -> Path:
    """`find_trained`, which must not be a whole model of full finetuning: RunError."""
    found = find_trained(path)
    if found != path and (found / "config.json").is_file():
        raise RunError(
            f"{path} trained all weights and has no adapter: go on from it with model.path={found}"
        )
    return found


def find_model(path: str) -> str:
    """The model that was trained in the run or checkpoint `path`; any other path as it is, whatever it means."""
    local = Path(path).expanduser()
    if not local.is_dir() or (local / "config.json").is_file():
        return path
    found = find_trained(local)
    return str(found) if (found / "config.json").is_file() else path


def remove_leftovers(run_folder: Path) -> None:
    """Delete what a crash left half-written or half-deleted."""
    for path in (run_folder / "checkpoints").glob(TEMPORARY + "*"):
        shutil.rmtree(path, ignore_errors=True)


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    adapter_writer: Callable[[Path], object],
    state: Mapping[str, Any],
    keep: int = 2,
    best: int | None = None,
) -> Path:
    """Write `folder`/checkpoints/step-NNNNNN and keep only the last `keep` checkpoints, and the best of each of them.

    folder: the run's folder.
    adapter_writer: is given an empty folder to write the adapter into, or a whole model.
    state: nested dicts and lists of tensors and plain values (tuples come back as lists).
    best: step of the best checkpoint so far, perhaps this one; None if nobody compares them.
    Raises RunError when it cannot be written; nothing that looks like a checkpoint is left then.
    """
    from safetensors import SafetensorError

    target = folder / "checkpoints" / f"step-{step:06d}"
    temporary = target.with_name(f"{TEMPORARY}{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write(temporary, step, adapter_writer, state, best)
        if target.exists():  # a folder cannot replace another one that has files
            _discard(target)
        temporary.rename(target)
        _fsync(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        steps = [str(number) for number, _ in list_checkpoints(folder)]
        kept = (
            f"The last complete checkpoint is that of step {steps[-1]}."
            if steps
            else "There is no other yet."
        )
        raise RunError(
            f"the checkpoint of step {step} could not be written to {target.parent}: {_reason(error)}. "
            f"{kept} Free some space or set run.dir to a folder that can be written to, then --resume auto"
        ) from error
    _prune(folder, target, keep)
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint folder. Raises RunError when a file is missing or shorter than it was written."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_complete(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        tensors = load_file(path / "state.safetensors")
        state = _unflatten(json.loads((path / "state.json").read_text("utf-8")), tensors)
        rng = json.loads((path / "rng.json").read_text("utf-8"))
        rng["torch"] = tensors["rng/torch"]
        rng["cuda"] = [tensors[f"rng/cuda/{i}"] for i in range(rng["cuda_devices"])]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RunError(f"{path} is damaged: {_reason(error)}.{_alternative(path)}") from error
    return Checkpoint(path=path, step=manifest["step"], state=state, rng=rng)


def _write(
    folder: Path,
    step: int,
    adapter_writer: Callable[[Path], object],
    state: Mapping[str, Any],
    best: int | None,
) -> None:
    from safetensors.torch import save_file

    (folder / "adapter").mkdir()
    adapter_writer(folder / "adapter")
    if (folder / "adapter" / "config.json").is_file():
        (folder / "adapter").rename(folder / "model")
    tensors: dict[str, Tensor] = {}
    plain = _flatten(state, "state", tensors)
    rng = _collect_rng(tensors)
    save_file(tensors, folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps(plain), "utf-8")
    (folder / "rng.json").write_text(json.dumps(rng), "utf-8")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    manifest = {"format": FORMAT, "step": step, "best": best, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
    for path in (folder, *folder.rglob("*")):
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(path: Path) -> None:
    """Renamed before it is deleted: an interrupted deletion leaves nothing that looks like a checkpoint."""
    doomed = path.with_name(f"{TEMPORARY}old-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """A kept checkpoint needs its best one: a run that goes on from it may end without finding a better one."""
    older = [path for _, path in list_checkpoints(folder) if path != newest]
    first = max(0, len(older) - (keep - 1))
    needed = {best_step(path) for path in (*older[first:], newest)}
    for path in older[:first]:
        if step_of(path) in needed:
            continue
        try:
            _discard(path)
        except OSError as error:  # the new checkpoint is safe, and that is what matters
            logger.warning("the old checkpoint %s could not be deleted: %s", path, _reason(error))


def _flatten(value: Any, name: str, tensors: dict[str, "Tensor"]) -> Any:
    """The JSON form of `value`; its tensors go to `tensors` as copies, because safetensors refuses views."""
    import torch

    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"__tensor__": name}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{name}: a checkpoint's keys are strings, got {list(value)[:3]}")
        return {key: _flatten(item, f"{name}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_flatten(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name}: a checkpoint holds tensors and plain values, not {type(value).__name__}")


def _unflatten(value: Any, tensors: Mapping[str, "Tensor"]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"__tensor__"}:
            return tensors[value["__tensor__"]]
        return {key: _unflatten(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_unflatten(item, tensors) for item in value]
    return value


def _collect_rng(tensors: dict[str, "Tensor"]) -> dict[str, Any]:
    """The plain part of the generators' states; torch's go to `tensors`."""
    import torch

    numpy_state: Any = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"].tolist()
    tensors["rng/torch"] = torch.get_rng_state()
    # A CUDA that nobody has used has no state yet, and asking for it would start a context.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    tensors.update({f"rng/cuda/{i}": generator for i, generator in enumerate(cuda)})
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "cuda_devices": len(cuda),
    }


def _check_complete(path: Path) -> None:
    if not (path / MANIFEST).is_file():
        raise RunError(f"{path} is not a complete checkpoint: {MANIFEST} is missing.{_alternative(path)}")
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        expected, version = manifest["files"], manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path / MANIFEST} cannot be read: {_reason(error)}.{_alternative(path)}") from error
    if version != FORMAT:
        raise RunError(f"{path} has checkpoint format {version}, this version of covey reads {FORMAT}")
    for name, size in expected.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise RunError(f"{path} is damaged: {name} {state}.{_alternative(path)}")


def _alternative(path: Path) -> str:
    """What else the user could resume from."""
    others = [other for _, other in list_checkpoints(path.parent.parent) if other != path]
    return f" Resume from another one: --resume {others[-1]}" if others else ""


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error)
