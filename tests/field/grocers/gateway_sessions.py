"""Inference gateway: admission permits, upstream connections, tenant quotas."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from typing import Any, Dict, List, Optional

log = logging.getLogger(__name__)


class UpstreamPool:
    """Connections to model servers; connect() waits for a free one."""

    def __init__(self, dial, limit: int):
        self._dial = dial
        self._idle: List[Any] = []
        self._room = asyncio.Semaphore(limit)

    async def connect(self) -> Any:
        await self._room.acquire()
        return self._idle.pop() if self._idle else await self._dial()

    def hang_up(self, conn: Any) -> None:
        self._idle.append(conn)
        self._room.release()


class TenantQuota:
    """Counted concurrent requests of a tenant."""

    def __init__(self, limit: int):
        self.limit = limit
        self._used: Dict[str, int] = defaultdict(int)

    def enter(self, tenant: str) -> bool:
        if self._used[tenant] >= self.limit:
            return False
        self._used[tenant] += 1
        return True

    def leave(self, tenant: str) -> None:
        self._used[tenant] -= 1


class Session:
    def __init__(self, sid: str, tenant: str):
        self.sid = sid
        self.tenant = tenant
        self.conn: Optional[Any] = None
        self.seen = time.monotonic()


class SessionTable:
    def __init__(self, pool: UpstreamPool, quota: TenantQuota, ttl: float):
        self.pool = pool
        self.quota = quota
        self.ttl = ttl
        self.sessions: Dict[str, Session] = {}

    async def open(self, sid: str, tenant: str) -> Optional[Session]:
        if sid in self.sessions:
            return self.sessions[sid]
        if not self.quota.enter(tenant):  # leak: expire hangs up the connection but never leaves the quota
            return None
        s = self.sessions[sid] = Session(sid, tenant)
        conn = await self.pool.connect()  # clean: hung up here if closed meanwhile, else by close and expire
        if self.sessions.get(sid) is not s:
            self.pool.hang_up(conn)
            return None
        s.conn = conn
        return s

    def close(self, sid: str) -> None:
        s = self.sessions.pop(sid, None)
        if s is None:
            return
        if s.conn is not None:
            self.pool.hang_up(s.conn)
        self.quota.leave(s.tenant)

    def expire(self) -> int:
        edge = time.monotonic() - self.ttl
        stale = [sid for sid, s in self.sessions.items() if s.seen < edge]
        for sid in stale:
            s = self.sessions.pop(sid)
            if s.conn is not None:
                self.pool.hang_up(s.conn)
                s.conn = None
        return len(stale)


class StickyRouter:
    """Keeps one connection per conversation, least recently used first out."""

    def __init__(self, pool: UpstreamPool, limit: int):
        self.pool = pool
        self.limit = limit
        self.conns: "OrderedDict[str, Any]" = OrderedDict()

    async def route(self, conv: str) -> Any:
        conn = self.conns.get(conv)
        if conn is not None:
            self.conns.move_to_end(conv)
            return conn
        conn = await self.pool.connect()  # leak: the oldest entry is popped over the limit and not hung up
        self.conns[conv] = conn
        if len(self.conns) > self.limit:
            self.conns.popitem(last=False)
        return conn

    async def reroute(self, conv: str) -> Any:
        bad = self.conns.pop(conv, None)
        if bad is not None:
            self.pool.hang_up(bad)
        conn = self.conns[conv] = await self.pool.connect()  # leak: lands in the same table, which route evicts by popitem
        return conn

    def close(self) -> None:
        while self.conns:
            self.pool.hang_up(self.conns.popitem()[1])


class HedgedCall:
    """Sends to a second server when the first is slow."""

    def __init__(self, pool: UpstreamPool, delay: float):
        self.pool = pool
        self.delay = delay

    async def call(self, req: dict) -> dict:
        tasks: List[asyncio.Task] = []
        conns: Dict[asyncio.Task, Any] = {}
        first = await self.pool.connect()  # clean: in conns by task, the finally hangs up all
        t = asyncio.ensure_future(first.send(req))
        tasks.append(t)
        conns[t] = first
        try:
            done, _ = await asyncio.wait(tasks, timeout=self.delay)
            if not done:
                second = await self.pool.connect()  # clean: joins conns before the wait, the finally hangs up all
                t = asyncio.ensure_future(second.send(req))
                tasks.append(t)
                conns[t] = second
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task, conn in conns.items():
                task.cancel()
                self.pool.hang_up(conn)

    async def call_first(self, reqs: List[dict]) -> Optional[dict]:
        for req in reqs:
            conn = await self.pool.connect()  # leak: the break on the first good answer skips the hang up
            answer = await conn.send(req)
            if answer.get("ok"):
                break
            self.pool.hang_up(conn)
        else:
            return None
        return answer


class StreamProxy:
    def __init__(self, pool: UpstreamPool, quota: TenantQuota):
        self.pool = pool
        self.quota = quota
        self.live: Dict[str, Any] = {}

    async def start(self, rid: str, tenant: str, req: dict):
        if not self.quota.enter(tenant):  # clean: the generator's finally leaves, refusal returns before
            raise PermissionError(tenant)
        try:
            conn = await self.pool.connect()  # clean: kept by request id, the finally pops and hangs up (by meaning)
            self.live[rid] = conn
            async for chunk in conn.stream(req):
                yield chunk
        finally:
            conn = self.live.pop(rid, None)
            if conn is not None:
                self.pool.hang_up(conn)
            self.quota.leave(tenant)


class BatchAdmission:
    """Admits a whole batch of one tenant or refuses it."""

    def __init__(self, quota: TenantQuota):
        self.quota = quota
        self.open: Dict[str, int] = {}

    def admit(self, bid: str, tenant: str, n: int) -> bool:
        if bid in self.open:
            return True
        got = 0
        while got < n and self.quota.enter(tenant):  # clean: near miss, the count is stored or given back whole
            got += 1
        if got < n:
            for _ in range(got):
                self.quota.leave(tenant)
            return False
        self.open[bid] = got
        return True

    def done(self, bid: str, tenant: str) -> None:
        for _ in range(self.open.pop(bid, 0)):
            self.quota.leave(tenant)


class RetryQueue:
    """Requests waiting for a retry keep their quota; giving up ends it."""

    def __init__(self, quota: TenantQuota, upstream, max_tries: int):
        self.quota = quota
        self.upstream = upstream
        self.max_tries = max_tries
        self.waiting: List[tuple] = []

    def submit(self, tenant: str, req: dict) -> bool:
        if not self.quota.enter(tenant):  # leak: pump logs and drops a request whose tries are used up
            return False
        self.waiting.append((tenant, req, 0))
        return True

    async def pump(self) -> None:
        batch, self.waiting = self.waiting, []
        for tenant, req, tries in batch:
            try:
                await self.upstream.send(req)
                self.quota.leave(tenant)
            except ConnectionError:
                if tries + 1 < self.max_tries:
                    self.waiting.append((tenant, req, tries + 1))
                else:
                    log.warning("gave up on a request of %s", tenant)
