"""`covey.export`: a run as an adapter, as merged weights or as a GGUF file, with all that is needed to use it."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from covey.policies.spec import WITH_IMAGES
from covey.policies.tokenizer import check_vocabulary, load_tokenizer
from covey.rl.checkpoint import RunError
from covey.rl.distributed import by_first
from covey.rl.export.compare import compare
from covey.rl.export.forms import write_adapter, write_gguf_folder, write_merged
from covey.rl.export.gguf_file import check_quant
from covey.rl.export.hub import check_repo, upload
from covey.rl.export.merge import Merged
from covey.rl.export.source import ExportError, Source, find_source, read_json
from covey.rl.export.tensors import Tensors
from covey.rl.model_card import licence_of, model_card

log = logging.getLogger(__name__)

Form = Literal["adapter", "merged", "gguf"]
FORMS = ("adapter", "merged", "gguf")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ORIGINAL, DEQUANTISED = "original", "dequantised"


@by_first
def export(
    source: str | Path,
    to: Form = "merged",
    *,
    out: str | Path | None = None,
    base: str | None = None,
    dtype: str | None = None,
    shard_gb: float = 4.0,
    quant: str | None = None,
    check: bool = False,
    push: str | None = None,
    public: bool = False,
    say: Callable[[str], object] = log.info,
) -> Path:
    """Write a run, a checkpoint or an adapter for others to load; returns the folder.

    source: a run's folder or name, a checkpoint, a PEFT adapter, or a model (which then goes out as it is).
    to: "adapter" (PEFT), "merged" (safetensors for transformers, vLLM and others), or "gguf" (llama.cpp, Ollama).
    out: the new folder; default: export/TO in the run's folder, or ADAPTER-TO beside an adapter.
    base: where else the base model is, or which of its weights the adapter is merged with: "dequantised", those that a
        run of method qlora has, which gives a model that computes what was trained (the default of such a run), or
        "original", those before they were quantised (the default otherwise).
    dtype: of merged weights: float32, bfloat16, float16; default: the base's, or bfloat16 where that has 32 bits.
    shard_gb: the most that a file of merged weights holds, in 10^9 bytes. Peak memory is about one such file.
    quant: of a GGUF file: q8_0 (the default), f32, f16, bf16, q5_1, q5_0, q4_1, q4_0; with llama.cpp q4_k_m and kin.
    check: load merged weights again and say how far their log-probs are from the run's policy; needs memory for both.
    push: a repository on the hub to upload to, which is private unless `public`.
    say: gets a sentence for everything that is worth knowing.
    Raises ExportError or ModelError (both ValueErrors) for what the caller can mend, RunError (a RuntimeError) when the
    disk or the hub fails. The folder has its name only when it is complete.

    >>> covey.export(run.folder, "gguf", quant="q4_k_m")
    """
    _check_options(to, dtype, quant, shard_gb, check, push, public)
    found = find_source(source, None if base in (ORIGINAL, DEQUANTISED) else base)
    target = Path(out).expanduser() if out else _default_target(found, to)
    _check_target(found, to, target, push)
    if push is not None:
        check_repo(push)
    tokenizer = load_tokenizer(found.base, found.chat_template)
    config = _config(found.base)
    check_vocabulary(tokenizer, config.vocab_size)
    if to != "adapter" and read_json(found.base / "config.json").get("model_type") in WITH_IMAGES:
        raise ExportError(
            f"{found.base} reads images too; merging into such models is not supported yet: export the adapter, which "
            "PEFT puts beside the whole model"
        )
    tensors = Tensors.of_model(found.base)
    as_trained = base == DEQUANTISED or (base is None and found.method == "qlora")
    dequantise = as_trained and to != "adapter" and not tensors.in_4_bits
    nf4 = _dtype_of_run(found) if dequantise else None
    merged = Merged(found, tensors, tied=config.tie_word_embeddings, nf4=nf4)
    licence = licence_of(found.base, found.base_name if found.on_hub else None)

    file = f"{found.name}-{(quant or 'q8_0').upper()}.gguf"
    with _new_folder(target) as folder:
        if to == "adapter":
            notes = write_adapter(folder, found, tokenizer)
        else:
            merged.check_mergeable()
            notes = _note_base(found, tensors.in_4_bits, dequantise)
        if to == "merged":
            size = {"dtype": DTYPES.get(dtype or ""), "shard_bytes": int(shard_gb * 1e9)}
            notes += write_merged(folder, found, merged, tokenizer, **size, say=say)
            if check:
                notes.append(compare(folder, found, tokenizer))
        elif to == "gguf":
            terms = {"quant": quant or "q8_0", "licence": licence.get("license")}
            notes += write_gguf_folder(folder, file, found, merged, config, tokenizer, **terms)
        card = model_card(
            found.name,
            form=to,
            use=_use(to, push or target.name, found.name, file),
            notes=notes,
            base=found.base_name,
            on_hub=found.on_hub,
            with_adapter=found.adapter is not None,
            licence=licence,
            config=found.config,
            run=found.run,
            step=found.step,
        )
        (folder / "README.md").write_text(card, "utf-8")
    for note in notes:
        say(note)
    say(f"{to:<8} {target}")
    if push is not None:
        say(f"pushed   {upload(target, push, public=public, message=f'{found.name} ({to})')}")
    return target


def _check_options(
    to: str,
    dtype: str | None,
    quant: str | None,
    shard_gb: float,
    check: bool,
    push: str | None,
    public: bool,
) -> None:
    if to not in FORMS:
        raise ExportError(f'to: "{to}" is not one of {", ".join(FORMS)}')
    if dtype is not None and to != "merged":
        raise ExportError(f"dtype is for merged weights, not for {to}")
    if dtype is not None and dtype not in DTYPES:
        raise ExportError(f'dtype: "{dtype}" is not one of {", ".join(DTYPES)}')
    if check and to != "merged":
        raise ExportError(f"check is for merged weights, not for {to}")
    if quant is not None and to != "gguf":
        raise ExportError(f"quant is for gguf, not for {to}")
    if public and push is None:
        raise ExportError("public is for what is pushed: name the repository with push")
    if not shard_gb > 0:
        raise ExportError(f"shard_gb: {shard_gb:g} must be above 0")
    if to == "gguf":
        check_quant(quant or "q8_0")


def _default_target(source: Source, to: str) -> Path:
    if source.run is not None:
        return source.run / "export" / to
    return source.adapter.with_name(f"{source.name}-{to}") if source.adapter else Path(f"{source.name}-{to}")


def _check_target(source: Source, to: str, target: Path, push: str | None) -> None:
    if to == "adapter" and source.adapter is None:
        raise ExportError(
            f"{source.base} is a whole model, without an adapter; it can be exported as merged or gguf"
        )
    if target.exists():
        raise ExportError(f"{target} exists already; remove it, or choose another folder with --out")
    if to == "adapter" and push is not None and not source.on_hub:
        raise ExportError(
            f'an adapter on the hub names its base model, and "{source.base_name}" is known on this machine alone; say '
            "which model of the hub it is with --base"
        )


def _dtype_of_run(source: Source) -> torch.dtype:
    """What a run computed in; without a run float32."""
    if source.method not in ("qlora", None):
        raise ExportError(f"the run's method was {source.method}, not qlora: there is nothing to dequantise")
    dtype = source.config.get("model", {}).get("dtype")
    if dtype in DTYPES:
        return DTYPES[dtype]
    environment = source.run / "environment.json" if source.run else None
    if environment is None or not environment.is_file():
        return torch.float32
    return torch.float32 if read_json(environment).get("device") == "CPU" else torch.bfloat16


def _config(base: Path) -> Any:
    """transformers' configuration of the language model."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(base).get_text_config()
    except (ValueError, OSError, KeyError) as error:
        raise ExportError(f"{base / 'config.json'} is none that transformers knows ({error})") from error


