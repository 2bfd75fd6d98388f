"""Packs a step's completions (or documents) into one Batch, with its weights, and splits it into passes.

Axes: P prompts, G completions of a prompt, T packed tokens, S segments, M scored tokens, R packed rows.

A row is a completion or a document. In a Batch its scored tokens stand together, in order: they are the
trained tokens of completion `row % G` of group `row // G` (of document `row`), from first to last. Nothing is
packed behind the token that predicts a row's last trained one, because nothing reads its hidden state: a
completion of C trained tokens costs C - 1, and one of length 1 costs none.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
import torch

from covey.policies.policy import Batch
from covey.rl.distributed import gather_objects, gather_rows
from covey.rl.objective_config import Aggregation
from covey.rollout.engine import Completion, Group

Span = tuple[int, int]  # start and end in the packed tokens


class Document(Protocol):
    """A supervised text: `trained[i]` says that token i is a target. `row` is its place in the data set."""

    @property
    def row(self) -> int: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def trained(self) -> Sequence[bool]: ...


def pack(
    groups: Sequence[Group],
    advantage_PG: np.ndarray,
    scored_PG: np.ndarray,
    *,
    aggregation: Aggregation,
    max_new_tokens: int,
    truncated: Literal["keep", "mask"],
    skip_zero: bool,
    temperature: float,
    count_zero_advantage: bool = True,
) -> Batch:
    """One Batch, on the CPU, of everything that an optimiser step trains on; empty if there is nothing.

    A row is in the loss if somebody scored it, it has trained tokens and, with truncated="mask", the length
    limit did not cut it off; without count_zero_advantage also only if its advantage is not 0. The weights follow
    from these rows alone, over all ranks (see token_weights). Only after that skip_zero leaves out rows with
    advantage exactly 0: it changes no gradient where no other term pulls on them. The weights and the advantages are
    float32. Raises ValueError for shapes that do not match and for log-probs that are not finite.
    """
    if advantage_PG.shape != scored_PG.shape or len(groups) != len(advantage_PG):
        raise ValueError(
            f"{len(groups)} groups with advantages {advantage_PG.shape} and scores {scored_PG.shape}"
        )
    size = advantage_PG.shape[1]
    for p, group in enumerate(groups):
        _check_group(group, f"group {p} (data row {group.prompt.row})", size)

    trained_PG = trained_tokens(groups, scored_PG, truncated)
    if not count_zero_advantage:
        trained_PG = np.where(advantage_PG != 0, trained_PG, 0)
    weight_PG = token_weights(trained_PG, aggregation, max_new_tokens)
    packed_PG = (weight_PG > 0) & (advantage_PG != 0) if skip_zero else weight_PG > 0

    packer = _Packer()
    for p, group in enumerate(groups):
        if not packed_PG[p].any():
            continue
        prompt = packer.segment(np.array(group.prompt.ids, np.int64))
        for g in np.flatnonzero(packed_PG[p]):
            row = p * size + int(g)
            packer.completion(row, group.completions[g], prompt, advantage_PG[p, g], weight_PG[p, g])
    return packer.batch(temperature, with_sampler=True)


def trained_tokens(
    groups: Sequence[Group], scored_PG: np.ndarray, truncated: Literal["keep", "mask"]
) -> np.ndarray:
    """How many tokens of each row are in the loss, int64 [P, G]; 0 for a row that is left out of it."""
    if not len(groups):
        return np.zeros(scored_PG.shape, np.int64)
    trained_PG = np.array([[sum(c.trained) for c in group.completions] for group in groups], np.int64)
    in_loss_PG = scored_PG.astype(bool)
    if truncated == "mask":
        in_loss_PG &= np.array([[c.finish != "length" for c in group.completions] for group in groups])
    return np.where(in_loss_PG, trained_PG, 0)


def token_weights(trained_PG: np.ndarray, aggregation: Aggregation, max_new_tokens: int) -> np.ndarray:
    """Weight of one token of each row, float64 [P, G], from how many tokens each row trains.

    With N_s rows and N_p prompts in the loss, T_i trained tokens in row i, T_p in its prompt's rows and N_t in all:
    token 1 / N_t, sequence 1 / (N_s T_i), constant 1 / (N_s max_new_tokens), prompt 1 / (N_p T_p); counted over all
    ranks. A row without trained tokens weighs 0.
    """
    everywhere_PG, _ = gather_rows(trained_PG)
    rows, prompts = np.count_nonzero(everywhere_PG), np.count_nonzero(everywhere_PG.sum(axis=1))
    if aggregation == "token":
        denominator_PG = np.full(trained_PG.shape, everywhere_PG.sum())
    elif aggregation == "sequence":
        denominator_PG = rows * trained_PG
    elif aggregation == "constant":
        denominator_PG = np.full(trained_PG.shape, rows * max_new_tokens)
    elif aggregation == "prompt":
        denominator_PG = np.broadcast_to(prompts * trained_PG.sum(axis=1, keepdims=True), trained_PG.shape)
    else:
        raise ValueError(f"unknown aggregation {aggregation!r}: one of token, sequence, constant, prompt")
    return np.divide(1.0, denominator_PG, out=np.zeros(trained_PG.shape), where=trained_PG > 0)


def pack_documents(documents: Sequence[Document]) -> Batch:
    """One Batch, on the CPU, of an optimiser step's documents: advantage 1, weight 1 / N_t
    (over all ranks), temperature 1.

    Nothing predicts a document's first token: it is never a target. A document without targets is left out.
    """
    targets = []
    for document in documents:
        if len(document.ids) != len(document.trained):
            raise ValueError(
                f"data row {document.row}: {len(document.ids)} ids and {len(document.trained)} trained flags"
            )
        targets.append(np.flatnonzero(document.trained[1:]) + 1)
    count = sum(gather_objects(sum(len(target) for target in targets)))

    packer = _Packer()
    for row, (document, target) in enumerate(zip(documents, targets, strict=True)):
        if len(target):
            ids = np.array(document.ids, np.int64)
            start, _ = packer.segment(ids[: target[-1]])
            packer.score(row, start + target - 1, ids[target], 1.0, 1.0 / count)
    return packer.batch(temperature=1.0, with_sampler=False)


def pack_pairs(pairs: Sequence[tuple[Document, Document]]) -> Batch:
    """One Batch, on the CPU, of an optimiser step's preference pairs (chosen, rejected): weight 1 / N_pairs (over all
    ranks) at every token, temperature 1.

    Of pair i the chosen document is row 2i with advantage 1, the rejected one row 2i + 1 with advantage -1. What both
    begin with, up to the first target of either, is their prompt: it is packed once. Raises ValueError for a pair
    without a common first token or with a document that has no targets.
    """
    count = sum(gather_objects(len(pairs)))
    packer = _Packer()
    for i, pair in enumerate(pairs):
        ids = [np.array(document.ids, np.int64) for document in pair]
        targets = [np.flatnonzero(document.trained[1:]) + 1 for document in pair]
        if not all(len(target) for target in targets) or ids[0][0] != ids[1][0]:
            raise ValueError(
                f"data row {pair[0].row}: not two documents with targets that begin with one token"
            )
        room = min(int(target[0]) for target in targets)
        differs = np.flatnonzero(ids[0][:room] != ids[1][:room])
        shared = int(differs[0]) if len(differs) else room
        prompt = packer.segment(ids[0][:shared])
        for side in (0, 1):
            target = targets[side]
            start, _ = packer.segment(ids[side][shared : target[-1]], prompt)
            source = np.where(target == shared, prompt[1] - 1, start + target - 1 - shared)
            packer.score(2 * i + side, source, ids[side][target], 1.0 - 2.0 * side, 1.0 / count)
    return packer.batch(temperature=1.0, with_sampler=False)


def split(batch: Batch, tokens_per_pass: int, *, keep_families: bool = False) -> list[Batch]:
    """Parts of at most `tokens_per_pass` tokens that sum to the same loss; none for an empty batch.

    A prompt and its completions stay in one part if they fit into one. Otherwise the prompt is repeated in
    every part that holds some of them, and a row that is too long even so has a part of its own. With keep_families
    a prompt and its completions always stay together, in a part of their own if they are too long, for losses that
    compare them. For batches on the CPU.
    """
    if not len(batch.source):
        return []
    segments_S4, source_M = batch.segments.numpy(), batch.source.numpy()
    start_S, length_S = segments_S4[:, 0], segments_S4[:, 1] - segments_S4[:, 0]
    has_prefix_S = segments_S4[:, 3] > 0
    root_S = np.where(has_prefix_S, np.searchsorted(start_S, segments_S4[:, 2]), np.arange(len(start_S)))
    segment_M = np.searchsorted(start_S, source_M, side="right") - 1

    # A row's scored tokens stand together; the last is predicted from the row's own segment if it has one.
    first_R = np.flatnonzero(np.diff(batch.row.numpy(), prepend=-1))
    last_R = np.append(first_R[1:], len(source_M)) - 1
    own_R = segment_M[last_R]
    root_R = root_S[own_R]
    length_R = np.where(own_R == root_R, 0, length_S[own_R])

    units, sizes = [], []  # rows that share a prompt and a part, and the tokens they need together
    for family in np.split(np.arange(len(root_R)), np.flatnonzero(np.diff(root_R)) + 1):
        prompt = int(length_S[root_R[family[0]]])
        lengths = length_R[family].tolist()
        room = sum(lengths) if keep_families else max(0, tokens_per_pass - prompt)
        for members in _best_fit(lengths, room):
            units.append(family[members])
            sizes.append(prompt + int(length_R[family[members]].sum()))

    parts = []
    for members in _best_fit(sizes, tokens_per_pass):
        rows = np.concatenate([units[i] for i in members])
        kept_S = np.unique(np.concatenate([root_R[rows], own_R[rows]]))
        spans = zip(first_R[rows].tolist(), last_R[rows].tolist(), strict=True)
        index_M = np.concatenate([np.arange(first, last + 1) for first, last in spans])
        parts.append(_take(batch, kept_S, root_S, segment_M, index_M))
    return parts


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The batch with its tensors on `device`, except `segments`, which kernels are launched from."""
    names = ("input_ids", "positions", "source", "target", "row", "advantage", "weight")
    moved = {name: getattr(batch, name).to(device, non_blocking=True) for name in names}
    for name in ("sampler", "old", "reference"):
        column_M = getattr(batch, name)
        moved[name] = None if column_M is None else column_M.to(device, non_blocking=True)
    return replace(batch, **moved)


