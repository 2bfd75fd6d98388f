"""However a step is split, ordered or shared, its loss and gradient are the same.

Shown in float64 on a toy policy that is small enough to check by hand and, unlike a bigram table, notices a
wrong prefix, position or source.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from covey.policies.policy import Batch
from covey.rl.batch import pack, pack_documents, split
from covey.rl.objective_config import Loss, ObjectiveSection
from covey.rl.objectives import policy_objective, sft_loss
from covey.rl.stats import Stats
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


class Toy(torch.nn.Module):
    """float64. Logits at a token: its own embedding, its position's, and the mean of what it attends to."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def table(rows: int) -> torch.nn.Parameter:
            values = torch.randn(rows, VOCABULARY, generator=generator, dtype=torch.float64)
            return torch.nn.Parameter(values)

        self.own, self.context, self.position = table(VOCABULARY), table(VOCABULARY), table(64)

    def logp(self, batch: Batch) -> Tensor:
        context = [torch.zeros(0, VOCABULARY, dtype=torch.float64)]
        for start, end, prefix_start, prefix_end in batch.segments.tolist():
            ids = torch.cat([batch.input_ids[prefix_start:prefix_end], batch.input_ids[start:end]])
            mean = self.context[ids].cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
            context.append(mean[prefix_end - prefix_start :])
        logits = self.own[batch.input_ids] + self.position[batch.positions.long()] + torch.cat(context)
        logp = (logits[batch.source] / batch.temperature).log_softmax(-1)
        return logp.gather(1, batch.target[:, None])[:, 0]

    def gradient(self, parts: Sequence[Batch], loss=None) -> tuple[float, Tensor, Stats]:
        """Loss, gradient and statistics summed over the parts."""
        loss = loss or ppo
        total, stats = 0.0, Stats()
        self.zero_grad()
        for part in parts:
            value, part_stats = loss(self.logp(part), part)
            value.backward()
            total, stats = total + value.item(), stats + part_stats
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters()]
        return total, torch.cat([g.flatten() for g in grads]), stats


def ppo(logp: Tensor, batch: Batch, **options):
    return policy_objective(logp, batch, ObjectiveSection.model_validate({"beta": 0.1} | options))


def with_old(batch: Batch) -> Batch:
    generator = torch.Generator().manual_seed(0)
    noise = 0.5 * torch.randn(2, len(batch.source), generator=generator, dtype=torch.float64)
    logp = Toy().logp(batch).detach()
    return replace(batch, old=logp + noise[0], reference=logp + noise[1])


def same(left: Batch, right: Batch) -> bool:
    pairs = [(getattr(left, f.name), getattr(right, f.name)) for f in fields(Batch)]
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def four_rows() -> tuple[list[Group], list[list[float]]]:
    groups = [
        group([1, 2, 3], completion([4, 5, 6, 7]), completion([8])),
        group([2, 9], completion([3, 4, 10, 11, 5], trained=[1, 0, 0, 1, 1]), completion([6, 7, 8])),
    ]
    return groups, [[1.0, -0.5], [0.25, -2.0]]


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("sequence", 0.0), ("token", 0.6), ("constant", 0.1875)]
)
def test_length_bias_in_one_and_in_two_micro_batches(aggregation, expected):
    """Completions of 2 and 8 tokens, advantages +1 and -1, ratio 1, no KL, 16 tokens allowed."""
    groups = [group([1], completion([2] * 2), completion([3] * 8))]
    batch = pack_all(groups, [[1, -1]], aggregation=aggregation)
    parts = split(batch, 2)
    assert len(parts) == 2

    def loss_of(logp: Tensor, part: Batch):
        return ppo(logp, part, beta=0, correction="none")

    for pieces in ([batch], parts):
        assert Toy().gradient(pieces, loss_of)[0] == pytest.approx(expected, abs=1e-7)


def test_one_document_does_not_reach_another():
    first, second = Text(0, (11, 10, 9, 8), (True,) * 4), Text(1, (1, 2, 3), (True,) * 3)
    changed = replace(first, ids=(11, 7, 9, 8))
    before, after = (Toy().logp(pack_documents([text, second])) for text in (first, changed))
    assert torch.equal(before[3:], after[3:]) and not torch.equal(before[:3], after[:3])


def test_a_step_without_anything_to_train_on():
    groups, _ = four_rows()
    batch = pack_all(groups, np.zeros((2, 2)), skip_zero=True)
    assert split(batch, 10) == []
    loss, stats = ppo(Toy().logp(batch), batch, beta=0)
    assert loss.item() == 0 and stats.finish() == {"loss/policy": 0, "tokens/trained": 0}


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_skipping_zero_advantages_changes_neither_weights_nor_gradient(aggregation):
    groups, _ = four_rows()
    advantage = [[0.0, 0.0], [0.25, 0.0]]
    full = pack_all(groups, advantage, aggregation=aggregation)
    lean = pack_all(groups, advantage, aggregation=aggregation, skip_zero=True)
    assert lean.row.unique().tolist() == [2]
    assert lean.input_ids.tolist() == [2, 9, 3, 4, 10, 11]
    assert torch.equal(lean.weight, full.weight[full.row == 2])
    results = [Toy().gradient([batch], lambda logp, part: ppo(logp, part, beta=0)) for batch in (full, lean)]
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-12)


