from __future__ import annotations

import asyncio
import logging
from typing import AsyncIterator, Optional

from .limits import Concurrency, ConcurrencyScope, Grant, TokenBudget
from .sessions import ReplicaSet, SessionTable

logger = logging.getLogger(__name__)


class Router:
    def __init__(self, budget: TokenBudget, conc: Concurrency, replicas: ReplicaSet, http) -> None:
        self.budget = budget
        self.conc = conc
        self.replicas = replicas
        self.sessions = SessionTable(replicas)
        self.http = http
        self._batch: dict[str, list[Grant]] = {}

    async def complete(self, tenant: str, body: dict) -> Optional[dict]:
        grant = self.budget.reserve(tenant, body["max_tokens"])  # clean: near miss, settled in finally
        if grant is None:
            return None
        try:
            async with ConcurrencyScope(self.conc, 5.0) as ok:  # clean: context manager
                if not ok:
                    return None
                replica = self.replicas.pick()  # leak: a client timeout returns with the load counted
                if replica is None:
                    return None
                try:
                    reply = await self.http.post(replica.url, body)
                except asyncio.TimeoutError:
                    logger.warning("timeout at %s", replica.url)
                    return None
                self.replicas.unpick(replica)
                return reply
        finally:
            self.budget.settle(grant)

    async def embed(self, tenant: str, body: dict) -> Optional[dict]:
        if not await self.conc.enter(1.0):  # leak: no budget, no exit
            return None
        grant = self.budget.reserve(tenant, len(body["input"]))  # clean: settled after the post
        if grant is None:
            return None
        reply = await self.http.post(self.replicas.replicas[0].url, body)
        self.budget.settle(grant)
        self.conc.exit()
        return reply

    async def stream(self, tenant: str, body: dict) -> AsyncIterator[bytes]:
        grant = self.budget.reserve(tenant, body["max_tokens"])  # clean: near miss, finally even when the client goes
        if grant is None:
            return
        try:
            async for part in self.http.stream(self.replicas.replicas[0].url, body):
                yield part
        finally:
            self.budget.settle(grant)

    def batch_add(self, batch_id: str, tenant: str, tokens: int) -> bool:
        grant = self.budget.reserve(tenant, tokens)  # leak: batch_done settles all but the last grant
        if grant is None:
            return False
        self._batch.setdefault(batch_id, []).append(grant)
        return True

    def batch_done(self, batch_id: str) -> int:
        grants = self._batch.pop(batch_id, [])
        for i in range(len(grants) - 1):
            self.budget.settle(grants[i])
        return len(grants)

    async def chat(self, sid: str, body: dict) -> Optional[dict]:
        session = self.sessions.open(sid)  # clean: near miss, stays open on purpose; the table sweeps it
        if session is None:
            return None
        return await self.http.post(session.replica.url, body)

    async def sweep_forever(self, max_idle: float) -> None:
        while True:
            await asyncio.sleep(max_idle / 4)
            self.sessions.sweep(max_idle)
