"""Loading recipes: scalars, what is said about mistakes and where, overrides, and the way back to YAML."""

import math
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rl.config import DpoConfig, GrpoConfig, SftConfig, VllmSection
from covey.rl.config_file import RECIPES, ConfigError, dump_config, load_config, recipes
from covey.rl.config_hints import ALIASES, _keys
from covey.rl.config_yaml import dump_yaml, parse_scalar, parse_yaml

MODEL_AND_DATA = {"model": {"path": "tiny"}, "data": {"train": "task:addition"}}
MODEL_AND_DATA_YAML = "model: {path: tiny}\ndata: {train: 'task:addition'}\n"  # lines 1 and 2


def load(yaml_text: str, folder: Path, overrides: Any = (), model: Any = GrpoConfig) -> Any:
    path = folder / "grpo.yaml"
    path.write_text(MODEL_AND_DATA_YAML + yaml_text)
    return load_config(path, overrides, model)


def problems(yaml_text: str, folder: Path, overrides: Any = (), model: Any = GrpoConfig) -> list[str]:
    """The lines of the ConfigError, without the folder."""
    with pytest.raises(ConfigError) as caught:
        load(yaml_text, folder, overrides, model)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


# Scalars. Expected values: the YAML 1.2 core schema (chapter 10.3.2), but for leading zeros, which it allows.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 0.00001),
        ("5e-6", 0.000005),
        ("1e5", 100000.0),
        ("1.0e-5", 0.00001),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("010.5", 10.5),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("8", 8),
        ("-8", -8),
        ("0", 0),
        ("0o10", 8),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("0b11", "0b11"),
        ("2026-01-31", "2026-01-31"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("-", "-"),
        ("٣", "٣"),
    ],
)
def test_scalars_are_read_after_yaml_1_2_in_files_and_overrides(text: str, value: Any) -> None:
    parsed = parse_scalar(text)
    assert parsed == value and type(parsed) is type(value)
    if text not in ("-",):  # alone it opens a list in a file
        assert parse_yaml(f"key: {text}", "f").value == {"key": value}


def test_not_a_number_needs_its_yaml_spelling() -> None:
    assert math.isnan(parse_scalar(".nan"))


