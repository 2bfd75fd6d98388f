"""GRPO with environments, from a configuration: a tool that is learned, a game, and what may be wrong with them."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch

import covey
from covey.configs.calculator import calculate
from covey.configs.guessing import GuessNumber
from covey.policies.tiny import byte_tokenizer
from covey.rl.config import CurriculumSection, EnvironmentSection, GrpoConfig
from covey.rl.config_file import ConfigError, load_config
from covey.rl.data import load_rows
from covey.rl.environments import Stage
from covey.rollout.environment import EpisodeError
from covey.rollout.episodes import LIMITS

CALL = '<tool_call>{"name": "password"}</tool_call>'
WORDS = [
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "\n",
    "user",
    "assistant",
    "tool",
    "system",
    "password",
    "Password?",
]
WORDS += [CALL, "k.", "m.", "n.", "o."]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools[0].function.name }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTION = [{"role": "user", "content": "Password?"}]


def password() -> str:
    """Tells the password."""
    return "k."


def told(completion: str, tool_calls: int = 0) -> float:
    """The password, and it was asked for."""
    return float(completion == "k" and tool_calls == 1)


def asked(completion: str, tool_calls: int = 0) -> float:
    return float(tool_calls == 1)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over WORDS, one token each: now and then it says CALL, or the password without having asked."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("caller")
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.add_tokens([AddedToken(word, normalized=False) for word in WORDS[3:]])
    core.add_special_tokens(WORDS[:3])
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def configuration(model: str | Path, folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "method": "lora", "dtype": "float32", "device": "cpu"},
        "run": {"dir": str(folder), "name": "run", "threads": 1, "samples_every": 0, "save_every": 0},
        **sections,
    }


def train_caller(caller: Path, folder: Path, steps: int, **more: Any):
    return covey.grpo(
        configuration(
            caller,
            folder,
            environment={"tools": [f"{__file__}:password"], "max_turns": 2, "max_tokens_per_turn": 3},
            rollout={
                "prompts_per_step": 1,
                "group_size": 32,
                "max_new_tokens": 24,
                "stop": ["</tool_call>", "."],
            },
            optim={"lr": 5e-3, "steps": steps},
            **more,
        ),
        rewards=[told, asked],
        data=[{"messages": QUESTION}],
        plain=True,
    )


def test_a_tool_is_used_and_the_reward_rises(caller: Path, tmp_path: Path) -> None:
    run = train_caller(caller, tmp_path, 18, eval={"temperature": 1.0}, data={"train": "none"})
    reward, metrics = run.metrics.column("reward/told"), run.metrics
    assert reward[:2].mean() < 0.25 and reward[-3:].mean() > 0.75
    assert (
        metrics.column("environment/tool_calls")[0] < 0.6
        and metrics.column("reward/asked")[-3:].mean() > 0.75
    )
    # What was sampled is what is trained: before an update every ratio is 1, in all turns.
    updated = metrics.column("groups/no_spread") == 0  # else there is nothing to train
    assert updated.sum() >= 12
    assert set(metrics.column("ratio/min")[updated]) == set(metrics.column("ratio/max")[updated]) == {1.0}
    assert metrics.column("sampler/logp_diff_max")[updated].max() <= 1e-5

    rows = parquet.read_table(sorted((run.folder / "samples").iterdir())[-1]).to_pylist()
    right = next(row for row in rows if row["reward/told"] == 1)
    assert right["completion"] == f"{CALL.removesuffix('</tool_call>')}\n[tool] k.\nk"
    tool = [
        WORDS.index(word)
        for word in ("<|im_end|>", "\n", "<|im_start|>", "tool", "\n", "k.", "<|im_end|>", "\n")
    ]
    after = [WORDS.index(word) for word in ("<|im_start|>", "assistant", "\n")]
    assert right["ids"] == [WORDS.index(CALL), *tool, *after, WORDS.index("k.")]
    assert [logprob != 0 for logprob in right["logprobs"]] == [True, *[False] * 11, True]
    assert json.loads(right["notes"])["turns"] == 2
    # The template describes the tool: its name stands in the system message.
    assert right["prompt"].startswith("<|im_start|>system\npassword<|im_end|>")


def test_a_run_can_be_repeated(caller: Path, tmp_path: Path) -> None:
    first, second = (train_caller(caller, tmp_path / name, 2) for name in ("a", "b"))
    for name in ("reward/told", "environment/turns", "length/mean", "grad/norm"):
        assert list(first.metrics.column(name)) == list(second.metrics.column(name))


GAME = """
class Guess:
    def __init__(self, wrong: float = 0.0):
        self.wrong = wrong

    def start(self, row):
        self.secret = row["secret"]
        return [{"role": "user", "content": f"A letter, {row['hint']}"}]

    def step(self, reply):
        if reply == self.secret:
            return [], True, 1.0
        return [{"role": "user", "content": "No."}], False, self.wrong

