"""LoRA parameters in one flat buffer, and PEFT's file format for them.

All A [r, K] and B [N, r] of all layers are views into `flat` (float32, the master copy that the optimiser
updates) and its gradient `flat.grad`. GEMMs read a copy in the compute dtype, refreshed before each use.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from covey.policies.locate import ModelError
from covey.policies.spec import ModelSpec

PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The adapter of one linear: y += scale * x A^T B^T. Views, so they follow the buffers they lie in."""

    a: Tensor  # [r, K]
    b: Tensor  # [N, r]
    grad_a: Tensor | None
    grad_b: Tensor | None


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
    ):
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
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
        self.pairs = self._pairs(self._shadow, self._grad)
        self.reference_pairs: dict[str, LoraPair] = {}

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
        self.reference_pairs = self._pairs(self._reference, None)

    def weights(self) -> dict[str, Tensor]:
        """Master weights by PEFT's names, as views."""
        flat = self.flat.detach()
        return {name: flat[at : at + n * k].view(n, k) for name, (at, n, k) in self._places.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights with PEFT's names in."""
        mine = self.weights()
        if set(weights) != set(mine):
            odd = sorted(set(weights) ^ set(mine))[0]
            raise ModelError(
                f"the adapter does not fit: {odd} is on one side only (targets: {', '.join(self.targets)})"
            )
        for name, tensor in weights.items():
            if tensor.shape != mine[name].shape:
                raise ModelError(
                    f"the adapter does not fit: {name} is {tuple(tensor.shape)}, expected {tuple(mine[name].shape)}"
                )
            mine[name].copy_(tensor)

    def _pairs(self, values: Tensor, grads: Tensor | None) -> dict[str, LoraPair]:
        def view(source: Tensor | None, name: str) -> Tensor | None:
            at, n, k = self._places[name]
            return None if source is None else source[at : at + n * k].view(n, k)

        pairs = {}
        for name in self._places:
            if name.endswith("lora_A.weight"):
                a, b = name, name.replace("lora_A", "lora_B")
                linear = name.removeprefix(PREFIX + "model.").removesuffix(".lora_A.weight")
                pairs[linear] = LoraPair(view(values, a), view(values, b), view(grads, a), view(grads, b))  # type: ignore[arg-type]
        return pairs

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
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(self.targets),
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def resolve_targets(spec: ModelSpec, targets: str | list[str]) -> tuple[str, ...]:
    """Names of the linears to adapt, such as q_proj; "all-linear" is all seven."""
    known = [name.rsplit(".", 1)[1] for name in spec.linears]
    if targets == "all-linear":
        return tuple(known)
    wanted = [targets] if isinstance(targets, str) else targets
    for name in wanted:
        if name not in known:
            raise ModelError(f'lora.targets: this model has no linear "{name}"; it has {", ".join(known)}')
    return tuple(name for name in known if name in wanted)


def _places(spec: ModelSpec, targets: tuple[str, ...], rank: int) -> dict[str, tuple[int, int, int]]:
    """Offset and shape of every A and B in the flat buffer, by PEFT's name."""
    places, at = {}, 0
    for layer in range(spec.num_layers):
        for linear, (n, k, _) in spec.linears.items():
            if linear.rsplit(".", 1)[1] not in targets:
                continue
            for part, rows, columns in (("lora_A", rank, k), ("lora_B", n, rank)):
                places[f"{PREFIX}model.layers.{layer}.{linear}.{part}.weight"] = (at, rows, columns)
                at += rows * columns
    return places


def read_adapter(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """(adapter_config.json, tensors by PEFT's name) of an adapter folder; refuses what cannot be continued."""
    from safetensors.torch import load_file

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).exists():
            raise ModelError(f"{folder}: no {name}; model.adapter wants a folder that PEFT or covey saved")
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    plain = {
        "peft_type": "LORA",
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
    }
    for key, value in plain.items():
        if config.get(key, value) != value:
            raise ModelError(f"{folder}: adapters with {key} = {config[key]!r} cannot be continued yet")
    return config, load_file(folder / "adapter_model.safetensors")
