from __future__ import annotations

import asyncio
import logging
from typing import Optional

import torch
from torch import nn

from .weights import WeightSync
from .workers import RolloutWorker, SessionManager, WorkerBusy, WorkerPool

logger = logging.getLogger("rollout")


class RolloutTrainer:
    def __init__(self, policy: nn.Module, pool: WorkerPool, sync: WeightSync) -> None:
        self.policy = policy
        self.pool = pool
        self.sync = sync
        self.sessions = SessionManager(pool)
        self.version = 0

    async def generate(self, prompts: list[str], n: int) -> list[list[str]]:
        return list(await asyncio.gather(*(self._one(p, n) for p in prompts)))

    async def _one(self, prompt: str, n: int) -> list[str]:
        async with self.pool.leased() as worker:  # clean: near miss, the handler returns from within the with block
            try:
                return await worker.generate(prompt, n)
            except WorkerBusy:
                return []

    async def generate_fresh(self, prompt: str, n: int) -> list[str]:
        worker = await self.pool.lease_at(self.version, tries=4)  # leak: the handled failure answers with an empty list and keeps the worker
        if worker is None:
            return []
        try:
            out = await worker.generate(prompt, n)
        except WorkerBusy:
            logger.warning("worker %d failed", worker.rank)
            return []
        self.pool.give_back(worker)
        return out

    async def best_of(self, prompt: str, n: int) -> Optional[str]:
        group = self.pool.lease_group(n)  # clean: near miss, all members go back whatever they answered
        if not group:
            return None
        answers = await asyncio.gather(*(w.generate(prompt, 1) for w in group), return_exceptions=True)
        for worker in group:
            self.pool.give_back(worker)
        good = [a[0] for a in answers if not isinstance(a, BaseException)]
        return max(good, key=len, default=None)

    async def vote(self, prompt: str, n: int) -> Optional[str]:
        group = self.pool.lease_group(n)  # leak: members that raised are not given back
        if not group:
            return None
        votes: list[str] = []
        for worker in group:
            try:
                votes.extend(await worker.generate(prompt, 1))
            except WorkerBusy:
                continue
            self.pool.give_back(worker)
        return max(set(votes), key=votes.count, default=None)

    async def update_weights(self) -> int:
        n = self.sync.pack(self.policy.named_parameters())
        chunks = self.sync.drain()
        self.version += 1
        seen: list[RolloutWorker] = []
        while (worker := self.pool.try_lease()) is not None:  # clean: near miss, all the idle ones are held at once and go back together
            worker.version = self.version
            seen.append(worker)
        for worker in seen:
            self.pool.give_back(worker)
        logger.info("sent %d tensors in %d buckets", n, len(chunks))
        return n

    async def multi_turn(self, session_id: str, texts: list[str], limit: int) -> list[str]:
        session = await self.sessions.begin(session_id)  # clean: near miss, reaching the limit breaks to the session's end
        for text in texts:
            if sum(map(len, session.turns)) > limit:
                break
            await self.sessions.turn(session_id, text)
        self.sessions.end(session_id)
        return session.turns

    async def single_turn(self, session_id: str, text: str) -> Optional[str]:
        await self.sessions.begin(session_id)  # clean: ended in the finally
        try:
            return await self.sessions.turn(session_id, text)
        except WorkerBusy:
            return None
        finally:
            self.sessions.end(session_id)

    def grad_norm(self) -> float:
        grads = [p.grad.norm() for p in self.policy.parameters() if p.grad is not None]
        return float(torch.stack(grads).norm()) if grads else 0.0
