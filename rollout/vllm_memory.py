"""How much of a GPU vLLM takes beside a trainer: what the rows of a run need, within its share of what is free.

By itself vLLM fills its share with keys and values. On a large GPU that is a hundred times what a small model's rows
can use, and would have to be given back before training and be taken again at every step.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from covey.policies.memory import Sizes

SHARE = 0.8  # of the memory that is free
SETTINGS = {"gpu_memory_utilization", "kv_cache_memory_bytes"}  # arguments of vLLM that say how much it takes
BLOCK = 128  # tokens: keys and values are stored in whole blocks, of 16 to 128
BATCHED = 16384  # tokens of a pass on a large GPU, at most
BASICS = 1 << 30  # CUDA graphs, workspaces, what lies beside torch's allocator
WEIGHT = {"bitsandbytes": 0.5 + 4 / 64, "fp8": 1.0}  # bytes of a quantised weight, with its share of a scale
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes. cache: keys and values, of all rows at their longest. work: of a pass, and what is always there; rough."""

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work


def needed(arguments: Mapping[str, Any], sizes: Sizes, token_bytes: int) -> Need:
    """Of an engine with these arguments. token_bytes: keys and values of one token, in all layers."""
    rows, itemsize = arguments["max_num_seqs"], getattr(torch, arguments["dtype"]).itemsize
    quantised, kind = sizes.linears + sizes.experts, arguments.get("quantization")
    weights = quantised * (WEIGHT[kind] if kind else itemsize)
    weights += (sizes.total - quantised + arguments.get("max_lora_rank", 0) * sizes.per_rank) * itemsize
    blocks = rows * -(-arguments["max_model_len"] // BLOCK) + 1  # vLLM keeps one for itself
    batched = arguments.get("max_num_batched_tokens", BATCHED)
    work = batched * (4 * sizes.hidden + 3 * sizes.inner) * itemsize + 3 * rows * sizes.vocab * 4 + BASICS
    return Need(int(weights), blocks * BLOCK * token_bytes, work)


def memory_arguments(need: Need | None, most: float, whole: int) -> dict[str, Any]:
    """Arguments for vLLM's engine: memory for what is needed if that is within `most` bytes, else for all of these.

    need: None if it is not known, or is not to matter. whole: bytes of the GPU.
    """
    if need is None:
        return {"gpu_memory_utilization": most / whole}
    parts = (need.total, need.weights, need.cache, need.work, most)
    total, weights, cache, work, share = (f"{part / 2**30:.1f}" for part in parts)
    detail = f"{weights} of weights, {cache} of keys and values, {work} to work in"
    if need.total > most:
        log.info("vLLM takes its share of the GPU, %s GiB; all rows need %s GiB (%s)", share, total, detail)
        return {"gpu_memory_utilization": most / whole}
    log.info("vLLM takes %s GiB (%s); its share of the GPU would be %s GiB", total, detail, share)
    # vLLM checks the first when it starts, and makes keys and values as large as the second says.
    return {"gpu_memory_utilization": need.total / whole, "kv_cache_memory_bytes": need.cache}
