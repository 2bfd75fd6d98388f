"""Environments of the package verifiers in covey's episodes, with the package itself.

The rewards are worked out by hand from the rubrics below; the right ids are those of the chat template on the finished
conversation, one id per byte.
"""

import signal
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from covey.policies.tiny import byte_tokenizer
from covey.rewards.find import find
from covey.rl.config import DataSection, EnvironmentSection
from covey.rl.data import load_rows
from covey.rl.environments import Stage
from covey.rl.templates import make_prompts
from covey.rollout import verifiers_env
from covey.rollout.engine import Completion, Finish, Group, Sampling
from covey.rollout.environment import EpisodeError

pytest.importorskip("verifiers", reason="verifiers has no release for this version of Python")

WORLDS = '''
import verifiers as vf
from datasets import Dataset

FORGOTTEN = []


def rows(*pairs):
    return Dataset.from_list([{"question": q, "answer": a, "info": {"bonus": 0.25}} for q, a in pairs])


def right(completion, answer):
    return float(completion[-1]["content"] == answer)


def bonus(completion, info):
    return info["bonus"]


def longest(completions) -> list:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


class Guess(vf.MultiTurnEnv):
    """The answer is guessed, and a wrong guess is repeated back."""

    async def setup_state(self, state):
        state["guesses"] = []

    async def env_response(self, messages, state, **kwargs):
        guess = messages[-1].content
        state["guesses"].append(guess)
        if guess == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="Yes!")]
            return state["final_env_response"]
        return [{"role": "user", "content": f"Not {guess}."}]

    @vf.stop
    async def gave_up(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == "I give up"

    @vf.cleanup
    async def forget(self, state):
        FORGOTTEN.append(len(state["trajectory"]))


class Failing(Guess):
    async def env_response(self, messages, state, **kwargs):
        raise vf.SandboxError("the box is gone")


class Rewriting(Guess):
    async def get_prompt_messages(self, state):
        turn = len(state["trajectory"])
        return [vf.UserMessage(content=f"Question {turn}")] if turn else state["prompt"]


class Opening(Guess):
    async def setup_state(self, state):
        state["prompt"] = [vf.UserMessage(content="Something else")]


class Looking(Guess):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


class Arming(Guess):
    async def setup_state(self, state):
        state["tool_defs"] = [vf.Tool(name="hammer", description="", parameters={})]


def guessed(state):
    """1 / guesses if the last one is right; half a point off for each wrong one."""
    guesses = state["guesses"]
    return 1 / len(guesses) if guesses[-1:] == [state["answer"]] else -0.5 * len(guesses)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Purse(vf.StatefulToolEnv):
    """What is left is the environment's, and no argument of the model."""

    def __init__(self, **args):
        super().__init__(**args)
        self.add_tool(spend, args_to_skip=["left"])

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        state["left"] = state.get("left", 10) - tool_args["coins"]
        return {**tool_args, "left": state["left"]}


def spend(coins: int, left: int) -> str:
    """Spends coins.

    Args:
        coins: how many
    """
    return f"{left} left"


def load_environment(kind="single", **args):
    if kind == "single":
        rubric = vf.Rubric(funcs=[right, bonus], weights=[2.0, 1.0])
        data = rows(("Capital of Peru?", "Lima"), ("Capital of Mali?", "Bamako"))
        held_out = rows(("Capital of Chad?", "N'Djamena"))
        return vf.SingleTurnEnv(dataset=data, eval_dataset=held_out, system_prompt="Be brief.", rubric=rubric, **args)
    if kind == "compared":
        rubric = vf.Rubric(funcs=[right, longest], weights=[2.0, 4.0])
        return vf.SingleTurnEnv(dataset=rows(("Capital of Peru?", "Lima")), rubric=rubric)
    if kind == "tools":
        rubric = vf.Rubric(funcs=[right])
        return vf.ToolEnv(tools=[add], max_turns=5, dataset=rows(("20 + 22?", "42")), rubric=rubric)
    if kind == "Purse":
        return Purse(dataset=rows(("Spend 3, then 4.", "3")), rubric=vf.Rubric(funcs=[right]))
    if kind == "group":
        other = vf.SingleTurnEnv(dataset=rows(("Capital of Cuba?", "Havana")), rubric=vf.Rubric([right], [8.0]))
        return vf.EnvGroup([load_environment(), other])
    if kind == "number":
        return 3
    rubric = vf.Rubric(funcs=[guessed])
    return globals()[kind](dataset=rows(("A letter?", "c")), rubric=rubric, **{"max_turns": 4, **args})
'''

