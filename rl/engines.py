"""Which sampler a run gets: the one of the house, vLLM in this process, or vLLM servers."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.policies.decoder import DecoderPolicy
from covey.policies.hf import HFPolicy
from covey.policies.memory import MOMENTS
from covey.policies.tokenizer import decode_completion
from covey.rl.config import DpoConfig, GrpoConfig, SftConfig
from covey.rl.distributed import from_first, world_size
from covey.rollout.engine import RolloutEngine
from covey.rollout.kv_pool import place_bytes
from covey.rollout.local import local_engine
from covey.rollout.vllm_http import Server
from covey.rollout.vllm_local import open_vllm
from covey.rollout.vllm_memory import SETTINGS
from covey.rollout.vllm_server import VllmServers
from covey.rollout.vllm_versions import Serving, VllmError, check_installed


def check_engine(config: GrpoConfig) -> None:
    """VllmError for an engine of which can be said before anything is loaded that it will not start."""
    if config.rollout.engine == "vllm":
        if world_size() > 1:
            raise VllmError(
                "rollout.engine: vllm samples for one training process; use inprocess, or vllm-server"
            )
        check_installed()
    _servers(config)


def _servers(config: GrpoConfig) -> list[Server]:
    return [Server(url, timeout=config.rollout.vllm.timeout) for url in config.rollout.vllm.urls]


def make_engine(
    config: GrpoConfig | SftConfig | DpoConfig,
    policy: DecoderPolicy | HFPolicy,
    folder: Path,
    tokenizer: Any,
    eos_ids: Sequence[int],
    max_rows: int,
    max_positions: int,
) -> RolloutEngine:
    """The engine that the configuration names, with the policy's weights; SFT and DPO sample with that of the house.

    folder: the base model. eos_ids: any of them ends a completion. max_rows: completions at a time.
    max_positions: of the model.
    """

    def decode(ids: Sequence[int]) -> str:
        return decode_completion(tokenizer, ids, eos_ids)

    if not isinstance(config, GrpoConfig) or config.rollout.engine == "inprocess":
        return local_engine(policy, decode, eos_ids, max_rows=max_rows)
    section, adapter = config.rollout.vllm, _adapter_config(config, policy)
    dtype = str(policy.dtype).removeprefix("torch.")
    needs = serving(config, folder, dtype, None if adapter is None else adapter["r"], max_positions)
    engine: RolloutEngine
    if config.rollout.engine == "vllm":
        trained = sum(parameter.numel() for parameter in policy.parameters())
        engine = open_vllm(
            needs,
            decode,
            eos_ids,
            adapter=adapter,
            device=policy.device,
            share=section.memory,
            reserve=int(MOMENTS[config.optim.optimizer] * trained),
            token_bytes=_token_bytes(policy),
        )
    else:
        engine = VllmServers(
            _servers(config),
            [config.model.path, str(folder)],
            decode,
            eos_ids,
            adapter=adapter,
            max_length=needs.max_length,
            dtype=policy.dtype,
            exchange=section.exchange,
            together=from_first,
        )
    engine.update(policy.weights(), 0)
    return engine


def serving(config: GrpoConfig, folder: Path, dtype: str, rank: int | None, max_positions: int) -> Serving:
    """What a vLLM for this run must be started with. rank: of the adapter, None for full finetuning."""
    rollout = config.rollout
    if rollout.vllm.memory is not None and (both := sorted(SETTINGS & rollout.vllm.args.keys())):
        raise VllmError(f"rollout.vllm.memory: rollout.vllm.args has {both[0]} too: remove one of them")
    longest = max(rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    return Serving(
        folder,
        dtype,
        base_weights(config),
        min(config.data.max_prompt_tokens + longest, max_positions),
        rollout.max_rows,
        rank,
        rollout.vllm.args,
    )


def base_weights(config: GrpoConfig) -> str:
    """How vLLM holds the base model: nf4, unquantised or fp8."""
    auto = "nf4" if config.model.method == "qlora" else "unquantised"
    return auto if config.rollout.vllm.base == "auto" else config.rollout.vllm.base


def _token_bytes(policy: DecoderPolicy | HFPolicy) -> int | None:
    """Of the keys and values of one token, in all layers; None for a model that keeps something else."""
    if isinstance(policy, DecoderPolicy):
        return place_bytes(policy.spec, policy.dtype)
    c = policy.config
    heads = getattr(c, "num_key_value_heads", None) or getattr(c, "num_attention_heads", None)
    if policy.recurrent or not isinstance(heads, int):
        return None
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * heads * dim * policy.dtype.itemsize


def _adapter_config(config: GrpoConfig, policy: DecoderPolicy | HFPolicy) -> Mapping[str, Any] | None:
    """What PEFT's adapter_config.json says of the policy's adapter; None if it has none."""
    if config.model.method == "full":
        return None
    with tempfile.TemporaryDirectory() as folder:
        policy.save_adapter(folder)
        return json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))
