"""Adapter slots of a multi-LoRA server.

A slot is one row of the stacked A and B matrices.  Requests lease the slot of their adapter,
leases of one adapter are counted, and a slot without leases may be taken for another one.
"""
import asyncio
import logging
import time
from dataclasses import dataclass, field

import torch

logger = logging.getLogger("lora")


class AdapterMissing(KeyError):
    pass


@dataclass
class Resident:
    name: str
    row: int
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Lease:
    name: str
    row: int


class AdapterPool:
    def __init__(self, store, stacked, rows):
        self._store = store
        self._stacked = stacked
        self._rows = list(range(rows))
        self._resident = {}
        self._cond = asyncio.Condition()
        self.hits = self.loads = 0

    def _idle(self):
        return [r for r in self._resident.values() if r.users == 0]

    def _take_row(self):
        if self._rows:
            return self._rows.pop()  # clean: the row is handed to acquire()
        victim = min(self._idle(), key=lambda r: r.last_used)
        del self._resident[victim.name]
        logger.debug("evict %s from row %d", victim.name, victim.row)
        return victim.row

    async def acquire(self, name):
        async with self._cond:
            await self._cond.wait_for(
                lambda: name in self._resident or self._rows or self._idle())
            res = self._resident.get(name)
            if res is None:
                row = self._take_row()  # leak: the row is in no list any more when AdapterMissing is raised
                weights = await self._store.fetch(name)
                if weights is None:
                    raise AdapterMissing(name)
                with torch.no_grad():
                    self._stacked[row].copy_(weights, non_blocking=True)
                res = self._resident[name] = Resident(name, row)
                self.loads += 1
            else:
                self.hits += 1
            res.users += 1
            res.last_used = time.monotonic()
            return Lease(name, res.row)

    def try_acquire(self, name):
        """Only if it is resident already, never waits."""
        res = self._resident.get(name)
        if res is None:
            return None
        res.users += 1
        self.hits += 1
        return Lease(name, res.row)

    async def release(self, lease):
        async with self._cond:
            res = self._resident[lease.name]
            res.users -= 1
            res.last_used = time.monotonic()
            if res.users == 0:
                self._cond.notify_all()


class ChatSession:
    """All turns of a conversation run with the adapter row that the first turn got."""

    def __init__(self, pool, engine, adapter):
        self.pool, self.engine, self.adapter = pool, engine, adapter
        self.lease = None
        self.turns = []

    async def ask(self, prompt):
        if self.lease is None:
            self.lease = await self.pool.acquire(self.adapter)  # leak: close() returns early when the first turn gave no answer
        answer = await self.engine.run(prompt, self.lease.row, history=self.turns)
        if not answer.text:
            return None
        self.turns.append((prompt, answer.text))
        return answer.text

    async def close(self):
        if not self.turns:
            return
        logger.info("session over after %d turns", len(self.turns))
        lease, self.lease = self.lease, None
        if lease is not None:
            await self.pool.release(lease)


class Server:
    def __init__(self, pool, engine, max_background=32):
        self.pool = pool
        self.engine = engine
        self.default = None
        self.background = set()
        self.max_background = max_background

    async def set_default(self, name):
        lease = await self.pool.acquire(name)  # leak: the lease of the previous default is rebound, not released
        if self.default is not None and self.default.name == name:
            await self.pool.release(lease)
            return
        self.default = lease
        logger.info("default adapter is %s in row %d", name, lease.row)

    async def handle(self, request):
        if request.adapter is None:
            row = self.default.row if self.default else -1
            return await self.engine.run(request.prompt, row)
        lease = self.pool.try_acquire(request.adapter)  # clean: None is replaced below and finally releases either
        if lease is None:
            try:
                lease = await self.pool.acquire(request.adapter)  # clean: released in finally
            except AdapterMissing:
                return self.engine.error(404, f"no adapter {request.adapter}")
        try:
            return await self.engine.run(request.prompt, lease.row)
        finally:
            await self.pool.release(lease)

    async def stream(self, request):
        lease = await self.pool.acquire(request.adapter)  # clean: near miss, the generator releases when it is closed
        try:
            async for token in self.engine.stream(request.prompt, lease.row):
                if request.cancelled:
                    return
                yield token
        finally:
            await self.pool.release(lease)

    async def merge(self, left, right, alpha):
        a = await self.pool.acquire(left)  # leak: AdapterMissing of the second acquire leaves the first held
        b = await self.pool.acquire(right)  # clean: finally releases it
        try:
            merged = await self.engine.blend(a.row, b.row, alpha)
        finally:
            await self.pool.release(b)
            await self.pool.release(a)
        return merged

    async def run_batch(self, requests):
        leases = {}
        try:
            for req in requests:
                if req.adapter in leases:
                    continue
                try:
                    leases[req.adapter] = await self.pool.acquire(req.adapter)  # clean: the dict is emptied in finally
                except AdapterMissing as exc:
                    req.fail(str(exc))
            rows = [leases[r.adapter].row for r in requests if r.adapter in leases]
            return await self.engine.run_rows(requests, rows)
        finally:
            for lease in leases.values():
                await self.pool.release(lease)

    async def prefetch(self, name, seconds):
        """Keep an adapter warm for some time without holding up the caller."""
        lease = await self.pool.acquire(name)  # leak: with too many background tasks it returns and no task releases
        if len(self.background) >= self.max_background:
            logger.warning("not prefetching %s", name)
            return False

        async def hold():
            try:
                await asyncio.sleep(seconds)
            finally:
                await self.pool.release(lease)

        task = asyncio.create_task(hold())
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return True

    async def compare(self, prompt, names):
        """One answer for every adapter, at the same time."""
        async def one(name):
            lease = await self.pool.acquire(name)  # clean: released in finally, also when gather is cancelled
            try:
                return name, await self.engine.run(prompt, lease.row)
            finally:
                await self.pool.release(lease)

        results = await asyncio.gather(*(one(n) for n in names), return_exceptions=True)
        return {r[0]: r[1] for r in results if not isinstance(r, BaseException)}

    async def pinned(self, name, fn):
        """Call fn with the row, fn may give the lease on to a longer job."""
        lease = await self.pool.acquire(name)  # clean: near miss, kept only when fn has taken it over to release it itself
        taken = False
        try:
            job = await fn(lease)
            taken = job is not None
            if taken:
                job.on_done(lambda: asyncio.ensure_future(self.pool.release(lease)))
        finally:
            if not taken:
                await self.pool.release(lease)

    async def shutdown(self):
        for task in list(self.background):
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)
        if self.default is not None:
            lease, self.default = self.default, None
            await self.pool.release(lease)
