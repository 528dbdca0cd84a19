"""Async gateway in front of model workers: permits, pooled connections, sticky sessions."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, AsyncIterator

logger = logging.getLogger(__name__)


class Upstream(Exception):
    pass


class Permits:
    def __init__(self, limit: int) -> None:
        self._left = limit
        self._cond = asyncio.Condition()

    async def obtain(self) -> None:
        async with self._cond:
            await self._cond.wait_for(lambda: self._left > 0)
            self._left -= 1

    def try_obtain(self) -> bool:
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    async def put_back(self) -> None:
        async with self._cond:
            self._left += 1
            self._cond.notify()


@dataclass
class Conn:
    worker: str
    broken: bool = False
    sent: list[Any] = field(default_factory=list)

    async def call(self, body: dict[str, Any]) -> dict[str, Any]:
        self.sent.append(body)
        await asyncio.sleep(0)
        if self.broken:
            raise Upstream(self.worker)
        return {"worker": self.worker, "text": body.get("prompt", "")}

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for word in str(body.get("prompt", "")).split():
            await asyncio.sleep(0)
            yield word


class ConnPool:
    def __init__(self, worker: str, size: int) -> None:
        self._idle = [Conn(worker) for _ in range(size)]

    async def checkout(self) -> Conn:
        while not self._idle:
            await asyncio.sleep(0.01)
        return self._idle.pop()

    def checkin(self, conn: Conn) -> None:
        conn.sent.clear()
        self._idle.append(conn)


@dataclass
class Session:
    sid: str
    worker: str
    conn: Conn | None = None


class SessionTable:
    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._rows: dict[str, Session] = {}

    def open_row(self, sid: str, worker: str) -> Session | None:
        if sid in self._rows or len(self._rows) >= self.cap:
            return None
        row = Session(sid, worker)
        self._rows[sid] = row
        return row

    def close_row(self, row: Session) -> None:
        self._rows.pop(row.sid, None)

    def get(self, sid: str) -> Session | None:
        return self._rows.get(sid)


class Gateway:
    def __init__(self, pools: dict[str, ConnPool], permits: Permits, sessions: SessionTable) -> None:
        self.pools = pools
        self.permits = permits
        self.sessions = sessions

    def pick(self, body: dict[str, Any]) -> str | None:
        model = body.get("model")
        return model if model in self.pools else None

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.permits.obtain()  # leak: an unknown model answers 404 and keeps the permit
        worker = self.pick(body)
        if worker is None:
            return {"error": "unknown model", "code": 404}
        conn = await self.pools[worker].checkout()  # clean: near miss, the finally checks in on both outcomes
        try:
            return await conn.call(body)
        except Upstream as exc:
            return {"error": str(exc), "code": 502}
        finally:
            self.pools[worker].checkin(conn)
            await self.permits.put_back()

    async def complete_once(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.permits.try_obtain():  # clean: near miss, a refusal took nothing and the finally covers the rest
            return {"error": "busy", "code": 429}
        try:
            worker = self.pick(body)
            if worker is None:
                return {"error": "unknown model", "code": 404}
            conn = await self.pools[worker].checkout()  # leak: the upstream error is answered without a checkin
            try:
                out = await conn.call(body)
            except Upstream:
                logger.warning("worker %s failed", worker)
                return {"error": "bad gateway", "code": 502}
            self.pools[worker].checkin(conn)
            return out
        finally:
            await self.permits.put_back()

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        worker = self.pick(body)
        if worker is None:
            return
        conn = await self.pools[worker].checkout()  # clean: near miss, closing the generator runs the finally
        try:
            async for piece in conn.chunks(body):
                if piece == body.get("stop"):
                    return
                yield piece
        finally:
            self.pools[worker].checkin(conn)

    async def open_session(self, sid: str, body: dict[str, Any]) -> Session | None:
        worker = self.pick(body)
        if worker is None:
            return None
        row = self.sessions.open_row(sid, worker)  # clean: near miss, closed when cancelled, else returned and closed by end_session
        if row is None:
            return None
        try:
            row.conn = await self.pools[worker].checkout()  # clean: near miss, lives in the session row until end_session
        except asyncio.CancelledError:
            self.sessions.close_row(row)
            raise
        return row

    async def migrate(self, row: Session, worker: str) -> bool:
        if worker not in self.pools:
            return False
        conn = await self.pools[worker].checkout()  # leak: overwrites row.conn whose old connection is never checked in
        row.worker = worker
        row.conn = conn
        return True

    def end_session(self, sid: str) -> None:
        row = self.sessions.get(sid)
        if row is None:
            return
        if row.conn is not None:
            self.pools[row.worker].checkin(row.conn)
            row.conn = None
        self.sessions.close_row(row)

    async def race(self, workers: list[str], body: dict[str, Any]) -> dict[str, Any] | None:
        held: list[tuple[str, Conn]] = []
        for worker in workers:
            conn = await self.pools[worker].checkout()  # clean: near miss, every held connection goes back after the race
            held.append((worker, conn))
        answers = await asyncio.gather(*(c.call(body) for _, c in held), return_exceptions=True)
        for worker, conn in held:
            self.pools[worker].checkin(conn)
        return next((a for a in answers if isinstance(a, dict)), None)

    async def with_retry(self, worker: str, body: dict[str, Any], tries: int = 3) -> dict[str, Any] | None:
        for attempt in range(tries):
            conn = await self.pools[worker].checkout()  # leak: a failed try goes on to the next connection without a checkin
            try:
                out = await conn.call(body)
            except Upstream:
                await asyncio.sleep(0.05 * (attempt + 1))
                continue
            self.pools[worker].checkin(conn)
            return out
        return None


async def chat(gw: Gateway, sid: str, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    row = await gw.open_session(sid, turns[0])  # clean: near miss, end_session in the finally finds the row by its id
    if row is None:
        return []
    try:
        if row.conn is None:
            return []
        return [await row.conn.call(t) for t in turns]
    finally:
        gw.end_session(sid)
