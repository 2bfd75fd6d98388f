"""Running rewards: totals, call styles, concurrency, and errors that name function, row and completion."""

import asyncio
import functools
import math
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.rewards.reward import RewardError, RewardSpec, check_columns, load_reward
from covey.rewards.runner import Scorer, ScoreTable

NAN = math.nan


@dataclass
class Prompt:
    text: str = "q"
    ids: tuple[int, ...] = (1,)
    messages: tuple[dict[str, Any], ...] | None = None
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class Completion:
    text: str
    ids: tuple[int, ...] = (5, 6)
    finish: str = "eos"


@dataclass
class Group:
    prompt: Prompt
    completions: tuple[Completion, ...]


def group(*texts: str, **columns: Any) -> Group:
    return Group(Prompt(columns=columns), tuple(Completion(text) for text in texts))


def run(groups, *uses, weights: tuple[float, ...] | None = None, **kwargs) -> ScoreTable:
    specs = [
        RewardSpec(use, weight=w, **kwargs) for use, w in zip(uses, weights or [1.0] * len(uses), strict=True)
    ]
    return Scorer([load_reward(spec) for spec in specs])(groups)


def error_of(groups, use) -> RewardError:
    with pytest.raises(RewardError) as error:
        run(groups, use)
    return error.value


def test_none_is_no_opinion():
    def first(completion):
        return [1, None, 0, None][int(completion)]

    def second(completions):
        return [None, NAN, 2, 1]

    scores = run([group("0", "1", "2", "3")], first, second, weights=(1.0, 0.5))
    np.testing.assert_array_equal(scores.total, [[1, NAN, 1, 0.5]])
    np.testing.assert_array_equal(scores.per_function["first"], [[1, NAN, 0, NAN]])
    np.testing.assert_array_equal(scores.per_function["second"], [[NAN, NAN, 2, 1]])
    assert scores.means() == {"first": 0.5, "second": 1.5}
    assert scores.total.dtype == scores.per_function["first"].dtype == np.float64
    # The advantages that follow from these totals: mean 5/6, standard deviation (ddof 1) 0.288675.
    known = scores.total[~np.isnan(scores.total)]
    np.testing.assert_allclose(
        (known - known.mean()) / known.std(ddof=1), [0.57735, 0.57735, -1.15470], atol=5e-6
    )


def test_nobody_has_an_opinion():
    scores = run([group("a", "b")], lambda completion: None)
    assert np.isnan(scores.total).all()
    assert math.isnan(scores.means()["<lambda>"])
    assert np.isnan(Scorer([])([group("a", "b")]).total).all()


def test_weight_zero_only_logs():
    def logged(completion):
        return 3.0

    def counts(completion):
        return {"a": 1.0, "b": None}[completion]

    scores = run([group("a", "b")], logged, counts, weights=(0.0, 2.0))
    np.testing.assert_array_equal(scores.total, [[2.0, NAN]])
    np.testing.assert_array_equal(scores.per_function["logged"], [[3.0, 3.0]])


