"""Drafting."""
from __future__ import annotations

import torch

from .slots import DraftDesk, Ticket


class NgramProposer:
    def __init__(self, desk: DraftDesk, k: int, min_k: int = 1):
        self.desk = desk
        self.k = k
        self.min_k = min_k

    def _fill(self, ticket: Ticket, history: torch.Tensor) -> int:
        n = min(ticket.width, history.numel())
        ticket.desk.tokens[ticket.start : ticket.start + n] = history[-n:] if n else history
        return n

    def propose(self, history: torch.Tensor) -> Ticket | None:
        """The caller redeems or cancels the ticket."""
        ticket = self.desk.reserve(self.k)  # clean: near miss, cancelled if the history is too short, else returned
        if ticket is None:
            return None
        if self._fill(ticket, history) < self.min_k:
            ticket.cancel()
            return None
        return ticket

    def propose_tokens(self, history: torch.Tensor) -> torch.Tensor | None:
        ticket = self.desk.reserve(self.k)  # leak: an insufficient fill returns None without cancel()
        if ticket is None:
            return None
        n = self._fill(ticket, history)
        if n < self.min_k:
            return None
        return ticket.redeem()[:n]

    def propose_shrinking(self, history: torch.Tensor) -> torch.Tensor | None:
        k = self.k
        ticket = self.desk.reserve(k)  # clean: redeemed, unless it was None
        while ticket is None and k > self.min_k:
            k //= 2
            ticket = self.desk.reserve(k)  # clean: near miss, the loop goes on only while nothing was reserved
        if ticket is None:
            return None
        n = self._fill(ticket, history)
        return ticket.redeem()[:n]

    def propose_growing(self, history: torch.Tensor) -> torch.Tensor | None:
        best = None
        for k in range(self.min_k, self.k + 1):
            ticket = self.desk.reserve(k)  # leak: each longer ticket takes the place of the shorter one in `best`
            if ticket is None:
                break
            best = ticket
        if best is None:
            return None
        self._fill(best, history)
        return best.redeem()