TOKENIZER: Any = byte_tokenizer()
END: int = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verifiers") / "worlds.py"
    path.write_text(WORLDS)
    return path


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Scripted:
    """An engine for the prompt of row 0: lines[sample][turn]. What ends with "..." was cut off."""

    def __init__(self, lines: Sequence[Sequence[str]]):
        self.lines, self.turns = lines, [0] * len(lines)

    def generate(self, prompts: Any, n: int, sampling: Any, finished: Any) -> None:
        for index, prompt in enumerate(prompts):
            completions = []
            for sample in range(n) if n > 1 else [prompt.row]:
                text = self.lines[sample][self.turns[sample]]
                self.turns[sample] += 1
                finish: Finish = "length" if text.endswith("...") else "eos"
                ids = (*encode(text), *((END,) if finish == "eos" else ()))
                completions.append(Completion(ids, (-1.0,) * len(ids), (True,) * len(ids), text, finish))
            finished(index, Group(prompt, tuple(completions)))


def prepared(worlds: Path, kind: str, tokenizer: Any = TOKENIZER, **section: Any) -> tuple[Stage, Any]:
    """The stage of a run, and the prompts of the environment's own rows."""
    args = {"kind": kind, **section.pop("args", {})}
    stage = Stage(EnvironmentSection(use=f"verifiers:{worlds}", args=args, **section))
    data = DataSection(train="environment")
    stage.prepare(tokenizer, data, [END])
    rows = load_rows(stage.own_rows("environment", False), data)
    return stage, make_prompts(stage.openings(rows), tokenizer, data)


def play(
    worlds: Path, kind: str, *lines: Sequence[str], row: int = 0, limit: int = 400, **section: Any
) -> list[Completion]:
    """The episodes of one group, one for each of `lines`."""
    stage, prompts = prepared(worlds, kind, **{"max_tokens_per_turn": 20, **section})
    engine: Any = Scripted(lines)
    prompt = prompts[row]
    prompt = type(prompt)(0, prompt.ids, prompt.text, prompt.messages, prompt.columns)
    (group,) = stage.engine(engine).generate([prompt], len(lines), Sampling(limit))
    return list(group.completions)


def said(completion: Completion) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in completion.columns["transcript"]]


def test_a_single_turn_is_scored_by_the_rubric_with_its_weights(worlds: Path) -> None:
    stage, prompts = prepared(worlds, "single")
    assert [[m["content"] for m in prompt.messages] for prompt in prompts] == [
        ["Be brief.", "Capital of Peru?"],
        ["Be brief.", "Capital of Mali?"],
    ]
    good, bad = play(worlds, "single", ["Lima"], ["Cusco"])
    assert (good.columns["environment_reward"], bad.columns["environment_reward"]) == (2.25, 0.25)
    assert (good.columns["right"], bad.columns["right"], good.columns["bonus"]) == (1.0, 0.0, 0.25)
    assert good.columns["turns"] == 1 and good.finish == "eos"
    assert good.ids == (*encode("Lima"), END) and good.trained == (True,) * 5
    (held_out,) = load_rows(stage.own_rows("environment", True), DataSection(train="x"))
    assert held_out.columns["answer"] == "N'Djamena" and held_out.where.endswith("worlds.py row 0")


def test_an_own_limit_of_turns_leaves_a_reply_all_tokens(worlds: Path) -> None:
    for kind, args, max_turns, turns, tokens in (
        ("single", {}, 8, 1, 400),
        ("Guess", {}, 8, 4, 100),
        ("Guess", {}, 2, 2, 200),
        ("Guess", {"max_turns": -1}, 8, 8, 50),
    ):
        stage, _ = prepared(worlds, kind, args=args, max_turns=max_turns)
        engine = stage.engine(Scripted([]))  # type: ignore[arg-type]
        assert (engine.max_turns, engine._reply_limit(Sampling(400))) == (turns, tokens)
        assert stage.describe().endswith(f"worlds.py; at most {turns} turns")


