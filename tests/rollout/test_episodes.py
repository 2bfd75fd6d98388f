"""Episodes: the ids of a whole conversation, its limits, and what environments may do wrong.

The right ids are those of transformers' chat template on the finished conversation, one id per byte.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from covey.policies.load import load_policy
from covey.policies.locate import locate_model
from covey.policies.tiny import byte_tokenizer
from covey.policies.tokenizer import decode_completion
from covey.rl.batch import pack
from covey.rollout.dialogue import Dialogue
from covey.rollout.engine import Completion, Finish, Group, Prompt, Sampling
from covey.rollout.environment import EpisodeError
from covey.rollout.episodes import EpisodeEngine
from covey.rollout.inprocess import InProcessEngine

TOKENIZER: Any = byte_tokenizer()
END: int = TOKENIZER.eos_token_id  # <|im_end|>
OPENING = {"role": "user", "content": "go"}


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def render(messages: Sequence[Any], generation: bool) -> str:
    conversation = [dict(message) for message in messages]
    return TOKENIZER.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generation)


def prompt_of(row: int = 0, messages: Any = (OPENING,), **columns: Any) -> Prompt:
    text = render(messages, True)
    return Prompt(row, tuple(encode(text)), text, tuple(messages), columns)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Scripted:
    """An engine that says what it is told to: script(row, sample, turn) -> (text, finish)."""

    def __init__(self, script: Callable[[int, int, int], tuple[str, Finish]] | None):
        self.script: Any = script
        self.asked: list[Any] = []
        self.turns: dict[tuple[int, int], int] = {}

    def generate(self, prompts, n, sampling, finished: Any = None):
        self.asked.append((list(prompts), n, sampling))
        groups = []
        for index, prompt in enumerate(prompts):
            completions = []
            for g in range(n):
                who = (prompt.row, g) if n > 1 or prompt.row < 1 << 20 else divmod(prompt.row, 1 << 20)
                turn = self.turns[who] = self.turns.get(who, -1) + 1
                text, finish = self.script(*who, turn)
                ids = (*encode(text), *((END,) if finish == "eos" else ()))
                logprobs = tuple(-1.0 - turn for _ in ids)
                completions.append(Completion(ids, logprobs, (True,) * len(ids), text, finish, 7))
            groups.append(Group(prompt, tuple(completions)))
            if finished is not None:
                finished(index, groups[-1])
        return groups

    def update(self, weights, version):
        self.version = version

    def sleep(self):
        self.asked.append("sleep")

    def wake(self):
        self.asked.append("wake")


class Countdown:
    """Done after `steps` replies; 0.5 for each reply "good", no opinion about others."""

    def __init__(self, steps: int = 2):
        self.left = steps
        self.notes = {"asked": 0}

    def start(self, row):
        self.left = row.get("steps", self.left)
        return [OPENING]

    def step(self, reply):
        self.left -= 1
        self.notes["asked"] += 1
        return [user(f"{self.left} left")], self.left == 0, 0.5 if reply == "good" else None


def play(
    script: Any,
    prompts: Sequence[Prompt],
    environment: Any = Countdown,
    n: int = 1,
    limit: int = 400,
    **settings: Any,
) -> tuple[list[Group], Scripted, list[int]]:
    engine, order = Scripted(script), []
    settings = {"max_turns": 8, "max_tokens_per_turn": 20, **settings}
    player = EpisodeEngine(engine, environment, Dialogue(render, encode, [END]), **settings)
    groups = player.generate(prompts, n, Sampling(limit, seed=5), lambda index, group: order.append(index))
    return groups, engine, order


def one(script: Any, environment: Any = Countdown, **settings: Any) -> Completion:
    return play(script, [prompt_of()], environment, **settings)[0][0].completions[0]


def test_the_ids_are_those_of_the_whole_conversation_and_only_replies_are_trained() -> None:
    prompt = prompt_of(steps=3)
    (group,), engine, _ = play(lambda row, sample, turn: (["good", "bad", "good"][turn], "eos"), [prompt])
    completion = group.completions[0]
    whole = [OPENING, *map(dict, completion.columns["transcript"][:-1])]
    assert [m["content"] for m in whole] == ["go", "good", "2 left", "bad", "1 left", "good"]
    assert [*prompt.ids, *completion.ids, *encode("\n")] == encode(render(whole, False))
    between = len(encode("\n<|im_start|>user\n2 left<|im_end|>\n<|im_start|>assistant\n"))
    lengths = [(5, True), (between, False), (4, True), (between, False), (5, True)]
    assert completion.trained == tuple(flag for length, flag in lengths for _ in range(length))
    expected = [-1.0] * 5 + [0.0] * between + [-2.0] * 4 + [0.0] * between + [-3.0] * 5
    assert completion.logprobs == tuple(expected)
    assert (completion.text, completion.finish, completion.version) == ("good", "eos", 7)
    assert completion.columns["environment_reward"] == 1.0 and completion.columns["turns"] == 3
    assert completion.columns["asked"] == 3
    # What the engine continued is exactly what is trained.
    asked = [prompts[0].ids for prompts, _, _ in engine.asked]
    whole_ids = prompt.ids + completion.ids
    assert asked == [prompt.ids, whole_ids[: len(prompt.ids) + 5 + between], whole_ids[:-5]]


def test_a_turn_that_did_not_end_itself_is_ended() -> None:
    """A stop string is no end-of-turn token: the template's own is appended, and not trained."""
    completion = one(lambda row, sample, turn: ("good", "stop" if turn == 0 else "eos"))
    middle = encode("<|im_end|>\n<|im_start|>user\n1 left<|im_end|>\n<|im_start|>assistant\n")
    assert list(completion.ids) == [*encode("good"), *middle, *encode("good"), END]
    assert sum(completion.trained) == 4 + 5


