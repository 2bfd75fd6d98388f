"""The keys under `objective`: which advantage, which loss, over which denominator, with which corrections.

A key left out has the value that fits the chosen loss (LOSS_DEFAULTS, CORRECTION_DEFAULTS). A key that means nothing
for it is an error: a clip bound that some loss ignores would look like a setting and be none.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from covey.rl.config_types import Count, NonNegative, Positive, Section, Share

Pair = Annotated[list[NonNegative], Field(min_length=2, max_length=2)]
AdvantageKind = Literal[
    "group", "batch", "none", "rloo", "reinforce++", "reinforce++-baseline", "maxrl", "gdpo", "opo", "passk"
]  # fmt: skip
Loss = Literal["grpo", "gspo", "luspo", "gmpo", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl"]
Aggregation = Literal["token", "sequence", "constant", "prompt"]
Correction = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
KlEstimator = Literal["k1", "k2", "k3"]

# What each loss has beside the advantage, with the defaults of its paper. None: the key may be given and is off.
LOSS_DEFAULTS: dict[Loss, dict[str, Any]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.28, "ratio_cap": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "luspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"ratio_cap": 5.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "vespo": {"gamma_positive": [2.0, 3.0], "gamma_negative": [3.0, 2.0]},
    "dppo_tv": {"max_divergence": 0.2, "ratio_cap": 20.0},
    "dppo_kl": {"max_divergence": 0.05, "ratio_cap": 20.0},
}
LOSS_KEYS = sorted({key for keys in LOSS_DEFAULTS.values() for key in keys})
# The aggregation of the paper that introduced the loss; covey's GRPO has DAPO's.
LOSS_AGGREGATION: dict[Loss, Aggregation] = {
    **dict.fromkeys(get_args(Loss), "token"),
    **dict.fromkeys(("gspo", "luspo", "gmpo", "sapo"), "sequence"),
}
# (correction_low, correction_high) by form and level; low is None where nothing is cut off below.
CORRECTION_DEFAULTS: dict[tuple[Correction, CorrectionLevel], tuple[float | None, float]] = {
    ("truncate", "token"): (None, 2.0),
    ("truncate", "sequence"): (None, 3.0),
    ("truncate", "geometric"): (None, 2.0),
    ("mask", "token"): (0.5, 2.0),
    ("mask", "sequence"): (0.0, 3.0),
    ("mask", "geometric"): (0.99, 1.01),
}


class ObjectiveSection(Section):
    # How much better than the others a completion is
    advantage: AdvantageKind = "group"
    std: Literal["unbiased", "biased"] | None = None  # variance over n - 1 (default) or n

    # What a token costs: a function of the ratio of new to old probability
    loss: Loss = "grpo"
    clip_low: Share | None = None
    clip_high: Positive | None = None
    ratio_cap: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = None
    max_divergence: Positive | None = None
    tau_positive: Positive | None = None
    tau_negative: Positive | None = None
    gamma_positive: Pair | None = None  # k and lambda where the advantage is positive
    gamma_negative: Pair | None = None

    # The denominator
    aggregation: Aggregation | None = None  # default: that of the loss's paper
    count_zero_advantage: bool = True  # do completions with advantage 0 count in the denominator?
    truncated: Literal["keep", "mask"] = "keep"  # completions cut off by max_new_tokens: train on them or not

    # The KL to the reference policy
    beta: NonNegative = 0.0  # its weight; 0 runs no reference pass
    kl: KlEstimator | None = None  # default k3 in the loss, k1 in the reward
    kl_in: Literal["loss", "reward"] | None = None  # default: loss
    kl_ratio: bool | None = None  # multiply by the live ratio; default: yes for k1 and k3, no for k2

    # Sampler and trainer disagree
    correction: Correction = "truncate"
    correction_level: CorrectionLevel | None = None  # default: token
    correction_low: NonNegative | None = None
    correction_high: Positive | None = None

    # Entropy
    entropy_bonus: NonNegative = 0.0  # weight of the entropy that is added to the objective
    entropy_target: Positive | None = (
        None  # nats: moves the weight by entropy_step to keep the entropy above it
    )
    entropy_step: Positive | None = None  # default 0.005
    top_entropy: Share = 1.0  # train this share of tokens, by entropy

    # Optimiser steps over one batch of rollouts: epochs * updates_per_rollout
    epochs: Count = 1  # passes over it (mu)
    updates_per_rollout: Count = 1  # in one pass, each on its own share of the prompts

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveSection":
        for key, sentence in _problems(self):
            raise ValueError(f"objective.{key}: {sentence}")
        return self

    def has(self, key: str) -> bool:
        """True if the chosen loss knows this one of LOSS_KEYS."""
        return key in LOSS_DEFAULTS[self.loss]

    def option(self, key: str) -> Any:
        """The value of one of LOSS_KEYS for the chosen loss: as given, else the default of the loss."""
        given = getattr(self, key)
        return LOSS_DEFAULTS[self.loss][key] if given is None else given

    @property
    def denominator(self) -> Aggregation:
        return self.aggregation or LOSS_AGGREGATION[self.loss]

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """(low, high) of the weights that pass unchanged; (0, inf) without a correction."""
        if self.correction == "none":
            return 0.0, float("inf")
        low, high = CORRECTION_DEFAULTS[self.correction, self.correction_level or "token"]
        low = low if self.correction_low is None else self.correction_low
        return low or 0.0, high if self.correction_high is None else self.correction_high

    @property
    def kl_place(self) -> Literal["none", "loss", "reward"]:
        return "none" if self.beta == 0 else self.kl_in or "loss"

    @property
    def kl_estimator(self) -> KlEstimator:
        return self.kl or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def kl_live_ratio(self) -> bool:
        return self.kl_estimator != "k2" if self.kl_ratio is None else self.kl_ratio

    @property
    def updates(self) -> int:
        """Optimiser steps per batch of rollouts."""
        return self.epochs * self.updates_per_rollout

    @property
    def entropy_step_size(self) -> float:
        return 0.005 if self.entropy_step is None else self.entropy_step

    @property
    def has_entropy_term(self) -> bool:
        return self.entropy_bonus > 0 or self.entropy_target is not None


def _problems(o: ObjectiveSection) -> Iterator[tuple[str, str]]:
    """What does not fit together: the key to change, and a sentence about it."""
    for key in LOSS_KEYS:
        if getattr(o, key) is not None and not o.has(key):
            known = ", ".join(LOSS_DEFAULTS[o.loss])
            yield key, f"has no meaning for loss {o.loss}, which has {known}: remove it"
    if o.loss == "grpo" and o.ratio_cap is not None and o.ratio_cap <= 1 + o.option("clip_high"):
        yield "ratio_cap", f"must lie above the clip range, which ends at {1 + o.option('clip_high'):g}"
    if o.loss == "luspo" and o.denominator != "sequence":
        yield "aggregation", "loss luspo already multiplies by the length: only sequence makes it LUSPO"
    if o.std is not None and o.advantage not in ("group", "batch", "gdpo"):
        yield "std", f"has no meaning for advantage {o.advantage}: remove it, or choose group, batch or gdpo"
    yield from _kl_problems(o)
    yield from _correction_problems(o)
    if o.entropy_step is not None and o.entropy_target is None:
        yield "entropy_step", "needs an entropy_target; a fixed weight is entropy_bonus alone"


def _kl_problems(o: ObjectiveSection) -> Iterator[tuple[str, str]]:
    if o.beta == 0:
        for key in ("kl", "kl_in", "kl_ratio"):
            if getattr(o, key) is not None:
                yield key, "there is no KL term while beta is 0: set beta, for example 0.001, or remove this"
    if o.kl_in == "reward" and o.kl_ratio is not None:
        yield "kl_ratio", "belongs to a KL in the loss: with kl_in reward remove it"
    if o.kl_in == "reward" and o.advantage == "gdpo":
        yield "kl_in", "reward changes the total reward, which advantage gdpo does not use: use loss"
    if o.kl_place == "loss" and o.kl_estimator == "k1" and not o.kl_live_ratio:
        yield (
            "kl_ratio",
            "k1 in the loss without the ratio has gradient 0 on average: use k3, or kl_in reward",
        )


def _correction_problems(o: ObjectiveSection) -> Iterator[tuple[str, str]]:
    if o.correction == "none":
        for key in ("correction_level", "correction_low", "correction_high"):
            if getattr(o, key) is not None:
                yield (
                    key,
                    "there is no correction while correction is none: use truncate or mask, or remove this",
                )
    elif o.loss == "vespo":
        yield "correction", "loss vespo holds its own correction for the sampler: set none"
    if o.correction == "truncate" and o.correction_low is not None:
        yield "correction_low", "correction truncate has no lower bound: remove it, or use correction mask"
    low, high = o.correction_bounds
    if low > 1.0:
        yield "correction_low", f"must be at most 1, the weight of a perfect sampler, not {low:g}"
    if high < 1.0:
        yield "correction_high", f"must be at least 1, the weight of a perfect sampler, not {high:g}"