def test_several_turns_are_the_ids_of_the_whole_conversation(worlds: Path) -> None:
    won, gave_up = play(worlds, "Guess", ["a", "b", "c"], ["a", "I give up"])
    assert won.columns["environment_reward"] == pytest.approx(1 / 3)
    assert gave_up.columns["environment_reward"] == -0.5
    assert (won.finish, gave_up.finish) == ("eos", "eos")
    assert (won.columns["num_turns"], gave_up.columns["num_turns"]) == (3, 2)  # a metric of the package
    turns = [
        ("assistant", "a"),
        ("user", "Not a."),
        ("assistant", "b"),
        ("user", "Not b."),
        ("assistant", "c"),
    ]
    assert said(won) == [*turns, ("user", "Yes!")]
    _, prompts = prepared(worlds, "Guess")
    whole = [*prompts[0].messages, *({"role": role, "content": text} for role, text in turns)]
    text = TOKENIZER.apply_chat_template(whole, tokenize=False)
    assert [*prompts[0].ids, *won.ids, *encode("\n")] == encode(text)
    assert sum(won.trained) == 3 * 2  # a letter and the end of the turn, three times


def test_what_a_limit_ends_is_scored_as_it_is(worlds: Path) -> None:
    """At max_turns, after a reply that was cut off, and where another reply has no room."""
    forgotten: Any = find(f"{worlds}:FORGOTTEN", {})
    forgotten.clear()
    (late,) = play(worlds, "Guess", ["a", "b"], max_turns=2)
    assert late.columns["environment_reward"] == -1.0 and late.finish == "length"
    (cut,) = play(worlds, "Guess", ["a", "b..."])
    assert cut.columns["environment_reward"] == -1.0 and cut.finish == "length"
    (full,) = play(worlds, "Guess", ["a"], limit=30)
    assert full.columns["environment_reward"] == -0.5 and full.finish == "length"
    assert full.ids == (*encode("a"), END)
    # The package cleaned up behind each of them, and behind the trial of each set-up (0 turns).
    assert forgotten == [0, 2, 0, 2, 0, 1]


def test_a_rubric_may_compare_the_episodes_of_a_group(worlds: Path) -> None:
    completions = play(worlds, "compared", ["Lima"], ["Santiago"], ["La Paz"])
    assert [c.columns["environment_reward"] for c in completions] == [2.0, 4.0, 0.0]
    assert [c.columns["longest"] for c in completions] == [0.0, 1.0, 0.0]


def test_a_group_of_environments(worlds: Path) -> None:
    for row, replies, rewards in ((0, ("Lima", "x"), [2.25, 0.25]), (2, ("Havana", "x"), [8.0, 0.0])):
        completions = play(worlds, "group", *([reply] for reply in replies), row=row)
        assert [c.columns["environment_reward"] for c in completions] == rewards


TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name + ': ' + tool.function.description + ' '"
    " + tool.function.parameters.properties | join(',') + '\n' }}{% endfor %}"
)


def test_tools_are_described_called_and_answered(worlds: Path) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = TOOLS + tokenizer.chat_template
    stage, prompts = prepared(worlds, "tools", tokenizer)
    assert prompts[0].text.startswith("add: Adds two numbers. a,b\n<|im_start|>user\n20 + 22?")
    assert "with the tools add; at most 5 turns" in stage.describe()
    calls = [
        '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>',
        '<tool_call>{"name": "add", ...</tool_call>',
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        "42",
    ]
    (completion,) = play(worlds, "tools", calls, limit=2000, max_tokens_per_turn=100)
    answers = [m for m in completion.columns["transcript"] if m["role"] == "tool"]
    assert [a["content"] for a in answers] == ["42", "Expecting value: line 1 column 1 (char 0)", "'sub'"]
    assert [(a["name"], a["tool_call_id"]) for a in answers] == [
        ("add", "000000001"),
        ("", "000000002"),
        ("sub", "000000003"),
    ]
    assert completion.columns["environment_reward"] == 1.0 and completion.finish == "eos"
    assert (completion.columns["add_calls"], completion.columns["total_tool_calls"]) == (1, 3)
    assert sum(completion.trained) == sum(len(reply) + 1 for reply in calls)