def test_rows_are_prompt_major_and_get_their_own_columns():
    groups = [group("a", "b", answer="x", level=1), group("c", "d", answer="y", level=2)]
    seen = {}

    def batch(completions, prompts, completion_ids, messages, finish, answer, level, scale):
        seen.update(locals())
        return [float(i) for i in range(4)]

    def single(completion, prompt, completion_ids, messages, finish, answer, level=9, missing="default"):
        assert (prompt, completion_ids, messages, finish, missing) == ("q", [5, 6], None, "eos", "default")
        return {"a": 0, "b": 1, "c": 10, "d": 11}[completion] + 100 * level + (answer == "y") * 1000

    scorer = Scorer([load_reward(RewardSpec(batch, args={"scale": 7})), load_reward(RewardSpec(single))])
    scores = scorer(groups)
    np.testing.assert_array_equal(scores.per_function["batch"], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(scores.per_function["single"], [[100, 101], [1210, 1211]])
    assert seen["completions"] == ["a", "b", "c", "d"]
    assert seen["answer"] == ["x", "x", "y", "y"] and seen["level"] == [1, 1, 2, 2]
    assert seen["prompts"] == ["q"] * 4 and seen["finish"] == ["eos"] * 4 and seen["scale"] == 7
    assert seen["completion_ids"] == [[5, 6]] * 4 and seen["messages"] == [None] * 4


def test_kwargs_get_every_column():
    def trl(completions, **kwargs):
        assert kwargs["answer"] == ["x", "x"] and kwargs["other"] == [None, None]
        assert kwargs["prompts"] == ["q", "q"] and kwargs["completion_ids"] == [[5, 6], [5, 6]]
        return [1.0, 2.0]

    def single(completion, **columns):
        return float(columns == {"answer": "x", "other": None})

    groups = [group("a", "b", answer="x", other=None)]
    scores = run(groups, trl, single)
    np.testing.assert_array_equal(scores.total, [[2.0, 3.0]])


def test_settings_win_over_columns_and_partials_too():
    def near(completion, limit):
        return float(limit)

    groups = [group("a", "b", limit=1)]
    assert run(groups, near).total[0, 0] == 1.0
    assert run(groups, near, args={"limit": 2}).total[0, 0] == 2.0
    assert run(groups, functools.partial(near, limit=3)).total[0, 0] == 3.0


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (None, NAN),
        (NAN, NAN),
        (np.float64(NAN), NAN),
        ({"score": None}, NAN),
    ],
)
def test_what_may_be_returned(returned, score):
    np.testing.assert_array_equal(run([group("a", "b")], lambda completion: returned).total, [[score, score]])
    np.testing.assert_array_equal(
        run([group("a", "b")], lambda completions: [returned] * 2).total, [[score] * 2]
    )


def test_arrays_and_tuples_are_fine_for_batches():
    assert run([group("a", "b")], lambda completions: np.array([1, 2])).total.tolist() == [[1, 2]]
    assert run([group("a", "b")], lambda completions: (1, 2)).total.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("1.0", 'returned "1.0" (str) for row 1 (prompt 0, completion 1); return a float or None.'),
        (
            math.inf,
            "returned inf for row 1 (prompt 0, completion 1); "
            "return a finite number, or None for no opinion.",
        ),
        (-math.inf, "returned -inf for row 1 (prompt 0, completion 1)"),
        (10**400, "returned inf for row 1 (prompt 0, completion 1)"),
        ([1.0], "returned [1.0] (list) for row 1 (prompt 0, completion 1); return a float or None."),
        (1j, "returned 1j (complex) for row 1"),
        ({"value": 1}, 'returned a dict without "score" for row 1 (prompt 0, completion 1) (keys: value)'),
        ({"score": "1"}, 'returned "1" (str) for row 1'),
    ],
)
def test_what_may_not_be_returned(returned, expected):
    def wrong(completion):
        return returned if completion == "b" else 0.0

    def wrong_batch(completions):
        return [0.0, returned]

    line = wrong.__code__.co_firstlineno
    for use, where in (wrong, f"test_runner.py:{line} wrong() "), (wrong_batch, "wrong_batch() "):
        message = str(error_of([group("a", "b")], use))
        assert expected in message and where in message


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1.0] * 3, "returned 3 values for 4 completions; return one float or None for each."),
        (1.0, "returned 1.0 (float) for 4 completions; return a list"),
        (None, "returned None (NoneType) for 4 completions; return a list"),
        ("abcd", 'returned "abcd" (str) for 4 completions; return a list'),
    ],
)
def test_batches_of_the_wrong_length(returned, expected):
    assert expected in str(error_of([group("a", "b"), group("c", "d")], lambda completions: returned))


def failing_single(completion):
    detail = {}
    if completion.startswith("c"):
        return detail["missing"]
    return 0.0


def failing_batch(completions):
    return [completions.nothing]


async def failing_async(completion):
    await asyncio.sleep(0)
    return failing_single(completion)


def line_of(text: str) -> int:
    return 1 + Path(__file__).read_text().splitlines().index(text)


