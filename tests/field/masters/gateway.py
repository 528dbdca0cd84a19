"""Completion gateway: tenants on one side, model servers on the other."""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import dataclass, field

logger = logging.getLogger("gateway")


class UpstreamDown(Exception): ...


@dataclass(slots=True)
class Conn:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    born: float = field(default_factory=time.monotonic)
    broken: bool = False

    def stale(self, age: float = 55.0) -> bool:
        return self.broken or self.reader.at_eof() or time.monotonic() - self.born > age

    def close(self) -> None:
        self.broken = True
        self.writer.close()

    async def roundtrip(self, payload: dict) -> tuple[int, dict]:
        self.writer.write(json.dumps(payload).encode() + b"\n")
        await self.writer.drain()
        line = await self.reader.readline()
        if not line:
            self.broken = True
            raise ConnectionResetError("upstream hung up")
        head, _, body = line.partition(b" ")
        return int(head), json.loads(body or b"{}")


class ConnPool:
    """At most `size` connections out at a time, idle ones are kept."""

    def __init__(self, host: str, port: int, size: int = 32):
        self.host, self.port, self.size = host, port, size
        self._idle: list[Conn] = []
        self._slots = asyncio.Semaphore(size)

    async def checkout(self) -> Conn:
        await self._slots.acquire()  # clean: near miss, released if we cannot connect, else by checkin()
        while self._idle:
            conn = self._idle.pop()  # clean: near miss, a stale one is closed and its place is used for the next
            if not conn.stale():
                return conn
            conn.close()
        try:
            r, w = await asyncio.open_connection(self.host, self.port)  # clean: wrapped and returned
        except BaseException as exc:
            self._slots.release()
            if isinstance(exc, OSError):
                raise UpstreamDown(f"{self.host}:{self.port}") from exc
            raise
        return Conn(r, w)

    def checkin(self, conn: Conn, reuse: bool = True) -> None:
        if reuse and not conn.stale():
            self._idle.append(conn)
        else:
            conn.close()
        self._slots.release()

    @contextlib.asynccontextmanager
    async def connection(self):
        conn = await self.checkout()  # clean: checked in in the finally
        try:
            yield conn
        except ConnectionError:
            conn.broken = True
            raise
        finally:
            self.checkin(conn)


class Permit:
    __slots__ = ("_sem", "_done")

    def __init__(self, sem: asyncio.Semaphore):
        self._sem, self._done = sem, False

    def leave(self, *_):
        if not self._done:
            self._done = True
            self._sem.release()


class Tenants:
    def __init__(self, default: int = 8, limits: dict[str, int] | None = None):
        self.default, self.limits = default, limits or {}
        self._sems: dict[str, asyncio.Semaphore] = {}

    async def enter(self, tenant: str) -> Permit:
        sem = self._sems.setdefault(tenant, asyncio.Semaphore(self.limits.get(tenant, self.default)))
        await sem.acquire()  # clean: returned as a permit
        return Permit(sem)


@dataclass
class Stats:
    ok: int = 0
    failed: int = 0
    hedged: int = 0
    retried: int = 0
    lat: list[float] = field(default_factory=list)