def test_ids_that_no_text_has_are_kept() -> None:
    class Odd(Scripted):
        def generate(self, prompts, n, sampling, finished: Any = None):
            groups = [
                Group(p, (Completion((9001, 9002, END), (-1.0,) * 3, (True,) * 3, "good", "eos"),))
                for p in prompts
            ]
            for index, group in enumerate(groups):
                finished(index, group)
            return groups

    player = EpisodeEngine(Odd(None), Countdown, Dialogue(render, encode, [END]), max_tokens_per_turn=20)
    completion = player.generate([prompt_of()], 1, Sampling(200))[0].completions[0]
    assert completion.ids[:3] == completion.ids[-3:] == (9001, 9002, END)


def test_episodes_end_at_their_own_time_and_groups_come_in_their_order() -> None:
    prompts = [prompt_of(row, steps=steps) for row, steps in ((10, 3), (11, 1), (12, 2))]
    groups, engine, order = play(lambda row, sample, turn: (f"r{row}s{sample}t{turn}", "eos"), prompts, n=2)
    assert order == [1, 2, 0]  # as they were over
    assert [group.prompt.row for group in groups] == [10, 11, 12]
    assert [[c.columns["turns"] for c in group.completions] for group in groups] == [[3, 3], [1, 1], [2, 2]]
    assert [c.text for c in groups[0].completions] == ["r10s0t2", "r10s1t2"]
    assert [(len(prompts), n) for prompts, n, _ in engine.asked] == [(3, 2), (4, 1), (2, 1)]
    # Every turn has draws of its own, and every episode is a row of its own.
    assert len({sampling.seed for _, _, sampling in engine.asked}) == 3
    assert len({prompt.row for prompt in engine.asked[1][0]}) == 4
    assert engine.asked[0][2].seed == 5


