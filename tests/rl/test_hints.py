import math

import pytest

from covey.rl.hints import Hints, reward_function
from covey.rollout.episodes import LIMITS

CALM = {"reward/mean": 0.4, "groups/no_spread": 0.3, "length/truncated": 0.1, "loss/total": 0.5}


def _said(*steps: dict[str, float]) -> list[tuple[int, str]]:
    hints = Hints()
    return [(i, text) for i, metrics in enumerate(steps, start=1) for text in hints.after(i, metrics)]


def test_a_calm_run_says_nothing() -> None:
    assert _said(*[CALM | {"reward/math": 0.1 * i} for i in range(8)]) == []
    assert _said({}, {"sft/nll": 0.01, "loss/total": 0.01}) == []


def test_a_loss_near_zero_is_explained_once_and_only_in_grpo() -> None:
    said = _said(CALM | {"loss/total": -0.001}, CALM | {"loss/total": 0.0}, CALM | {"loss/total": 0.0})
    assert [step for step, _ in said] == [1] and "normal in GRPO" in said[0][1]
    assert _said(CALM | {"loss/total": 0.0, "groups/no_spread": 1.0}) == []  # here 0 is 0
    assert Hints().after(101, CALM | {"loss/total": 0.0}) == []  # a resumed run


def test_groups_without_spread_for_three_steps_in_a_row() -> None:
    few, many = CALM, CALM | {"groups/no_spread": 0.61}
    assert _said(many, many, few, many, many, few) == []
    said = _said(many, few, many, many, many, many)
    assert [step for step, _ in said] == [5] and "rollout.group_size" in said[0][1]
    assert _said(*[CALM | {"groups/no_spread": 0.6}] * 5) == []


def test_all_rewards_zero() -> None:
    nothing = {"reward/mean": 0.0, "reward/math": 0.0, "groups/no_spread": 1.0}
    said = _said(*[nothing] * 10)
    assert len(said) == 1 and said[0][0] == 1 and "All rewards of step 1 are 0" in said[0][1]
    # Rewards of +1 and -1 whose mean is 0 are something.
    assert _said({"reward/mean": 0.0, "groups/no_spread": 0.0}) == []


@pytest.mark.parametrize(("share", "fires"), [(0.2, False), (0.21, True), (math.nan, False)])
def test_cut_off(share: float, fires: bool) -> None:
    said = _said(CALM | {"length/truncated": share})
    assert bool(said) == fires
    if fires:
        assert said[0][1].startswith("21% of the completions") and "rollout.max_new_tokens" in said[0][1]


@pytest.mark.parametrize(
    ("limit", "key"),
    [
        ("max_turns", "environment.max_turns was reached before the environment was done. Raise it"),
        ("max_tokens_per_turn", "a reply was longer than environment.max_tokens_per_turn"),
        ("max_new_tokens", "rollout.max_new_tokens had no room for another reply"),
    ],
)
def test_what_cut_most_episodes_off_is_named(limit: str, key: str) -> None:
    shares = {f"environment/cut_off_by_{name}": 0.125 for name in LIMITS}
    (most,) = _said(CALM | shares | {"length/truncated": 0.75, f"environment/cut_off_by_{limit}": 0.5})
    assert most[1].startswith(f"75% of the episodes were cut off, most of them (50%) because {key}")
    none = dict.fromkeys(shares, 0.0)
    (all_of_them,) = _said(CALM | none | {"length/truncated": 0.5, f"environment/cut_off_by_{limit}": 0.5})
    assert all_of_them[1].startswith(f"50% of the episodes were cut off because {key}")
    for _, text in (most, all_of_them):
        assert text.endswith(", or leave them out of the loss (objective.truncated: mask).")


def test_a_hint_comes_again_after_fifty_steps() -> None:
    said = _said(*[CALM | {"length/truncated": 0.5}] * 105)
    assert [step for step, _ in said] == [1, 51, 101]


def test_a_reward_that_never_varies() -> None:
    constant = {"reward/mean": 0.5, "reward/std": 0.0, "reward/unscored": 0.0, "reward/format": 0.98}
    said = _said(*[constant | {"reward/math": 0.1 * i} for i in range(20)])
    assert [step for step, _ in said] == [5] and '"format" had the mean 0.98' in said[0][1]
    # One change and it is never constant again.
    varied = [constant | {"reward/format": 1.0}, *[constant | {"reward/math": 0.1 * i} for i in range(9)]]
    assert _said(*varied) == []
    assert _said(*[{"reward/format": math.nan}] * 9) == []


def test_skipped_steps() -> None:
    said = _said({"grad/skipped": 0}, {"grad/skipped": 1}, {"grad/skipped": 1}, {"grad/skipped": 2})
    assert [step for step, _ in said] == [2] and "(1 so far)" in said[0][1]


def test_names_of_reward_functions() -> None:
    assert reward_function("reward/math") == "math"
    others = ("reward/mean", "reward/std", "reward/unscored", "reward/math/std", "length/mean", "math")
    assert [reward_function(key) for key in others] == [None] * 6
