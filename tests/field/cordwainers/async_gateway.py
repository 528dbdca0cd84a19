"""Gateway in front of the attention workers: pooled upstream links, concurrency permits, hedging."""
from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator

log = logging.getLogger("gateway")


@dataclass(eq=False)
class Link:
    host: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    uses: int = 0
    broken: bool = False

    async def call(self, payload: dict) -> dict:
        self.uses += 1
        self.writer.write(json.dumps(payload).encode() + b"\n")
        await self.writer.drain()
        return json.loads(await self.reader.readline())

    async def lines(self, payload: dict) -> AsyncIterator[dict]:
        self.writer.write(json.dumps(payload).encode() + b"\n")
        await self.writer.drain()
        while line := await self.reader.readline():
            yield json.loads(line)


class LinkPool:
    def __init__(self, host: str, port: int, limit: int) -> None:
        self.host, self.port = host, port
        self._idle: deque[Link] = deque()
        self._permits = asyncio.Semaphore(limit)

    async def checkout(self) -> Link:
        await self._permits.acquire()  # clean: one permit per link that is out, checkin releases it
        if self._idle:
            return self._idle.popleft()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        return Link(self.host, reader, writer)

    def checkin(self, link: Link) -> None:
        if link.broken:
            link.writer.close()
        else:
            self._idle.append(link)
        self._permits.release()

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        ln = await self.checkout()  # clean: checked in by the finally clause
        try:
            yield ln
        finally:
            self.checkin(ln)


@dataclass
class Session:
    sid: str
    link: Link | None = None
    turns: list[dict] = field(default_factory=list)


class Gateway:
    def __init__(self, pools: list[LinkPool], concurrency: int) -> None:
        self.pools = pools
        self.gate = asyncio.Semaphore(concurrency)
        self.sessions: dict[str, Session] = {}
        self.background: set[asyncio.Task] = set()

    def pick(self) -> LinkPool:
        return random.choice(self.pools)

    async def score(self, query: list[float], docs: list[int]) -> dict | None:
        pool = self.pick()
        ln = await pool.checkout()  # leak: a worker that answers busy makes it return with the link
        reply = await ln.call({"op": "score", "q": query, "docs": docs})
        if reply.get("status") == "busy":
            log.info("%s busy", ln.host)
            return None
        pool.checkin(ln)
        return reply

    async def score_timeout(self, query: list[float], limit_s: float) -> dict | None:
        pool = self.pick()
        ln = await pool.checkout()  # clean: near miss, the timeout marks it broken and checks it in
        try:
            reply = await asyncio.wait_for(ln.call({"op": "score", "q": query}), limit_s)
        except asyncio.TimeoutError:
            ln.broken = True
            pool.checkin(ln)
            return None
        pool.checkin(ln)
        return reply

    async def rerank(self, docs: list[int], tries: int = 3) -> dict | None:
        pool = self.pick()
        for attempt in range(tries):
            ln = await pool.checkout()  # leak: the link of a failed try is marked and never checked in
            try:
                reply = await ln.call({"op": "rerank", "docs": docs})
            except ConnectionError:
                ln.broken = True
                await asyncio.sleep(0.05 * 2**attempt)
                continue
            pool.checkin(ln)
            return reply
        return None

    async def rerank_safe(self, docs: list[int], tries: int = 3) -> dict | None:
        pool = self.pick()
        for attempt in range(tries):
            ln = await pool.checkout()  # clean: near miss, finally runs for continue and return
            try:
                return await ln.call({"op": "rerank", "docs": docs})
            except ConnectionError:
                ln.broken = True
                await asyncio.sleep(0.05 * 2**attempt)
                continue
            finally:
                pool.checkin(ln)
        return None

    async def hedged(self, payload: dict, after_s: float) -> dict:
        """Asks a second worker when the first is slow; the quicker answer wins."""
        p1, p2 = self.pick(), self.pick()
        a = await p1.checkout()  # clean: checked in on both ways
        t1 = asyncio.create_task(a.call(payload))
        done, _ = await asyncio.wait({t1}, timeout=after_s)
        if done:
            p1.checkin(a)
            return t1.result()
        b = await p2.checkout()  # leak: when the first worker wins the hedge's link is not checked in
        t2 = asyncio.create_task(b.call(payload))
        done, _ = await asyncio.wait({t1, t2}, return_when=asyncio.FIRST_COMPLETED)
        if t1 in done:
            t2.cancel()
            p1.checkin(a)
            return t1.result()
        t1.cancel()
        a.broken = True
        p1.checkin(a)
        p2.checkin(b)
        return t2.result()

    async def generate(self, prompt: str) -> AsyncIterator[str]:
        pool = self.pick()
        ln = await pool.checkout()  # clean: finally of the generator
        try:
            async for chunk in ln.lines({"op": "generate", "prompt": prompt}):
                if chunk.get("eos"):
                    return
                yield chunk["text"]
        finally:
            pool.checkin(ln)

    async def complete(self, prompt: str, limit: int) -> str:
        pool = self.pick()
        ln = await pool.checkout()  # leak: reaching the limit returns from inside the loop with the link
        text = ""
        async for chunk in ln.lines({"op": "generate", "prompt": prompt}):
            if chunk.get("eos"):
                break
            text += chunk["text"]
            if len(text) >= limit:
                return text[:limit]
        pool.checkin(ln)
        return text

    # -- sticky sessions -------------------------------------------------------------------
    async def open_session(self, sid: str) -> Session:
        if sid in self.sessions:
            return self.sessions[sid]
        sess = Session(sid)
        sess.link = await self.pools[0].checkout()  # clean: near miss, close_session checks it in
        self.sessions[sid] = sess
        return sess

    async def turn(self, sid: str, text: str) -> dict:
        sess = await self.open_session(sid)  # clean: the session stays in the table, close_session ends it
        reply = await sess.link.call({"op": "turn", "sid": sid, "text": text})
        sess.turns.append(reply)
        return reply

    def close_session(self, sid: str) -> int:
        sess = self.sessions.pop(sid, None)
        if sess is None:
            return 0
        self.pools[0].checkin(sess.link)
        sess.link = None
        return len(sess.turns)

    # -- admission -------------------------------------------------------------------------
    async def _one(self, payload: dict) -> dict:
        try:
            async with self.pick().link() as ln:  # clean: context manager
                return await ln.call(payload)
        finally:
            self.gate.release()

    async def fire(self, payload: dict) -> None:
        await self.gate.acquire()  # clean: near miss, the task releases the permit when it ends
        task = asyncio.create_task(self._one(payload))
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def fire_dedup(self, payload: dict, seen: set[str]) -> bool:
        await self.gate.acquire()  # leak: a duplicate returns without a task that would release the permit
        key = json.dumps(payload, sort_keys=True)
        if key in seen:
            return False
        seen.add(key)
        task = asyncio.create_task(self._one(payload))
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return True

    async def prewarm(self, per_pool: int) -> int:
        opened = 0
        for pool in self.pools:
            links = [await pool.checkout() for _ in range(per_pool)]  # leak: only one link per pool goes back
            opened += len(links)
            if links:
                pool.checkin(links[-1])
        return opened
