from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import AsyncIterator

from .quota import Hold, QuotaLedger
from .workers import Worker, WorkerGone, WorkerSet

logger = logging.getLogger(__name__)


@dataclass
class Reply:
    status: int
    tokens: list[str]


@dataclass
class Session:
    tenant: str
    worker: Worker
    hold: Hold
    used: int = 0


class Gate:
    def __init__(self, ledger: QuotaLedger, workers: WorkerSet) -> None:
        self.ledger = ledger
        self.workers = workers
        self.sessions: dict[str, Session] = {}

    async def complete(self, tenant: str, prompt: str, max_tokens: int) -> Reply:
        hold = self.ledger.hold(tenant, max_tokens)  # leak: neither settled nor cancelled when all workers stay busy
        if hold is None:
            return Reply(429, [])
        worker = await self.workers.wait_lease(20)  # clean: near miss, given up by finally on both ways
        if worker is None:
            return Reply(503, [])
        try:
            tokens = await worker.run(prompt, max_tokens)
        except WorkerGone:
            self.ledger.cancel(hold)
            return Reply(502, [])
        finally:
            self.workers.unlease(worker)
        self.ledger.settle(hold, len(tokens))
        return Reply(200, tokens)

    async def complete_once_more(self, tenant: str, prompt: str, max_tokens: int) -> Reply:
        hold = self.ledger.hold(tenant, max_tokens)  # clean: near miss, settled upon success and cancelled after the rounds
        if hold is None:
            return Reply(429, [])
        for _ in range(2):
            worker = self.workers.lease()  # clean: near miss, given up by finally in each round
            if worker is None:
                break
            try:
                tokens = await worker.run(prompt, max_tokens)
                self.ledger.settle(hold, len(tokens))
                return Reply(200, tokens)
            except WorkerGone:
                logger.info("%s is gone, another try", worker.name)
            finally:
                self.workers.unlease(worker)
        self.ledger.cancel(hold)
        return Reply(502, [])

    async def retry_elsewhere(self, prompt: str, failed: str) -> list[str] | None:
        worker = self.workers.lease_avoiding(failed)  # clean: near miss, None is returned at once, else finally gives it up
        if worker is None:
            return None
        try:
            return await worker.run(prompt, 16)
        except WorkerGone:
            return None
        finally:
            self.workers.unlease(worker)

    async def stream(self, tenant: str, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        worker = self.workers.lease()  # leak: the return for a tenant over its limit keeps it
        if worker is None:
            return
        hold = self.ledger.hold(tenant, max_tokens)  # clean: near miss, finally settles it wherever the consumer stops
        if hold is None:
            return
        sent = 0
        try:
            for tok in await worker.run(prompt, max_tokens):
                yield tok
                sent += 1
        finally:
            self.ledger.settle(hold, sent)
            self.workers.unlease(worker)

    def open_session(self, sid: str, tenant: str, budget: int) -> bool:
        if sid in self.sessions:
            return False
        hold = self.ledger.hold(tenant, budget)  # clean: near miss, cancelled without a worker, else settled by close_session
        if hold is None:
            return False
        worker = self.workers.lease()  # clean: the session's until close_session
        if worker is None:
            self.ledger.cancel(hold)
            return False
        self.sessions[sid] = Session(tenant, worker, hold)
        return True

    def extend_session(self, sid: str, more: int) -> bool:
        s = self.sessions[sid]
        hold = self.ledger.hold(s.tenant, more)  # leak: the session's first hold is replaced and stays open
        if hold is None:
            return False
        s.hold = hold
        return True

    async def session_turn(self, sid: str, prompt: str) -> Reply:
        s = self.sessions[sid]
        try:
            tokens = await s.worker.run(prompt, s.hold.tokens - s.used)
        except WorkerGone:
            self.close_session(sid)
            return Reply(502, [])
        s.used += len(tokens)
        return Reply(200, tokens)

    def rehome(self, sid: str) -> bool:
        s = self.sessions[sid]
        worker = self.workers.lease()  # clean: near miss, the old worker is given up before the field changes
        if worker is None:
            return False
        self.workers.unlease(s.worker)
        s.worker = worker
        return True

    def close_session(self, sid: str) -> None:
        s = self.sessions.pop(sid, None)
        if s is None:
            return
        self.workers.unlease(s.worker)
        self.ledger.settle(s.hold, s.used)

    async def team_complete(self, tenants: list[str], prompt: str, max_tokens: int) -> Reply:
        holds = self.ledger.hold_split(tenants, max_tokens)  # clean: near miss, all are cancelled or settled in the loops below
        if holds is None:
            return Reply(429, [])
        worker = await self.workers.wait_lease(5)  # leak: not given up when the worker has gone meanwhile
        if worker is None:
            for h in holds:
                self.ledger.cancel(h)
            return Reply(503, [])
        try:
            tokens = await worker.run(prompt, max_tokens)
        except WorkerGone:
            for h in holds:
                self.ledger.cancel(h)
            return Reply(502, [])
        self.workers.unlease(worker)
        for h in holds:
            self.ledger.settle(h, len(tokens) // max(len(holds), 1))
        return Reply(200, tokens)
