"""Unknown combinations are refused with a sentence, and what is chosen is printed in full."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from covey.rl.cli import app
from covey.rl.config import GrpoConfig
from covey.rl.config_file import ConfigError, load_config
from covey.rl.explain import ADVANTAGES, DENOMINATORS, SFT_OBJECTIVE, explain
from covey.rl.explain import LOSSES as LOSS_WORDS
from covey.rl.objective_config import LOSS_AGGREGATION, LOSS_DEFAULTS, AdvantageKind, Loss, ObjectiveSection

BASE: dict[str, Any] = {"model": {"path": "tiny"}, "data": {"train": "rows.jsonl"}}


def load(objective: dict[str, Any], **sections: Any) -> GrpoConfig:
    return load_config(BASE | sections, {"objective": objective}, GrpoConfig)


@pytest.mark.parametrize(
    ("objective", "key", "sentence"),
    [
        ({"loss": "cispo", "clip_low": 0.2}, "clip_low", "no meaning for loss cispo, which has ratio_cap"),
        ({"loss": "sapo", "ratio_cap": 3.0}, "ratio_cap", "which has tau_positive, tau_negative"),
        ({"max_divergence": 0.1}, "max_divergence", "no meaning for loss grpo"),
        ({"ratio_cap": 1.1}, "ratio_cap", "must lie above the clip range, which ends at 1.28"),
        ({"loss": "luspo", "aggregation": "token"}, "aggregation", "only sequence makes it LUSPO"),
        ({"advantage": "rloo", "std": "biased"}, "std", "no meaning for advantage rloo"),
        ({"kl": "k1"}, "kl", "no KL term while beta is 0"),
        ({"kl_in": "reward"}, "kl_in", "no KL term while beta is 0"),
        ({"beta": 0.1, "kl_in": "reward", "kl_ratio": True}, "kl_ratio", "belongs to a KL in the loss"),
        ({"beta": 0.1, "kl_in": "reward", "advantage": "gdpo"}, "kl_in", "advantage gdpo does not use"),
        ({"beta": 0.1, "kl": "k1", "kl_ratio": False}, "kl_ratio", "gradient 0 on average"),
        ({"correction": "none", "correction_high": 2.0}, "correction_high", "while correction is none"),
        ({"correction": "none", "correction_level": "token"}, "correction_level", "while correction is none"),
        ({"correction_low": 0.5}, "correction_low", "truncate has no lower bound"),
        ({"correction": "mask", "correction_low": 1.5}, "correction_low", "must be at most 1"),
        ({"correction_high": 0.9}, "correction_high", "must be at least 1"),
        ({"loss": "vespo"}, "correction", "holds its own correction for the sampler: set none"),
        ({"entropy_step": 0.1}, "entropy_step", "needs an entropy_target"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(objective, key, sentence):
    with pytest.raises(ConfigError) as error:
        load(objective)
    assert f"objective.{key}: " in str(error.value) and sentence in str(error.value)


def test_a_group_of_one_is_refused_where_it_is_compared_with_itself():
    with pytest.raises(ConfigError, match=r"rollout\.group_size: 1 gives every completion advantage 0"):
        load({}, rollout={"group_size": 1})
    assert load({"advantage": "reinforce++"}, rollout={"group_size": 1}).rollout.group_size == 1


def test_updates_must_divide_the_prompts():
    with pytest.raises(
        ConfigError, match=r"12 prompts per step .* 5 equal updates; possible are 1, 2, 3, 4, 6, 12"
    ):
        load({"updates_per_rollout": 5}, rollout={"prompts_per_step": 12})
    assert load({"updates_per_rollout": 4, "epochs": 2}).objective.updates == 8


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_truncated_sampling_in_training_is_refused_with_the_reason(key):
    with pytest.raises(ConfigError, match="sampling in training is never truncated"):
        load({}, rollout={key: 0.9})


def test_defaults_follow_the_loss():
    for loss in get_args(Loss):
        section = ObjectiveSection(loss=loss, correction="none")
        assert {key: section.option(key) for key in LOSS_DEFAULTS[loss]} == LOSS_DEFAULTS[loss]
        assert section.denominator == LOSS_AGGREGATION[loss]
    assert ObjectiveSection(clip_low=0.1).option("clip_low") == 0.1
    gspo = ObjectiveSection(loss="gspo")
    assert (gspo.option("clip_low"), gspo.option("clip_high"), gspo.denominator) == (3e-4, 4e-4, "sequence")
    assert ObjectiveSection(correction="mask").correction_bounds == (0.5, 2.0)
    assert ObjectiveSection(correction="mask", correction_level="geometric").correction_bounds == (0.99, 1.01)
    assert ObjectiveSection(correction_high=4.0).correction_bounds == (0.0, 4.0)


# In words


def test_the_contract_names_tests_that_exist():
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs/objectives.md").read_text()))
    written = {
        name
        for file in (root / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) > 80 and named <= written


def test_explain_names_formula_and_denominator():
    text = explain(ObjectiveSection(), max_new_tokens=64)
    assert "[-c min(r A, clip(r, 0.8, 1.28) A)] / D" in text and "N_t: all trained tokens" in text
    assert "(R - mean of the group) / (std of the group + eps), std unbiased" in text and "eps 1e-06" in text
    assert "at most 2" in text and "the reference is never computed" in text and "nothing is clipped" in text
    section = ObjectiveSection(
        advantage="rloo",
        aggregation="constant",
        beta=0.04,
        correction="mask",
        correction_low=0.25,
        correction_high=4.0,
        truncated="mask",
        count_zero_advantage=False,
        ratio_cap=3.0,
        epochs=2,
    )
    text = explain(section, max_new_tokens=64)
    assert "N_s * 64" in text and "+ 0.04 r k3" in text and "mean of the other rewards" in text
    assert "0 outside [0.25, 4]" in text and "nothing is clipped" not in text
    assert "scored, completions that max_new_tokens cut off, completions with advantage 0" in text
    assert "at most 3 |A|" in text and "2 x 1 optimiser steps" in text
    plain = explain(ObjectiveSection(aggregation="sequence", correction="none"), max_new_tokens=64)
    assert "[-min(" in plain and "N_s * T" in plain
    assert "cross-entropy" in SFT_OBJECTIVE


@pytest.mark.parametrize("loss", get_args(Loss))
@pytest.mark.parametrize("advantage", get_args(AdvantageKind))
def test_every_combination_can_be_said_with_its_numbers(loss, advantage):
    text = explain(ObjectiveSection(loss=loss, advantage=advantage, correction="none"), max_new_tokens=100)
    assert "{" not in text and "None" not in text
    for value in LOSS_DEFAULTS[loss].values():
        if value is not None and loss not in ("grpo", "gspo", "luspo"):
            assert str(value) in text
    assert "arXiv" in text


def test_explain_says_where_the_kl_is_and_how_entropy_moves():
    reward = explain(ObjectiveSection(beta=0.01, kl_in="reward"), max_new_tokens=8)
    assert (
        "in the reward: R loses 0.01 times the sum over its tokens of k1 = k" in reward
        and "+ 0.01" not in reward
    )
    returns = ObjectiveSection(beta=0.01, kl_in="reward", advantage="reinforce++")
    assert "from the token on (return)" in explain(returns, max_new_tokens=8)
    assert "+ 0.01 k2]" in explain(ObjectiveSection(beta=0.01, kl="k2"), max_new_tokens=8)
    bonus = explain(ObjectiveSection(entropy_bonus=0.02), max_new_tokens=8)
    assert "- b H] / D" in bonus and "0.02, and the entropy of the policy" in bonus
    target = explain(ObjectiveSection(entropy_target=0.3, entropy_step=0.01), max_new_tokens=8)
    assert "b starts at 0 and moves by 0.01 per update towards a mean entropy H of 0.3 nats" in target
    assert "all but the 20% of tokens" in explain(ObjectiveSection(top_entropy=0.2), max_new_tokens=8)


def test_nothing_is_without_words():
    assert set(ADVANTAGES) == set(get_args(AdvantageKind)) and set(LOSS_WORDS) == set(get_args(Loss))
    assert set(DENOMINATORS) == {"token", "sequence", "constant", "prompt"}


def test_the_command_prints_it_and_stops():
    arguments = ["grpo", "quickstart", "objective.loss=gspo", "objective.beta=0.01", "--explain"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "minimise  L = sum over trained tokens of  [-c min(s A, clip(s, 0.9997, 1.0004) A)"
    )
    assert "N_s * T" in result.stdout and "0.01 r k3" in result.stdout