def _note_base(source: Source, in_4_bits: bool, dequantised: bool) -> list[str]:
    if dequantised:
        return [
            "The base's weights were quantised to NF4 and dequantised again before the merge, as the run had them: this"
            " model computes what was trained."
        ]
    if in_4_bits:
        return ["Merged with the dequantised 4-bit weights of the base; there were no 16-bit ones."]
    if source.method == "qlora":
        return [
            "The run trained on the base in 4 bits (NF4), and the adapter is merged with the original weights here, so"
            " the logits are not those of the run; an export without `--base` has exactly those."
        ]
    return []


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """An empty folder that becomes `target` when the block ends; if it ends in an error, nothing is left."""
    unfinished = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".unfinished", dir=target.parent)
        unfinished = Path(made)
        yield unfinished
        for path in (unfinished, *unfinished.rglob("*")):
            path.chmod(
                0o755 if path.is_dir() else 0o644
            )  # what was made as a temporary file is for its owner alone
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        raise RunError(
            f"the export to {target} failed ({reason}), and nothing of it is left; free some space, or choose another "
            "folder with --out"
        ) from error
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)


def _use(to: str, place: str, name: str, file: str) -> str:
    """How the exported files are used, in Markdown."""
    if to == "gguf":
        return _code("sh", f"ollama create {name} -f Modelfile && ollama run {name}", f"llama-cli -m {file}")
    model, imports = "AutoModelForCausalLM", ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if to == "adapter":
        model = "AutoPeftModelForCausalLM"
        imports = [f"from peft import {model}", "from transformers import AutoTokenizer"]
    loaded = (("model", model), ("tokenizer", "AutoTokenizer"))
    code = _code(
        "python", *imports, "", *(f'{what} = {kind}.from_pretrained("{place}")' for what, kind in loaded)
    )
    return code if to == "adapter" else f"{code}\n\n{_code('sh', f'vllm serve {place}')}"


def _code(language: str, *lines: str) -> str:
    return "\n".join((f"```{language}", *lines, "```"))
