"""Draft slots. `reserve` makes a ticket, which is either redeemed or cancelled."""
from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Ticket:
    desk: "DraftDesk"
    start: int
    width: int
    open: bool = True

    def cancel(self) -> None:
        """Give the slots back."""
        if self.open:
            self.desk.slots_left += self.width
            self.open = False

    def redeem(self) -> torch.Tensor:
        """Read the drafted tokens and give the slots back."""
        out = self.desk.tokens[self.start : self.start + self.width].clone()
        self.cancel()
        return out


class DraftDesk:
    def __init__(self, slots: int):
        self.slots_left = slots
        self.tokens = torch.zeros(slots, dtype=torch.long)

    def reserve(self, width: int) -> Ticket | None:
        if width > self.slots_left:
            return None
        self.slots_left -= width  # clean: given back by the ticket that is returned
        return Ticket(self, self.slots_left, width)

    def reserve_tree(self, width: int, depth: int) -> Ticket | None:
        total = width * depth
        if total > self.slots_left:
            return None
        self.slots_left -= total  # leak: the ticket covers `width` slots only, the other levels never come back
        return Ticket(self, self.slots_left, width)