def make(): return 3
"""


def play(folder: Path, rows: Any, rewards: Any = (), eval_data: Any = None, **environment: Any):
    (folder / "game.py").write_text(GAME)
    section = {"use": f"{folder / 'game.py'}:Guess", "max_turns": 2, "max_tokens_per_turn": 2} | environment
    config = configuration(
        "tiny",
        folder,
        environment=section,
        rollout={"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 80, "temperature": 0.5},
        optim={"steps": 1},
    )
    return covey.grpo(config, rewards=rewards, data=rows, eval_data=eval_data, plain=True)


ROWS = [{"prompt": "unused", "secret": "x", "hint": hint} for hint in ("early", "late")]


def test_the_environment_opens_the_prompt_and_its_reward_has_a_name_and_a_weight(tmp_path: Path) -> None:
    def turned(completions: list[str], turns: list[int], environment_reward: list[float]) -> list[float]:
        assert environment_reward == [-0.5] * len(completions)
        return [float(turn) for turn in turns]

    def heard(completion: list[dict[str, str]]) -> float:
        assert completion[0]["role"] == "assistant" and completion[1:] == [{"role": "user", "content": "No."}]
        return 0.0

    run = play(tmp_path, ROWS, [turned, heard], ROWS[:1], name="game", weight=2.0, args={"wrong": -0.5})
    row = run.metrics[-1]
    assert row["reward/game"] == -0.5 and row["reward/turned"] == 1.0 and row["reward/mean"] == 0.0
    assert row["eval/game"] == -0.5 and row["eval/reward"] == 0.0
    # Replies of random bytes have no end within 2 tokens.
    cut_off = {name: row[f"environment/cut_off_by_{name}"] for name in LIMITS}
    assert cut_off == {
        "max_turns": 0.0,
        "max_tokens_per_turn": row["length/truncated"],
        "max_new_tokens": 0.0,
    }
    assert row["length/truncated"] == 1.0
    rows = parquet.read_table(run.folder / "samples/step-000001.parquet").to_pylist()
    openings = {row["prompt"] for row in rows}
    assert openings == {
        f"<|im_start|>user\nA letter, {hint}<|im_end|>\n<|im_start|>assistant\n" for hint in ("early", "late")
    }
    assert all(row["completion"].endswith("\n[user] No.") for row in rows)


@pytest.mark.parametrize("name", ["calculator", "guessing"])
def test_the_shipped_recipes_name_what_is_there(name: str) -> None:
    config = load_config(name, [], GrpoConfig)
    stage = Stage(config.environment)
    rows = load_rows(config.data.train, config.data)
    assert (
        stage.prepare(byte_tokenizer(), config.data, [258])[1:] == []
    )  # ChatML without tools: at most that warning
    if name == "calculator":
        assert [tool.name for tool in stage.tools] == ["calculate"] and not stage.rewards
        assert stage.openings(rows[:2]) == rows[:2]
    else:
        opened = stage.openings(rows)
        assert {int(row.columns["answer"]) for row in rows} <= set(range(2, 19))
        assert all("from 2 to 18" in row.messages[0]["content"] for row in opened if row.messages)


def test_the_calculator() -> None:
    assert calculate("(3 + 4) * 12 - -1") == "85" and calculate("7 // 2 + 7 % 4 + 1 / 4") == "6.25"
    for wrong in (
        "2 ** 9",
        "__import__('os')",
        "abs(3)",
        "'a' * 9",
        "1 if 2 else 3",
        "True",
        "1" * 201,
        "1 / 0",
        "(",
    ):
        with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
            calculate(wrong)


def test_the_guessing_game() -> None:
    game = GuessNumber(low=2, high=18, guesses=4)
    assert "from 2 to 18. You have 4 guesses" in game.start({"answer": "9"})[0]["content"]
    assert game.step("10?") == ([{"role": "user", "content": "Lower."}], False, 0.0)
    assert game.step("8 or 9") == ([{"role": "user", "content": "Reply with one number."}], False, -0.1)
    assert game.step("It is 9") == ([], True, 0.75)
    late = GuessNumber(guesses=1)
    late.start({"answer": 3})
    assert late.step("2") == ([{"role": "user", "content": "Higher."}], True, 0.0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"use": "game.py:Gess"}, 'has no function Gess. Did you mean "Guess"?'),
        ({"use": "nowhere.py:Guess"}, "There is no environment file"),
        ({"use": "no_such_module:Guess"}, "There is no module no_such_module to take an environment from"),
        ({"use": "Guess"}, "Name the environment like file.py:NAME or module:NAME"),
        ({"args": {"wrnog": 1}}, "cannot be called with them: got an unexpected keyword argument 'wrnog'"),
        ({"use": "game.py:make"}, "makes 3, which has no method `start`"),
        ({"use": None, "tools": ["game.py:make"]}, "The tool make cannot be described to the model"),
    ],
)
def test_what_cannot_be_used_is_said_before_the_model_is_loaded(
    environment: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for key in ("use", "tools"):
        given = environment.get(key)
        here = lambda use: use.replace("game.py", str(tmp_path / "game.py"))  # noqa: E731
        if given:
            environment = environment | {key: here(given) if key == "use" else list(map(here, given))}
    with pytest.raises(EpisodeError) as error:
        play(tmp_path, ROWS, [lambda completion: 0.0], **environment)
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_plain_prompts_have_no_turns(tmp_path: Path) -> None:
    config = configuration(
        "tiny", tmp_path, environment={"tools": [f"{__file__}:password"]}, rollout={"prompts_per_step": 1}
    )
    with pytest.raises(
        EpisodeError, match=r"the prompt is plain text, and an episode needs messages. Set data.chat: true."
    ):
        covey.grpo(config, rewards=[told], data=[{"prompt": "Password?"}], plain=True)
    config["model"]["chat_template"] = str(tmp_path / "last.jinja")
    (tmp_path / "last.jinja").write_text("{% for m in messages %}{{ loop.revindex ~ m.content }}{% endfor %}")
    with pytest.raises(EpisodeError, match="writes the beginning of a conversation differently"):
        covey.grpo(config, rewards=[told], data=[{"messages": QUESTION}], plain=True)
    assert not (tmp_path / "run").exists()


def test_a_start_that_fails_names_the_row(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match=r"row 1.*Guess.start\(\) raised KeyError: 'hint'"):
        play(tmp_path, [ROWS[0], {"prompt": "unused", "secret": "x"}])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"max_turns": 3}, "give either use (a class) or tools (functions)"),
        ({"use": "a.py:A", "tools": ["a.py:f"]}, "give either use (a class) or tools (functions)"),
        ({"tools": ["a.py:f"], "args": {"a": 1}}, "environment.args: has no meaning for tools"),
        (
            {"use": "a.py:A", "parser": "hermes"},
            "environment.parser: has no meaning without environment.tools",
        ),
        ({"use": "a.py:A", "max_turns": 0}, "environment.max_turns: must be at least 1"),
        (
            {"use": "a.py:A", "max_turn": 3},
            "environment.max_turn: unknown key. Did you mean environment.max_turns?",
        ),
    ],
)
def test_the_section_is_checked(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(
            {"model": {"path": "tiny"}, "data": {"train": "x"}, "environment": section}, [], GrpoConfig
        )
    assert message in str(error.value)


def test_the_section_can_be_set_key_by_key() -> None:
    base = {"model": {"path": "tiny"}, "data": {"train": "x"}}
    config = load_config(base, ["environment.use=a.py:A", "environment.max_turns=3"], GrpoConfig)
    assert config.environment.given and config.environment.max_turns == 3


def test_the_examples_of_the_documentation_run() -> None:
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    names: dict[str, Any] = {"__name__": "environments"}
    for block in blocks:
        exec(compile(block, "docs/environments.md", "exec"), names)
    game = names["Guess"](guesses=2)
    game.start({"secret": 7})
    assert [game.step("3")[1:], game.step(" 7 ")[1:]] == [(False, 0.0), (True, 1.0)]
    for key in EnvironmentSection.model_fields | CurriculumSection.model_fields:
        assert key in page, key
