"""Workers announce themselves; the router holds a lease on a worker while it uses it."""

import asyncio
import itertools
import logging
import time
import typing as t
from dataclasses import dataclass, field

log = logging.getLogger("routelet.registry")

class NoWorker(Exception):
    """No worker has a slot."""

class LeaseLost(Exception):
    """The worker has gone away below a lease."""

@dataclass
class Worker:
    wid: str
    url: str
    slots: int
    seen: float = field(default_factory=time.monotonic)
    used: t.Set[int] = field(default_factory=set)
    gone: bool = False

    def pick_slot(self) -> t.Optional[int]:
        for i in range(self.slots):
            if i not in self.used:
                self.used.add(i)
                return i
        return None

    def drop_slot(self, slot: int) -> None:
        self.used.discard(slot)

class Lease:
    _count = itertools.count()

    def __init__(self, registry: "Registry", worker: Worker, slot: int):
        self.number = next(self._count)
        self.registry = registry
        self.worker = worker
        self.slot = slot
        self.live = True

    def check(self) -> None:
        if self.worker.gone:
            raise LeaseLost(self.worker.wid)

    async def release(self) -> None:
        if not self.live:
            return
        self.live = False
        self.worker.drop_slot(self.slot)
        await self.registry.wake()

    async def __aenter__(self) -> "Lease":
        return self

    async def __aexit__(self, *exc: t.Any) -> None:
        await self.release()

class Registry:
    def __init__(self) -> None:
        self.workers: t.Dict[str, Worker] = {}
        self._cond = asyncio.Condition()

    async def announce(self, wid: str, url: str, slots: int) -> None:
        known = self.workers.get(wid)
        if known is not None:
            known.seen = time.monotonic()
            return
        self.workers[wid] = Worker(wid, url, slots)
        await self.wake()

    async def wake(self) -> None:
        async with self._cond:
            self._cond.notify_all()

    def try_lease(self, avoid: t.Container[str] = ()) -> t.Optional[Lease]:
        for w in sorted(self.workers.values(), key=lambda w: len(w.used) / w.slots):
            if w.wid in avoid:
                continue
            slot = w.pick_slot()  # clean: None goes on to the next worker, a number moves into the lease
            if slot is not None:
                return Lease(self, w, slot)
        return None

    async def lease(self, timeout: float, avoid: t.Container[str] = ()) -> Lease:
        end = time.monotonic() + timeout
        while True:
            got = self.try_lease(avoid)  # clean: returned unless it is None
            if got is not None:
                return got
            if time.monotonic() >= end:
                raise NoWorker
            async with self._cond:
                try:
                    await asyncio.wait_for(self._cond.wait(), end - time.monotonic())
                except asyncio.TimeoutError:
                    log.debug("no worker in %.1fs", timeout)

    async def lease_pair(self, timeout: float) -> t.Tuple[Lease, Lease]:
        """A prefill worker and another one for decoding."""
        first = await self.lease(timeout)  # leak: NoWorker for the second one leaves with the first lease live
        second = await self.lease(timeout, avoid={first.worker.wid})  # clean: returned along with the first
        return first, second

    def expel(self, silent_for: float) -> t.List[str]:
        limit = time.monotonic() - silent_for
        out = [w.wid for w in self.workers.values() if w.seen < limit]
        for wid in out:
            self.workers.pop(wid).gone = True
        return out
