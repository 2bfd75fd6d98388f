"""Loading a reward: names, files, signatures, settings, and messages that say what to do."""

import functools
import random
import sys
import types

import pytest

from covey.rewards.reward import BUILTINS, Reward, RewardError, RewardSpec, check_columns, load_reward


def load(use, **kwargs) -> Reward:
    return load_reward(RewardSpec(use, **kwargs))


def message(error: pytest.ExceptionInfo) -> str:
    assert isinstance(error.value, ValueError)
    return str(error.value)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes rewards.py into an empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str, name: str = "rewards.py") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


NEEDED = {
    "judge": {"url": "http://localhost:8000/v1", "model": "m"},
    "length": {"max_tokens": 20, "cache": 4},
    "model": {"path": "organisation/name"},
    "regex": {"pattern": "x"},
}


@pytest.mark.parametrize("name", BUILTINS)
def test_builtins_load(name):
    reward = load(name, args=NEEDED.get(name, {}))
    assert reward.name == name and reward.weight == 1.0
    assert reward.style == ("completions" if name == "model" else "completion")
    assert reward.where == f"{name}() (built in)"


def test_builtins_say_what_they_need():
    assert load("math").required == load("exact").required == load("first_number").required == ("answer",)
    assert load("format").required == ()
    assert load("json_schema").required == ("schema",)
    assert load("json_schema", args={"schema": {}}).required == ()


def test_call_styles():
    def single(completion, answer, prompt, limit=3): ...
    def batch(completions, prompts, answer, **kwargs): ...
    async def waits(completion): ...

    one = load(single)
    assert (one.style, one.engine, one.required) == ("completion", ("completion", "prompt"), ("answer",))
    assert (one.optional, one.all_columns, one.lane, one.name) == (("limit",), False, "process", "single")
    many = load(batch)
    assert (many.style, many.engine, many.required) == (
        "completions",
        ("completions", "prompts"),
        ("answer",),
    )
    assert many.all_columns and many.lane == "thread"
    assert load(waits).lane == load(functools.partial(waits)).lane == "loop"


def test_objects_and_partials():
    class Judge:
        def __call__(self, completion, answer, strict=False): ...

    class AsyncJudge:
        async def __call__(self, completion): ...

    def near(completion, answer, limit): ...

    judge = load(Judge(), name="judge", weight=0.5)
    assert (judge.name, judge.weight, judge.required) == ("judge", 0.5, ("answer",))
    assert load(Judge()).name == "Judge"
    assert (load(AsyncJudge()).lane, load(Judge()).lane) == ("loop", "process")
    partial = load(functools.partial(near, limit=3))
    # A column called "limit" must not replace what the partial binds.
    assert (partial.name, partial.required, partial.optional) == ("near", ("answer",), ())


def test_decorated_functions_keep_their_signature_and_place():
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    @decorate
    def mine(completion, answer): ...

    assert load(mine).required == ("answer",)
    assert "test_reward.py:" in load(mine).where and "mine()" in load(mine).where


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            lambda text: 0.0,
            "takes (text). A reward needs a parameter `completion` (one text) or `completions`",
        ),
        (lambda completion, completions: 0.0, "has both `completion` and `completions`"),
        (eval("lambda completion, /: 0.0"), "completion is positional-only"),
        (3, "3 is not callable"),
        (dict, "is a class"),
    ],
)
def test_what_is_not_a_reward(function, expected):
    with pytest.raises(RewardError) as error:
        load(function)
    assert expected in message(error)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weight_is_finite(weight):
    with pytest.raises(RewardError, match="weight"):
        load("exact", weight=weight)


def test_a_file(file):
    path = file(
        "import neighbour\nloads = []\nloads.append(1)\n"
        "def a(completion): return float(len(loads))\ndef b(completion): return neighbour.x\n"
    )
    file("x = 2.0\n", "neighbour.py")
    a, b = load(f"{path}:a"), load(f"{path}:b")
    assert a.where == "rewards.py:4 a()"
    assert a.function("") == 1.0 and b.function("") == 2.0
    assert a.function.__globals__ is b.function.__globals__, "loaded once"
    file("def a(completion): return 7.0\n\n\n")
    assert load("rewards.py:a").function("") == 7.0, "an edited file loads again"