def lengths(parts: Sequence[Batch]) -> list[int]:
    return [len(part.input_ids) for part in parts]


def test_families_stay_together_where_they_fit():
    groups = [group([1] * 4, completion([2] * 3), completion([3] * 4)) for _ in range(3)]  # 4 + 2 + 3 tokens
    batch = pack_all(groups, np.ones((3, 2)))
    assert same(split(batch, 100)[0], batch) and lengths(split(batch, 27)) == [27]
    assert lengths(split(batch, 26)) == [18, 9]
    assert lengths(split(batch, 9)) == [9, 9, 9]
    assert [part.row.unique().tolist() for part in split(batch, 17)] == [[0, 1], [2, 3], [4, 5]]


def test_a_large_family_repeats_its_prompt_and_a_long_row_stands_alone():
    rows = [
        completion([2] * 4),
        completion([3] * 9),
        completion([4] * 3),
        completion([5]),
        completion([6] * 2),
    ]
    batch = pack_all([group([1, 1], *rows)], np.ones((1, 5)))
    parts = split(batch, 8)
    assert [part.row.unique().tolist() for part in parts] == [[0, 2, 3, 4], [1]]
    assert lengths(parts) == [2 + 3 + 2 + 1, 2 + 8]
    assert parts[0].segments.tolist() == [[0, 2, 0, 0], [2, 5, 0, 2], [5, 7, 0, 2], [7, 8, 0, 2]]
    parts = split(
        batch, 1
    )  # less than the prompt alone; the completion of one token has no segment of its own
    assert [part.row.unique().tolist() for part in parts] == [[0], [1], [2], [3], [4]]
    assert lengths(parts) == [5, 10, 4, 2, 3]


def test_columns_of_a_step_follow_their_tokens():
    groups, advantage = four_rows()
    batch = with_old(pack_all(groups, advantage, temperature=0.7))
    parts = split(batch, 7)
    assert len(parts) > 2
    for name in ("target", "advantage", "weight", "sampler", "old", "reference"):
        joined = torch.cat([getattr(part, name) for part in parts])
        order = torch.cat([part.row for part in parts]).argsort(stable=True)
        assert torch.equal(joined[order], getattr(batch, name))
    assert {part.temperature for part in parts} == {0.7}


@st.composite
def steps(draw) -> tuple[list[Group], np.ndarray, np.ndarray]:
    token = st.integers(0, VOCABULARY - 1)
    size = draw(st.integers(1, 4))
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        rows = []
        for _ in range(size):
            ids = draw(st.lists(token, max_size=9))
            flags = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            finish = draw(st.sampled_from(["eos", "length"]))
            rows.append(completion(ids, trained=flags, finish=finish))
        groups.append(group(draw(st.lists(token, min_size=1, max_size=6)), *rows))
    shape = (len(groups), size)
    advantage = draw(arrays(np.float64, shape, elements=st.sampled_from([-2.0, -0.5, 0.0, 1.0])))
    return groups, advantage, draw(arrays(np.bool_, shape))


options = st.fixed_dictionaries(
    {
        "aggregation": st.sampled_from(["token", "sequence", "constant", "prompt"]),
        "truncated": st.sampled_from(["keep", "mask"]),
        "skip_zero": st.booleans(),
        "count_zero_advantage": st.booleans(),
    }
)
sections = st.builds(
    ObjectiveSection,
    loss=st.sampled_from(sorted(set(get_args(Loss)) - {"luspo", "vespo"})),
    beta=st.just(0.1),
    kl=st.sampled_from(["k1", "k2", "k3"]),
    correction=st.sampled_from(["truncate", "mask"]),
    correction_level=st.sampled_from(["token", "sequence", "geometric"]),
) | st.sampled_from(
    [
        ObjectiveSection(loss="luspo", aggregation="sequence", beta=0.1),
        ObjectiveSection(loss="vespo", correction="none", beta=0.1),
    ]
)


@settings(max_examples=150, deadline=None)
@given(steps(), options, sections, st.integers(1, 60))
def test_no_split_changes_the_gradient(step, options, section, budget):
    """Every loss, correction and KL. Against unpacked rows too: every completion behind its own copy of the prompt,
    nothing left out."""
    batch = with_old(pack_all(*step, **options))

    def loss(logp: Tensor, part: Batch):
        return policy_objective(logp, part, section)

    parts, toy = split(batch, budget), Toy()
    for part in parts:
        own = sum(end - start for start, end, _, prefix_end in part.segments.tolist() if prefix_end)
        rows = part.row.unique()
        assert len(part.input_ids) <= budget or len(rows) == 1 or own == 0
    whole, gradient, stats = toy.gradient([batch], loss)
    for pieces in (parts, parts[::-1], unshared(step[0], batch)):
        value, other, other_stats = toy.gradient(pieces, loss)
        assert value == pytest.approx(whole, abs=1e-10)
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-10)
        if len(batch.source):
            assert other_stats.finish() == pytest.approx(stats.finish(), abs=1e-10)


