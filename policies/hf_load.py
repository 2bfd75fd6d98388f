"""From a checkpoint to an HFPolicy: transformers reads weights, bitsandbytes quantises them, PEFT adds the adapter."""

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covey.policies.hf import HFPolicy
from covey.policies.hf_save import quiet_transformers
from covey.policies.load import free_memory
from covey.policies.locate import ModelError
from covey.policies.memory import activation_bytes, dequantised_bytes, read_sizes

log = logging.getLogger(__name__)


class AdapterDropout(torch.nn.Dropout):
    """Active wherever there is a gradient, so also when a layer is computed again in the backward, and nowhere else."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.nn.functional.dropout(input, self.p, training=torch.is_grad_enabled())


def load_hf_policy(
    folder: Path,
    *,
    method: Literal["qlora", "lora", "full"],
    dtype: torch.dtype,
    device: torch.device,
    memory: Literal["auto", "fast", "lean"],
    rank: int,
    alpha: float,
    targets: str | list[str],
    dropout: float,
    dora: bool,
    rslora: bool,
    modules_to_save: Sequence[str],
    adapter: Path | None,
    reference: Literal["adapter", "base", "none"],
    tokens_per_pass: int,
    seed: int,
) -> HFPolicy:
    """An HFPolicy from a model folder. The parameters are those of `open_policy` (policies/open.py)."""
    model = _load_model(folder, method, dtype, device)
    if method == "qlora":
        _quantise_experts(model)
    model.requires_grad_(method == "full").eval()
    peft, saved = None, None
    if method != "full" and adapter is not None:
        peft, saved = _continue_adapter(model, adapter)
    elif method != "full":
        options = {"lora_dropout": dropout, "use_dora": dora, "use_rslora": rslora}
        options["modules_to_save"] = list(modules_to_save) or None
        peft = _new_adapter(model, rank, alpha, targets, options, seed)
    if peft is not None:
        _prepare_adapter(model, dtype)
    if _is_lean(memory, method, model.config, dtype, device, tokens_per_pass):
        _checkpoint_layers(model)
    parameters, aliases = _trained(model, peft)
    policy = HFPolicy(
        model,
        peft,
        parameters,
        aliases=aliases,
        folder=folder,
        frozen_copy=reference != "none" if peft is None else saved is not None and reference == "adapter",
        tokens_per_pass=tokens_per_pass,
    )
    if saved is not None:  # unrounded; PEFT has read them already, but would only warn of what it misses
        if missing := sorted(set(policy.weights()) - set(saved)):
            raise ModelError(f"{adapter}: the adapter has no {missing[0]}; was it trained on another model?")
        policy.load_weights({name: saved[name] for name in policy.weights()})
    return policy


def _load_model(folder: Path, method: str, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers

    stored = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    if stored and method != "qlora":
        raise ModelError(
            f"{folder}: this checkpoint is stored quantised ({stored.get('quant_method')}), which model.method "
            f"{method} cannot train; use qlora, or the 16-bit original"
        )
    options: dict[str, Any] = {}
    if method == "qlora" and not stored:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # the faster ones have no float64
    try:
        with quiet_transformers():
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                device_map={"": device},
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise ModelError(f"{folder}: transformers cannot load this model ({error})") from error
    model, read = loaded
    if missing := sorted(read["missing_keys"]):  # transformers would go on with random ones
        raise ModelError(f"{folder}: the checkpoint has no tensor {missing[0]}; is it complete?")
    return model


def _quantise_experts(model: Any) -> None:
    """Experts are matrices in one parameter, which transformers leaves in 16 bit."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    found = [
        (module, name)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if "experts" in path and parameter.ndim == 3 and parameter.is_floating_point()
    ]
    for module, name in found:
        replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")
    if found:
        log.info("%d matrices of experts are held in 4 bit, without an adapter", len(found))


