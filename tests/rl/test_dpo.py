"""The loss of preference pairs: against a pair-by-pair computation, closed forms, and however a step is split.

The toy policy works in float64 and notices a wrong prefix, position or source.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from covey.policies.policy import Batch
from covey.rl import batch as batch_module
from covey.rl.batch import pack_pairs, split
from covey.rl.config import DpoSection
from covey.rl.dpo import explain_pairs, pair_loss, pair_metrics, preference_loss
from covey.rl.stats import Stats

VOCABULARY = 12
SECTIONS = [
    DpoSection(beta=0.5),
    DpoSection(beta=0.3, label_smoothing=0.2),
    DpoSection(beta=0.3, sft_weight=0.7),
    DpoSection(loss="ipo", beta=0.4),
    DpoSection(loss="ipo", beta=2.0, sft_weight=0.1),
    DpoSection(loss="hinge", beta=0.8),
]


@dataclass(frozen=True)
class Text:
    row: int
    ids: tuple[int, ...]
    trained: tuple[bool, ...]


Side = tuple[Sequence[int], Sequence[bool]]


def texts(row: int, prompt: Sequence[int], *sides: Side) -> tuple[Text, Text]:
    chosen, rejected = (
        Text(row, (*prompt, *ids), (*([False] * len(prompt)), *flags)) for ids, flags in sides
    )
    return chosen, rejected


def pair(
    row: int, prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int]
) -> tuple[Text, Text]:
    return texts(row, prompt, (chosen, [True] * len(chosen)), (rejected, [True] * len(rejected)))


class Toy(torch.nn.Module):
    """Logits at a token: its own embedding, its position's, and the mean of what it attends to."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def table(rows: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, VOCABULARY, generator=generator, dtype=torch.float64))

        self.own, self.context, self.position = table(VOCABULARY), table(VOCABULARY), table(64)

    def sequence(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Log-probs [T, V] after each token of one text."""
        mean = self.context[ids].cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        return (self.own[ids] + self.position[positions] + mean).log_softmax(-1)

    def logp(self, batch: Batch) -> Tensor:
        rows = [torch.zeros(0, VOCABULARY, dtype=torch.float64)]
        for start, end, prefix_start, prefix_end in batch.segments.tolist():
            at = torch.cat([torch.arange(prefix_start, prefix_end), torch.arange(start, end)])
            rows.append(
                self.sequence(batch.input_ids[at], batch.positions[at].long())[prefix_end - prefix_start :]
            )
        return torch.cat(rows)[batch.source].gather(1, batch.target[:, None])[:, 0]

    def document(self, text: Text) -> Tensor:
        """Log-probs of the targets of one text, which nothing else is packed with."""
        ids = torch.tensor(text.ids)
        logp = self.sequence(ids, torch.arange(len(ids)))
        return torch.stack([logp[i - 1, ids[i]] for i, trained in enumerate(text.trained) if trained])


POLICY, REFERENCE = Toy(0), Toy(1)


def gradient(loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(POLICY.parameters()))])


def packed(pairs: Sequence[tuple[Text, Text]]) -> Batch:
    batch = pack_pairs(pairs)
    return replace(batch, reference=REFERENCE.logp(batch).detach())


def run(parts: Sequence[Batch], section: DpoSection) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics summed over the parts."""
    total, grad, stats = 0.0, torch.zeros(1), Stats()
    for part in parts:
        loss, part_stats = preference_loss(POLICY.logp(part), part, section)
        total, grad, stats = total + loss.item(), grad + gradient(loss), stats + part_stats
    return total, grad, pair_metrics(stats)


def one_by_one(pairs: Sequence[tuple[Text, Text]], section: DpoSection) -> tuple[Tensor, dict[str, float]]:
    """The mean over the pairs, each from two texts of its own, in the words of the papers."""
    losses, h_values, chosen_d, rejected_d = [], [], [], []
    for chosen, rejected in pairs:
        logp, other = POLICY.document(chosen), POLICY.document(rejected)
        d, other_d = logp - REFERENCE.document(chosen).detach(), other - REFERENCE.document(rejected).detach()
        if section.loss == "ipo":
            h = d.mean() - other_d.mean()
            loss = (h - 1 / (2 * section.beta)) ** 2
        else:
            h = d.sum() - other_d.sum()
            loss = torch.clamp(1 - section.beta * h, min=0)
        if section.loss == "sigmoid":
            better = 1 / (1 + torch.exp(-section.beta * h))  # the Bradley-Terry probability
            loss = (
                -(1 - section.label_smoothing) * better.log() - section.label_smoothing * (1 - better).log()
            )
        losses.append(loss - section.sft_weight * logp.mean())
        h_values.append(h.item())
        reduce = Tensor.mean if section.loss == "ipo" else Tensor.sum
        chosen_d.append(reduce(d).item())
        rejected_d.append(reduce(other_d).item())
    n = len(pairs)
    metrics = {
        "dpo/accuracy": sum(h > 0 for h in h_values) / n,
        "dpo/margin": section.beta * sum(h_values) / n,
        "dpo/chosen": section.beta * sum(chosen_d) / n,
        "dpo/rejected": section.beta * sum(rejected_d) / n,
    }
    return torch.stack(losses).mean(), metrics


@st.composite
def steps(draw, sizes=(1, 2, 4)) -> list[tuple[Text, Text]]:
    """The weights are float32: with 1, 2 or 4 pairs they are exact, so everything can be compared in float64."""
    token = st.integers(0, VOCABULARY - 1)
    pairs = []
    for row in range(draw(st.sampled_from(sizes))):
        sides = []
        for _ in range(2):
            ids = draw(st.lists(token, min_size=1, max_size=7))
            flags = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            sides.append((ids, flags if any(flags) else [True] * len(ids)))
        pairs.append(texts(row, draw(st.lists(token, min_size=1, max_size=6)), *sides))
    return pairs


@settings(max_examples=100, deadline=None)
@given(steps(), st.sampled_from(SECTIONS), st.integers(1, 60))
def test_loss_gradient_and_metrics_are_those_of_the_pairs_one_by_one(step, section, budget):
    """One prompt for both completions or a copy each, in one pass or in many: the same."""
    expected, expected_metrics = one_by_one(step, section)
    expected_gradient, batch = gradient(expected), packed(step)
    for parts in ([batch], split(batch, budget, keep_families=True)):
        loss, grad, metrics = run(parts, section)
        assert loss == pytest.approx(expected.item(), abs=1e-10)
        torch.testing.assert_close(grad, expected_gradient, rtol=0, atol=1e-10)
        assert {name: metrics[name] for name in expected_metrics} == pytest.approx(
            expected_metrics, abs=1e-10
        )


@settings(max_examples=60, deadline=None)
@given(steps(sizes=(2, 3, 5, 6)), st.sampled_from(SECTIONS), st.integers(1, 60))
def test_no_split_and_no_order_changes_loss_gradient_or_metrics(step, section, budget):
    batch = packed(step)
    loss, grad, metrics = run([batch], section)
    parts = split(batch, budget, keep_families=True)
    for other in (parts, parts[::-1], [packed(step[::-1])]):
        other_loss, other_grad, other_metrics = run(other, section)
        assert other_loss == pytest.approx(loss, abs=1e-10)
        torch.testing.assert_close(other_grad, grad, rtol=0, atol=1e-10)
        assert other_metrics == pytest.approx(metrics, abs=1e-10)


@settings(max_examples=60, deadline=None)
@given(steps(sizes=(1, 3, 6)), st.integers(1, 60))
def test_a_pair_is_never_split_and_budgets_are_kept_where_they_can_be(step, budget):
    batch = packed(step)
    parts = split(batch, budget, keep_families=True)
    found = [sorted(set(part.row.tolist())) for part in parts]
    for rows in found:
        assert rows == [row for k in sorted({row // 2 for row in rows}) for row in (2 * k, 2 * k + 1)]
    assert sorted(itertools.chain(*found)) == list(range(2 * len(step)))
    assert all(
        len(part.input_ids) <= budget or len(rows) == 2 for part, rows in zip(parts, found, strict=True)
    )
    assert sum(len(part.input_ids) for part in parts) == len(batch.input_ids)  # no prompt is repeated


def test_without_keep_families_the_same_pair_would_be_split():
    batch = packed([pair(0, [1, 2], [3, 4, 5], [6, 7, 8])])
    assert len(split(batch, 4)) == 2 and len(split(batch, 4, keep_families=True)) == 1


# ------------------------------------------------------------------------------------------- packing


def test_a_pair_shares_its_prompt_and_forwards_no_last_token():
    batch = pack_pairs([pair(0, [7, 8], [1, 2, 3], [4]), pair(1, [9], [5, 6], [5, 1])])
    assert batch.input_ids.tolist() == [7, 8, 1, 2, 9, 5, 5]
    assert batch.segments.tolist() == [[0, 2, 0, 0], [2, 4, 0, 2], [4, 5, 0, 0], [5, 6, 4, 5], [6, 7, 4, 5]]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 1]
    assert batch.source.tolist() == [1, 2, 3, 1, 4, 5, 4, 6]
    assert batch.target.tolist() == [1, 2, 3, 4, 5, 6, 5, 1]
    assert batch.row.tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert batch.advantage.tolist() == [1, 1, 1, -1, 1, 1, -1, -1]
    assert batch.weight.tolist() == [0.5] * 8


def test_documents_that_part_before_their_first_target_share_what_they_begin_with():
    """As in conversations that differ from an earlier question on."""
    step = [texts(0, [1, 2], ([3, 4, 5], [False, True, True]), ([6, 7], [False, True]))]
    batch = packed(step)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 6]
    assert batch.source.tolist() == [2, 3, 4] and batch.target.tolist() == [4, 5, 7]
    section = SECTIONS[0]
    assert run([batch], section)[0] == pytest.approx(one_by_one(step, section)[0].item(), abs=1e-12)


def test_the_denominator_counts_the_pairs_of_all_ranks(monkeypatch):
    monkeypatch.setattr(batch_module, "gather_objects", lambda mine: [mine, 6])
    batch = pack_pairs([pair(0, [1], [2], [3]), pair(1, [1], [2], [3])])
    assert batch.weight.tolist() == [0.125] * 4


def test_what_cannot_be_packed_or_compared():
    with pytest.raises(ValueError, match="data row 3: not two documents"):
        pack_pairs([pair(3, [], [1, 2], [2, 2])])
    with pytest.raises(ValueError, match="data row 3: not two documents"):
        pack_pairs([pair(3, [1], [2], [])])
    batch = pack_pairs([pair(0, [1], [2], [3])])
    with pytest.raises(ValueError, match="relative to the reference"):
        preference_loss(POLICY.logp(batch), batch, SECTIONS[0])
    assert split(pack_pairs([]), 10, keep_families=True) == []
    assert pair_metrics(Stats()) == {"dpo/loss": 0.0, "loss/total": 0.0, "tokens/trained": 0.0}


# -------------------------------------------------------------------------------------- closed forms


def token_gradient(section: DpoSection, gap: float = 0.0) -> tuple[float, Tensor, dict[str, float]]:
    """Two pairs with 3 and 1 tokens, and with 2 and 2. Every log-prob is -1; `gap` is h, all of it in the chosen one's
    first token. Returns the loss, its gradient with respect to the log-probs, and the metrics."""
    batch = pack_pairs([pair(0, [1], [2, 3, 4], [5]), pair(1, [1], [6, 7], [8, 9])])
    logp = torch.full((8,), -1.0, requires_grad=True)
    reference = torch.full((8,), -1.0)
    reference[[0, 4]] -= gap
    loss, stats = preference_loss(logp, replace(batch, reference=reference), section)
    loss.backward()
    assert logp.grad is not None
    return loss.item(), logp.grad, pair_metrics(stats)


CHOSEN, REJECTED = [0, 1, 2, 4, 5], [3, 6, 7]  # which of the eight tokens


@pytest.mark.parametrize(("smoothing", "slope"), [(0.0, 0.1), (0.25, 0.05)])
def test_at_the_reference_the_loss_is_ln_2_and_every_token_has_the_same_gradient(smoothing, slope):
    """d/dh = -(1 - 2 eps) beta / 2, over 2 pairs."""
    loss, grad, metrics = token_gradient(DpoSection(beta=0.4, label_smoothing=smoothing))
    assert loss == pytest.approx(math.log(2), abs=1e-12)
    expected = torch.full((8,), slope)
    expected[CHOSEN] *= -1
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)
    assert metrics == {
        "dpo/loss": loss, "dpo/accuracy": 0.0, "dpo/margin": 0.0, "dpo/chosen": 0.0, "dpo/rejected": 0.0,
        "logp/chosen": -1.0, "logp/rejected": -1.0, "loss/total": loss, "tokens/trained": 8.0,
    }  # fmt: skip


def test_ipo_divides_by_the_length_of_each_completion():
    """h = 0: the loss is (1 / (2 beta))^2 and d/dh = -1 / beta; h is a difference of means."""
    loss, grad, _ = token_gradient(DpoSection(loss="ipo", beta=0.25))
    assert loss == pytest.approx(4.0, abs=1e-12)
    expected = 0.5 * 4.0 * torch.tensor([-1 / 3, -1 / 3, -1 / 3, 1.0, -1 / 2, -1 / 2, 1 / 2, 1 / 2])
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)