@pytest.mark.parametrize(
    ("settings", "script_finish", "turns", "limit"),
    [
        ({"max_turns": 2}, "eos", 2, "max_turns"),
        # a reply of 5, then 52 of the environment and room for 20: another turn
        ({"limit": 20 + 5 + 52}, "eos", 2, "max_new_tokens"),
        ({"limit": 20 + 5 + 51}, "eos", 1, "max_new_tokens"),
        ({}, "length", 1, "max_tokens_per_turn"),
        ({"max_turns": 1}, "length", 1, "max_tokens_per_turn"),
    ],
)
def test_limits(settings: dict[str, Any], script_finish: Finish, turns: int, limit: str) -> None:
    assert len(encode("\n<|im_start|>user\n1 left<|im_end|>\n<|im_start|>assistant\n")) == 26
    longer = "x" * 26  # 26 + 26 = 52

    class Endless(Countdown):
        def step(self, reply):
            return [user("1 left" + longer)], False, 0.25

    completion = one(lambda row, sample, turn: ("good", script_finish), Endless, **settings)
    assert (completion.finish, completion.columns["turns"]) == ("length", turns)
    assert completion.columns["cut_off_by"] == limit
    assert completion.columns["environment_reward"] == 0.25 * turns
    assert completion.trained[-1]  # nothing is appended that no reply follows


def test_a_reply_may_have_its_share_by_default() -> None:
    _, engine, _ = play(
        lambda *_: ("good", "eos"), [prompt_of()], max_turns=4, max_tokens_per_turn=None, limit=400
    )
    assert engine.asked[0][2].max_new_tokens == 100
    _, engine, _ = play(lambda *_: ("good", "eos"), [prompt_of()], max_tokens_per_turn=500, limit=400)
    assert engine.asked[0][2].max_new_tokens == 400


def test_a_system_message_of_the_configuration_may_stand_in_front() -> None:
    prompt = prompt_of(messages=({"role": "system", "content": "be brief"}, OPENING))
    groups, _, _ = play(lambda *_: ("good", "eos"), [prompt])
    whole = [
        *map(dict, prompt.messages or ()),
        *map(dict, groups[0].completions[0].columns["transcript"][:-1]),
    ]
    assert [*prompt.ids, *groups[0].completions[0].ids, *encode("\n")] == encode(render(whole, False))


def test_async_environments_run_side_by_side_and_are_closed() -> None:
    together, closed = threading.Barrier(4, timeout=5), []

    class Slow(Countdown):
        async def start(self, row):
            await asyncio.sleep(0)

        async def step(self, reply):
            await asyncio.to_thread(together.wait)  # only four at once get past it
            return [], True, 1.0

        def close(self):
            closed.append(self)

    groups, _, _ = play(lambda *_: ("good", "eos"), [prompt_of(0), prompt_of(1)], Slow, n=2)
    assert [c.columns["environment_reward"] for g in groups for c in g.completions] == [1.0] * 4
    assert len(closed) == 4


def test_a_group_is_scored_when_its_last_episode_is_over() -> None:
    """What `score` gives is added to what the steps gave; None adds nothing."""
    asked: list[list[int]] = []

    async def score(environments: Sequence[Any]) -> list[float | None]:
        asked.append([environment.notes["asked"] for environment in environments])
        return [float(place) if place else None for place in range(len(environments))]

    prompts = [prompt_of(0, steps=3), prompt_of(1, steps=1)]
    groups, _, order = play(lambda *_: ("good", "eos"), prompts, n=3, score=score)
    assert asked == [[1, 1, 1], [3, 3, 3]] and sorted(order) == [0, 1]
    rewards = [[c.columns["environment_reward"] for c in group.completions] for group in groups]
    assert rewards == [[1.5, 2.5, 3.5], [0.5, 1.5, 2.5]]
    assert [c.columns["cut_off_by"] for c in groups[0].completions] == [None] * 3


