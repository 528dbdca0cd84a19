"""Asyncio client of the rendezvous store used by the elastic launcher."""
from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from typing import Any, AsyncIterator, Callable, Dict, List, Optional

log = logging.getLogger(__name__)


class Conn:
    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.reader: Optional[asyncio.StreamReader] = None
        self.writer: Optional[asyncio.StreamWriter] = None
        self.broken = False

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)  # clean: kept in self, take_back() or close() of the pool closes it

    async def call(self, op: str, **kw: Any) -> Dict[str, Any]:
        self.writer.write(json.dumps({"op": op, **kw}).encode() + b"\n")
        await self.writer.drain()
        line = await self.reader.readline()
        if not line:
            self.broken = True
            return {"ok": False, "why": "eof"}
        return json.loads(line)


class ConnPool:
    def __init__(self, host: str, port: int, limit: int) -> None:
        self.host, self.port = host, port
        self._spare: List[Conn] = []
        self._room = asyncio.Semaphore(limit)

    async def lend(self) -> Conn:
        await self._room.acquire()  # clean: near miss, released when open() fails and else by take_back()
        if self._spare:
            return self._spare.pop()
        conn = Conn(self.host, self.port)
        try:
            await conn.open()
        except OSError:
            self._room.release()
            raise
        return conn

    async def lend_now(self) -> Optional[Conn]:
        if self._room.locked():
            return None
        await self._room.acquire()  # leak: not released when nothing is spare and None is returned
        while self._spare:
            conn = self._spare.pop()
            if not conn.broken:
                return conn
        return None

    def take_back(self, conn: Conn) -> None:
        if conn.broken:
            conn.writer.close()
        else:
            self._spare.append(conn)
        self._room.release()

    def close(self) -> None:
        while self._spare:
            self._spare.pop().writer.close()

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Conn]:
        conn = await self.lend()  # clean: taken back in finally
        try:
            yield conn
        finally:
            self.take_back(conn)


class Shared:
    """One connection with several users; the last to leave gives it back."""

    def __init__(self, pool: ConnPool) -> None:
        self.pool = pool
        self.conn: Optional[Conn] = None
        self.users = 0
        self._mu = asyncio.Lock()

    async def join(self) -> Conn:
        async with self._mu:
            if self.users == 0:
                self.conn = await self.pool.lend()  # clean: near miss, leave() takes it back at the last user
            self.users += 1
            return self.conn

    def leave(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.pool.take_back(self.conn)
            self.conn = None


class Rendezvous:
    def __init__(self, pool: ConnPool, run_id: str) -> None:
        self.pool = pool
        self.run_id = run_id
        self.shared = Shared(pool)
        self.watches: Dict[str, Conn] = {}
        self.beat: Optional[asyncio.Task] = None

    async def get(self, key: str) -> Any:
        async with self.pool.borrowed() as conn:  # clean: async with
            r = await conn.call("get", key=key)
            if not r["ok"]:
                return None
            return r["value"]

    async def compare_set(self, key: str, old: Any, new: Any) -> bool:
        conn = await self.pool.lend()  # leak: not taken back when the value differs
        r = await conn.call("get", key=key)
        if r.get("value") != old:
            return False
        r = await conn.call("set", key=key, value=new)
        self.pool.take_back(conn)
        return r["ok"]

    async def set_with_retry(self, key: str, value: Any, tries: int = 5) -> bool:
        for attempt in range(tries):
            conn = await self.pool.lend()  # leak: not taken back before a retry
            r = await conn.call("set", key=key, value=value)
            if r["ok"]:
                self.pool.take_back(conn)
                return True
            log.warning("set %s failed: %s", key, r.get("why"))
            await asyncio.sleep(0.1 * 2 ** attempt)
        return False

    async def delete_with_retry(self, key: str, tries: int = 5) -> bool:
        for attempt in range(tries):
            conn = await self.pool.lend()  # clean: near miss, taken back before the result is looked at
            r = await conn.call("delete", key=key)
            self.pool.take_back(conn)
            if r["ok"]:
                return True
            await asyncio.sleep(0.1 * 2 ** attempt)
        return False

    async def watch(self, key: str) -> bool:
        if key in self.watches:
            return True
        conn = await self.pool.lend()  # clean: near miss, kept in watches, unwatch() and close() take it back
        if key in self.watches:
            self.pool.take_back(conn)
            return True
        self.watches[key] = conn
        r = await conn.call("watch", key=key)
        return r["ok"]

    def unwatch(self, key: str) -> None:
        conn = self.watches.pop(key, None)
        if conn is not None:
            self.pool.take_back(conn)

    async def start_heartbeat(self, rank: int) -> None:
        conn = await self.pool.lend()  # clean: near miss, the task it is passed to takes it back in finally
        self.beat = asyncio.create_task(self._beat(conn, rank))
        await asyncio.sleep(0)

    async def _beat(self, conn: Conn, rank: int) -> None:
        try:
            while True:
                r = await conn.call("beat", run=self.run_id, rank=rank)
                if not r["ok"]:
                    return
                await asyncio.sleep(5.0)
        finally:
            self.pool.take_back(conn)

    async def poll_task(self, key: str, done: Callable[[Any], None]) -> asyncio.Task:
        conn = await self.pool.lend()  # leak: the task returns without taking it back when the key is closed
        return asyncio.create_task(self._poll(conn, key, done))

    async def _poll(self, conn: Conn, key: str, done: Callable[[Any], None]) -> None:
        while True:
            r = await conn.call("get", key=key)
            if r.get("closed"):
                return
            if r["ok"]:
                done(r["value"])
                break
            await asyncio.sleep(1.0)
        self.pool.take_back(conn)

    async def rank_table(self, world: int) -> Optional[List[str]]:
        conn = await self.shared.join()  # leak: not left when a rank has not registered
        hosts = []
        for r in range(world):
            reply = await conn.call("get", key=f"{self.run_id}/rank/{r}")
            if not reply["ok"]:
                return None
            hosts.append(reply["value"])
        self.shared.leave()
        return hosts

    async def barrier(self, name: str, world: int) -> None:
        conn = await self.shared.join()  # clean: left in finally
        try:
            r = await conn.call("add", key=name, delta=1)
            while r.get("value", 0) < world:
                await asyncio.sleep(0.05)
                r = await conn.call("get", key=name)
        finally:
            self.shared.leave()

    async def move_key(self, src: str, dst: str) -> bool:
        a = await self.pool.lend()  # clean: taken back at the end
        b = await self.pool.lend_now()  # clean: taken back when it is not None
        r = await a.call("get", key=src)
        ok = r["ok"]
        if ok:
            await (b or a).call("set", key=dst, value=r["value"])
        if b is not None:
            self.pool.take_back(b)
        self.pool.take_back(a)
        return ok

    async def close(self) -> None:
        if self.beat is not None:
            self.beat.cancel()
        for key in list(self.watches):
            self.unwatch(key)