def test_hinge_pulls_until_the_margin_is_one():
    section = DpoSection(loss="hinge", beta=0.5)
    for gap, loss, slope in ((0.0, 1.0, 0.25), (1.5, 0.25, 0.25), (-2.0, 2.0, 0.25), (2.5, 0.0, 0.0)):
        value, grad, metrics = token_gradient(section, gap)
        assert value == pytest.approx(loss, abs=1e-6)
        torch.testing.assert_close(grad[CHOSEN], torch.full((5,), -slope))
        torch.testing.assert_close(grad[REJECTED], torch.full((3,), slope))
        assert metrics["dpo/margin"] == pytest.approx(0.5 * gap, abs=1e-6)


def test_sft_weight_adds_the_mean_nll_of_the_chosen_completions_tokens():
    """0.6 * 1 nat; per token 0.6 / (2 pairs * tokens of the completion), and nothing for the rejected one."""
    loss, grad, metrics = token_gradient(DpoSection(beta=0.4, sft_weight=0.6))
    assert loss == metrics["loss/total"] == pytest.approx(math.log(2) + 0.6, abs=1e-7)
    assert metrics["dpo/loss"] == pytest.approx(math.log(2)) and metrics["loss/sft"] == pytest.approx(
        0.6, abs=1e-7
    )
    expected = torch.tensor([-0.2, -0.2, -0.2, 0.1, -0.25, -0.25, 0.1, 0.1])
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "gap", "loss", "slope"),
    [
        ({}, 1000.0, math.exp(-100), -0.1 * math.exp(-100)),
        ({}, -1000.0, 100.0, -0.1),
        ({"label_smoothing": 0.1}, 1000.0, 10.0, 0.01),
        ({"loss": "hinge"}, 1000.0, 0.0, 0.0),
        ({"loss": "hinge"}, -1000.0, 101.0, -0.1),
        ({"loss": "ipo"}, 1000.0, 995.0**2, 1990.0),
        ({"loss": "ipo"}, -1000.0, 1005.0**2, -2010.0),
    ],
)
def test_a_thousand_nats_stay_finite_and_exact(options: dict[str, Any], gap, loss, slope):
    h = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
    value = pair_loss(h, DpoSection(**options))
    (grad,) = torch.autograd.grad(value.sum(), h)
    assert value.item() == pytest.approx(loss, rel=1e-12) and grad.item() == pytest.approx(slope, rel=1e-12)