class Gateway:
    def __init__(self, pool: ConnPool, backup: ConnPool, tenants: Tenants, retries: int = 3):
        self.pool, self.backup, self.tenants, self.retries = pool, backup, tenants, retries
        self.stats = Stats()
        self.sticky: dict[str, Conn] = {}
        self._bg: set[asyncio.Task] = set()

    async def handle(self, tenant: str, raw: bytes) -> tuple[int, dict]:
        permit = await self.tenants.enter(tenant)  # leak: a body that is not JSON returns 400 before the try below
        try:
            req = json.loads(raw)
        except ValueError:
            self.stats.failed += 1
            return 400, {"error": "not json"}
        t0 = time.monotonic()
        try:
            if req.get("hedge"):
                return 200, await self.hedged(req)
            return 200, await self.complete(req)
        except UpstreamDown as exc:
            self.stats.failed += 1
            return 502, {"error": str(exc)}
        finally:
            self.stats.lat.append(time.monotonic() - t0)
            permit.leave()

    async def complete(self, req: dict) -> dict:
        delay = 0.1
        for attempt in range(self.retries):
            conn = await self.pool.checkout()  # leak: the branch for 503 sleeps and tries again without a checkin
            try:
                status, body = await conn.roundtrip(req)
            except ConnectionError:
                self.pool.checkin(conn, reuse=False)
                self.stats.retried += 1
                continue
            if status == 503:
                logger.info("busy, attempt %d, next in %.1fs", attempt, delay)
                await asyncio.sleep(delay)
                delay *= 2
                continue
            self.pool.checkin(conn)
            self.stats.ok += 1
            return body
        raise UpstreamDown("retries used up")

    async def _attempt(self, pool: ConnPool, req: dict) -> dict | None:
        conn = await pool.checkout()  # leak: hedged() cancels the slower attempt in the middle of its round trip
        try:
            _, body = await conn.roundtrip(req)
        except ConnectionError:
            pool.checkin(conn, reuse=False)
            return None
        pool.checkin(conn)
        return body

    async def hedged(self, req: dict, after: float = 0.3) -> dict:
        first = asyncio.create_task(self._attempt(self.pool, req))
        done, _ = await asyncio.wait({first}, timeout=after)
        if done and first.result() is not None:
            return first.result()
        self.stats.hedged += 1
        second = asyncio.create_task(self._attempt(self.backup, req))
        done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for t in pending:
            t.cancel()
        for t in done:
            if t.result() is not None:
                return t.result()
        raise UpstreamDown("both attempts failed")

    async def stream(self, req: dict):
        """Async generator over chunks; the consumer may stop early."""
        conn = await self.pool.checkout()  # clean: checked in by the generator's finally
        whole = False
        try:
            conn.writer.write(json.dumps(req | {"stream": True}).encode() + b"\n")
            async for line in conn.reader:
                if line == b"[DONE]\n":
                    whole = True
                    return
                yield json.loads(line)
        finally:
            self.pool.checkin(conn, reuse=whole)

    async def session(self, sid: str, req: dict) -> dict:
        """Sessions stay on one connection, the server keeps their cache with it."""
        conn = self.sticky.get(sid)
        if conn is None or conn.stale():
            conn = await self.pool.checkout()  # leak: a stale connection in the table is overwritten and never checked in
            self.sticky[sid] = conn
        _, body = await conn.roundtrip(req)
        return body

    def end_session(self, sid: str) -> None:
        conn = self.sticky.pop(sid, None)
        if conn is not None:
            self.pool.checkin(conn)

    async def mirror(self, req: dict) -> None:
        """A copy of the traffic for the canary, whose answer nobody waits for."""
        try:
            conn = await self.backup.checkout()  # clean: near miss, the task owns it and checks it in
        except UpstreamDown:
            return
        task = asyncio.create_task(self._mirror(conn, req))
        self._bg.add(task)
        task.add_done_callback(self._bg.discard)

    async def _mirror(self, conn: Conn, req: dict) -> None:
        try:
            status, _ = await conn.roundtrip(req)
            logger.debug("canary says %d", status)
        except ConnectionError:
            conn.broken = True
        finally:
            self.backup.checkin(conn)

    async def submit(self, tenant: str, req: dict) -> asyncio.Task:
        permit = await self.tenants.enter(tenant)  # clean: near miss, left when the task is done, however it ends
        task = asyncio.create_task(self.complete(req))
        task.add_done_callback(permit.leave)
        return task

    async def keep_warm(self, every: float = 20.0) -> None:
        while True:
            await asyncio.sleep(every)
            try:
                conn = await self.pool.checkout()  # leak: checked in only if the server answers 200
            except UpstreamDown:
                logger.warning("model server is down")
                continue
            try:
                status, _ = await conn.roundtrip({"ping": 1})
                if status == 200:
                    self.pool.checkin(conn)
            except ConnectionError:
                self.pool.checkin(conn, reuse=False)

    async def models(self) -> list[str]:
        async with self.pool.connection() as conn:  # clean: the context manager checks in
            _, body = await conn.roundtrip({"list": "models"})
            return body.get("models", [])
