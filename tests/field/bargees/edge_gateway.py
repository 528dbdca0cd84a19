"""Async gateway in front of several inference upstreams."""
from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field


@dataclass
class Conn:
    host: str
    rtt: float = 0.0
    sent: int = 0

    async def request(self, body: bytes) -> tuple[int, bytes]:
        self.sent += len(body)
        await asyncio.sleep(0)
        return 200, body


class UpstreamPool:
    def __init__(self, hosts: list[str], per_host: int) -> None:
        self._idle: asyncio.Queue[Conn] = asyncio.Queue()
        for host in hosts:
            for _ in range(per_host):
                self._idle.put_nowait(Conn(host))

    async def checkout(self) -> Conn:
        return await self._idle.get()

    def checkin(self, conn: Conn) -> None:
        self._idle.put_nowait(conn)


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.left = total

    def reserve(self, n: int) -> int:
        self.left -= n
        return n

    def refund(self, n: int) -> None:
        self.left += n


@dataclass
class Stream:
    rid: int
    conn: Conn
    grant: int
    deadline: float
    chunks: list[bytes] = field(default_factory=list)


@dataclass
class Session:
    sid: str
    conn: Conn
    generation: int = 0


@dataclass
class Job:
    body: bytes
    grant: int
    attempts: int = 0


class Gateway:
    def __init__(self, pool: UpstreamPool, budget: TokenBudget) -> None:
        self.pool = pool
        self.budget = budget
        self.streams: dict[int, Stream] = {}
        self.sessions: dict[str, Session] = {}
        self.consoles: dict[str, Session] = {}
        self.retries: asyncio.Queue[Job] = asyncio.Queue()
        self.batch_jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._serial = 0
        self.stats: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.stats[name] = self.stats.get(name, 0) + 1

    async def open_stream(self, max_tokens: int, ttl: float) -> int:
        conn = await self.pool.checkout()  # leak: expire pops the stream and only counts its host
        grant = self.budget.reserve(max_tokens)  # clean: near miss, refunded by expire and by close_stream
        self._serial += 1
        self.streams[self._serial] = Stream(self._serial, conn, grant, time.monotonic() + ttl)
        return self._serial

    def close_stream(self, rid: int) -> bytes:
        stream = self.streams.pop(rid, None)
        if stream is None:
            return b""
        self.pool.checkin(stream.conn)
        self.budget.refund(stream.grant)
        return b"".join(stream.chunks)

    def expire(self, now: float) -> int:
        late = [rid for rid, s in self.streams.items() if s.deadline < now]
        for rid in late:
            stream = self.streams.pop(rid)
            self.budget.refund(stream.grant)
            self._count(f"expired.{stream.conn.host}")
        return len(late)

    async def connect(self, sid: str) -> int:
        """Clients reconnect under the id they had; the generation tells the two apart."""
        previous = self.sessions.get(sid)
        generation = previous.generation + 1 if previous is not None else 0
        conn = await self.pool.checkout()  # leak: a reconnect puts its session over this one
        self.sessions[sid] = Session(sid, conn, generation)
        return generation

    def disconnect(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is not None:
            self.pool.checkin(session.conn)

    async def attach_console(self, user: str) -> int:
        conn = await self.pool.checkout()  # clean: near miss, the session it replaces is checked in
        previous = self.consoles.get(user)
        generation = 0
        if previous is not None:
            generation = previous.generation + 1
            self.pool.checkin(previous.conn)
        self.consoles[user] = Session(user, conn, generation)
        return generation

    def detach_console(self, user: str) -> None:
        if (session := self.consoles.pop(user, None)) is not None:
            self.pool.checkin(session.conn)

    async def hedge(self, body: bytes, width: int) -> bytes:
        conns = [await self.pool.checkout() for _ in range(width)]  # leak: only the best one goes back
        best = min(conns, key=lambda c: c.rtt)
        status, reply = await best.request(body)
        self.pool.checkin(best)
        self._count(f"hedge.{status}")
        return reply

    async def probe(self, width: int) -> float:
        conns = [await self.pool.checkout() for _ in range(width)]  # clean: near miss, all of them go back
        fastest = min(conns, key=lambda c: c.rtt)
        for other in conns:
            if other is not fastest:
                self.pool.checkin(other)
        await fastest.request(b"ping")
        rtt = fastest.rtt
        self.pool.checkin(fastest)
        return rtt

    async def enqueue(self, body: bytes) -> None:
        await self.retries.put(Job(body, self.budget.reserve(len(body))))  # leak: dropped at the third try

    async def work_retries(self) -> None:
        while True:
            job = await self.retries.get()
            conn = await self.pool.checkout()  # clean: checked in before the outcome is looked at
            status, _ = await conn.request(job.body)
            self.pool.checkin(conn)
            if status == 200:
                self.budget.refund(job.grant)
                self._count("retry.ok")
                continue
            job.attempts += 1
            if job.attempts < 3:
                await self.retries.put(job)
                continue
            self._count("retry.given_up")

    async def enqueue_batch(self, body: bytes) -> None:
        grant = self.budget.reserve(len(body))  # clean: near miss, requeued or refunded at the last try
        await self.batch_jobs.put(Job(body, grant))

    async def work_batch(self) -> None:
        while True:
            job = await self.batch_jobs.get()
            conn = await self.pool.checkout()  # clean: checked in right after the request
            status, _ = await conn.request(job.body)
            self.pool.checkin(conn)
            job.attempts += 1
            if status != 200 and job.attempts < 5:
                await self.batch_jobs.put(job)
                continue
            self.budget.refund(job.grant)
            self._count("batch.ok" if status == 200 else "batch.given_up")
