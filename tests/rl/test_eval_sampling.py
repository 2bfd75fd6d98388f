"""How evaluations draw completions, and what training refuses."""

import math
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from covey.rl.config import DpoConfig, EvalSection, GrpoConfig, SftConfig
from covey.rl.config_file import ConfigError, dump_config, load_config
from covey.rl.sampler import Sampler
from covey.rollout.engine import Sampling
from covey.rollout.sampling import check_sampling

GIVEN = {"model": {"path": "tiny"}, "data": {"train": "task:addition"}}
SFT = GIVEN | {"optim": {"steps": 1}}
VALUES = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {5: -100.0, 17: 2.5},
}


def sampling_of(config: Any, stop: tuple[str, ...] = ()) -> Sampling:
    trainer: Any = SimpleNamespace(config=config, eval_tokens=33)
    return Sampler.eval_sampling(trainer, stop)


def test_evaluations_take_every_key_of_the_engine():
    names = {field.name for field in fields(Sampling)}
    assert set(VALUES) | {"max_new_tokens", "stop", "ignore_eos", "seed"} == names
    for model, given in ((GrpoConfig, GIVEN), (SftConfig, SFT), (DpoConfig, SFT)):
        config = load_config(given | {"eval": VALUES, "run": {"seed": 3}}, [], model)
        assert sampling_of(config, ("\n",)) == Sampling(33, **VALUES, stop=("\n",), seed=3)


def test_evaluations_are_greedy_unless_told_otherwise():
    assert sampling_of(load_config(GIVEN, [], GrpoConfig)) == Sampling(33, temperature=0.0)


@pytest.mark.parametrize("key", VALUES)
def test_the_same_values_are_refused(key: str):
    """What the configuration takes the engine takes, and the other way round."""
    values: list[Any] = [-1.0, -1e-9, 0.0, 0.5, 1.0, 1.0001, 7.0, math.inf, -math.inf, math.nan]
    if key == "top_k":
        values = [-1, 0, 1, 50]
    if key == "logit_bias":
        values = [{0: 1.0}, {-1: 1.0}, {3: math.inf}, {3: math.nan}, {3: -1e9}, {}]
    taken = set()
    for value in values:
        settings = {"temperature": 1.0, key: value}
        in_file = takes(lambda s: load_config(GIVEN | {"eval": s}, [], GrpoConfig), settings)
        assert in_file == takes(lambda s: check_sampling(Sampling(**s)), settings), value
        taken.add(in_file)
    assert taken == {True, False}


def takes(check: Callable[[dict[str, Any]], object], settings: dict[str, Any]) -> bool:
    try:
        check(settings)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "overrides",
    [
        ["eval.logit_bias={5: -100, 17: 2.5}"],
        ["eval.logit_bias.5=-100", "eval.logit_bias.17=2.5"],
        {"eval": {"logit_bias": {5: -100, 17: 2.5}}},
        {"eval.logit_bias.5": -100, "eval.logit_bias": {17: 2.5, 5: -100}},
    ],
)
def test_ids_are_written_as_numbers(overrides: Any):
    config = load_config(GIVEN, overrides, GrpoConfig)
    assert config.eval.logit_bias == {5: -100.0, 17: 2.5}


def test_ids_survive_the_file(tmp_path: Any):
    config = load_config(GIVEN | {"eval": VALUES}, [], GrpoConfig)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml", [], GrpoConfig) == config
    with pytest.raises(ConfigError, match=r"eval\.logit_bias\.the: its keys are token ids: whole numbers"):
        load_config(GIVEN, ["eval.logit_bias={the: 1}"], GrpoConfig)


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.1)])
def test_greedy_completions_are_not_truncated(key: str, value: float):
    with pytest.raises(ConfigError, match=rf"eval\.{key}: has no meaning .* set eval\.temperature"):
        load_config(GIVEN | {"eval": {key: value}}, [], GrpoConfig)
    assert EvalSection(repetition_penalty=1.1).temperature == 0  # a penalty has


@pytest.mark.parametrize("key", [key for key in VALUES if key != "temperature"])
def test_what_training_refuses_says_why_and_where_it_goes(key: str):
    reason = "is never truncated" if key in ("top_p", "top_k", "min_p") else "has no penalties and no bias"
    with pytest.raises(ConfigError, match=rf"sampling in training {reason}.*; evaluations take eval\.{key}"):
        load_config(GIVEN | {"rollout": {key: 1}}, [], GrpoConfig)
    with pytest.raises(ConfigError, match=rf"optim\.{key}: unknown key. Did you mean eval\.{key}\?"):
        load_config(SFT, [f"optim.{key}=1"], SftConfig)
