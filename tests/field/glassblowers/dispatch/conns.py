from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, Optional


@dataclass(frozen=True)
class Worker:
    name: str
    role: str
    addr: str


class Conn:
    def __init__(self, worker: Worker, transport) -> None:
        self.worker = worker
        self.transport = transport
        self.born = time.monotonic()
        self.broken = False

    async def call(self, method: str, payload):
        return await self.transport.request(method, payload)


class ConnPool:
    """Connections per worker, capped by a semaphore per worker."""

    def __init__(self, dialer, per_worker: int = 4, max_age: float = 300.0) -> None:
        self.dialer = dialer
        self.per_worker = per_worker
        self.max_age = max_age
        self._idle: Dict[str, Deque[Conn]] = {}
        self._caps: Dict[str, asyncio.Semaphore] = {}

    def _cap(self, worker: Worker) -> asyncio.Semaphore:
        return self._caps.setdefault(worker.name, asyncio.Semaphore(self.per_worker))

    async def checkout(self, worker: Worker) -> Conn:
        cap = self._cap(worker)
        await cap.acquire()  # clean: near miss, released when dialing fails, else by checkin()
        idle = self._idle.setdefault(worker.name, deque())
        while idle:
            conn = idle.pop()  # clean: returned, or closed when it is too old
            if time.monotonic() - conn.born < self.max_age:
                return conn
            conn.transport.close()
        try:
            return Conn(worker, await self.dialer(worker.addr))  # clean: returned to the caller
        except OSError:
            cap.release()
            raise

    def checkin(self, conn: Conn) -> None:
        if conn.broken:
            conn.transport.close()
        else:
            self._idle.setdefault(conn.worker.name, deque()).append(conn)
        self._cap(conn.worker).release()

    async def checkout_now(self, worker: Worker) -> Optional[Conn]:
        """An idle connection, without dialing."""
        cap = self._cap(worker)
        if cap.locked():
            return None
        await cap.acquire()  # leak: not released when no idle connection is there
        idle = self._idle.get(worker.name)
        if not idle:
            return None
        return idle.pop()  # clean: returned to the caller
