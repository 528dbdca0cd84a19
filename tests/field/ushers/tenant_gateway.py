"""Multi-tenant gateway: per-tenant permits, upstream sessions and token budgets."""
from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional

logger = logging.getLogger(__name__)


class UpstreamError(Exception):
    pass


class Phase(enum.Enum):
    NEW = 0
    ADMITTED = 1
    STREAMING = 2
    DONE = 3


class PermitBook:
    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self._in_use: dict[str, int] = defaultdict(int)

    def try_enter(self, tenant: str) -> bool:
        if self._in_use[tenant] >= self.per_tenant:
            return False
        self._in_use[tenant] += 1
        return True

    def leave(self, tenant: str) -> None:
        self._in_use[tenant] -= 1


@dataclass
class UpstreamSession:
    host: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    last_used: float = field(default_factory=time.monotonic)

    @property
    def healthy(self) -> bool:
        return not self.writer.is_closing()


class SessionPool:
    def __init__(self, hosts: list[str]) -> None:
        self._idle: dict[str, list[UpstreamSession]] = {h: [] for h in hosts}
        self._cap = asyncio.Semaphore(64)

    async def checkout(self, host: str) -> UpstreamSession:
        await self._cap.acquire()  # clean: near miss, released on OSError, else by checkin or discard
        if self._idle[host]:
            return self._idle[host].pop()
        try:
            reader, writer = await asyncio.open_connection(host, 8000)
        except OSError as exc:
            self._cap.release()
            raise UpstreamError(host) from exc
        return UpstreamSession(host, reader, writer)

    def checkin(self, session: UpstreamSession) -> None:
        self._cap.release()
        if session.healthy:
            session.last_used = time.monotonic()
            self._idle[session.host].append(session)

    def discard(self, session: UpstreamSession) -> None:
        self._cap.release()
        session.writer.close()


@dataclass
class Call:
    tenant: str
    body: bytes
    phase: Phase = Phase.NEW
    session: Optional[UpstreamSession] = None


class Gateway:
    def __init__(self, permits: PermitBook, sessions: SessionPool, hosts: list[str]) -> None:
        self.permits = permits
        self.sessions = sessions
        self.hosts = hosts
        self._live: dict[int, Call] = {}

    async def _send(self, session: UpstreamSession, body: bytes) -> bytes:
        session.writer.write(body)
        await session.writer.drain()
        line = await session.reader.readline()
        if not line:
            raise UpstreamError("closed by peer")
        return line

    async def unary(self, tenant: str, body: bytes) -> Optional[bytes]:
        if not self.permits.try_enter(tenant):  # clean: left in finally
            return None
        try:
            session = await self.sessions.checkout(self.hosts[0])  # clean: near miss, discarded on error, else checked in
            try:
                reply = await self._send(session, body)
            except UpstreamError:
                self.sessions.discard(session)
                return None
            self.sessions.checkin(session)
            return reply
        except UpstreamError:
            return None
        finally:
            self.permits.leave(tenant)

    async def unary_with_retry(self, tenant: str, body: bytes, attempts: int = 3) -> Optional[bytes]:
        for i in range(attempts):
            session = await self.sessions.checkout(self.hosts[i % len(self.hosts)])  # leak: a failed attempt goes round without discard
            try:
                reply = await self._send(session, body)
            except UpstreamError:
                await asyncio.sleep(0.05 * 2**i)
                continue
            self.sessions.checkin(session)
            return reply
        return None

    async def hedge(self, body: bytes) -> Optional[bytes]:
        first = await self.sessions.checkout(self.hosts[0])  # clean: checked in after the race
        try:
            second = await self.sessions.checkout(self.hosts[-1])  # leak: the answer of the first returns without it
        except UpstreamError:
            self.sessions.discard(first)
            return None
        task = asyncio.create_task(self._send(first, body))
        done, _ = await asyncio.wait({task}, timeout=0.2)
        if done and task.exception() is None:
            self.sessions.checkin(first)
            return task.result()
        task.cancel()
        self.sessions.discard(first)
        reply = await self._send(second, body)
        self.sessions.checkin(second)
        return reply

    async def admit(self, key: int, call: Call) -> bool:
        if not self.permits.try_enter(call.tenant):  # leak: no permit is given back when the upstream is down
            return False
        try:
            call.session = await self.sessions.checkout(self.hosts[key % len(self.hosts)])  # clean: finish or abort settles call.session
        except UpstreamError:
            logger.warning("upstream down for %s", call.tenant)
            return False
        call.phase = Phase.ADMITTED
        self._live[key] = call
        return True

    async def stream(self, key: int) -> AsyncIterator[bytes]:
        call = self._live[key]
        call.phase = Phase.STREAMING
        call.session.writer.write(call.body)
        async for line in call.session.reader:
            yield line
            if line == b"[DONE]\n":
                break
        self.finish(key)

    def finish(self, key: int) -> None:
        call = self._live.pop(key, None)
        if call is None:
            return
        self.sessions.checkin(call.session)
        self.permits.leave(call.tenant)
        call.phase = Phase.DONE

    def abort(self, key: int) -> None:
        call = self._live.pop(key, None)
        if call is None:
            return
        self.sessions.discard(call.session)
        self.permits.leave(call.tenant)
        call.phase = Phase.DONE

    async def failover(self, key: int, host: str) -> bool:
        call = self._live.get(key)
        if call is None:
            return False
        try:
            fresh = await self.sessions.checkout(host)  # clean: near miss, the former session is discarded before it is replaced
        except UpstreamError:
            return False
        self.sessions.discard(call.session)
        call.session = fresh
        return True

    async def rebind(self, key: int, host: str) -> None:
        call = self._live.get(key)
        if call is None or call.phase is not Phase.ADMITTED:
            return
        call.session = await self.sessions.checkout(host)  # leak: the admitted session is overwritten

    async def probe(self) -> dict[str, bool]:
        health: dict[str, bool] = {}
        for host in self.hosts:
            try:
                session = await self.sessions.checkout(host)  # clean: near miss, settled before each continue
            except UpstreamError:
                health[host] = False
                continue
            if not session.healthy:
                self.sessions.discard(session)
                health[host] = False
                continue
            health[host] = True
            self.sessions.checkin(session)
        return health

    async def run_exclusive(self, tenant: str, job) -> bool:
        taken = self.permits.try_enter(tenant)  # clean: near miss, `taken` guards the leave
        if taken:
            try:
                await job()
            except asyncio.CancelledError:
                logger.info("job of %s cancelled", tenant)
        if taken:
            self.permits.leave(tenant)
        return taken
