"""Pass rates, prompts that are left out, and groups that are replaced: worked out by hand on a few rows."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import covey
from covey.rewards.runner import ScoreTable
from covey.rl.config import CurriculumSection, DataSection, GrpoConfig
from covey.rl.config_file import ConfigError, load_config
from covey.rl.curriculum import Curriculum, Supply, has_spread
from covey.rl.data import Cursor, DataError
from covey.rollout.engine import Completion, Group, Prompt

NAN = float("nan")


def prompts(count: int, **columns: Sequence[Any]) -> list[Prompt]:
    """Prompts of the data rows 10, 11, ...; columns: a value per prompt."""
    return [
        Prompt(10 + i, (1,), "", columns={name: values[i] for name, values in columns.items()})
        for i in range(count)
    ]


def group(prompt: Prompt, size: int) -> Group:
    return Group(prompt, (Completion((1,), (-1.0,), (True,), "", "eos"),) * size)


def curriculum(
    count: int, batch: int, *, shuffle: bool = False, columns: Any = None, **settings: Any
) -> Curriculum:
    data = DataSection(train="x", shuffle=shuffle)
    return Curriculum(prompts(count, **(columns or {})), batch, data, CurriculumSection(**settings))


def observe(cursor: Curriculum, *rewards: tuple[int, Sequence[float]]) -> None:
    """rewards: (place, the rewards of its group)."""
    for place, values in rewards:
        cursor.observe([group(Prompt(10 + place, (1,), ""), len(values))], np.array([values]))


def test_what_is_always_or_never_solved_is_left_out_of_the_next_epoch() -> None:
    cursor = curriculum(5, 2, drop_solved=2, drop_unsolved=1)
    assert [cursor.next(), cursor.next()] == [[0, 1], [2, 3]]
    observe(cursor, (0, [1, 1]), (1, [1, 0]), (2, [0.2, 0.4]), (3, [0.5, 1]), (4, [NAN, NAN]))
    assert cursor.rate == [1.0, 0.5, 0.0, 1.0, None]
    assert cursor.next() == [4, 0]  # row 2 was never solved; rows 0 and 3 once, which is not twice
    assert cursor.next() == [1, 3]
    observe(cursor, (0, [1, 1]), (3, [1, 0]), (3, [1, 1]))
    assert cursor.next() == [4, 1]  # row 0 was solved twice in a row, row 3 was not
    assert cursor.next() == [3, 4]


def test_if_too_few_are_left_all_come_back(caplog: pytest.LogCaptureFixture) -> None:
    cursor = curriculum(3, 2, drop_solved=1)
    observe(cursor, (0, [1, 1]), (1, [1, 1]))
    assert cursor.next() == [0, 1]
    with caplog.at_level(logging.INFO, "covey"):
        assert cursor.next() == [2, 0]
    assert "epoch 2: 2 of 3 prompts are left out, 2 as always and 0 as never solved" in caplog.text
    assert "only 1 prompts would be left, and a step takes 2: all come back" in caplog.text
    assert cursor.next() == [1, 2]


def test_easy_prompts_come_first_and_unknown_ones_in_the_middle() -> None:
    columns = {"known": [0.1, None, 0.9, 1.0, 0]}
    cursor = curriculum(5, 5, order="easy_first", pass_rate="known", columns=columns)
    assert cursor.next() == [3, 2, 1, 0, 4]
    observe(cursor, (4, [1, 1, 1, 0]), (2, [0, 0, 0, 1]))
    assert cursor.next() == [3, 4, 1, 2, 0]  # 1, 0.75, unknown, 0.25, 0.1
    shuffled = curriculum(5, 5, order="easy_first", shuffle=True, columns=columns)
    assert shuffled.next() == Cursor(5, 5, 0, True).next()  # nothing is known, so nothing is sorted


def test_a_known_pass_rate_leaves_out_at_once() -> None:
    cursor = curriculum(
        4, 2, drop_solved=3, drop_unsolved=2, pass_rate="known", columns={"known": [1, 0.5, 0, 0.2]}
    )
    assert [cursor.next(), cursor.next()] == [[1, 3], [1, 3]]
    with pytest.raises(
        DataError, match=r'row 11 has 50 in the column "known"; a pass rate is a number from 0 to 1'
    ):
        curriculum(2, 1, pass_rate="known", drop_solved=1, columns={"known": [0.5, 50]})


def test_a_resumed_curriculum_goes_on_as_if_nothing_had_happened() -> None:
    def make() -> Curriculum:
        return curriculum(7, 2, shuffle=True, order="easy_first", drop_solved=1, drop_unsolved=2)

    def rewards(step: int) -> list[list[float]]:
        return [[(place + step) % 3 > 0, place % 2] for place in range(7)]

    def run(cursor: Curriculum, steps: Sequence[int]) -> list[list[int]]:
        taken = []
        for step in steps:
            taken.append(cursor.next())
            observe(cursor, *((place, rewards(step)[place]) for place in taken[-1]))
        return taken

    whole = run(make(), range(12))
    first = make()
    assert run(first, range(5)) == whole[:5]
    second = make()
    second.restore(first.state())
    assert run(second, range(5, 12)) == whole[5:]
    with pytest.raises(DataError, match="made without a curriculum"):
        make().restore(Cursor(7, 2, 0, True).state())


def test_spread() -> None:
    reward_PG = np.array([[1, 1], [1, 0], [NAN, 1], [NAN, NAN], [0.1, 0.3]])
    assert list(has_spread(reward_PG)) == [False, True, False, False, True]


class Scores:
    """Samples prompts whose rewards are known by row; keeps what was asked for."""

    def __init__(self, rewards: dict[int, Sequence[float]]):
        self.rewards, self.asked = rewards, []

    def __call__(self, prompts: Sequence[Prompt]) -> tuple[list[Group], ScoreTable]:
        rows = [prompt.row for prompt in prompts]
        self.asked.append(rows)
        total = np.array([self.rewards[row] for row in rows], float)
        notes: list[list[dict[str, Any]]] = [[{"row": row}, {}] for row in rows]
        table = ScoreTable(total, {"f": 2 * total}, notes, {"f/errors": len(rows)}, {"f": total + 1})
        return [group(prompt, 2) for prompt in prompts], table


def complete(rewards: Sequence[Sequence[float]], batch: int, rounds: int):
    data = prompts(len(rewards))
    cursor = Cursor(len(data), batch, 0, False)
    sample = Scores({10 + i: values for i, values in enumerate(rewards)})
    groups, scores = sample([data[place] for place in cursor.next()])
    groups, scores, measured = Supply(data, cursor, rounds).complete(groups, scores, sample, 4)
    assert [note[0]["row"] for note in scores.notes] == [g.prompt.row for g in groups]
    np.testing.assert_array_equal(scores.total, [sample.rewards[g.prompt.row] for g in groups])
    np.testing.assert_array_equal(scores.per_function["f"], 2 * scores.total)
    np.testing.assert_array_equal(scores.seconds["f"], scores.total + 1)
    assert scores.failures == {"f/errors": sum(map(len, sample.asked))}
    return [g.prompt.row for g in groups], sample.asked, measured


DEAD, LIVE = [1, 1], [1, 0]


def test_dead_groups_are_replaced_by_as_many_as_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    rows, asked, measured = complete([DEAD, LIVE, DEAD, DEAD, LIVE, LIVE, LIVE], batch=3, rounds=3)
    assert asked == [[10, 11, 12], [13, 14], [15]]
    assert rows == [11, 14, 15]
    assert measured == {"groups/sampled": 6, "reward/sampled": 0.75}  # 9 of the 12 completions
    assert not caplog.records


def test_the_cap_is_kept_and_said(caplog: pytest.LogCaptureFixture) -> None:
    rows, asked, _ = complete([DEAD, LIVE, DEAD, DEAD, DEAD, LIVE, DEAD, [0, 0]], batch=3, rounds=2)
    assert asked == [[10, 11, 12], [13, 14], [15, 16]]
    assert rows == [10, 11, 15]  # filled up with the first of the others
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().startswith(
        "step 5: 2 of 3 groups have rewards that differ, after 2 rounds for more (rollout.dynamic_sampling: 2 is the "
        "limit). 5 of the 7 groups sampled have equal rewards, 1 on average."
    )


def test_no_prompt_is_sampled_twice_in_a_step(caplog: pytest.LogCaptureFixture) -> None:
    rows, asked, _ = complete([DEAD, LIVE, DEAD], batch=2, rounds=9)
    assert asked == [[10, 11], [12]] and rows == [10, 11]
    assert "9 would allow more, but all prompts were sampled" in caplog.text


def test_without_rounds_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    assert complete([DEAD, LIVE, LIVE], batch=2, rounds=0) == ([10, 11], [[10, 11]], {})
    assert not caplog.records


def test_a_run_with_both(tmp_path: Path) -> None:
    """Rows 0 to 3 have equal rewards, always 0 or always 1; the other four differ."""

    def reward(completion: str, kind: str) -> float:
        return {"never": 0.0, "always": 1.0}.get(kind, (sum(map(ord, completion)) % 16) / 16)

    kinds = ["never", "never", "always", "always", *["both"] * 4]
    run = covey.grpo(
        {
            "model": {"path": "tiny", "method": "lora", "dtype": "float32", "device": "cpu"},
            "data": {"train": "none", "shuffle": False},
            "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6, "dynamic_sampling": 3},
            "curriculum": {"drop_solved": 1, "drop_unsolved": 1},
            "optim": {"steps": 4},
            "run": {"dir": str(tmp_path), "threads": 1, "samples_every": 0, "save_every": 2},
        },
        rewards=[reward],
        data=[{"prompt": f"{i}:", "kind": kind} for i, kind in enumerate(kinds)],
        plain=True,
    )
    # 0 1 | 2 3 | 4 5, then 6 7, then without the first four: 4 5, 6 7.
    assert list(run.metrics.column("groups/sampled")) == [6, 2, 2, 2]
    assert list(run.metrics.column("groups/no_spread")) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"curriculum": {"passing": 0.7}}, "curriculum.passing: has no effect alone"),
        (
            {"rollout": {"dynamic_sampling": 2}, "objective": {"advantage": "reinforce++"}},
            "rollout.dynamic_sampling: has no meaning for objective.advantage reinforce++",
        ),
    ],
)
def test_settings_without_effect_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"model": {"path": "tiny"}, "data": {"train": "x"}, **sections}, [], GrpoConfig)
    assert message in str(error.value)
