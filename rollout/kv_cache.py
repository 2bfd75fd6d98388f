"""Keys and values of a wave of completions in which a group's prompt is stored, and read, once.

Axes: B rows (completions still running), P prompts, G slots (most rows of one prompt), L longest prompt,
n query heads, m key-value heads, r = n / m query heads per key-value head, d head dimension.

A row attends to its prompt and to its own tokens. The first part is computed for all rows of a prompt at
once, so that a prompt's keys are read once per step however large its group is. The parts, each with its

    lse = log sum_j exp s_j        o = sum_j exp(s_j - lse) v_j        (s = scale * q k)

are then joined: out = w o_prompt + (1 - w) o_own with w = sigmoid(lse_prompt - lse_own).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_FIRST_ROOM = 32  # tokens per row before the first growth


class KVCache:
    """The cache of one wave: `store_prompts` per layer, then per token `advance` and `attend` per layer.

    Every row holds the same number of own tokens. When rows leave (`keep`), the last ones move into the gaps:
    a departure copies no more than what departs.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        prompt_lengths: Sequence[int],
        group: int,
        max_own: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Rows stand prompt by prompt, `group` each. max_own: own tokens that a row will ever store."""
        self.layers, self.kv_heads, self.head_dim = range(layers), kv_heads, head_dim
        self.scale, self.dtype, self.device = scale, dtype, device
        self.max_own, self.own_length, self.room = max_own, 0, 0
        self.lengths_P = np.asarray(prompt_lengths)
        self.prompt_B = np.repeat(np.arange(len(self.lengths_P)), group)
        shape = (len(self.lengths_P), kv_heads, int(self.lengths_P.max()), head_dim)
        # Zeros, for the padding is multiplied by a weight of 0 and must not be NaN.
        self.prompt_keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in self.layers]
        self.prompt_values = [torch.zeros(shape, dtype=dtype, device=device) for _ in self.layers]
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []
        self._index_rows()

    @property
    def rows(self) -> int:
        return len(self.prompt_B)

    def positions(self) -> Tensor:
        """int64 [B]: the position of the token that `advance` made room for."""
        return self.lengths_B + (self.own_length - 1)

    def store_prompts(self, layer: int, first: int, last: int, k_Tmd: Tensor, v_Tmd: Tensor) -> None:
        """Keys and values of the prompts [first, last), packed one after another."""
        lengths = self.lengths_P[first:last]
        prompt_T = torch.from_numpy(np.repeat(np.arange(first, last), lengths)).to(self.device)
        place_T = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(self.device)
        self.prompt_keys[layer][prompt_T, :, place_T] = k_Tmd
        self.prompt_values[layer][prompt_T, :, place_T] = v_Tmd

    def advance(self) -> None:
        """Makes room for one more token in every row."""
        self.own_length += 1
        assert self.own_length <= self.max_own, f"a row was to hold {self.max_own} tokens at most"
        if self.own_length <= self.room:
            return
        self.room = min(max(2 * self.room, _FIRST_ROOM), self.max_own)
        old_length = self.own_length - 1
        for tensors in (self.own_keys, self.own_values):
            for layer in self.layers:  # layer by layer, so that only one is held twice
                shape = (self.rows, self.kv_heads, self.room, self.head_dim)
                grown = torch.empty(shape, dtype=self.dtype, device=self.device)
                if old_length:
                    grown[:, :, :old_length] = tensors[layer][: self.rows, :, :old_length]
                    tensors[layer] = grown
                else:
                    tensors.append(grown)

    def attend(self, layer: int, q_Bnd: Tensor, k_Bmd: Tensor, v_Bmd: Tensor) -> Tensor:
        """Stores the newest token's keys and values and returns [B, n, d], what its queries attend to."""
        rows, m, d = k_Bmd.shape
        last, count = self.own_length - 1, self.prompt_count
        keys, values = self.own_keys[layer], self.own_values[layer]
        keys[:rows, :, last], values[:rows, :, last] = k_Bmd, v_Bmd
        q_Bmrd = q_Bnd.view(rows, m, -1, d)
        own_keys = keys[:rows, :, : self.own_length].flatten(0, 1)
        own_values = values[:rows, :, : self.own_length].flatten(0, 1)
        own, own_lse = _part(q_Bmrd.flatten(0, 1), own_keys, own_values, self.scale, None)

        prompt_keys = self.prompt_keys[layer][:count, :, : self.longest].flatten(0, 1)
        prompt_values = self.prompt_values[layer][:count, :, : self.longest].flatten(0, 1)
        parts = _part(self._by_prompt(q_Bmrd), prompt_keys, prompt_values, self.scale, self.mask)
        prompt, prompt_lse = (self._by_row(x, m) for x in parts)
        weight = torch.sigmoid(prompt_lse - own_lse.view(prompt_lse.shape))
        return torch.lerp(own.view(prompt.shape), prompt, weight).flatten(1, 2).to(q_Bnd.dtype)

    def keep(self, alive_B: np.ndarray) -> np.ndarray:
        """Drops rows, and prompts left without rows. Returns which old row each new row is: int64 [new B]."""
        order, holes, movers = _fill_holes(alive_B)
        if len(holes):
            to, source = torch.from_numpy(holes).to(self.device), torch.from_numpy(movers).to(self.device)
            for tensor in (*self.own_keys, *self.own_values):
                tensor[to, :, : self.own_length] = tensor[source, :, : self.own_length]
        self.prompt_B = self.prompt_B[order]
        self._keep_prompts()
        self._index_rows()
        return order

    def _keep_prompts(self) -> None:
        alive_P = np.isin(np.arange(len(self.lengths_P)), self.prompt_B)
        if alive_P.all():
            return
        order, holes, movers = _fill_holes(alive_P)
        if len(holes):
            to, source = torch.from_numpy(holes).to(self.device), torch.from_numpy(movers).to(self.device)
            for tensor in (*self.prompt_keys, *self.prompt_values):
                tensor[to] = tensor[source]
        new_index_P = np.empty(len(alive_P), dtype=np.int64)
        new_index_P[order] = np.arange(len(order))
        self.lengths_P, self.prompt_B = self.lengths_P[order], new_index_P[self.prompt_B]

    def _index_rows(self) -> None:
        """What follows from which rows are there: slots, padding mask and lengths on the device."""
        self.prompt_count, self.longest = len(self.lengths_P), int(self.lengths_P.max())
        rows_P = np.bincount(self.prompt_B, minlength=self.prompt_count)
        self.slots = int(rows_P.max())
        by_prompt = np.argsort(self.prompt_B, kind="stable")
        rank_B = np.empty(self.rows, dtype=np.int64)
        rank_B[by_prompt] = np.arange(self.rows) - np.repeat(np.cumsum(rows_P) - rows_P, rows_P)
        slot_B = self.prompt_B * self.slots + rank_B
        dense = self.rows == self.prompt_count * self.slots and bool((slot_B == np.arange(self.rows)).all())
        self.slot_B = None if dense else torch.from_numpy(slot_B).to(self.device)
        self.lengths_B = torch.from_numpy(self.lengths_P[self.prompt_B]).to(self.device)
        self.mask = None
        if (self.lengths_P < self.longest).any():
            padding_PL = np.arange(self.longest) >= self.lengths_P[:, None]
            hidden = torch.from_numpy(padding_PL.repeat(self.kv_heads, 0)[:, None]).to(self.device)
            self.mask = torch.zeros(hidden.shape, dtype=torch.float32, device=self.device)
            self.mask.masked_fill_(hidden, -torch.inf)

    def _by_prompt(self, x_Bmrd: Tensor) -> Tensor:
        """[P * m, G * r, d]: the rows of a prompt in one matrix."""
        _, m, r, d = x_Bmrd.shape
        if self.slot_B is not None:
            slots = x_Bmrd.new_zeros(self.prompt_count * self.slots, m, r, d)
            x_Bmrd = slots.index_copy_(0, self.slot_B, x_Bmrd)
        x_PGmrd = x_Bmrd.view(self.prompt_count, self.slots, m, r, d)
        return x_PGmrd.transpose(1, 2).reshape(self.prompt_count * m, self.slots * r, d)

    def _by_row(self, x: Tensor, m: int) -> Tensor:
        """[B, m, r, d], the way back."""
        x_PmGrd = x.view(self.prompt_count, m, self.slots, -1, x.shape[-1])
        x_Bmrd = x_PmGrd.transpose(1, 2).flatten(0, 1)
        return x_Bmrd if self.slot_B is None else x_Bmrd.index_select(0, self.slot_B)


def _part(
    q_XQd: Tensor, k_XLd: Tensor, v_XLd: Tensor, scale: float, mask_X1L: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over a part of the keys, in float32 at least: the output [X, Q, d] and its lse [X, Q, 1]."""
    scores_XQL = _matmul(q_XQd, k_XLd.transpose(1, 2)).mul_(scale)  # scaling 16-bit queries would round them
    if mask_X1L is not None:
        scores_XQL += mask_X1L
    lse_XQ1 = scores_XQL.logsumexp(-1, keepdim=True)
    weights_XQL = scores_XQL.sub_(lse_XQ1).exp_()
    return _matmul(weights_XQL.to(v_XLd.dtype), v_XLd), lse_XQ1


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched product with a float32 result for 16-bit factors."""
    if a.dtype.itemsize >= 4:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _fill_holes(alive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Closes gaps with the last survivors: the old index of every new place, the gaps, who fills them."""
    count = int(alive.sum())
    holes = np.flatnonzero(~alive[:count])
    movers = count + np.flatnonzero(alive[count:])
    order = np.arange(count)
    order[holes] = movers
    return order, holes, movers
