"""Endpoints."""
import asyncio
from collections import OrderedDict
from functools import partial

import numpy as np

from .batching import Batcher, Expired
from .replicas import NoReplica, ReplicaGone

LOST = (Expired, ReplicaGone, NoReplica, asyncio.TimeoutError)


class EmbedService:
    def __init__(self, pool, replicas, cache_size=256):
        self.pool, self.replicas = pool, replicas
        self.batcher = Batcher(pool, replicas)
        self.cache_size = cache_size
        self._cache = OrderedDict()
        self._ahead = {}
        self._jobs = set()
        self._runner = None

    async def start(self):
        self._runner = asyncio.create_task(self.batcher.run())
        async with self.replicas.claimed() as replica:  # clean: the context manager yields it back
            probe = np.empty((1, self.pool.dim), np.float32)
            await replica.encode(["warm up"], out=probe)

    async def embed(self, texts):
        result = await self.batcher.submit(texts)  # clean: released in the finally
        try:
            return result.rows().tolist()
        finally:
            result.release()

    async def similarity(self, left, right):
        try:
            a = await self.batcher.submit(left)  # leak: when the second request is lost the handler returns without releasing the first
            b = await self.batcher.submit(right)  # clean: released below
        except LOST:
            return None
        scores = a.rows() @ b.rows().T
        a.release()
        b.release()
        return scores.tolist()

    async def stream(self, chunks):
        async for texts in chunks:
            result = await self.batcher.submit(texts)  # clean: near miss, the finally is reached also if the client leaves at the yield
            try:
                yield result.rows().tolist()
            finally:
                result.release()

    def _shrink(self):
        while len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)[1].release()

    async def embed_cached(self, key, texts):
        hit = self._cache.get(key)
        if hit is None:
            hit = await self.batcher.submit(texts)  # leak: two callers that miss the same key store one after the other, the first result is overwritten
            self._cache[key] = hit
            self._shrink()
        self._cache.move_to_end(key)
        return hit.rows().tolist()

    def prefetch(self, key, texts):
        task = asyncio.create_task(self.batcher.submit(texts))  # clean: near miss, the callback stores the result and releases an older one
        self._jobs.add(task)
        task.add_done_callback(partial(self._store, key))
        return task

    def _store(self, key, task):
        self._jobs.discard(task)
        if task.cancelled() or task.exception() is not None:
            return
        old = self._ahead.pop(key, None)
        if old is not None:
            old.release()
        self._ahead[key] = task.result()

    def take_ahead(self, key):
        result = self._ahead.pop(key, None)
        if result is None:
            return None
        vectors = result.rows().tolist()
        result.release()
        return vectors

    async def centroid(self, texts):
        """Mean vector; written to a slab if there is one to spare, since the caller's array may be read-only."""
        slab = self.pool.rent_nowait()  # clean: near miss, dropped unless it is None
        out = slab.array if slab is not None else np.empty((self.pool.rows, self.pool.dim), np.float32)
        try:
            async with self.replicas.claimed() as replica:  # clean: the context manager yields it back
                n = await replica.encode(texts, out=out)
            return out[:n].mean(0).tolist()
        finally:
            if slab is not None:
                self.pool.drop(slab)

    async def stop(self):
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        await self.batcher.drain()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        for table in (self._cache, self._ahead):
            while table:
                table.popitem()[1].release()
