"""Async HTTP gateway in front of an LLM cluster: quotas, backend connections, SSE streams."""
import asyncio
import itertools
from dataclasses import dataclass, field


class TokenBudget:
    def __init__(self, total):
        self.left = total

    def charge(self, n):
        if n > self.left:
            return 0
        self.left -= n
        return n

    def refund(self, n):
        self.left += n


class BackendPool:
    def __init__(self, conns):
        self._q = asyncio.Queue()
        for c in conns:
            self._q.put_nowait(c)

    async def lease(self):
        return await self._q.get()

    def lease_nowait(self):
        return None if self._q.empty() else self._q.get_nowait()

    def restore(self, conn):
        self._q.put_nowait(conn)


class Gate:
    """Counts the streams of one tenant."""

    def __init__(self, limit):
        self.limit, self.inside = limit, 0

    def enter(self):
        if self.inside >= self.limit:
            return False
        self.inside += 1
        return True

    def leave(self):
        self.inside -= 1


@dataclass
class Stream:
    sid: int
    tenant: str
    conn: object = None
    charged: int = 0
    mirror: object = None
    used: int = 0
    state: str = "open"
    chunks: list = field(default_factory=list)


class Gateway:
    def __init__(self, backends, mirrors, budget, gates):
        self.backends = backends
        self.mirrors = mirrors
        self.budget = budget
        self.gates = gates
        self.streams = {}
        self.ids = itertools.count()

    async def open(self, tenant, prompt_len, max_tokens, mirrored):
        gate = self.gates[tenant]
        if not gate.enter():  # clean: near miss, left by every end and by the refusal below
            return None
        amount = self.budget.charge(prompt_len + max_tokens)  # leak: fail() refunds nothing
        if amount == 0:
            gate.leave()
            return None
        s = Stream(next(self.ids), tenant, charged=amount)
        s.conn = await self.backends.lease()  # clean: near miss, close, fail and migrate restore it
        if mirrored:
            s.mirror = self.mirrors.lease_nowait()  # leak: close() forgets the mirror connection
        self.streams[s.sid] = s
        return s.sid

    async def migrate(self, sid):
        s = self.streams.get(sid)
        if s is None:
            return False
        fresh = await self.backends.lease()  # clean: near miss, replaces the one restored, or goes back
        await fresh.send({"replay": s.chunks})
        if sid not in self.streams:
            self.backends.restore(fresh)
            return False
        old, s.conn = s.conn, fresh
        self.backends.restore(old)
        return True

    async def pump(self, sid):
        s = self.streams[sid]
        async for event in s.conn.events():
            match event:
                case {"type": "token", "text": text}:
                    s.chunks.append(text)
                    s.used += 1
                    if s.mirror is not None:
                        await s.mirror.send(text)
                case {"type": "end"}:
                    self.close(sid)
                    return "".join(s.chunks)
                case {"type": "error", "code": code}:
                    self.fail(sid, code)
                    return None
        self.close(sid)
        return "".join(s.chunks)

    def close(self, sid):
        s = self.streams.pop(sid, None)
        if s is None:
            return
        s.state = "closed"
        self.budget.refund(s.charged)
        self.backends.restore(s.conn)
        self.gates[s.tenant].leave()

    def fail(self, sid, code):
        s = self.streams.pop(sid, None)
        if s is None:
            return
        s.state = f"failed:{code}"
        self.backends.restore(s.conn)
        if s.mirror is not None:
            self.mirrors.restore(s.mirror)
        self.gates[s.tenant].leave()


class ProbeBoard:
    """Keeps one connection a region for health probes, and hands spares to a retry lane."""

    def __init__(self, pool):
        self.pool = pool
        self.by_region = {}
        self.lane = asyncio.Queue()

    async def attach(self, region):
        conn = await self.pool.lease()  # leak: a second attach of the region overwrites the first connection
        await conn.send({"probe": region})
        self.by_region[region] = conn

    def ensure_spare(self, region):
        key = (region, "spare")
        if key in self.by_region:
            return
        spare = self.pool.lease_nowait()  # clean: near miss, taken only if absent, detach restores it
        if spare is not None:
            self.by_region[key] = spare

    async def offer(self):
        if (conn := self.pool.lease_nowait()) is None:  # clean: near miss, drain_lane restores them
            return False
        await self.lane.put(conn)
        return True

    def detach(self, region):
        for key in (region, (region, "spare")):
            conn = self.by_region.pop(key, None)
            if conn is not None:
                self.pool.restore(conn)

    def drain_lane(self):
        while not self.lane.empty():
            self.pool.restore(self.lane.get_nowait())