@pytest.mark.parametrize(
    ("use", "line", "cause"),
    [
        (failing_single, '        return detail["missing"]', KeyError),
        (failing_async, '        return detail["missing"]', KeyError),
        (failing_batch, "    return [completions.nothing]", AttributeError),
    ],
)
def test_exceptions_name_line_function_row_and_completion(use, line, cause):
    error = error_of([group("a", "b"), group("c" * 200, "d")], use)
    assert isinstance(error.__cause__, cause)
    message = str(error)
    assert f"test_runner.py:{line_of(line)}: " in message
    assert f"{use.__name__}() raised {cause.__name__}: " in message
    if use is not failing_batch:
        assert "for row 2 (prompt 1, completion 0)" in message
        assert f"completion '{'c' * 80}'." in message


def test_the_first_bad_row_is_reported():
    def wrong(completion):
        raise KeyError(completion)

    groups = [group(*"abcd")] * 16
    assert {str(error_of(groups, wrong)) for _ in range(5)} == {str(error_of(groups, wrong))}
    assert "row 0 (" in str(error_of(groups, wrong))


def test_a_row_without_the_column():
    def exact(completion, answer):
        return 1.0

    message = str(error_of([group("a", "b", answer="x"), group("c", "d", solution="y")], exact))
    assert 'exact() needs "answer"; row 2 (prompt 1, completion 0) has only the columns solution.' in message


def test_notes():
    def judge(completion):
        return {"score": 1.0, "why": f"saw {completion}"}

    def plain(completion):
        return 0.0

    scores = run([group("a", "b")], judge, plain)
    assert scores.notes == [[{"judge.why": "saw a"}, {"judge.why": "saw b"}]]


def test_async_rewards_run_concurrently():
    inside = []

    async def meet(completion):
        inside.append(completion)
        for _ in range(1000):  # returns only once all eight of both functions are inside
            if len(inside) == 16:
                return 1.0
            await asyncio.sleep(0.005)
        return 0.0

    async def meet_too(completion):
        return await meet(completion)

    async def batch(completions):
        await asyncio.sleep(0)
        return [2.0] * len(completions)

    scores = run([group(*"abcd"), group(*"efgh")], meet, meet_too, batch)
    assert (scores.total == 4.0).all()


def test_async_rewards_keep_their_loop_and_work_inside_a_running_one():
    loops = set()

    async def loop(completion):
        loops.add(asyncio.get_running_loop())
        return 1.0

    async def notebook_cell():
        return run([group("a", "b")], loop).total.tolist()

    assert asyncio.run(notebook_cell()) == [[1.0, 1.0]]
    assert run([group("a", "b")], loop).total.tolist() == [[1.0, 1.0]]
    assert len(loops) == 1


def test_sync_rewards_overlap():
    inside = threading.Barrier(2, timeout=20)

    def meet(completion):
        inside.wait()
        return 1.0

    assert run([group("a", "b")], meet).total.tolist() == [[1.0, 1.0]]


def test_random_numbers_of_the_run_are_left_alone():
    def draws(completion):
        random.seed(1)
        np.random.seed(1)
        return random.random() + np.random.rand()

    def draws_and_fails(completions):
        raise KeyError(np.random.rand() + random.random())

    random.seed(7)
    np.random.seed(7)
    expected = (random.Random(7).random(), np.random.RandomState(7).rand())
    run([group("a", "b")], draws)
    error_of([group("a", "b")], draws_and_fails)
    assert (random.random(), np.random.rand()) == expected


def test_shapes():
    empty = run([], lambda completion: 1.0)
    assert empty.total.shape == (0, 0) and empty.notes == []
    with pytest.raises(RewardError, match=r"different numbers of completions: \[1, 2\]"):
        run([group("a", "b"), group("c")], lambda completion: 1.0)


def test_names_are_unique():
    with pytest.raises(RewardError, match='Two rewards are called "exact"'):
        Scorer([load_reward(RewardSpec("exact")), load_reward(RewardSpec("exact"))])


def test_built_ins_together():
    specs = [
        RewardSpec("math"),
        RewardSpec("regex", 0.5, args={"pattern": "boxed"}),
        RewardSpec("length", args={"max_tokens": 4, "cache": 4}),
    ]
    scores = Scorer([load_reward(spec) for spec in specs])([group("\\boxed{18}", "18", "17", answer=18)])
    # Two tokens of at most four: a penalty of 1/2 for each.
    assert scores.total.tolist() == [[1.0, 0.5, -0.5]]
    assert scores.notes[0][0] == {"math.read": "18"}


