"""What is packed, with which weights. tests/rl/test_split.py proves that no split changes a gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from covey.policies.policy import Batch
from covey.rl.batch import pack, pack_documents, split, to_device, token_weights
from covey.rollout.engine import Completion, Finish, Group, Prompt

VOCABULARY = 12


@dataclass(frozen=True)
class Text:
    row: int
    ids: tuple[int, ...]
    trained: tuple[bool, ...]


def completion(
    ids: Sequence[int], *, trained: Sequence[int] | None = None, finish: Finish = "eos"
) -> Completion:
    flags = tuple(map(bool, trained)) if trained is not None else (True,) * len(ids)
    return Completion(tuple(ids), tuple(-0.1 * i for i in ids), flags, "", finish)


def group(prompt: Sequence[int], *completions: Completion) -> Group:
    return Group(Prompt(0, tuple(prompt), ""), completions)


def pack_all(groups, advantage, scored=None, **options) -> Batch:
    advantage = np.array(advantage, np.float64)
    scored = np.ones(advantage.shape, bool) if scored is None else np.array(scored, bool)
    defaults = {
        "aggregation": "token",
        "max_new_tokens": 16,
        "truncated": "keep",
        "skip_zero": False,
        "temperature": 1.0,
    }
    return pack(groups, advantage, scored, **(defaults | options))


def four_rows() -> tuple[list[Group], list[list[float]]]:
    groups = [
        group([1, 2, 3], completion([4, 5, 6, 7]), completion([8])),
        group([2, 9], completion([3, 4, 10, 11, 5], trained=[1, 0, 0, 1, 1]), completion([6, 7, 8])),
    ]
    return groups, [[1.0, -0.5], [0.25, -2.0]]


# what is packed


def test_a_group_shares_its_prompt_and_forwards_no_last_token():
    batch = pack_all([group([7, 8], completion([1]), completion([2, 3]), completion([4, 5, 6]))], [[1, 2, 3]])
    assert batch.input_ids.tolist() == [7, 8, 2, 4, 5]  # the 1, 3 and 6 predict nothing
    assert batch.positions.tolist() == [0, 1, 2, 2, 3]
    assert batch.segments.tolist() == [
        [0, 2, 0, 0],
        [2, 3, 0, 2],
        [3, 5, 0, 2],
    ]  # none for the completion [1]
    assert batch.source.tolist() == [1, 1, 2, 1, 3, 4]
    assert batch.target.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.row.tolist() == [0, 1, 1, 2, 2, 2]
    assert batch.advantage.tolist() == [1, 2, 2, 3, 3, 3]
    assert batch.sampler is not None
    np.testing.assert_allclose(batch.sampler, [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6], rtol=1e-6)
    assert [t.dtype for t in (batch.input_ids, batch.source, batch.target)] == [torch.int64] * 3
    assert [t.dtype for t in (batch.positions, batch.segments, batch.row)] == [torch.int32] * 3
    assert [t.dtype for t in (batch.advantage, batch.weight, batch.sampler)] == [torch.float32] * 3


def test_a_second_group_has_its_own_prompt():
    groups, advantage = four_rows()
    batch = pack_all(groups, advantage)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 2, 9, 3, 4, 10, 11, 6, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 2, 3]
    assert batch.segments.tolist() == [
        [0, 3, 0, 0],
        [3, 6, 0, 3],
        [6, 8, 0, 0],
        [8, 12, 6, 8],
        [12, 14, 6, 8],
    ]
    assert batch.row.tolist() == [0] * 4 + [1] + [2] * 3 + [3] * 3


def test_tokens_of_a_tool_are_read_but_not_scored():
    tool = completion([3, 4, 10, 11, 5, 6, 6], trained=[1, 0, 0, 1, 1, 0, 0])
    batch = pack_all([group([1, 2], tool, completion([9], trained=[0]))], [[1, 1]])
    assert batch.input_ids.tolist() == [
        1,
        2,
        3,
        4,
        10,
        11,
    ]  # nothing is forwarded behind the last trained token
    assert batch.source.tolist() == [1, 4, 5]
    assert batch.target.tolist() == [3, 11, 5]
    assert batch.row.tolist() == [0, 0, 0]
    np.testing.assert_allclose(batch.weight, 1 / 3)


def test_an_eos_that_is_also_the_pad_id_is_read_and_trained():  # the known bug masks by id
    eos = 2
    batch = pack_all([group([9, eos, 5], completion([6, 7, eos]), completion([6, 7, 8, 9]))], [[1, -1]])
    assert batch.input_ids.tolist() == [9, eos, 5, 6, 7, 6, 7, 8]
    assert batch.target.tolist() == [6, 7, eos, 6, 7, 8, 9]
    document = Text(0, (5, 6, 7, eos), (False, True, True, True))
    assert pack_documents([document]).target.tolist() == [6, 7, eos]


def test_documents_do_not_see_each_other():
    documents = [Text(0, (11, 10, 9, 8), (True,) * 4), Text(1, (1, 2, 3), (True,) * 3)]
    batch = pack_documents(documents)
    assert batch.input_ids.tolist() == [11, 10, 9, 1, 2]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.segments.tolist() == [[0, 3, 0, 0], [3, 5, 0, 0]]
    assert batch.target.tolist() == [10, 9, 8, 2, 3]  # the first token of a document is not a target
    assert batch.row.tolist() == [0, 0, 0, 1, 1]
    np.testing.assert_allclose(batch.weight, 0.2)
    assert batch.sampler is None and batch.advantage.tolist() == [1.0] * 5


def test_documents_of_all_lengths():
    documents = [
        Text(0, (1,), (True,)),
        Text(1, (1, 2, 3), (False,) * 3),
        Text(2, (4, 5), (False, True)),
        Text(3, (6, 7, 8, 9), (True, True, False, False)),
    ]
    batch = pack_documents(documents)
    assert batch.input_ids.tolist() == [4, 6] and batch.target.tolist() == [5, 7]
    assert batch.row.tolist() == [2, 3] and batch.weight.tolist() == [0.5, 0.5]
    assert len(pack_documents([]).target) == 0


# weights


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [("sequence", 0.25, 0.0625), ("token", 0.1, 0.1), ("constant", 0.03125, 0.03125)],
)
def test_weights_of_a_short_and_a_long_completion(aggregation, short, long):
    batch = pack_all(
        [group([1], completion([2] * 2), completion([3] * 8))], [[1, -1]], aggregation=aggregation
    )
    np.testing.assert_allclose(batch.weight, [short] * 2 + [long] * 8, rtol=1e-7)


def test_weights_add_up():
    trained = np.array([[3, 0, 5], [1, 1, 0]])
    assert (token_weights(trained, "token", 16) * trained).sum() == pytest.approx(1)
    np.testing.assert_allclose((token_weights(trained, "sequence", 16) * trained)[trained > 0], 1 / 4)
    np.testing.assert_allclose(token_weights(trained, "constant", 16)[trained > 0], 1 / 64)
    with pytest.raises(ValueError, match="one of token, sequence, constant"):
        token_weights(trained, "mean", 16)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("aggregation", "weight"), [("token", 1 / 5), ("sequence", 1 / (2 * 3)), ("constant", 1 / (2 * 16))]
)
def test_unscored_and_masked_rows_leave_the_loss_and_its_denominator(aggregation, weight):
    rows = (
        completion([2] * 3),
        completion([3] * 4, finish="length"),
        completion([4] * 5),
        completion([5] * 2),
    )
    batch = pack_all(
        [group([1], *rows)], [[1, 1, 0, -1]], [[1, 1, 0, 1]], aggregation=aggregation, truncated="mask"
    )
    assert batch.row.tolist() == [0, 0, 0, 3, 3]
    assert batch.weight[0].item() == pytest.approx(weight)
    kept = pack_all([group([1], *rows)], [[1, 1, 0, -1]], [[1, 1, 0, 1]], aggregation=aggregation)
    assert kept.row.unique().tolist() == [0, 1, 3]
    assert kept.weight[0] < batch.weight[0]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("case", ["nobody scored", "all cut off", "all zero", "no groups", "nothing trained"])
def test_nothing_to_train_on_is_an_empty_batch(case, aggregation):
    cut = completion([2, 3], finish="length")
    groups, advantage, scored = [group([1], cut, cut)], np.ones((1, 2)), np.ones((1, 2), bool)
    if case == "nobody scored":
        scored = np.zeros((1, 2), bool)
    if case == "all zero":
        advantage = np.zeros((1, 2))
    if case == "no groups":
        groups, advantage, scored = [], np.ones((0, 2)), np.ones((0, 2), bool)
    if case == "nothing trained":
        groups = [group([1], completion([]), completion([3], trained=[0]))]
    truncated = "mask" if case == "all cut off" else "keep"
    batch = pack_all(groups, advantage, scored, aggregation=aggregation, truncated=truncated, skip_zero=True)
    assert len(batch.input_ids) == len(batch.segments) == len(batch.source) == len(batch.weight) == 0
    assert batch.segments.shape == (0, 4) and split(batch, 10) == []


# the rest


def test_to_device_leaves_segments_on_the_cpu():
    groups, advantage = four_rows()
    batch = pack_all(groups, advantage)
    batch = replace(batch, old=batch.sampler)
    moved = to_device(batch, "meta")
    assert moved.segments.device.type == "cpu" and torch.equal(moved.segments, batch.segments)
    assert moved.reference is None and moved.temperature == batch.temperature
    for name in (
        "input_ids",
        "positions",
        "source",
        "target",
        "row",
        "advantage",
        "weight",
        "sampler",
        "old",
    ):
        assert getattr(moved, name).device.type == "meta"


def test_what_is_refused():
    good = completion([2, 3])
    with pytest.raises(ValueError, match="1 groups with advantages"):
        pack_all([group([1], good)], np.ones((2, 1)))
    with pytest.raises(ValueError, match=r"group 0 .*: 1 completions where the advantages have 2"):
        pack_all([group([1], good)], np.ones((1, 2)))
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        pack_all([group([], good)], np.ones((1, 1)))
    with pytest.raises(ValueError, match="completion 1: 2 ids, 1 log-probs and 2 trained flags"):
        pack_all([group([1], good, replace(good, logprobs=(-1.0,)))], np.ones((1, 2)))
    with pytest.raises(ValueError, match="must be finite"):
        pack_all([group([1], replace(good, logprobs=(-1.0, float("nan"))))], np.ones((1, 1)))
    pack_all(
        [group([1], replace(good, logprobs=(-1.0, float("nan")), trained=(True, False)))], np.ones((1, 1))
    )
    with pytest.raises(ValueError, match="data row 3: 2 ids and 1 trained flags"):
        pack_documents([Text(3, (1, 2), (True,))])


def test_weights_by_prompt():
    """Prompts with 2 + 8 and 5 trained tokens count the same; one that trains nothing does not count."""
    trained = np.array([[2, 8], [5, 0], [0, 0]])
    np.testing.assert_allclose(
        token_weights(trained, "prompt", 16), [[1 / 20, 1 / 20], [1 / 10, 0], [0, 0]], rtol=1e-15
    )


def test_rows_with_advantage_zero_can_leave_the_denominator():
    rows = [completion([1] * n) for n in (1, 2, 3)]
    groups, advantage = [group([1], *rows)], [[1, 0, -1]]
    for counted, tokens in ((True, 6), (False, 4)):
        batch = pack_all(groups, advantage, count_zero_advantage=counted)
        np.testing.assert_allclose(batch.weight, 1 / tokens, rtol=1e-6)
        assert (1 in batch.row) is counted
