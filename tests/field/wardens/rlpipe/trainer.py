from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Optional

from .pools import ReplayBuffer, Ticket, TokenBudget
from .worker import EpisodeWorker

logger = logging.getLogger(__name__)


class AsyncTrainer:
    def __init__(self, worker: EpisodeWorker, buffer: ReplayBuffer, budget: TokenBudget,
                 batch_size: int) -> None:
        self.worker = worker
        self.buffer = buffer
        self.budget = budget
        self.batch_size = batch_size
        self.pending: deque[Ticket] = deque()
        self.spare: Optional[Ticket] = None
        self.version = 0

    def enqueue(self) -> bool:
        ticket = self.buffer.checkout_batch(self.batch_size)  # clean: near miss, queued and settled by train_pending or stop
        if ticket is None:
            return False
        self.pending.append(ticket)
        return True

    def train_pending(self) -> int:
        trained = 0
        while self.pending:
            ticket = self.pending.popleft()
            try:
                if not all(ticket.items):
                    continue
                self.version += 1
                trained += len(ticket.items)
            finally:
                self.buffer.settle(ticket)
        return trained

    def evaluate(self) -> Optional[float]:
        ticket = self.buffer.checkout_batch(self.batch_size)  # leak: a batch of empty samples returns None before it is settled
        if ticket is None:
            return None
        lengths = [len(item) for item in ticket.items if item]
        if not lengths:
            return None
        score = sum(lengths) / len(lengths)
        self.buffer.settle(ticket)
        return score

    def keep_spare(self) -> bool:
        if self.spare is not None:
            self.buffer.settle(self.spare)
        self.spare = self.buffer.checkout_batch(self.batch_size)  # clean: near miss, the earlier spare is settled first, stop settles the last
        return self.spare is not None

    async def collect(self, prompts: list[list[str]], tokens: int) -> int:
        granted = 0
        for prompt in prompts:
            if not self.budget.reserve(tokens):  # leak: an empty prompt continues with its tokens reserved
                break
            if not prompt:
                continue
            granted += 1
            self.budget.refund(tokens)
            await self.worker.run_episode(prompt, tokens)
        return granted

    async def warmup(self, sessions: list[str], tokens: int) -> bool:
        if not self.budget.reserve(tokens):  # clean: near miss, refunded in finally
            return False
        try:
            await asyncio.gather(*(self.worker.turn(s, "noop") for s in sessions))
            return True
        finally:
            for session in sessions:
                self.worker.end_session(session)
            self.budget.refund(tokens)

    def stop(self) -> None:
        while self.pending:
            self.buffer.settle(self.pending.popleft())
        if self.spare is not None:
            self.buffer.settle(self.spare)
            self.spare = None
