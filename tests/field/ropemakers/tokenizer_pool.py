"""Async tokenizer worker pool. Tokenizers are not thread safe, so each call checks one out."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, AsyncIterator, Dict, List, Optional

logger = logging.getLogger(__name__)


class Worker:
    def __init__(self, wid: int, tokenizer: Any):
        self.wid = wid
        self.tokenizer = tokenizer
        self.calls = 0
        self.broken = False

    def encode(self, text: str) -> List[int]:
        self.calls += 1
        return self.tokenizer.encode(text)

    def decode(self, ids: List[int]) -> str:
        self.calls += 1
        return self.tokenizer.decode(ids)


class WorkerPool:
    def __init__(self, factory, size: int):
        self._factory = factory
        self._q: asyncio.Queue[Worker] = asyncio.Queue()
        self.size = size
        for i in range(size):
            self._q.put_nowait(Worker(i, factory()))

    async def checkout(self) -> Worker:
        w = await self._q.get()  # clean: returned to the caller, or replaced when broken
        if w.broken:
            w = Worker(w.wid, self._factory())
        return w

    def checkout_nowait(self) -> Optional[Worker]:
        try:
            w = self._q.get_nowait()  # leak: a worker over its call limit is dropped without a successor
        except asyncio.QueueEmpty:
            return None
        if w.calls > 1_000_000:
            return None
        return w

    def checkin(self, w: Worker) -> None:
        self._q.put_nowait(w)

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        w = await self.checkout()  # clean: checked in after the body in finally
        try:
            yield w
        finally:
            self.checkin(w)


class TokenizerService:
    def __init__(self, pool: WorkerPool, max_len: int, inflight: int = 64):
        self.pool = pool
        self.max_len = max_len
        self.gate = asyncio.Semaphore(inflight)
        self.sessions: Dict[str, Worker] = {}
        self.cache: Dict[str, List[int]] = {}

    async def encode(self, text: str) -> List[int]:
        async with self.pool.worker() as w:  # clean: context manager
            return w.encode(text)

    async def encode_limited(self, text: str) -> Optional[List[int]]:
        await self.gate.acquire()  # clean: released in finally
        try:
            w = await self.pool.checkout()  # leak: an over-long prompt returns with the worker
            ids = w.encode(text)
            if len(ids) > self.max_len:
                return None
            self.pool.checkin(w)
            return ids
        finally:
            self.gate.release()

    async def encode_cached(self, text: str) -> List[int]:
        hit = self.cache.get(text)
        w = None
        if hit is None:
            w = await self.pool.checkout()  # clean: near miss, checked in when w is set
            hit = w.encode(text)
        self.cache[text] = hit
        if w is not None:
            self.pool.checkin(w)
        return hit

    async def encode_many(self, texts: List[str]) -> List[List[int]]:
        out: List[List[int]] = []
        for text in texts:
            await self.gate.acquire()  # leak: empty strings skip the release
            if not text:
                out.append([])
                continue
            async with self.pool.worker() as w:  # clean: context manager
                out.append(w.encode(text))
            self.gate.release()
        return out

    # -- sessions: a worker stays with one streaming request ------------------

    async def open_session(self, sid: str) -> None:
        if sid in self.sessions:
            return
        w = await self.pool.checkout()  # clean: near miss, checked in if another task was faster, else in self.sessions
        if sid in self.sessions:
            self.pool.checkin(w)
            return
        self.sessions[sid] = w

    async def reopen_session(self, sid: str) -> Worker:
        w = await self.pool.checkout()  # leak: the fresh worker is dropped if the session exists
        cur = self.sessions.get(sid)
        if cur is not None and not cur.broken:
            return cur
        self.sessions[sid] = w
        if cur is not None:
            self.pool.checkin(cur)
        return w

    def close_session(self, sid: str) -> None:
        w = self.sessions.pop(sid, None)
        if w is not None:
            self.pool.checkin(w)

    def close_all(self) -> None:
        while self.sessions:
            _, w = self.sessions.popitem()
            self.pool.checkin(w)

    # -- streaming decode -----------------------------------------------------

    async def stream(self, tokens: AsyncIterator[int]) -> AsyncIterator[str]:
        w = await self.pool.checkout()  # leak: the end of sequence id returns before the checkin
        buf: List[int] = []
        async for t in tokens:
            if t < 0:
                return
            buf.append(t)
            piece = w.decode(buf)
            if not piece.endswith("\ufffd"):
                yield piece
                buf.clear()
        self.pool.checkin(w)

    async def stream_safe(self, tokens: AsyncIterator[int]) -> AsyncIterator[str]:
        w = await self.pool.checkout()  # clean: finally covers the return and an abandoned generator
        try:
            async for t in tokens:
                if t < 0:
                    return
                yield w.decode([t])
        finally:
            self.pool.checkin(w)

    # -- maintenance ----------------------------------------------------------

    async def health(self, timeout: float) -> bool:
        try:
            w = await asyncio.wait_for(self.pool.checkout(), timeout)  # clean: checked in below
        except asyncio.TimeoutError:
            return False
        w.broken = not w.encode("ping")
        self.pool.checkin(w)
        return not w.broken

    async def measure(self, text: str) -> float:
        w = self.pool.checkout_nowait()  # clean: near miss, either this or the awaited one is checked in
        if w is None:
            w = await self.pool.checkout()  # clean: checked in below
        t0 = time.perf_counter()
        w.encode(text)
        dt = time.perf_counter() - t0
        self.pool.checkin(w)
        return dt

    async def vocab_size(self) -> int:
        return len((await self.pool.checkout()).tokenizer)  # leak: the worker is used as a temporary
