"""Micro-batches: requests wait a moment so that several share one run of the encoder."""
from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Optional, Sequence

import torch

from .staging import StagingPool, pad_rows


@dataclass
class Ticket:
    staged: torch.Tensor
    rows: int
    future: asyncio.Future
    queued_at: float = field(default_factory=time.monotonic)


class MicroBatcher:
    def __init__(self, pool: StagingPool, model: torch.nn.Module, max_wait: float = 0.01) -> None:
        self.pool = pool
        self.model = model
        self.max_wait = max_wait
        self._queue: deque[Ticket] = deque()

    def enqueue(self, vectors: Sequence[Sequence[float]]) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        staged = pad_rows(self.pool, vectors)  # leak: expire() takes the ticket out and forgets the tensor
        self._queue.append(Ticket(staged, len(vectors), future))
        return future

    def expire(self, deadline: float) -> int:
        dropped = 0
        now = time.monotonic()
        while self._queue and now - self._queue[0].queued_at > deadline:
            ticket = self._queue.popleft()
            if not ticket.future.done():
                ticket.future.set_exception(TimeoutError())
            dropped += 1
        return dropped

    async def step(self) -> int:
        if not self._queue:
            await asyncio.sleep(self.max_wait)
            return 0
        ticket = self._queue.popleft()
        out = self.model(ticket.staged)[: ticket.rows]
        self.pool.restore(ticket.staged)
        if not ticket.future.done():
            ticket.future.set_result(out.detach().clone())
        return ticket.rows


class PriorityBatcher:
    """Two queues; urgent tickets go first and everything left is drained at the close."""

    def __init__(self, pool: StagingPool, model: torch.nn.Module) -> None:
        self.pool = pool
        self.model = model
        self._urgent: deque[Ticket] = deque()
        self._normal: deque[Ticket] = deque()

    def enqueue(self, vectors: Sequence[Sequence[float]], urgent: bool) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        staged = pad_rows(self.pool, vectors)  # clean: near miss, step() and close() restore from both queues
        ticket = Ticket(staged, len(vectors), future)
        if urgent:
            self._urgent.append(ticket)
        else:
            self._normal.append(ticket)
        return future

    def _next(self) -> Optional[Ticket]:
        if self._urgent:
            return self._urgent.popleft()
        if self._normal:
            return self._normal.popleft()
        return None

    def step(self) -> int:
        ticket = self._next()
        if ticket is None:
            return 0
        if ticket.future.cancelled():
            self.pool.restore(ticket.staged)
            return 0
        out = self.model(ticket.staged)[: ticket.rows].detach().clone()
        self.pool.restore(ticket.staged)
        ticket.future.set_result(out)
        return ticket.rows

    def close(self) -> None:
        while (ticket := self._next()) is not None:
            ticket.future.cancel()
            self.pool.restore(ticket.staged)
