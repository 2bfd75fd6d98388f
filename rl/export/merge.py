"""A base model and its adapter as one set of weights.

W' = W + s B A in float32 with s = alpha / r, or alpha / sqrt(r) for rsLoRA. With DoRA every row of that gets the length
that the adapter says: W'' = m W' / |W'|. What an adapter holds whole (modules_to_save, biases) takes the base's place.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from covey.policies.spec import read_spec
from covey.policies.weight import NF4Weight
from covey.rl.export.source import ADAPTER_FILES, ExportError, Source, read_json
from covey.rl.export.tensors import Tensors

PREFIX = "base_model.model."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LORA = {
    "lora_A.weight": "A",
    "lora_embedding_A": "A",
    "lora_B.weight": "B",
    "lora_embedding_B": "B",
    "lora_magnitude_vector": "m",
}
LORA_PART = re.compile(rf"(.+)\.({'|'.join(map(re.escape, LORA))})")
# Settings of PEFT that change what an adapter computes beyond what is said above.
UNKNOWN = (
    "use_qalora", "lora_bias", "fan_in_fan_out", "target_parameters", "trainable_token_indices", "layer_replication",
    "alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "megatron_config",
    "ensure_weight_tying",
)  # fmt: skip
OWN_BASE = ("pissa", "olora", "corda", "loftq")  # initialisations that train beside a changed base


class Merged:
    """The merged weights by checkpoint name; `names` lists them in the base's order.

    untied: the base has one matrix for its embedding and its head, and the adapter has another for one of the two, so
    that both are there.
    """

    def __init__(self, source: Source, base: Tensors, *, tied: bool, nf4: torch.dtype | None = None):
        """tied: whether the head of the base is its embedding, as its configuration says.
        nf4: take the base as a run has it that computes in this dtype: rounded to it, the linears in 4 bits.

        Raises ExportError for an adapter that does not fit the base.
        """
        self._base, self._nf4 = base, nf4
        self._quantised = set() if nf4 is None else _linears(source.base)
        self._adapter = None if source.adapter is None else AdapterWeights(source.adapter)
        touched = self._adapter.touched if self._adapter else set()
        self.untied = tied and not touched.isdisjoint({EMBEDDING, HEAD})
        self._stored = {HEAD: EMBEDDING} if tied else {}  # a tied head is not read, even where it is stored
        self.names = [name for name in base.names if name not in self._stored] + [HEAD] * self.untied
        if self._adapter is not None:
            self._adapter.check_fit({name: self.shape(name) for name in self.names}, source.base)

    @property
    def dtype(self) -> torch.dtype:
        """That of the base's largest weight as it is stored."""
        return self._base.dtype(max(self._base.names, key=lambda name: math.prod(self._base.shape(name))))

    def check_mergeable(self) -> None:
        """Refuses adapters that compute something else than is written above."""
        if self._adapter is not None:
            self._adapter.check_kind()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(self._stored.get(name, name))

    def read(self, name: str) -> Tensor:
        """One tensor in float32, on the CPU."""
        weight = self._base.read(self._stored.get(name, name))
        if self._nf4 is not None:
            weight = weight.to(self._nf4)
            weight = NF4Weight(weight, self._nf4).dense() if name in self._quantised else weight
        weight = weight.float()
        return weight if self._adapter is None else self._adapter.apply(name, weight)


class AdapterWeights:
    """A PEFT LoRA adapter; `touched` are the checkpoint names of what it changes."""

    def __init__(self, folder: Path):
        self._file, self._config_file = folder / ADAPTER_FILES[1], folder / ADAPTER_FILES[0]
        self._config = read_json(self._config_file)
        self._tensors = Tensors.of_adapter(folder)
        self._lora: dict[str, dict[str, str]] = {}  # by weight: part of LoRA -> key
        self._whole: dict[str, str] = {}
        for key in self._tensors.names:
            path = key.removeprefix(PREFIX)
            if match := LORA_PART.fullmatch(path):
                self._lora.setdefault(f"{match[1]}.weight", {})[LORA[match[2]]] = key
            else:
                self._whole[path.replace(".base_layer.", ".")] = key
        for parts in self._lora.values():
            if not {"A", "B"} <= parts.keys():
                raise ExportError(
                    f"{self._file} has {next(iter(parts.values()))}, but not the other half of it"
                )

    @property
    def touched(self) -> set[str]:
        return {*self._lora, *self._whole}

    def check_fit(self, shapes: Mapping[str, tuple[int, ...]], base: Path) -> None:
        """Refuses an adapter that is not made for a base with tensors of these shapes."""
        for name in sorted(self.touched):
            key = self._whole.get(name) or self._lora[name]["A"]
            if name not in shapes:
                raise ExportError(
                    f"{self._file} has {key}, but {base} has no {name}: it belongs to another base model, which --base "
                    "can name"
                )
            if (found := self._shape(name)) != shapes[name]:
                raise ExportError(
                    f"{self._file}: {key} is for a weight of {found}, and {name} of {base} has {shapes[name]}: it "
                    "belongs to another base model, which --base can name"
                )

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of the weight that the adapter's parts for `name` are made for."""
        if name in self._whole:
            return self._tensors.shape(self._whole[name])
        a, b = (self._tensors.shape(self._lora[name][part]) for part in "AB")
        return (a[1], b[0]) if "lora_embedding" in self._lora[name]["A"] else (b[0], *a[1:])

    def check_kind(self) -> None:
        config, file = self._config, self._config_file
        start = str(config.get("init_lora_weights", "")).lower()
        if config.get("peft_type") != "LORA":
            raise ExportError(
                f"{file}: peft_type is {config.get('peft_type')!r}; only LORA adapters can be merged"
            )
        if odd := next((key for key in UNKNOWN if config.get(key)), None):
            raise ExportError(
                f"{file}: {odd} is set, which cannot be merged here; PEFT's merge_and_unload may know how"
            )
        if start.startswith(OWN_BASE):
            raise ExportError(
                f"{file}: init_lora_weights is {start!r}, so the adapter belongs to a changed base; convert it first, "
                "with the option path_initial_model_for_weight_conversion of PEFT's save_pretrained"
            )

    def apply(self, name: str, weight: Tensor) -> Tensor:
        """The base's float32 weight with what the adapter makes of it."""
        if name in self._whole:
            weight = self._read(self._whole[name])
        if name not in self._lora:
            return weight
        parts = self._lora[name]
        a, b = (self._read(parts[part]) for part in "AB")
        delta = self._scale(name.removesuffix(".weight"), a.shape[0]) * (b @ a)
        weight = weight + (delta.T if "lora_embedding" in parts["A"] else delta)
        if "m" in parts:
            weight = weight * (self._read(parts["m"]) / weight.norm(dim=1))[:, None]
        return weight

    def _read(self, key: str) -> Tensor:
        return self._tensors.read(key).float()

    def _scale(self, module: str, rank: int) -> float:
        patterns = self._config.get("alpha_pattern") or {}
        key = next((p for p in patterns if re.fullmatch(rf"(.*\.)?({p})", module)), None)
        alpha = self._config["lora_alpha"] if key is None else patterns[key]
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


def _linears(base: Path) -> set[str]:
    """Names of the weights that a run of method qlora holds in NF4."""
    spec = read_spec(base)
    return {f"model.layers.{i}.{name}.weight" for i in range(spec.num_layers) for name in spec.linears}