def _new_adapter(
    model: Any, rank: int, alpha: float, targets: str | list[str], options: dict[str, Any], seed: int
) -> Any:
    import peft

    if options["modules_to_save"] and model.config.get_text_config().tie_word_embeddings:
        options["ensure_weight_tying"] = True  # else the head and the embedding would part
    if targets == "all-linear":
        options["exclude_modules"] = _not_plain(model) or None
    options |= {"r": rank, "lora_alpha": alpha, "target_modules": targets, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**options)
    try:
        with torch.random.fork_rng(), quiet_transformers():
            torch.manual_seed(seed)
            return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ModelError(f"lora: PEFT cannot make this adapter ({error})") from error


def _not_plain(model: Any) -> list[str]:
    """Names of linears that "all-linear" leaves out: routers that give more than a product, and in state-space layers
    the output, whose weight their kernels read past the adapter."""
    from bitsandbytes.nn import Linear4bit

    modules = dict(model.named_modules())
    names = {
        path.rsplit(".", 1)[-1]
        for path, module in modules.items()
        if isinstance(module, torch.nn.Linear) and type(module) not in (torch.nn.Linear, Linear4bit)
    }
    return sorted(names | ({"out_proj"} if any(path.endswith(".conv1d") for path in modules) else set()))


def _continue_adapter(model: Any, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """PEFT's wrapper with a saved adapter in it, and the adapter's tensors as they are in the file."""
    import peft
    from safetensors.torch import load_file

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).exists():
            raise ModelError(f"{folder}: no {name}; model.adapter wants a folder that PEFT or covey saved")
    try:
        wrapped = peft.PeftModel.from_pretrained(
            model, folder, is_trainable=True, autocast_adapter_dtype=False
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise ModelError(f"{folder}: this adapter does not fit the model ({error})") from error
    return wrapped, load_file(folder / "adapter_model.safetensors")


def _prepare_adapter(model: Any, dtype: torch.dtype) -> None:
    """What is trained gets the compute dtype, its layers the training mode that DoRA looks at, dropout its rule."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    model.eval()
    for layer in model.modules():
        drops = getattr(layer, "lora_dropout", {})  # of layers with an adapter
        dropping = {name: drop.p for name, drop in drops.items() if isinstance(drop, torch.nn.Dropout)}
        for name, p in dropping.items():
            drops[name] = AdapterDropout(p)
        if dropping:
            layer.train(True)


def _trained(model: Any, peft: Any) -> tuple[dict[str, torch.nn.Parameter], dict[str, str]]:
    """(what is trained, by its name in PEFT's or transformers' checkpoint; second names of tied weights in PEFT's)."""
    if peft is None:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}, {}
    from peft import get_peft_model_state_dict

    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in get_peft_model_state_dict(peft, save_embedding_layers=False).items():
        first = names.setdefault(tensor.data_ptr(), name)
        if first != name:
            aliases[name] = first
    return {names[p.data_ptr()]: p for p in model.parameters() if p.requires_grad}, aliases


def _is_lean(
    memory: str, method: str, config: Any, dtype: torch.dtype, device: torch.device, tokens: int
) -> bool:
    if memory == "auto":
        sizes, free = read_sizes(config), free_memory(device)
        kept = activation_bytes(sizes, tokens, dtype.itemsize, "transformers")
        if method == "qlora":
            kept += dequantised_bytes(sizes, "transformers", dtype.itemsize)
        memory = "fast" if kept < free / 2 else "lean"
        log.info(
            "memory: auto is %s (fast keeps %.2f GiB, free %.1f GiB)", memory, kept / 2**30, free / 2**30
        )
    return memory == "lean"


def _checkpoint_layers(model: Any) -> None:
    """Layers keep their inputs only. Only the layers themselves are set to training mode, not what is in them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.training = True
    if not layers:
        log.warning(
            "%s has no layers that can be computed again: model.memory lean is fast here",
            type(model).__name__,
        )