def test_metrics_worked_by_hand():
    """beta 0.1. Pair 0: d = 2 + 1 = 3 and -1, h = 4. Pair 1: d = -1 and 0.5 + 0.5 = 1, h = -2."""
    batch = pack_pairs([pair(0, [1], [2, 3], [4]), pair(1, [1], [5], [6, 7])])
    logp = torch.tensor([-1.0, -2.0, -3.0, -4.0, -0.5, -1.5])
    batch = replace(batch, reference=torch.tensor([-3.0, -3.0, -2.0, -3.0, -1.0, -2.0]))
    loss, stats = preference_loss(logp, batch, DpoSection())
    expected = (math.log(1 + math.exp(-0.4)) + math.log(1 + math.exp(0.2))) / 2
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert pair_metrics(stats) == pytest.approx({
        "dpo/loss": expected, "dpo/accuracy": 0.5, "dpo/margin": 0.1, "dpo/chosen": 0.1, "dpo/rejected": 0.0,
        "logp/chosen": -7 / 3, "logp/rejected": -5 / 3, "loss/total": expected, "tokens/trained": 6.0,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (DpoSection(), ["[-log sigmoid(0.1 h)] / N", "summed over the completion's tokens"]),
        (DpoSection(beta=0.2, label_smoothing=0.1), ["-0.9 log sigmoid(0.2 h) - 0.1 log sigmoid(-0.2 h)"]),
        (DpoSection(loss="ipo", beta=0.5), ["[(h - 1)^2] / N", "its mean per token"]),
        (DpoSection(loss="hinge", sft_weight=0.5), ["[max(0, 1 - 0.1 h) + 0.5 nll] / N", "nll  "]),
    ],
)
def test_a_run_says_what_it_minimises(section, said):
    text = explain_pairs(section, "the model without its adapter")
    for words in [*said, "reference  the model without its adapter", "counted once per optimiser step"]:
        assert words in text