def test_a_score_that_fails_is_an_error_or_no_reward() -> None:
    class Odd(Countdown):
        def step(self, reply):
            if reply == "bad":
                raise KeyError("board")
            return [], True, 0.5

    async def score(environments: Sequence[Any]) -> list[float]:
        return [1 / (len(environments) - 3)] * len(environments)

    def script(row: int, sample: int, turn: int) -> tuple[str, Finish]:
        return "bad" if (row, sample) == (1, 0) else "good", "eos"

    prompts = [prompt_of(0), prompt_of(1)]
    with pytest.raises(
        EpisodeError, match=r"environment.score\(\) raised ZeroDivisionError.* for row 0, turn 1"
    ):
        play(lambda *_: ("good", "eos"), prompts[:1], Odd, n=3, score=score)
    groups, _, _ = play(script, prompts, Odd, n=3, score=score, on_error="none")
    columns = [[c.columns for c in group.completions] for group in groups]
    assert [[c["environment_reward"] for c in group] for group in columns] == [[None] * 3, [None, -0.5, -0.5]]
    assert [[c["failed"] for c in group] for group in columns] == [[True] * 3, [True, False, False]]


class Breaks(Countdown):
    def step(self, reply):
        raise KeyError("board")


class Hangs(Countdown):
    def step(self, reply):
        time.sleep(2)


class Wanders(Countdown):
    def start(self, row):
        return [user("another opening")]


def returning(result: Any) -> type:
    return type("Odd", (Countdown,), {"step": lambda self, reply: result})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Breaks, r"game.step\(\) raised KeyError: 'board' for row 0, turn 1"),
        (Hangs, r"game.step\(\) took longer than 0.05 seconds for row 0"),
        (Wanders, r"game.start\(\) opened row 0 differently than before"),
        (returning(None), r"game.step\(\) returned None; return \(messages, done, reward\)"),
        (returning(([], 1, 0.0)), r"done = 1; it must be True or False"),
        (returning(([], True, float("inf"))), r"returned the reward inf; give a number or None"),
        (returning(([], False, 0.0)), r"no messages, and is not done"),
        (returning(("hello", False, 0.0)), r"gave 'hello'; give a list of messages"),
        (returning(([{"content": "x"}], False, 0.0)), r"gave the message \{'content': 'x'\}"),
    ],
)
def test_what_an_environment_does_wrong_is_said(environment: Any, message: str) -> None:
    with pytest.raises(EpisodeError, match=message):
        one(lambda *_: ("good", "eos"), environment, name="game", timeout=0.05)


def test_plain_text_has_no_turns() -> None:
    with pytest.raises(EpisodeError, match="prompt of row 3 is plain text"):
        play(lambda *_: ("good", "eos"), [replace(prompt_of(3), messages=None)])


@pytest.mark.parametrize("method", ["start", "step"])
def test_an_environment_that_fails_can_cost_its_episode_alone(method: str) -> None:
    made = []

    def environment():
        made.append(Countdown(1))
        if len(made) == 2:
            setattr(made[-1], method, lambda _: 1 / 0)
        return made[-1]

    (group,), _, _ = play(lambda *_: ("good", "eos"), [prompt_of()], environment, n=3, on_error="none")
    assert [c.columns["environment_reward"] for c in group.completions] == [0.5, None, 0.5]
    assert [c.columns["failed"] for c in group.completions] == [False, True, False]
    assert [c.finish for c in group.completions] == ["eos", "abort", "eos"]


def test_the_row_is_the_environments_own() -> None:
    class Greedy(Countdown):
        def start(self, row):
            row["cards"].clear()

    prompt = prompt_of(cards=[1, 2])
    play(lambda *_: ("good", "eos"), [prompt], Greedy)
    assert prompt.columns["cards"] == [1, 2]


# ------------------------------------------------------------------------------------------------ templates