class _Packer:
    """Grows a Batch segment by segment and row by row."""

    def __init__(self) -> None:
        self.length = 0
        self.segments: list[tuple[int, int, int, int]] = []
        self.ids, self.source, self.target = [[np.zeros(0, np.int64)] for _ in range(3)]
        self.positions, self.row = [[np.zeros(0, np.int32)] for _ in range(2)]
        self.advantage, self.weight, self.sampler = [[np.zeros(0, np.float32)] for _ in range(3)]

    def segment(self, ids: np.ndarray, prefix: Span = (0, 0)) -> Span:
        """Appends tokens that follow those of `prefix`, says where they lie; no tokens make no segment."""
        span = (self.length, self.length + len(ids))
        if len(ids):
            first = prefix[1] - prefix[0]
            self.segments.append((*span, *prefix))
            self.ids.append(ids)
            self.positions.append(np.arange(first, first + len(ids), dtype=np.int32))
            self.length = span[1]
        return span

    def completion(
        self, row: int, completion: Completion, prompt: Span, advantage: float, weight: float
    ) -> None:
        ids, trained = np.array(completion.ids, np.int64), np.flatnonzero(completion.trained)
        start, _ = self.segment(ids[: trained[-1]], prompt)
        source = np.where(trained == 0, prompt[1] - 1, start + trained - 1)
        self.score(row, source, ids[trained], advantage, weight)
        self.sampler.append(np.array(completion.logprobs, np.float32)[trained])

    def score(
        self, row: int, source: np.ndarray, target: np.ndarray, advantage: float, weight: float
    ) -> None:
        self.source.append(source)
        self.target.append(target)
        self.row.append(np.full(len(target), row, np.int32))
        self.advantage.append(np.full(len(target), advantage, np.float32))
        self.weight.append(np.full(len(target), weight, np.float32))

    def batch(self, temperature: float, *, with_sampler: bool) -> Batch:
        def tensor(parts: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(parts))

        return Batch(
            input_ids=tensor(self.ids),
            positions=tensor(self.positions),
            segments=torch.tensor(self.segments, dtype=torch.int32).reshape(-1, 4),
            source=tensor(self.source),
            target=tensor(self.target),
            row=tensor(self.row),
            advantage=tensor(self.advantage),
            weight=tensor(self.weight),
            sampler=tensor(self.sampler) if with_sampler else None,
            temperature=temperature,
        )


