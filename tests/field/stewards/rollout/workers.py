from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional


class WorkerBusy(Exception):
    pass


@dataclass(eq=False)
class RolloutWorker:
    rank: int
    version: int = 0
    healthy: bool = True

    async def generate(self, prompt: str, n: int) -> list[str]:
        await asyncio.sleep(0)
        if not self.healthy:
            raise WorkerBusy(str(self.rank))
        return [f"{prompt}#{i}" for i in range(n)]


class WorkerPool:
    def __init__(self, world: int) -> None:
        self._idle: asyncio.Queue[RolloutWorker] = asyncio.Queue()
        for rank in range(world):
            self._idle.put_nowait(RolloutWorker(rank))

    async def lease(self) -> RolloutWorker:
        return await self._idle.get()

    def try_lease(self) -> Optional[RolloutWorker]:
        return None if self._idle.empty() else self._idle.get_nowait()

    def give_back(self, worker: RolloutWorker) -> None:
        self._idle.put_nowait(worker)

    async def lease_at(self, version: int, tries: int) -> Optional[RolloutWorker]:
        for _ in range(tries):
            worker = await self.lease()  # clean: near miss, a stale worker is given back before the next try
            if worker.version >= version:
                return worker
            self.give_back(worker)
        return None

    def lease_group(self, n: int) -> list[RolloutWorker]:
        group: list[RolloutWorker] = []
        while len(group) < n:
            worker = self.try_lease()  # leak: a group that cannot be completed is returned empty, its members are lost
            if worker is None:
                return []
            group.append(worker)
        return group

    @asynccontextmanager
    async def leased(self) -> AsyncIterator[RolloutWorker]:
        worker = await self.lease()  # clean: given back at the end of the with block
        try:
            yield worker
        finally:
            self.give_back(worker)


@dataclass
class AgentSession:
    session_id: str
    worker: RolloutWorker
    turns: list[str] = field(default_factory=list)


class SessionManager:
    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.sessions: dict[str, AgentSession] = {}

    async def begin(self, session_id: str) -> AgentSession:
        worker = await self.pool.lease()  # clean: near miss, kept by the session, end() and end_all() give it back
        session = AgentSession(session_id, worker)
        old = self.sessions.pop(session_id, None)
        if old is not None:
            self.pool.give_back(old.worker)
        self.sessions[session_id] = session
        return session

    async def turn(self, session_id: str, text: str) -> str:
        session = self.sessions[session_id]
        try:
            (reply,) = await session.worker.generate(text, 1)
        except WorkerBusy:
            session.worker = await self.pool.lease()  # leak: the worker that failed is replaced and not given back
            (reply,) = await session.worker.generate(text, 1)
        session.turns.append(reply)
        return reply

    async def move(self, session_id: str) -> None:
        session = self.sessions[session_id]
        old, session.worker = session.worker, await self.pool.lease()  # clean: near miss, the tuple keeps the old one, which goes back next
        self.pool.give_back(old)

    def end(self, session_id: str) -> None:
        session = self.sessions.pop(session_id, None)
        if session is not None:
            self.pool.give_back(session.worker)

    def end_all(self) -> None:
        for session_id in list(self.sessions):
            self.end(session_id)
