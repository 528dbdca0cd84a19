"""Asyncio connection manager for the feature-store upstreams."""
import asyncio
import contextlib
import json
import logging
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

log = logging.getLogger("upstream")


class Link:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer
        self.broken = False

    async def ask(self, payload: dict) -> Optional[dict]:
        self.writer.write(json.dumps(payload).encode() + b"\n")
        await self.writer.drain()
        line = await self.reader.readline()
        if not line:
            self.broken = True
            return None
        return json.loads(line)


class LinkPool:
    def __init__(self, host: str, port: int, limit: int = 16):
        self.host = host
        self.port = port
        self._idle: Deque[Link] = deque()
        self._sem = asyncio.Semaphore(limit)

    async def checkout(self) -> Link:
        await self._sem.acquire()  # clean: permit goes with the link, checkin() releases it
        if self._idle:
            return self._idle.popleft()
        try:
            r, w = await asyncio.open_connection(self.host, self.port)
        except OSError:
            self._sem.release()
            raise
        return Link(r, w)

    def checkin(self, link: Link) -> None:
        if link.broken:
            link.writer.close()
        else:
            self._idle.append(link)
        self._sem.release()

    async def try_checkout(self) -> Optional[Link]:
        if self._sem.locked():
            return None
        await self._sem.acquire()  # leak: permit kept when no idle link is left and None is returned
        if not self._idle:
            return None
        return self._idle.popleft()

    @contextlib.asynccontextmanager
    async def link(self):
        lk = await self.checkout()  # clean: checked in in finally
        try:
            yield lk
        finally:
            self.checkin(lk)


class FeatureClient:
    def __init__(self, pool: LinkPool, shadow: Optional[LinkPool] = None):
        self.pool = pool
        self.shadow = shadow
        self._pinned: Dict[str, Link] = {}
        self._bulk: Dict[str, Link] = {}

    async def get(self, key: str) -> Optional[Any]:
        lk = await self.pool.checkout()  # leak: a missing reply returns without checkin
        reply = await lk.ask({"op": "get", "key": key})
        if reply is None:
            return None
        self.pool.checkin(lk)
        return reply["value"]

    async def put(self, key: str, value: Any) -> bool:
        async with self.pool.link() as lk:  # clean: async with
            reply = await lk.ask({"op": "put", "key": key, "value": value})
            if reply is None:
                return False
            return bool(reply.get("ok"))

    async def mget(self, keys: List[str]) -> Dict[str, Any]:
        out: Dict[str, Any] = {}
        lk = await self.pool.checkout()  # clean: near miss, break and continue both reach the checkin
        for k in keys:
            reply = await lk.ask({"op": "get", "key": k})
            if reply is None:
                break
            if "value" not in reply:
                continue
            out[k] = reply["value"]
        self.pool.checkin(lk)
        return out

    async def copy_key(self, key: str, other: LinkPool) -> bool:
        src = await self.pool.checkout()  # clean: given back before both returns
        reply = await src.ask({"op": "get", "key": key})
        self.pool.checkin(src)
        if reply is None:
            return False
        dst = await other.checkout()  # leak: the ttl case returns before checkin
        await dst.ask({"op": "put", "key": key, "value": reply["value"]})
        ttl = reply.get("ttl")
        if ttl:
            ack = await dst.ask({"op": "expire", "key": key, "ttl": ttl})
            return ack is not None
        other.checkin(dst)
        return True

    async def pin(self, session: str) -> Link:
        if session in self._pinned:
            return self._pinned[session]
        lk = await self.pool.checkout()  # clean: near miss, kept in _pinned until unpin(), or checked in when another pin was faster
        held = self._pinned.setdefault(session, lk)
        if held is not lk:
            self.pool.checkin(lk)
        return held

    def unpin(self, session: str) -> None:
        lk = self._pinned.pop(session, None)
        if lk is not None:
            self.pool.checkin(lk)

    async def repin(self, session: str) -> None:
        fresh = await self.pool.checkout()  # clean: kept in _pinned
        old = self._pinned.get(session)
        if old is not None:
            self.pool.checkin(old)
        self._pinned[session] = fresh

    async def pin_all(self, sessions: List[str]) -> None:
        for s in sessions:
            self._bulk[s] = await self.pool.checkout()  # leak: overwrites the link of a session already in the table

    def unpin_bulk(self) -> None:
        while self._bulk:
            _, lk = self._bulk.popitem()
            self.pool.checkin(lk)

    async def with_retries(self, payload: dict, attempts: int = 3) -> Optional[dict]:
        for i in range(attempts):
            lk = await self.pool.checkout()  # leak: a broken link is not checked in before the next attempt
            reply = await lk.ask(payload)
            if reply is None:
                await asyncio.sleep(0.1 * 2 ** i)
                continue
            self.pool.checkin(lk)
            return reply
        return None

    async def with_retries_logged(self, payload: dict, attempts: int = 3) -> Optional[dict]:
        for i in range(attempts):
            lk = await self.pool.checkout()  # clean: near miss, finally runs before continue
            try:
                reply = await lk.ask(payload)
                if reply is None:
                    log.info("attempt %d failed", i)
                    continue
                return reply
            finally:
                self.pool.checkin(lk)
        return None

    async def stream(self, prefix: str):
        lk = await self.pool.checkout()  # clean: generator closes in finally
        try:
            cursor = 0
            while True:
                reply = await lk.ask({"op": "scan", "prefix": prefix, "cursor": cursor})
                if reply is None:
                    return
                for item in reply["items"]:
                    yield item
                cursor = reply["cursor"]
                if cursor == 0:
                    return
        finally:
            self.pool.checkin(lk)
