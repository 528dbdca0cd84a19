"""Connections to the replicas. Every replica has a bounded pool."""
from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Deque, Dict, List, Optional


class Conn:
    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.opened = time.monotonic()
        self.broken = False

    async def call(self, method: str, payload: Any) -> Optional[Any]:
        await asyncio.sleep(0)
        return None if self.broken else {"method": method, "payload": payload}

    async def hangup(self) -> None:
        await asyncio.sleep(0)


class ConnPool:
    def __init__(self, replica: str, limit: int, max_age: float = 300.0) -> None:
        self.replica = replica
        self.limit = limit
        self.max_age = max_age
        self._total = 0
        self._idle: Deque[Conn] = deque()

    def try_take(self) -> Optional[Conn]:
        while self._idle:
            conn = self._idle.popleft()
            if conn.broken:
                self._total -= 1
                continue
            return conn
        if self._total >= self.limit:
            return None
        self._total += 1
        return Conn(self.replica)

    def put_back(self, conn: Conn) -> None:
        if conn.broken or time.monotonic() - conn.opened > self.max_age:
            self._total -= 1
            return
        self._idle.append(conn)

    def load(self) -> float:
        return (self._total - len(self._idle)) / self.limit


class Fleet:
    def __init__(self, pools: List[ConnPool]) -> None:
        self.pools: Dict[str, ConnPool] = {p.replica: p for p in pools}

    def by_load(self) -> List[ConnPool]:
        return sorted(self.pools.values(), key=lambda p: p.load())

    def take_any(self, avoid: Optional[str] = None) -> Optional[Conn]:
        for pool in self.by_load():
            if pool.replica == avoid:
                continue
            conn = pool.try_take()  # clean: returned to the caller when there is one
            if conn is not None:
                return conn
        return None

    def take_freshest(self) -> Optional[Conn]:
        """The connection opened last among one of every replica."""
        best: Optional[Conn] = None
        for pool in self.by_load():
            conn = pool.try_take()  # leak: of the two compared, the older is not put back
            if conn is None:
                continue
            if best is None or conn.opened > best.opened:
                best = conn
        return best

    def take_oldest(self) -> Optional[Conn]:
        taken: List[Conn] = []
        for pool in self.by_load():
            conn = pool.try_take()  # clean: near miss, all but the returned one are put back
            if conn is not None:
                taken.append(conn)
        if not taken:
            return None
        taken.sort(key=lambda c: c.opened)
        for other in taken[1:]:
            self.put_back(other)
        return taken[0]

    def put_back(self, conn: Conn) -> None:
        self.pools[conn.replica].put_back(conn)
