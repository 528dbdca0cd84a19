"""Asyncio pool of tokenizer workers with admission permits."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, AsyncIterator, Dict, List, Optional, Set

logger = logging.getLogger(__name__)


class TokenizerWorker:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.healthy = True

    async def encode(self, text: str) -> List[int]:
        await asyncio.sleep(0)
        if "\x00" in text:
            raise ValueError("NUL in prompt")
        self.healthy = len(text) < 1 << 20
        return [ord(c) % 97 for c in text]

    async def decode(self, ids: List[int]) -> str:
        await asyncio.sleep(0)
        return "".join(chr(97 + i % 26) for i in ids)


class WorkerPool:
    def __init__(self, n: int) -> None:
        self._idle: "asyncio.Queue[TokenizerWorker]" = asyncio.Queue()
        for i in range(n):
            self._idle.put_nowait(TokenizerWorker(i))

    async def checkout(self) -> TokenizerWorker:
        return await self._idle.get()

    def checkout_nowait(self) -> Optional[TokenizerWorker]:
        if self._idle.empty():
            return None
        return self._idle.get_nowait()

    def checkin(self, worker: TokenizerWorker) -> None:
        self._idle.put_nowait(worker)


class WorkerLease:
    """``async with WorkerLease(pool) as w``"""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.worker: Optional[TokenizerWorker] = None

    async def __aenter__(self) -> TokenizerWorker:
        self.worker = await self.pool.checkout()  # leak: __aexit__ keeps an unhealthy worker out of the pool without a replacement or record
        return self.worker

    async def __aexit__(self, exc_type, exc, tb) -> None:
        if not self.worker.healthy:
            return
        self.pool.checkin(self.worker)


@dataclass
class EncodeJob:
    rid: str
    text: str
    worker: Optional[TokenizerWorker] = None
    ids: Optional[List[int]] = None


class TokenizerManager:
    def __init__(self, workers: int, max_inflight: int) -> None:
        self.pool = WorkerPool(workers)
        self.permits = asyncio.Semaphore(max_inflight)
        self.jobs: Dict[str, EncodeJob] = {}
        self.tasks: Set["asyncio.Task[Any]"] = set()
        self.cache: Dict[str, List[int]] = {}

    async def encode(self, text: str) -> List[int]:
        await self.permits.acquire()  # clean: finally
        try:
            worker = await self.pool.checkout()  # clean: inner finally
            try:
                return await worker.encode(text)
            finally:
                self.pool.checkin(worker)
        finally:
            self.permits.release()

    async def encode_cached(self, text: str) -> List[int]:
        await self.permits.acquire()  # leak: a cache hit returns with the permit
        hit = self.cache.get(text)
        if hit is not None:
            return hit
        try:
            async with WorkerLease(self.pool) as worker:  # clean: async with
                self.cache[text] = ids = await worker.encode(text)
                return ids
        finally:
            self.permits.release()

    async def encode_batch(self, texts: List[str]) -> List[Optional[List[int]]]:
        out: List[Optional[List[int]]] = []
        for text in texts:
            worker = await self.pool.checkout()  # leak: a rejected prompt is skipped with its worker
            try:
                ids = await worker.encode(text)
            except ValueError:
                logger.info("rejected prompt")
                out.append(None)
                continue
            out.append(ids)
            self.pool.checkin(worker)
        return out

    async def encode_batch_lenient(self, texts: List[str]) -> List[Optional[List[int]]]:
        out: List[Optional[List[int]]] = []
        for text in texts:
            worker = await self.pool.checkout()  # clean: near miss, both ways of the try come to the checkin
            try:
                out.append(await worker.encode(text))
            except ValueError:
                out.append(None)
            self.pool.checkin(worker)
        return out

    # -- jobs --------------------------------------------------------------

    async def open_job(self, rid: str, text: str) -> EncodeJob:
        self.close_job(rid)
        job = EncodeJob(rid, text)
        job.worker = await self.pool.checkout()  # clean: rides in the job, close_job checks it in
        self.jobs[rid] = job
        return job

    async def step_job(self, rid: str) -> None:
        job = self.jobs[rid]
        assert job.worker is not None
        job.ids = await job.worker.encode(job.text)

    def close_job(self, rid: str) -> Optional[List[int]]:
        job = self.jobs.pop(rid, None)
        if job is None:
            return None
        if job.worker is not None:
            self.pool.checkin(job.worker)
            job.worker = None
        return job.ids

    async def submit(self, text: str) -> "asyncio.Task[List[int]]":
        worker = await self.pool.checkout()  # clean: near miss, the task's done callback checks it in
        task = asyncio.create_task(worker.encode(text))
        self.tasks.add(task)

        def _done(t: "asyncio.Task[Any]") -> None:
            self.tasks.discard(t)
            self.pool.checkin(worker)

        task.add_done_callback(_done)
        return task

    async def submit_throttled(self, text: str) -> "asyncio.Task[List[int]]":
        await self.permits.acquire()  # leak: the done callback only forgets the task
        task = asyncio.create_task(self._encode_unmetered(text))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _encode_unmetered(self, text: str) -> List[int]:
        worker = await self.pool.checkout()  # clean: finally
        try:
            return await worker.encode(text)
        finally:
            self.pool.checkin(worker)

    async def submit_metered(self, text: str) -> "asyncio.Task[List[int]]":
        await self.permits.acquire()  # clean: near miss, the task body releases it
        return asyncio.create_task(self._encode_and_release(text))

    async def _encode_and_release(self, text: str) -> List[int]:
        try:
            return await self._encode_unmetered(text)
        finally:
            self.permits.release()

    # -- streaming detokenizer ---------------------------------------------

    async def detok_stream(self, chunks: List[List[int]], stop: str) -> AsyncIterator[str]:
        worker = await self.pool.checkout()  # leak: a stop string ends the stream before checkin
        for ids in chunks:
            text = await worker.decode(ids)
            if stop and stop in text:
                yield text.split(stop)[0]
                return
            yield text
        self.pool.checkin(worker)

    def probe_idle(self) -> int:
        """How many workers are idle and healthy right now."""
        seen: List[TokenizerWorker] = []
        while True:
            worker = self.pool.checkout_nowait()  # clean: near miss, all collected and checked in
            if worker is None:
                break
            seen.append(worker)
        for worker in seen:
            self.pool.checkin(worker)
        return sum(w.healthy for w in seen)
