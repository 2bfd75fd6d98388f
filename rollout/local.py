"""The sampler in the trainer's own process that suits a policy."""

from collections.abc import Callable, Iterable, Sequence

from covey.policies.decoder import DecoderPolicy
from covey.policies.hf import HFPolicy
from covey.rollout.engine import RolloutEngine
from covey.rollout.hf_generate import GenerateEngine
from covey.rollout.inprocess import InProcessEngine


def local_engine(
    policy: DecoderPolicy | HFPolicy,
    decode: Callable[[Sequence[int]], str],
    eos_ids: Iterable[int],
    *,
    max_rows: int = 256,
) -> RolloutEngine:
    """The engine of the house on covey's decoder, transformers' `generate` on any other model; see there."""
    kind = GenerateEngine if isinstance(policy, HFPolicy) else InProcessEngine
    return kind(policy, decode, eos_ids, max_rows=max_rows)  # type: ignore[arg-type]