def test_calls_may_be_written_as_a_model_does(worlds: Path) -> None:
    call = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    (completion,) = play(worlds, "tools", [call, "3"], parser="llama3", limit=500, max_tokens_per_turn=60)
    assert said(completion)[1] == ("tool", "3") and completion.columns["environment_reward"] == 0.0


def test_tools_with_a_state(worlds: Path) -> None:
    stage, _ = prepared(worlds, "Purse")
    assert list(stage.schemas[0]["function"]["parameters"]["properties"]) == ["coins"]
    spend = '<tool_call>{"name": "spend", "arguments": {"coins": COINS}}</tool_call>'
    replies = [spend.replace("COINS", "3"), spend.replace("COINS", "4"), "3"]
    (completion,) = play(worlds, "Purse", replies, limit=2000, max_tokens_per_turn=100)
    assert [text for role, text in said(completion) if role == "tool"] == ["7 left", "3 left"]
    assert completion.columns["environment_reward"] == 1.0 and completion.columns["spend_calls"] == 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Failing", r"step\(\) raised EpisodeError: SandboxError: the box is gone for row 0, turn 1"),
        ("Rewriting", r"a conversation that does not go on from the last one"),
        ("Looking", r"a user message has content other than text"),
        ("Opening", r"worlds.py row 0: .*start\(\) raised .* opens with other messages than the prompt"),
        ("Arming", r"the tools of this episode \(hammer\) are others than those .* \(none\)"),
    ],
)
def test_what_an_environment_may_not_do(kind: str, message: str, worlds: Path) -> None:
    with pytest.raises(EpisodeError, match=message):
        play(worlds, kind, ["a", "c"])


def test_a_failed_episode_has_no_reward_if_that_is_asked_for(worlds: Path) -> None:
    (completion,) = play(worlds, "Failing", ["a"], on_error="none")
    assert completion.columns["environment_reward"] is None and completion.columns["failed"] is True
    assert completion.finish == "abort"


def test_what_cannot_be_loaded_is_said(worlds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(use: str, **section: Any) -> str:
        with pytest.raises(EpisodeError) as error:
            Stage(EnvironmentSection(use=f"verifiers:{use}", **section))
        return str(error.value)

    assert "owner/no-such-world is not installed: there is no module no_such_world" in problem(
        "owner/no-such-world"
    )
    assert "There is no environment file nowhere.py" in problem("nowhere.py")
    assert "raised KeyError: 'Missing'" in problem(str(worlds), args={"kind": "Missing"})
    assert "gave 3, which is no verifiers.Environment" in problem(str(worlds), args={"kind": "number"})
    assert "environment.parser: verifiers:" in problem(str(worlds), parser="hermes")
    stage = Stage(EnvironmentSection(use=f"verifiers:{worlds}", args={"kind": "tools"}))
    with pytest.raises(EpisodeError, match=r"data.eval: .*worlds.py has no rows for evaluations"):
        stage.own_rows("environment", True)

    # An installed one is a module, and its errors come through verifiers' own loader.
    (tmp_path / "broken_world.py").write_text(
        "def load_environment(size=1):\n    raise RuntimeError('no token')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "loading broken-world with the arguments {} raised RuntimeError: no token" in problem(
        "broken-world"
    )
    assert "unexpected keyword argument 'sise'" in problem("broken-world", args={"sise": 2})

    monkeypatch.setattr(verifiers_env, "version", lambda name: "0.4.0")
    assert "verifiers 0.4.0 is installed, and covey plays the environments of 0.3" in problem(str(worlds))

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(verifiers_env, "version", missing)
    assert "needs the package verifiers: pip install 'covey[verifiers]'" in problem(str(worlds))


def test_an_installed_environment_is_found_by_its_name(
    worlds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "capital_world.py").write_text(WORLDS)
    monkeypatch.syspath_prepend(tmp_path)
    stage = Stage(EnvironmentSection(use="verifiers:owner/capital-world", args={"kind": "compared"}))
    found = stage.own_rows("environment", False)
    assert (
        found is not None
        and found.rows[0][1]["answer"] == "Lima"
        and found.name == "verifiers:owner/capital-world"
    )


def test_ctrl_c_stays_with_the_run(worlds: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    Stage(EnvironmentSection(use=f"verifiers:{worlds}"))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
