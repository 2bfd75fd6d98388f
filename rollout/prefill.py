"""Keys and values of prompts, and of what rows that come back have drawn.

Axes: T tokens of packed segments, S segments.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from covey.kernels.attention import attention
from covey.kernels.decode_attention import store
from covey.rollout.kv_pool import KVPool
from covey.rollout.rows import Family, Row

if TYPE_CHECKING:
    from covey.policies.decoder import DecoderPolicy


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens to compute: a prompt's, or those that a row had drawn before it left."""

    ids: np.ndarray  # int64
    places: np.ndarray  # int64, -1 where they are stored already
    behind: int  # tokens of the prompt before them; it is the last piece that has none

    def again(self) -> "Piece":
        """The same tokens, stored already."""
        return replace(self, places=np.full_like(self.places, -1))


def prefill(policy: "DecoderPolicy", pool: KVPool, entering: Sequence[Row], most: int) -> None:
    """Computes and stores what stands before the newest token of these rows, which have their places.

    most: tokens of a pass, unless a prompt or a row with its prompt alone has more.
    """
    batch: list[Piece] = []
    prompt = None
    for piece in _pieces(entering):
        prompt = piece if not piece.behind else prompt
        if batch and sum(len(p.ids) for p in batch) + len(piece.ids) > most:
            _compute(policy, pool, batch)
            # A row's piece is computed with the prompt that it attends to.
            batch = [prompt.again()] if piece.behind and prompt else []
        batch.append(piece)
    if batch:
        _compute(policy, pool, batch)


def _pieces(entering: Sequence[Row]) -> Iterator[Piece]:
    families: dict[Family, list[Row]] = {}
    for row in entering:
        families.setdefault(row.family, []).append(row)
    for family, rows in families.items():
        prefix = np.array(family.prompt.ids[:-1], dtype=np.int64)
        back = [row for row in rows if row.ids]
        here = family.running > len(rows)  # others of the family are in slots, so the prompt is stored
        if len(prefix) and (back or not here):
            places = np.full(len(prefix), -1) if here else family.prefix.start + np.arange(len(prefix))
            yield Piece(prefix, places, 0)
        for row in back:
            own = np.array([family.prompt.ids[-1], *row.ids[:-1]], dtype=np.int64)
            yield Piece(own, row.own.start + np.arange(len(own)), len(prefix))


def _compute(policy: "DecoderPolicy", pool: KVPool, pieces: Sequence[Piece]) -> None:
    """One forward pass over segments, as far as keys and values need it."""
    ends = np.cumsum([len(piece.ids) for piece in pieces])
    segments, prefix = torch.zeros(len(pieces), 4, dtype=torch.int32), (0, 0)
    for i, piece in enumerate(pieces):
        span = int(ends[i]) - len(piece.ids), int(ends[i])
        segments[i] = torch.tensor([*span, *(prefix if piece.behind else (0, 0))])
        prefix = prefix if piece.behind else span

    def upload(parts: Iterable[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts))).to(policy.device)

    place_T = upload(piece.places for piece in pieces)
    rope = policy.rope(upload(piece.behind + np.arange(len(piece.ids)) for piece in pieces))
    plan = policy.plan(segments)
    hidden = policy.embed(upload(piece.ids for piece in pieces))
    keys, values = pool.layers()
    for layer in policy.layers:
        q, k, v = policy.project_qkv(layer.index, hidden, rope)
        store(k, v, keys[layer.index], values[layer.index], place_T)
        if layer.index + 1 < len(policy.layers):
            seen = {"window": layer.at.window, "softcap": policy.spec.attention_softcap}
            out, _ = attention(q, k, v, plan, policy.spec.attention_scale, **seen)
            hidden = policy.finish_layer(layer.index, hidden, out)