@pytest.mark.parametrize(
    ("text", "advice"),
    [("010", "write 8 or 10,"), ("-010", "write -10 or -8,"), ("007", "write 7,"), ("08", "write 8,")],
)
def test_a_leading_zero_is_refused_because_it_has_two_readings(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        parse_scalar(text)


def test_quotes_make_text(tmp_path: Path) -> None:
    assert load("run: {name: '010'}", tmp_path).run.name == "010"
    assert load('run: {name: "1e5"}', tmp_path).run.name == "1e5"
    assert load("run: {name: no}", tmp_path).run.name == "no"


@pytest.mark.parametrize("written", ["1e-5", "1.0e-5", "0.00001", "1E-05"])
def test_learning_rates_are_the_same_from_file_override_and_python(written: str, tmp_path: Path) -> None:
    configs = [
        load(f"optim: {{lr: {written}}}", tmp_path),
        load("", tmp_path, [f"optim.lr={written}"]),
        load("", tmp_path, {"optim.lr": float(written)}),
        load("", tmp_path, {"optim": {"lr": float(written)}}),
        load_config({**MODEL_AND_DATA, "optim": {"lr": float(written)}}, [], GrpoConfig),
    ]
    assert [config.optim.lr for config in configs] == [0.00001] * 5
    assert all(config == configs[0] for config in configs)


def test_a_whole_number_will_do_where_a_number_is_expected(tmp_path: Path) -> None:
    temperature = load("rollout: {temperature: 1}", tmp_path).rollout.temperature
    assert temperature == 1.0 and type(temperature) is float


# Messages


def test_all_mistakes_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
optim:
  learnin_rate: 1e-5
  lr: fast
  steps: 010
  weight_decay: -1
  eps: .nan
rollout:
  group_size: 0
  temperature: 1
  temperature: 2
rewards:
  - use: math
    wieght: 2
objective: {aggregation: toekn}
"""
    assert problems(text, tmp_path) == [
        "grpo.yaml:4 optim.learnin_rate: unknown key. Did you mean optim.lr?",
        'grpo.yaml:5 optim.lr: expected a number, got "fast"',
        'grpo.yaml:6 optim.steps: 010 has a leading zero: write 8 or 10, or "010" in quotes if it is text',
        "grpo.yaml:7 optim.weight_decay: must be at least 0, got -1",
        "grpo.yaml:8 optim.eps: must be a finite number, got nan",
        "grpo.yaml:10 rollout.group_size: must be at least 1, got 0",
        "grpo.yaml:12 rollout.temperature: given twice (first on line 11)",
        "grpo.yaml:15 rewards.0.wieght: unknown key. Did you mean rewards.0.weight?",
        'grpo.yaml:16 objective.aggregation: expected "token", "sequence", "constant", "prompt" or null, got "toekn"',
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.lrr", "Did you mean optim.lr?"),
        ("optim.learning_rte", "Did you mean optim.lr?"),
        ("learning_rate", "Did you mean optim.lr?"),
        ("learning-rate", "Did you mean optim.lr?"),
        ("lr", "Did you mean optim.lr?"),
        ("optim.group_size", "Did you mean rollout.group_size?"),
        ("objective.seed", "Did you mean data.seed or run.seed?"),
        ("num_generations", "Did you mean rollout.group_size?"),
        ("rollout.max_completion_length", "Did you mean rollout.max_new_tokens?"),
        ("objective.epsilon", "Did you mean objective.clip_low?"),
        ("rolout", "Did you mean rollout?"),
        ("data.loss_on", "belongs to covey sft; covey grpo has no such key"),
        ("optim.num_train_epochs", "optim.epochs belongs to covey sft, covey grpo has none"),
        ("qqqq", "Sections: model, lora, data"),
        ("lora.qqqq", "Keys of lora: rank, alpha, targets"),
    ],
)
def test_an_unknown_key_says_which_was_meant(key: str, meant: str, tmp_path: Path) -> None:
    (line,) = problems("", tmp_path, [f"{key}=1"])
    assert line.startswith(f"command line {key}: ") and meant in line


def test_a_grpo_recipe_given_to_sft_names_what_does_not_belong(tmp_path: Path) -> None:
    text = "rollout: {group_size: 4}\nobjective: {beta: 0.1}\noptim: {steps: 3}\n"
    assert problems(text, tmp_path, model=SftConfig) == [
        "grpo.yaml:3 rollout: belongs to covey grpo; covey sft has no such key",
        "grpo.yaml:4 objective: belongs to covey grpo; covey sft has no such key",
    ]


def test_every_alias_names_a_key_that_exists() -> None:
    keys = {*_keys(GrpoConfig), *_keys(SftConfig), *_keys(DpoConfig)}
    keys |= {f"rollout.vllm.{key}" for key in VllmSection.model_fields}
    assert {key for keys_meant in ALIASES.values() for key in keys_meant.split()} <= keys


def test_every_key_is_found_from_every_other_section() -> None:
    """A known key in the wrong section is never an unknown word."""
    for model in (GrpoConfig, SftConfig, DpoConfig):
        for key in _keys(model):
            section, _, name = key.partition(".")
            other = "lora" if section != "lora" else "eval"
            if not name or name in model.model_fields[other].annotation.model_fields:  # type: ignore
                continue
            with pytest.raises(ConfigError, match=key):
                load_config({**MODEL_AND_DATA, other: {name: 1}}, [], model)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=-1", "optim.lr: must be above 0, got -1"),
        ("optim.lr=nan", 'optim.lr: expected a number, got "nan"'),
        ("optim.lr=.inf", "optim.lr: must be a finite number, got inf"),
        ("optim.lr=true", "optim.lr: expected a number, got true"),
        ("optim.lr=", "optim.lr: expected a number, got null"),
        ("optim.beta2=1", "optim.beta2: must be below 1, got 1"),
        ("optim.steps=1e3", "optim.steps: expected a whole number, got 1000.0; write 1000"),
        ("optim.steps=0", "optim.steps: must be at least 1, got 0"),
        ("data.chat=yes", 'data.chat: expected true, false or null, got "yes"'),
        ("data.shuffle=no", 'data.shuffle: expected true or false, got "no"'),
        ("run.name=2026", "run.name: expected text or null, got 2026; write run.name='\"2026\"'"),
        ("run.seed=010", 'run.seed: 010 has a leading zero: write 8 or 10, or "010" in quotes if it is text'),
        ("data.prompt={question}", 'data.prompt: expected text or null, got {"question": null}; put text'),
        ("lora.targets=5", 'lora.targets: expected "all-linear" or a list with text as items, got 5'),
        ("rollout.stop=[a, 1]", "rollout.stop.1: expected text, got 1"),
        ("optim=5", "optim: expected a section (lr: …), got 5"),
        ("rewards=[math]", 'rewards.0: expected a section (use: …), got "math"'),
        ("rewards=[{weight: .inf}]", "rewards.0.use: missing; give a built-in name"),
        ("rewards.2.use=math", "rewards.2.use: not an item of rewards; the next free one is rewards.0"),
        ("rollout.stop=[a", "rollout.stop: not valid YAML: expected ',' or ']'"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(override: str, message: str, tmp_path: Path) -> None:
    assert problems("", tmp_path, [override])[0].startswith(f"command line {message}")


@pytest.mark.parametrize("override", ["optim.lr", "=3", "--resume"])
def test_an_override_that_is_none_says_what_one_looks_like(override: str, tmp_path: Path) -> None:
    assert problems("", tmp_path, [override]) == [
        f'command line: expected section.key=value, got "{override}"'
    ]


def test_missing_keys_say_what_to_give() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [], GrpoConfig)
    path, train = str(caught.value).splitlines()
    assert path.startswith("model.path: missing; give a folder, a hub id")
    assert train.startswith("data.train: missing; give FILE.jsonl")


def test_sft_needs_either_steps_or_epochs(tmp_path: Path) -> None:
    text = "optim: {lr: 1e-4}"
    assert problems(text, tmp_path, model=SftConfig) == ["grpo.yaml:3 optim: give either steps or epochs"]
    assert load(text, tmp_path, ["optim.epochs=1.5"], SftConfig).optim.epochs == 1.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lr: 1e-5", "not valid YAML: expected ',' or '}'"),
        ("optim:\n\tlr: 1e-5", "not valid YAML: found character '\\t'"),
        ("optim: !!python/name:os.system ''", "optim: tags like tag:yaml.org,2002:python/name"),
        ("data: &loop {task: *loop}", "given twice"),
        ("lora: &loop {targets: [*loop]}", "nested too deeply"),
        ("optim.lr: 1e-5", "optim.lr: dots do not open a section in a file; write optim: {lr: …}"),
        ("? [a]\n: 1", "a key has to be a word"),
    ],
)
def test_a_file_that_is_not_a_recipe(text: str, message: str, tmp_path: Path) -> None:
    assert any(message in line for line in problems(text, tmp_path))


@pytest.mark.parametrize(
    ("content", "message"), [(b"- a\n", "expected sections"), (b"\xff\xfe", "not a text file in UTF-8")]
)
def test_a_file_of_another_kind(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "odd.yaml", [], GrpoConfig)


# Sources


def test_a_missing_file_suggests_a_sibling_or_a_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grpo.yaml").write_text(MODEL_AND_DATA_YAML)
    with pytest.raises(ConfigError, match=r"grop.yaml: no such file. Did you mean grpo.yaml\?"):
        load_config("grop.yaml", [], GrpoConfig)
    with pytest.raises(ConfigError, match=r"configs/gsm8k.yml: no such file. Did you mean gsm8k\?"):
        load_config("configs/gsm8k.yml", [], GrpoConfig)
    with pytest.raises(ConfigError, match=r"zzz: no such file. Recipes that come with covey: .*gsm8k"):
        load_config("zzz", [], GrpoConfig)
    run = Path("runs/a")
    run.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"runs/a: a folder, not a recipe$"):
        load_config("runs/a", [], GrpoConfig)
    (run / "config.yaml").write_text(MODEL_AND_DATA_YAML)
    with pytest.raises(ConfigError, match=r"Did you mean runs/a/config.yaml\?"):
        load_config("runs/a", [], GrpoConfig)


def command_of(recipe: str) -> type[Any]:
    """The configuration of the command that a recipe's first line shows."""
    first = (RECIPES / f"{recipe}.yaml").read_text().splitlines()[0]
    command = first.split("covey ")[1].split()[0]
    return {"grpo": GrpoConfig, "sft": SftConfig, "dpo": DpoConfig}[command]


@pytest.mark.parametrize("recipe", recipes())
def test_every_shipped_recipe_loads_by_name_and_by_path(recipe: str) -> None:
    keys = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    model = command_of(recipe)
    config = load_config(recipe, [], model)
    assert config == load_config(RECIPES / f"{recipe}.yaml", [], model)
    assert config.model.path == keys["model"]["path"]


def test_the_gsm8k_recipe_keeps_its_backslash_and_its_mark() -> None:
    data = load_config("gsm8k", [], GrpoConfig).data
    assert data.system is not None and data.system.endswith(r"in \boxed{}.")
    assert data.answer_after == "####"


def test_a_section_with_all_its_lines_commented_out_is_empty(tmp_path: Path) -> None:
    assert load("eval:\n  # every: 10\nrewards:\n", tmp_path) == load("", tmp_path)


def test_python_values_are_taken_as_yaml_would_give_them(tmp_path: Path) -> None:
    overrides = {
        "model": {"adapter": tmp_path},
        "optim.lr": np.float32(0.5),
        "optim.steps": np.int64(7),
        "lora.targets": ("q_proj", "v_proj"),
    }
    config = load_config(MODEL_AND_DATA, overrides, GrpoConfig)
    assert config.model.adapter == str(tmp_path) and config.model.path == "tiny"
    assert config.optim.lr == 0.5 and config.optim.steps == 7
    assert config.lora.targets == ["q_proj", "v_proj"]
    assert load_config(config, {"optim.steps": 8}, GrpoConfig).optim.steps == 8
    with pytest.raises(ConfigError, match="expected a file, the name of a recipe or a mapping"):
        load_config([1], [], GrpoConfig)  # type: ignore


# Overrides


def test_overrides_reach_lists_sections_and_free_mappings(tmp_path: Path) -> None:
    text = "rewards:\n  - {use: math}\n  - {use: format, args: {tag: a}}\n"
    overrides = [
        "rewards.0.weight=2",
        "rewards.1.args.tag=b",
        "rewards.2.use=my.py:short",
        "data.task={digits: 2, style: chat}",
        "data.answer_after=####",
        "data.prompt=Q: {question} # not a comment",
        'data.system="two\\nlines"',
        "rollout.stop=['\\n', \"</s>\"]",
        "optim.lr=1e-4",
        "optim.lr=1e-3",
    ]
    config = load(text, tmp_path, overrides)
    assert [(r.use, r.weight, r.args) for r in config.rewards] == [
        ("math", 2.0, {}),
        ("format", 1.0, {"tag": "b"}),
        ("my.py:short", 1.0, {}),
    ]
    assert config.data.task == {"digits": 2, "style": "chat"}
    assert config.data.answer_after == "####"
    assert config.data.prompt == "Q: {question} # not a comment"
    assert config.data.system == "two\nlines"
    assert config.rollout.stop == ["\\n", "</s>"]
    assert config.optim.lr == 0.001


def test_a_reward_can_be_added_where_the_recipe_has_none(tmp_path: Path) -> None:
    config = load("", tmp_path, ["rewards.0.use=length", "rewards.0.args.cache=50", "rollout.stop.0=A"])
    assert config.rewards[0].use == "length" and config.rewards[0].args == {"cache": 50}
    assert config.rollout.stop == ["A"]


def test_an_override_takes_the_blame_for_its_value_and_the_file_for_the_rest(tmp_path: Path) -> None:
    text = "optim: {lr: fast, stepz: 3}"
    assert problems(text, tmp_path, ["optim.lr=slow"]) == [
        'command line optim.lr: expected a number, got "slow"',
        "grpo.yaml:3 optim.stepz: unknown key. Did you mean optim.steps?",
    ]
    assert problems(text, tmp_path, ["optim={lr: faster}"]) == [
        'command line optim.lr: expected a number, got "faster"'
    ]


# The way back


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.text(
    string.digits + "eE+-._~:xo#{}[]'\" \n\t", max_size=8
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(TEXT, PLAIN, max_size=4))
def test_dumped_yaml_reads_back_equal(value: dict[str, Any]) -> None:
    tree = parse_yaml(dump_yaml(value), "f")
    assert tree.problems == []
    assert tree.value == value
    assert repr(tree.value) == repr(value)  # 1, 1.0 and True are equal, but not the same


@settings(deadline=None)
@given(name=TEXT, system=TEXT, lr=st.floats(1e-12, 1e6), stop=st.lists(TEXT, max_size=3))
def test_a_dumped_configuration_loads_back_equal(name: str, system: str, lr: float, stop: list[str]) -> None:
    source = {
        **MODEL_AND_DATA,
        "run": {"name": name},
        "optim": {"lr": lr},
        "rollout": {"stop": stop},
        "rewards": [{"use": "math", "args": {"text": system, "number": lr}}],
    }
    config = load_config(source, {"data.system": system}, GrpoConfig)
    tree = parse_yaml(dump_config(config), "f")
    assert load_config(tree.value, [], GrpoConfig) == config


@pytest.mark.parametrize("recipe", recipes())
def test_a_dumped_recipe_loads_back_equal_from_a_file(recipe: str, tmp_path: Path) -> None:
    model = command_of(recipe)
    config = load_config(recipe, ["optim.steps=3", "run.name=no"], model)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path, [], model) == config
