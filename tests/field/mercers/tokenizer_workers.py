"""Tokenizer and detokenizer workers of the API frontend (asyncio)."""
from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Dict, List, Optional, Sequence

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Worker:
    wid: int
    backlog: int = 0
    vocab: Dict[str, int] = field(default_factory=dict)

    async def encode(self, text: str) -> List[int]:
        await asyncio.sleep(0)
        return [self.vocab.setdefault(w, len(self.vocab)) for w in text.split()]


class WorkerPool:
    def __init__(self, n: int) -> None:
        self._ready: "asyncio.Queue[Worker]" = asyncio.Queue()
        self._made = 0
        for _ in range(n):
            self._spawn()

    def _spawn(self) -> None:
        self._ready.put_nowait(Worker(self._made))
        self._made += 1

    async def checkout(self) -> Worker:
        return await self._ready.get()

    def checkin(self, w: Worker) -> None:
        self._ready.put_nowait(w)

    def retire(self, w: Worker) -> None:
        """Instead of checkin for a worker that must not be used again."""
        log.info("worker %d retired", w.wid)
        self._spawn()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Worker]:
        w = await self.checkout()  # clean: checked in in finally
        try:
            yield w
        finally:
            self.checkin(w)


class DetokTable:
    """Incremental detokenizer states, one per stream."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size))
        self._text: Dict[int, List[str]] = {}

    def open_stream(self) -> int:
        sid = self._free.pop()
        self._text[sid] = []
        return sid

    def feed(self, sid: int, tok: int) -> str:
        piece = f"<{tok}>"
        self._text[sid].append(piece)
        return piece

    def close_stream(self, sid: int) -> str:
        self._free.append(sid)
        return "".join(self._text.pop(sid))


class Frontend:
    def __init__(self, pool: WorkerPool, detok: DetokTable, max_inflight: int = 128) -> None:
        self.pool = pool
        self.detok = detok
        self.gate = asyncio.Semaphore(max_inflight)
        self.streams: Dict[str, int] = {}
        self.max_backlog = 32

    # ---- encoding ----------------------------------------------------------

    async def encode(self, text: str) -> List[int]:
        async with self.pool.lease() as w:  # clean: ended by the context manager
            return await w.encode(text)

    async def encode_chat(self, messages: Sequence[str]) -> List[int]:
        w = await self.pool.checkout()  # leak: an empty chat returns before checkin
        text = "\n".join(m.strip() for m in messages if m.strip())
        if not text:
            return []
        ids = await w.encode(text)
        self.pool.checkin(w)
        return ids

    async def encode_many(self, texts: Sequence[str], parallel: int = 4) -> List[List[int]]:
        workers = [await self.pool.checkout() for _ in range(parallel)]  # leak: zip stops at the last text
        out: List[List[int]] = []
        for text, w in zip(texts, workers):
            out.append(await w.encode(text))
            self.pool.checkin(w)
        for text in texts[parallel:]:
            out.append(await self.encode(text))
        return out

    async def _pick(self) -> Worker:
        """A worker, aging its backlog."""
        w = await self.pool.checkout()  # clean: handed to the caller
        w.backlog = max(0, w.backlog - 1)
        return w

    async def warm(self, sample: str, rounds: int) -> int:
        warmed = 0
        for _ in range(rounds):
            w = await self._pick()  # leak: continue for a busy worker goes past checkin
            if w.backlog > self.max_backlog:
                continue
            await w.encode(sample)
            warmed += 1
            self.pool.checkin(w)
        return warmed

    async def rotate(self, max_vocab: int) -> bool:
        w = await self._pick()  # clean: near miss, retired or checked in
        if len(w.vocab) > max_vocab:
            self.pool.retire(w)
            return True
        self.pool.checkin(w)
        return False

    # ---- admission ---------------------------------------------------------

    async def submit(self, text: str) -> Optional[List[int]]:
        await self.gate.acquire()  # leak: a blank text returns before the try
        if text.isspace():
            log.debug("blank prompt")
            return None
        try:
            return await self.encode(text)
        finally:
            self.gate.release()

    async def submit_detached(self, text: str) -> "asyncio.Task[List[int]]":
        await self.gate.acquire()  # clean: near miss, released by the done callback of the task
        task = asyncio.create_task(self.encode(text))
        task.add_done_callback(lambda _t: self.gate.release())
        return task

    # ---- detokenizing ------------------------------------------------------

    async def collect(self, tokens: AsyncIterator[int], stop: Optional[int]) -> str:
        sid = self.detok.open_stream()  # leak: break on the stop token skips the else that closes it
        text = ""
        async for tok in tokens:
            if tok == stop:
                break
            text += self.detok.feed(sid, tok)
        else:
            text = self.detok.close_stream(sid)
        return text

    async def collect_until(self, tokens: AsyncIterator[int], stop: Optional[int]) -> str:
        sid = self.detok.open_stream()  # clean: near miss, break and exhaustion both arrive at close_stream
        async for tok in tokens:
            if tok == stop:
                break
            self.detok.feed(sid, tok)
        return self.detok.close_stream(sid)

    async def stream(self, tokens: AsyncIterator[int]) -> AsyncIterator[str]:
        sid = self.detok.open_stream()  # clean: closed in finally
        try:
            async for tok in tokens:
                yield self.detok.feed(sid, tok)
        finally:
            self.detok.close_stream(sid)

    def begin(self, rid: str) -> None:
        if rid not in self.streams:
            self.streams[rid] = self.detok.open_stream()  # clean: near miss, closed by end or by shutdown

    def push(self, rid: str, tok: int) -> str:
        return self.detok.feed(self.streams[rid], tok)

    def end(self, rid: str) -> str:
        sid = self.streams.pop(rid, None)
        return self.detok.close_stream(sid) if sid is not None else ""

    def shutdown(self) -> None:
        for rid in list(self.streams):
            self.end(rid)