def _best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes` in bins, longest first, each in the fullest bin with room; one above the capacity in its own.

    Bins stand in the order of their first members, and equal sizes keep theirs, so the result is reproducible.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, bin), ascending
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(room, (sizes[i], -1))
        if at == len(room):
            bins.append([])
            left, b = capacity, len(bins) - 1
        else:
            left, b = room.pop(at)
        bins[b].append(i)
        insort(room, (left - sizes[i], b))
    return sorted(sorted(members) for members in bins)


def _take(
    batch: Batch, kept_S: np.ndarray, root_S: np.ndarray, segment_M: np.ndarray, index_M: np.ndarray
) -> Batch:
    """The batch of segments `kept_S` (ascending, each with its prefix) and of scored tokens `index_M`."""
    segments_S4 = batch.segments.numpy()
    kept_K4 = segments_S4[kept_S].copy()
    index_T = np.concatenate([np.arange(start, end) for start, end in kept_K4[:, :2].tolist()])
    end_K = np.cumsum(kept_K4[:, 1] - kept_K4[:, 0])
    shift_S = np.zeros(len(segments_S4), np.int32)
    shift_S[kept_S] = end_K - kept_K4[:, 1]  # how far each segment moves
    kept_K4[:, :2] += shift_S[kept_S, None]
    kept_K4[:, 2:] += np.where(kept_K4[:, 3:] > 0, shift_S[root_S[kept_S], None], 0)

    tokens, scored = torch.from_numpy(index_T), torch.from_numpy(index_M)
    names = ("target", "row", "advantage", "weight", "sampler", "old", "reference")
    columns = {name: getattr(batch, name) for name in names}
    return replace(
        batch,
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        segments=torch.from_numpy(kept_K4),
        source=batch.source[scored] + torch.from_numpy(shift_S[segment_M[index_M]]),
        **{name: None if column_M is None else column_M[scored] for name, column_M in columns.items()},
    )


def _check_group(group: Group, name: str, size: int) -> None:
    if not group.prompt.ids:
        raise ValueError(f"{name}: the prompt has no tokens, so nothing predicts a completion's first token")
    if len(group.completions) != size:
        raise ValueError(f"{name}: {len(group.completions)} completions where the advantages have {size}")
    for g, completion in enumerate(group.completions):
        if not len(completion.ids) == len(completion.logprobs) == len(completion.trained):
            raise ValueError(
                f"{name}, completion {g}: {len(completion.ids)} ids, {len(completion.logprobs)} log-probs "
                f"and {len(completion.trained)} trained flags must be equally many"
            )
        logprobs = np.array(completion.logprobs)[np.array(completion.trained, bool)]
        if not np.isfinite(logprobs).all():
            raise ValueError(
                f"{name}, completion {g}: the sampler's log-probs of trained tokens must be finite"
            )