def test_a_file_with_dataclasses_and_an_absolute_path(file, tmp_path):
    file(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Near:\n    limit: float\n    def __call__(self, completion): return self.limit\n"
        "near = Near(0.25)\n"
    )
    assert load(f"{tmp_path}/rewards.py:near").function("") == 0.25


def test_file_mistakes(file):
    def failing(text, use):
        file(text)
        with pytest.raises(RewardError) as error:
            load(use)
        return message(error)

    good = "def exact(completion): ...\ndef short(completion): ...\nimport math\n"
    assert failing(good, "rewards.py:exakt") == (
        'rewards.py has no function exakt. Did you mean "exact"? Functions in it: exact, short.'
    )
    assert failing(good, "rewards.py") == (
        "rewards.py: say which function, as in rewards.py:NAME. Functions in it: exact, short."
    )
    assert "There is no reward file reward.py (looked for " in failing(good, "reward.py:exact")
    assert 'Did you mean "rewards.py"?' in failing(good, "reward.py:exact")
    assert failing("def a(:\n", "rewards.py:a").startswith("rewards.py:1: syntax error: ")
    assert failing("x = 1\n\ny = 1 / 0  \n", "rewards.py:a") == (
        "rewards.py:3 failed while it was loaded: ZeroDivisionError: division by zero."
    )


def test_modules(monkeypatch, file):
    module = types.ModuleType("my_rewards")
    exec("def short(completion): return 1.0", module.__dict__)
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    assert load("my_rewards:short").function("") == 1.0
    with pytest.raises(RewardError) as error:
        load("my_rewards:shirt")
    assert message(error) == 'my_rewards has no function shirt. Did you mean "short"? Functions in it: short.'
    file("def a(completion): ...\n", "nearby_file.py")
    with pytest.raises(RewardError) as error:
        load("nearby_file:a")
    assert message(error) == (
        "There is no module nearby_file to take a reward from. Did you mean nearby_file.py:a?"
    )


def test_unknown_builtin():
    with pytest.raises(RewardError) as error:
        load("exakt")
    assert message(error) == (
        f'There is no built-in reward "exakt" ({", ".join(sorted(BUILTINS))}). '
        'Did you mean "exact"? Your own is named like rewards.py:exakt.'
    )


def test_settings(file):
    file("def brevity(completion: str, limit: int = 400): ...\ndef bare(completion): ...\n")
    assert load("rewards.py:brevity", args={"limit": 3}).optional == ()
    for use, args, expected in [
        (
            "rewards.py:brevity",
            {"limt": 3},
            'rewards.py:1 brevity() has no parameter `limt` for args. Did you mean "limit"? '
            "It can set: limit.",
        ),
        (
            "rewards.py:bare",
            {"x": 3},
            "rewards.py:2 bare() has no parameter `x` for args. It has nothing to set.",
        ),
        (
            "rewards.py:bare",
            {"completion": "x"},
            "rewards.py:2 bare(): args sets `completion`, which the trainer supplies. Remove it.",
        ),
    ]:
        with pytest.raises(RewardError) as error:
            load(use, args=args)
        assert message(error) == expected


def test_columns(file):
    file("\n" * 11 + "def exact(completion, solution): ...\ndef typo(completion, anwser, level=1): ...\n")
    for use, columns, expected in [
        (
            "rewards.py:exact",
            ["question", "answer"],
            'rewards.py:12 exact() needs "solution", which is not a column (question, answer). '
            'Rename it to "answer" or give it a default.',
        ),
        (
            "rewards.py:typo",
            ["question", "answers"],
            'rewards.py:13 typo() needs "anwser", which is not a column (question, answers). '
            'Rename it to "answers" or give it a default.',
        ),
        (
            "math",
            ["question", "solution"],
            'math() (built in) needs "answer", which is not a column (question, solution). '
            "Name the column that holds it in data.answer.",
        ),
        (
            "json_schema",
            ["question"],
            'json_schema() (built in) needs "schema", which is not a column (question). '
            "Set it in the reward's args: {schema: ...}.",
        ),
    ]:
        with pytest.raises(RewardError) as error:
            check_columns(load(use), columns)
        assert message(error) == expected
    check_columns(load("rewards.py:typo"), ["anwser"])
    check_columns(load("rewards.py:typo", args={"anwser": 3}), [])


def test_loading_leaves_random_numbers_alone():
    random.seed(3)
    expected = random.Random(3).random()
    load("exact")
    assert random.random() == expected