def test_empty_gold_names_the_row():
    error = error_of([group("1", "2", answer="1"), group("3", "4", answer="")], "math")
    assert "row 2 (prompt 1, completion 0)" in str(error) and "the answer is empty" in str(error)


# ------------------------------------------------------------------------- functions for other trainers


CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"})


def test_functions_that_want_messages():
    seen = []

    def trl(completions: list[list[dict[str, str]]], prompts, **kwargs):
        seen.append((prompts, completions))
        return [float(len(messages[0]["content"])) for messages in completions]

    def single(completion: "list[dict]", prompt):
        return float(completion == [{"role": "assistant", "content": "bb"}] and prompt[-1]["content"] == "q")

    def plain(completions, prompts):
        return [float(isinstance(text, str)) for text in completions]

    groups = [Group(Prompt(messages=CHAT), (Completion("a"), Completion("bb")))]
    table = run(groups, trl, single)
    assert table.per_function["trl"].tolist() == [[1.0, 2.0]]
    assert table.per_function["single"].tolist() == [[0.0, 1.0]]
    assert seen == [
        ([list(CHAT)] * 2, [[{"role": "assistant", "content": text}] for text in ("a", "bb")]),
    ]
    assert run(groups, plain).total.tolist() == [[1.0, 1.0]]
    assert run(groups, plain, form="messages").total.tolist() == [[0.0, 0.0]]
    # Without a conversation the prompt is one of its own.
    run([group("a", "bb")], trl)
    assert seen[1][0] == [[{"role": "user", "content": "q"}]] * 2


def test_messages_are_recognised_by_the_annotation():
    def with_types(completions: list[list[Any]]): ...
    def of_messages(completions: "list[list[ChatMessage]]"): ...  # type: ignore[name-defined]  # noqa: F821
    def text(completions: list[str]): ...
    def other(completions: list[str], answer: list[dict]): ...

    forms = [load_reward(RewardSpec(f)).form for f in (with_types, of_messages, text, other)]
    assert forms == ["text", "messages", "text", "text"]
    assert load_reward(RewardSpec(of_messages, form="text")).form == "text"


def test_verl():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=False, **settings):
        seen.append((data_source, solution_str, ground_truth, extra_info, strict, settings))
        return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}

    nested = {"style": "rule", "ground_truth": "72"}
    rows = [
        ({"data_source": "gsm8k", "ground_truth": "72", "extra_info": {"i": 1}}, ("gsm8k", {"i": 1})),
        ({"data_source": "gsm8k", "reward_model": nested, "answer": "x"}, ("gsm8k", None)),
        ({"answer": "72"}, ("", None)),
    ]
    for columns, (source, info) in rows:
        table = run(
            [group("72", "7", **columns)], compute_score, run="inline", args={"strict": True, "more": 1}
        )
        assert table.total.tolist() == [[1.0, 0.0]]
        assert table.notes[0][0] == {"compute_score.acc": True}
        assert seen[-1] == (source, "7", "72", info or columns, True, {"more": 1})
    message = str(error_of([group("72", "7", question="q")], compute_score))
    assert "compute_score() needs ground_truth; row 0 (prompt 0, completion 0) has it in none of" in message


def test_verl_is_checked_early():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...
    def both(solution_str, completion): ...

    reward = load_reward(RewardSpec(compute_score))
    assert (reward.style, reward.required, reward.lane) == ("solution_str", (), "process")
    check_columns(reward, ["reward_model"])
    with pytest.raises(RewardError, match=r"no column ground_truth or reward_model or answer \(question\)"):
        check_columns(reward, ["question"])
    with pytest.raises(RewardError, match="args sets `ground_truth`, which the trainer supplies"):
        load_reward(RewardSpec(compute_score, args={"ground_truth": 1}))
    with pytest.raises(RewardError, match="has both `completion` and `solution_str`"):
        load_reward(RewardSpec(both))
