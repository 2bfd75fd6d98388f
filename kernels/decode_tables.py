"""Who attends to what in a decoding step: the tables of kernels/decode_attention.py."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """Who attends to what: int32 tensors on the device, written to in place between the steps.

    A row with own_length 0 is idle. rows_of_group and group_of_row say the same thing in both directions. The tokens
    of a prompt, and the own tokens of a row, have consecutive places.
    """

    own_start: Tensor  # [B]
    own_length: Tensor  # [B] tokens stored so far, the newest included; 0: idle
    prefix_start: Tensor  # [Q]
    prefix_length: Tensor  # [Q] 0: no such group
    rows_of_group: Tensor  # [Q, G] -1: an empty seat
    group_of_row: Tensor  # [B] -1: none
    max_own: int
    max_prefix: int

    @classmethod
    def idle(
        cls, rows: int, groups: int, seats: int, max_own: int, max_prefix: int, device: torch.device | str
    ) -> "DecodeTables":
        """Tables for B rows and Q groups of at most G seats, with nothing in them yet. ValueError for sizes < 1."""
        if min(rows, groups, seats, max_own, max_prefix) < 1:
            raise ValueError(
                f"rows {rows}, groups {groups}, seats {seats}, lengths {max_own}, {max_prefix}: 1 or more"
            )

        def full(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return cls(
            full(rows), full(rows), full(groups), full(groups), full(groups, seats, value=-1), full(rows, value=-1),
            max_own, max_prefix,
        )  # fmt: skip

    def prefix_of_rows(self) -> tuple[Tensor, Tensor]:
        """Start and length of every row's prompt: int32 [B], length 0 where there is none."""
        group_B = self.group_of_row.clamp(min=0)
        length_B = self.prefix_length[group_B].masked_fill(self.group_of_row < 0, 0)
        return self.prefix_start[group_B], length_B

    def candidates(self, window: int) -> tuple[Tensor, Tensor]:
        """For max_prefix + max_own candidates per row their places and whether they are hidden from it: [B, L]."""
        start_B, length_B = self.prefix_of_rows()
        device, own_B = start_B.device, self.own_length
        prefix_P, own_O = (torch.arange(x, device=device) for x in (self.max_prefix, self.max_own))
        position_BL = torch.cat((prefix_P.expand(len(own_B), -1), length_B[:, None] + own_O), 1)
        exists_BL = (
            torch.cat((prefix_P < length_B[:, None], own_O < own_B[:, None]), 1) & (own_B > 0)[:, None]
        )
        place_BL = torch.cat((start_B[:, None] + prefix_P, self.own_start[:, None] + own_O), 1)
        if window:
            exists_BL &= position_BL > (length_B + own_B)[:, None] - 1 - window
        return place_BL.masked_fill(~exists_BL, 0), ~exists_BL
