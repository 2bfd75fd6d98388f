"""LoRA parameters in one flat buffer, and PEFT's file format for them.

All A [r, K] and B [N, r] of all layers are views into `flat` (float32, the master copy that the optimiser
updates) and its gradient `flat.grad`. GEMMs read a copy in the compute dtype, refreshed before each use. The A of
linears that share an input lie below each other, so that they are one matrix.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.kernels.lora_linear import LoraGroup, LoraPart
from covey.policies.linear import GROUPS
from covey.policies.locate import ModelError
from covey.policies.spec import ModelSpec, OutsideDecoder

PREFIX = "base_model.model."
# Keys of adapter_config.json with the one value, besides null and empty, that the decoder can continue.
CONTINUED = {
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": None,
    "alpha_pattern": None,
    "layers_to_transform": None,
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
}


class Adapter:
    """One LoRA adapter over the chosen linears of every layer."""

    def __init__(
        self,
        spec: ModelSpec,
        rank: int,
        alpha: float,
        targets: str | list[str],
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        rslora: bool = False,
    ):
        """The product B A is scaled by alpha / rank, with rslora by alpha / sqrt(rank) (Kalajdzievski 2023)."""
        self._spec = spec
        self.rank, self.alpha, self.rslora = rank, alpha, rslora
        self.scale = alpha / (math.sqrt(rank) if rslora else rank)
        self.targets = resolve_targets(spec, targets)
        self._places = _places(spec, self.targets, rank)
        size = sum(rows * columns for _, rows, columns in self._places.values())
        master = torch.float64 if compute_dtype == torch.float64 else torch.float32
        self.flat = torch.zeros(size, dtype=master, device=device, requires_grad=True)
        self._grad = torch.zeros_like(self.flat, requires_grad=False)
        self.flat.grad = self._grad
        self._shadow = (
            self.flat.detach()
            if compute_dtype == master
            else torch.empty_like(self.flat, dtype=compute_dtype)
        )
        self._reference: Tensor | None = None
        self._initialise(seed)
        self.groups = self._groups(self._shadow, self._grad)
        self.reference_groups: dict[str, LoraGroup] = {}

    def _initialise(self, seed: int) -> None:
        """A uniform in +-1/sqrt(K) (PEFT's Kaiming default), B zero, so that training starts at the base model."""
        generator = torch.Generator().manual_seed(seed)
        for name, view in self.weights().items():
            if name.endswith("lora_A.weight"):
                bound = 1 / math.sqrt(view.shape[1])
                view.copy_(torch.empty(view.shape).uniform_(-bound, bound, generator=generator))

    def refresh(self) -> None:
        """Bring the compute-dtype copy up to date with the master, and attach the gradient buffer again."""
        if self.flat.grad is None:  # as after a torch optimiser's zero_grad(), which drops it
            self._grad.zero_()
            self.flat.grad = self._grad
        if self._shadow.dtype != self.flat.dtype:
            self._shadow.copy_(self.flat.detach())

    def zero_grad(self) -> None:
        self._grad.zero_()
        self.flat.grad = self._grad

    def freeze_reference(self) -> None:
        """Take the adapter as it is now for the reference policy. Without this the reference is the base model."""
        self.refresh()
        self._reference = self._shadow.clone()
        self.reference_groups = self._groups(self._reference, None)

    def weights(self) -> dict[str, Tensor]:
        """Master weights by PEFT's names, as views."""
        flat = self.flat.detach()
        return {name: _matrix(flat, place) for name, place in self._places.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights with PEFT's names in. Raises ModelError if they are those of another model or other targets."""
        mine = self.weights()
        if set(weights) != set(mine):
            odd = sorted(set(weights) ^ set(mine))[0]
            side = "only in the adapter" if odd in weights else "missing from it"
            raise ModelError(
                f"the adapter does not fit: {odd} is {side} (targets: {', '.join(self.targets)})"
            )
        for name, tensor in weights.items():
            if tensor.shape != mine[name].shape:
                raise ModelError(
                    f"the adapter does not fit: {name} is {tuple(tensor.shape)}, expected {tuple(mine[name].shape)}"
                )
            mine[name].copy_(tensor)

    def _groups(self, values: Tensor, grads: Tensor | None) -> dict[str, LoraGroup]:
        """By layer and group, for example layers.3.qkv; groups without a target are left out."""
        spec, groups = self._spec, {}
        for layer in range(spec.num_layers):
            for name, linears in GROUPS.items():
                names, sizes = [n for n in spec.linears if n.rsplit(".", 1)[1] in linears], []
                parts, stacked = [], []
                for linear in names:
                    start = sum(sizes)
                    sizes.append(spec.linears[linear][0])
                    if linear.rsplit(".", 1)[1] not in self.targets:
                        continue
                    a, b = (self._places[_name(spec, layer, linear, part)] for part in ("lora_A", "lora_B"))
                    ranks = slice(len(parts) * self.rank, (len(parts) + 1) * self.rank)
                    outputs = slice(start, start + sizes[-1])
                    parts.append(LoraPart(outputs, ranks, _matrix(values, b), _matrix(grads, b)))
                    stacked.append(a)
                if parts:
                    (at, _, k), rows = stacked[0], len(stacked) * self.rank
                    a = (at, rows, k)
                    groups[f"layers.{layer}.{name}"] = LoraGroup(
                        _matrix(values, a), _matrix(grads, a), tuple(parts)
                    )
        return groups

    def _peft_targets(self) -> list[str] | str:
        """The linears as PEFT finds them: by their names, or where an image encoder has the same ones by a pattern."""
        prefix = self._spec.prefix
        if prefix == "model.":
            return list(self.targets)
        return rf"{re.escape(prefix)}layers\.\d+\.\w+\.({'|'.join(self.targets)})"

    def save(self, folder: Path, base: str) -> None:
        """Write adapter_model.safetensors and adapter_config.json; `base` names the model it belongs to."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: view.to("cpu", torch.float32).contiguous() for name, view in self.weights().items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": self._peft_targets(),
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_lora_options(*, dropout: float, dora: bool, modules_to_save: Sequence[str]) -> None:
    """Raises OutsideDecoder for options of LoRA that the decoder does not have."""
    if dropout:
        raise OutsideDecoder(
            f"lora.dropout: {dropout:g} is not in covey's decoder, whose sampler and trainer are one function; set it "
            "to 0, or train with HFPolicy"
        )
    if dora:
        raise OutsideDecoder("lora.dora: covey's decoder has no DoRA; leave it out, or train with HFPolicy")
    if modules_to_save:
        raise OutsideDecoder(
            f"lora.modules_to_save: {', '.join(modules_to_save)} stay frozen in covey's decoder; leave it out, or "
            "train with HFPolicy"
        )


def resolve_targets(spec: ModelSpec, targets: str | list[str]) -> tuple[str, ...]:
    """Names of the linears to adapt, such as q_proj; "all-linear" is all of a layer's."""
    known = [name.rsplit(".", 1)[1] for name in spec.linears]
    if targets == "all-linear":
        return tuple(known)
    wanted = [targets] if isinstance(targets, str) else targets
    if not wanted:
        raise ModelError(f'lora.targets: the list is empty; write "all-linear" or some of {", ".join(known)}')
    for name in wanted:
        if name not in known:
            raise ModelError(f'this model has no linear "{name}"; it has {", ".join(known)} (lora.targets)')
    return tuple(name for name in known if name in wanted)


Place = tuple[int, int, int]  # offset in the flat buffer, rows, columns


def _name(spec: ModelSpec, layer: int, linear: str, part: str) -> str:
    return f"{PREFIX}{spec.prefix}layers.{layer}.{linear}.{part}.weight"


def _matrix(flat: Any, place: Place) -> Any:
    """The matrix at `place` of a flat buffer as a view; None of None."""
    at, rows, columns = place
    return None if flat is None else flat[at : at + rows * columns].view(rows, columns)


def _places(spec: ModelSpec, targets: tuple[str, ...], rank: int) -> dict[str, Place]:
    """Where every A and B lies, by PEFT's name: of each group first all A, then all B."""
    places, at = {}, 0
    for layer in range(spec.num_layers):
        for linears in GROUPS.values():
            names = [n for n in spec.linears if n.rsplit(".", 1)[1] in linears]
            names = [n for n in names if n.rsplit(".", 1)[1] in targets]
            for part in ("lora_A", "lora_B"):
                for linear in names:
                    n, k, _ = spec.linears[linear]
                    rows, columns = (rank, k) if part == "lora_A" else (n, rank)
                    places[_name(spec, layer, linear, part)] = (at, rows, columns)
                    at += rows * columns
    return places


def read_adapter(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """(adapter_config.json, tensors by PEFT's name) of a folder that PEFT or covey saved.

    Raises OutsideDecoder for what can be continued, but not by the decoder, ModelError for what is wrong with it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).exists():
            raise ModelError(f"{folder}: no {name}; model.adapter wants a folder that PEFT or covey saved")
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "adapter_model.safetensors")
    except (ValueError, SafetensorError) as error:
        raise ModelError(f"{folder}: the adapter cannot be read ({error}); save or copy it again") from error
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{folder}: a {config.get('peft_type')} adapter; covey continues LoRA adapters")
    for key, plain in CONTINUED.items():
        if config.get(key) not in (None, plain, [], {}):
            raise OutsideDecoder(
                f"{folder}: the adapter has {key} = {config[key]!r}, which covey's decoder does not continue"
            )
    for name in weights:
        linear, part = ["", "", *name.split(".")][-3:-1]
        if part not in ("lora_A", "lora_B") or linear in ("lm_head", "embed_tokens"):
            raise OutsideDecoder(
                f"{folder}: the adapter holds {name}, which is no LoRA matrix of a layer's linear; covey's decoder "
                "trains nothing else"
            )
    return config, weights


def adapted_linears(weights: Mapping[str, Tensor]) -> list[str]:
    """Names of the linears that an adapter's tensors belong to: a configuration may say it with a pattern."""
    return sorted({name.split(".")[-3] for name in weights})