def templated(template: str, tools: Any = None) -> Dialogue:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = template

    def render(messages: Sequence[Any], generation: bool) -> str:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation, tools=tools
        )

    return Dialogue(render, encode, [END])


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    moves_tools = (
        "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}{% if m == asked[-1] %}TOOLS {% endif %}"
        "{{ loop.index ~ m.role + ':' + m.content + '\n' }}{% endfor %}"
    )
    templated(moves_tools).between([OPENING], [{"role": "tool", "content": "4"}], "eos")
    with pytest.raises(
        EpisodeError, match=r"beginning of a conversation differently .*'TOOLS 1user:go\\n' becomes '1user"
    ):
        templated(moves_tools).between([OPENING], [user("4")], "eos")
    with pytest.raises(EpisodeError, match="writes a reply 0 times"):
        templated(
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        ).check("user")


def test_thoughts_that_a_template_drops_are_a_warning() -> None:
    drops = (
        "{% for m in messages %}{{ m.role + ':' + m.content.split('</think>')[-1] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think>\n{% endif %}"
    )
    (warning,) = templated(drops).check("user")
    assert "leaves <think> blocks of earlier replies out once a user message follows" in warning
    answer = [user("more")]
    ids = templated(drops).between([OPENING], answer, "eos")
    assert list(ids) == encode("user:more<|im_end|>assistant:<think>\n")


# ------------------------------------------------------------------------------------------------ a real engine


@pytest.fixture(scope="module")
def real() -> InProcessEngine:
    policy = load_policy(locate_model("tiny"), method="lora", dtype="float32", device="cpu", rank=4)
    ends = [END, 256]
    return InProcessEngine(policy, lambda ids: decode_completion(TOKENIZER, ids, ends), ends)


class Stopped(Scripted):
    """An engine whose replies always end: the last token is taken for a stop."""

    def __init__(self, engine: InProcessEngine):
        super().__init__(None)
        self.engine = engine

    def generate(self, prompts, n, sampling, finished: Any = None):
        def done(index, group):
            ended = [replace(c, finish="stop") for c in group.completions]
            finished(index, replace(group, completions=tuple(ended)))

        return self.engine.generate(prompts, n, sampling, done)


def test_episodes_of_one_turn_are_plain_completions(real: InProcessEngine) -> None:
    prompts = [prompt_of(row, steps=1) for row in (3, 8)]
    player = EpisodeEngine(real, Countdown, Dialogue(render, encode, [END]), max_turns=1)
    plain = real.generate(prompts, 3, Sampling(6, seed=11))
    for group, expected in zip(player.generate(prompts, 3, Sampling(6, seed=11)), plain, strict=True):
        assert [replace(c, columns={}) for c in group.completions] == list(expected.completions)


def test_draws_depend_on_row_sample_and_turn_alone_and_are_what_is_trained(real: InProcessEngine) -> None:
    player = EpisodeEngine(Stopped(real), Countdown, Dialogue(render, encode, [END]), max_tokens_per_turn=5)
    prompts = [prompt_of(row, steps=steps) for row, steps in ((3, 3), (8, 2))]
    sampling = Sampling(300, temperature=0.8, seed=11)
    groups = player.generate(prompts, 2, sampling)
    alone = player.generate(prompts[1:], 2, sampling)[0]
    assert [c.ids for c in alone.completions] == [c.ids for c in groups[1].completions]
    assert groups[0].completions[0].ids != groups[0].completions[1].ids
    replies = [groups[0].completions[0].columns["transcript"][2 * turn]["content"] for turn in range(3)]
    assert len(set(replies)) == 3

    ones_PG = np.ones((2, 2))
    batch = pack(
        groups, ones_PG, ones_PG > 0, aggregation="token", max_new_tokens=300, truncated="keep", skip_zero=False,
        temperature=0.8,
    )  # fmt: skip
    assert len(batch.target) == sum(sum(c.trained) for g in groups for c in g.completions)
    assert batch.sampler is not None
    with torch.no_grad():
        logp_M = real.policy.logprobs(batch).logp
    torch.testing.assert_close(logp_M, batch.sampler, rtol=0, atol=1e-5)