def unshared(groups: Sequence[Group], batch: Batch) -> list[Batch]:
    pieces = []
    for row in batch.row.unique().tolist():
        p, g = divmod(row, len(groups[0].completions))
        prompt, sampled = groups[p].prompt.ids, groups[p].completions[g]
        ids = prompt + sampled.ids
        targets = [len(prompt) + i for i, trained in enumerate(sampled.trained) if trained]
        mine = batch.row == row
        columns = ("row", "advantage", "weight", "sampler", "old", "reference")
        pieces.append(
            Batch(
                input_ids=torch.tensor(ids),
                positions=torch.arange(len(ids), dtype=torch.int32),
                segments=torch.tensor([[0, len(ids), 0, 0]], dtype=torch.int32),
                source=torch.tensor(targets) - 1,
                target=torch.tensor(ids)[targets],
                **{name: getattr(batch, name)[mine] for name in columns},
            )
        )
    return pieces


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant", "prompt"])
def test_order_of_rows_and_groups_does_not_matter(aggregation):
    groups, advantage = four_rows()
    swapped = [replace(g, completions=g.completions[::-1]) for g in groups[::-1]]
    results = [
        Toy().gradient([pack_all(groups, advantage, aggregation=aggregation)], no_reference),
        Toy().gradient(
            [pack_all(swapped, np.array(advantage)[::-1, ::-1], aggregation=aggregation)], no_reference
        ),
    ]
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-12)


def no_reference(logp: Tensor, batch: Batch):
    return ppo(logp, batch, beta=0)


@pytest.mark.parametrize("budget", [1, 5, 9, 30, 100])
def test_documents_of_very_different_lengths_split_anyhow(budget):
    """1, 3, 9 and 27 supervised tokens: the loss is the mean over all 40, whatever is in a pass together."""
    documents = [
        Text(i, tuple(j % VOCABULARY for j in range(n + 1)), (True,) * (n + 1))
        for i, n in enumerate((1, 3, 9, 27))
    ]
    batch, toy = pack_documents(documents), Toy()
    loss, gradient, stats = toy.gradient([batch], sft_loss)
    assert loss == pytest.approx(-toy.logp(batch).mean().item(), abs=1e-7)
    assert stats.finish()["tokens/trained"] == 40
    other_loss, other, _ = toy.gradient(split(batch, budget), sft_loss)
    assert other_loss == pytest.approx(loss, abs=1e-10)
    torch.testing.assert_close(other, gradient, rtol=0, atol=1e-10)


def test_micro_batches_of_different_size_against_the_closed_form():
    """B01. Bias-only model of two classes at zero: eight targets of class 0, two of class 1. The gradient of the
    mean is softmax - counts / 10 = (-0.3, +0.3); the mean of the two micro-batches' means would be 0."""
    documents = [Text(0, (0,) * 9, (True,) * 9), Text(1, (1,) * 3, (True,) * 3)]
    parts = split(pack_documents(documents), 8)
    assert [len(part.target) for part in parts] == [8, 2]
    bias = torch.zeros(2, requires_grad=True)
    for part in parts:
        sft_loss(bias.log_softmax(0)[part.target], part)[0].backward()
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, torch.tensor([-0.3, 0.3]), rtol=0, atol=1e-7)
    per_token = [torch.full((8,), -1.0), torch.full((2,), -4.0)]
    losses = [sft_loss(logp, part)[0].item() for logp, part in zip(per_token, parts, strict=True)]
    assert sum(losses) == pytest.approx(1.6)


def test_a_short_last_step_has_the_gradient_norm_of_the_others():
    """B01. Five equal rows of one target, two per step: 2, 2, 1. The bias model's gradient is (-1/2, 1/2) in each."""
    documents = [Text(i, (0, 0), (True, True)) for i in range(5)]
    for step in (documents[:2], documents[2:4], documents[4:]):
        bias = torch.zeros(2, requires_grad=True)
        for part in split(pack_documents(step), 1):
            sft_loss(bias.log_softmax(0)[part.target], part)[0].backward()
        assert bias.grad is not None
        assert bias.grad.norm().item() == pytest.approx(0.70711, abs=5e-6)


def test_documents_fill_the_passes():
    """Packed lengths 5 1 4 3 1 2 for passes of 5 tokens: three full ones and a fourth, the fewest that hold 16."""
    lengths = [6, 2, 5, 4, 2, 3]  # the last token of a document is not packed
    documents = [Text(i, (1,) * n, (True,) * n) for i, n in enumerate(lengths)]
    parts = split(pack_documents(documents), 5)
    assert [sorted(part.row.unique().tolist()) for part in parts] == [[0], [1, 2], [3, 5], [4]]
    assert [len(part.input_ids) for part in parts] == [5, 5, 5, 1]
