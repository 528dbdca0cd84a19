from __future__ import annotations

import collections
import dataclasses
from typing import Iterator

import torch

from .helpers import masked_mean, pack_tokens, pack_tokens_or_none
from .pools import ArenaPool


@dataclasses.dataclass
class Ticket:
    rows: list[list[int]]
    tokens: torch.Tensor | None = None
    cancelled: bool = False


class Batcher:
    def __init__(self, arena: ArenaPool, model, width: int = 512):
        self.arena = arena
        self.model = model
        self.width = width
        self.line: collections.deque[Ticket] = collections.deque()
        self.parked: dict[int, Ticket] = {}

    def enqueue(self, rows: list[list[int]]) -> Ticket:
        ticket = Ticket(rows)
        ticket.tokens = pack_tokens(self.arena, rows, self.width)  # clean: near miss, carried by the ticket, and step repays cancelled ones too
        self.line.append(ticket)
        return ticket

    def step(self) -> torch.Tensor | None:
        while self.line:
            ticket = self.line.popleft()
            if ticket.cancelled:
                self._settle(ticket)
                continue
            try:
                return self.model(ticket.tokens).clone()
            finally:
                self._settle(ticket)
        return None

    def _settle(self, ticket: Ticket) -> None:
        if ticket.tokens is not None:
            self.arena.repay(ticket.tokens)
            ticket.tokens = None

    def park(self, key: int, rows: list[list[int]]) -> None:
        ticket = Ticket(rows)
        ticket.tokens = pack_tokens(self.arena, rows, self.width)  # leak: unpark pops a cancelled ticket without repaying its tokens
        stale = self.parked.pop(key, None)
        if stale is not None:
            self._settle(stale)
        self.parked[key] = ticket

    def unpark(self, key: int) -> torch.Tensor | None:
        ticket = self.parked.pop(key, None)
        if ticket is None or ticket.cancelled:
            return None
        out = self.model(ticket.tokens).clone()
        self._settle(ticket)
        return out

    def run_now(self, rows: list[list[int]]) -> torch.Tensor | None:
        tokens = pack_tokens_or_none(self.arena, rows, self.width)  # clean: None-checked and repaid
        if tokens is None:
            return None
        out = self.model(tokens).clone()
        self.arena.repay(tokens)
        return out

    def run_pooled(self, rows: list[list[int]]) -> torch.Tensor:
        tokens = pack_tokens(self.arena, rows, self.width)  # clean: near miss, a PoolDry from masked_mean passes through the finally
        try:
            hidden = self.model(tokens)
            return masked_mean(self.arena, hidden, (tokens != 0).float())
        finally:
            self.arena.repay(tokens)

    def run_stream(self, groups: list[list[list[int]]]) -> Iterator[torch.Tensor]:
        for rows in groups:
            tokens = pack_tokens_or_none(self.arena, rows, self.width)  # leak: the repay is after the yield and a consumer that stops early never reaches it
            if tokens is None:
                continue
            yield self.model(tokens)
            self.arena.repay(tokens)
