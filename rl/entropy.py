"""Keeping a policy from becoming sure too early: a bonus for entropy, and training only where it is undecided.

Entropies are those of the whole next-token distribution at a scored token, in nats, at the sampling temperature.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from covey.policies.policy import Batch, Policy
from covey.rl.distributed import gather_rows
from covey.rl.objective_config import ObjectiveSection


class EntropyBonus:
    """The weight of the entropy in the objective.

    Without a target it is `entropy_bonus` for ever. With one it starts there, and after every update moves by
    entropy_step: up if the mean entropy was below the target, down (not below 0) if it was above; and while the entropy
    is above the target the term is left out (Skywork-OR1, arXiv 2505.22312).
    """

    def __init__(self, section: ObjectiveSection):
        self._step, self._target = section.entropy_step_size, section.entropy_target
        self.coefficient = section.entropy_bonus
        self.active = True

    @property
    def value(self) -> float:
        """What multiplies the entropy in the next update."""
        return self.coefficient if self.active else 0.0

    def observe(self, entropy: float) -> None:
        """Takes note of the mean entropy per token of an update, over all ranks."""
        if self._target is None or not np.isfinite(entropy):
            return
        self.active = entropy <= self._target
        self.coefficient = max(0.0, self.coefficient + (self._step if self.active else -self._step))

    def state_dict(self) -> dict[str, float | bool]:
        return {"coefficient": self.coefficient, "active": self.active}

    def load_state_dict(self, state: dict[str, float | bool]) -> None:
        self.coefficient, self.active = float(state["coefficient"]), bool(state["active"])


def keep_top_entropy(policy: Policy, minibatches: Sequence[list[Batch]], share: float) -> list[list[Batch]]:
    """The minibatches with advantage 0 at all tokens but the `share` with the highest entropy (arXiv 2506.01939).

    The quantile is that of all scored tokens of the step on all ranks; it costs a pass without gradient. The
    denominators stay as they are, and so does a KL term.
    """
    with torch.no_grad():
        entropies = [[policy.logprobs(p, entropy=True).entropy for p in parts] for parts in minibatches]
    flat = [e.double().cpu().numpy() for parts in entropies for e in parts if e is not None]
    everywhere, _ = gather_rows(np.concatenate([np.zeros(0), *flat]))
    threshold = float(np.quantile(everywhere, 1.0 - share)) if len(everywhere) else 0.0

    def kept(part: Batch, entropy_M: torch.Tensor | None) -> Batch:
        assert entropy_M is not None, "a policy must give entropies where it is asked for them"
        return replace(part, advantage=part.advantage * (entropy_M.double() >= threshold))

    return [
        [kept(*pair) for pair in zip(parts, found, strict=True)]
        for parts, found in zip(minibatches, entropies, strict=True)
    ]
