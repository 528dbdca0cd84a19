"""LoRA adapter slots on the GPU, shared by requests through references."""
from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional, Set

logger = logging.getLogger(__name__)

Loader = Callable[[str, int], Awaitable[bool]]
Run = Callable[[int, List[int]], Awaitable[List[int]]]


@dataclass
class AdapterRef:
    name: str
    slot: int


class AdapterSlots:
    """Adapters stay resident while referenced; idle ones are evicted."""

    def __init__(self, count: int, loader: Loader) -> None:
        self.loader = loader
        self._free = list(range(count))
        self._slot_of: Dict[str, int] = {}
        self._refs: Dict[str, int] = {}
        self._loads = asyncio.Semaphore(2)

    def _grab_slot(self) -> int:
        if self._free:
            return self._free.pop()
        for name, refs in self._refs.items():
            if refs == 0:
                slot = self._slot_of.pop(name)
                del self._refs[name]
                return slot
        return -1

    def _return_slot(self, slot: int) -> None:
        self._free.append(slot)

    async def acquire(self, name: str) -> Optional[AdapterRef]:
        if name in self._slot_of:
            self._refs[name] += 1
            return AdapterRef(name, self._slot_of[name])
        slot = self._grab_slot()  # clean: returned unless it becomes resident under its name
        if slot < 0:
            return None
        await self._loads.acquire()  # clean: released straight after the load
        loaded = await self.loader(name, slot)
        self._loads.release()
        if not loaded:
            self._return_slot(slot)
            return None
        if name in self._slot_of:
            self._return_slot(slot)
        else:
            self._slot_of[name] = slot
            self._refs[name] = 0
        self._refs[name] += 1
        return AdapterRef(name, self._slot_of[name])

    def release(self, ref: AdapterRef) -> None:
        self._refs[ref.name] -= 1

    async def replace(self, name: str) -> bool:
        """Loads a new version of a resident adapter beside the old one."""
        slot = self._grab_slot()  # leak: the slot of a failed load is not returned
        if slot < 0:
            return False
        await self._loads.acquire()  # clean: near miss, released before the result is looked at
        loaded = await self.loader(name, slot)
        self._loads.release()
        if not loaded:
            logger.error("new version of %s could not be loaded", name)
            return False
        old = self._slot_of.get(name)
        self._slot_of[name] = slot
        self._refs.setdefault(name, 0)
        if old is not None:
            self._return_slot(old)
        return True

    async def prefetch(self, names: List[str]) -> int:
        fetched = 0
        for name in names:
            await self._loads.acquire()  # leak: adapters already resident continue without a release
            if name in self._slot_of:
                continue
            slot = self._grab_slot()  # leak: the slot of a failed load is kept by nobody
            if slot < 0:
                self._loads.release()
                break
            loaded = await self.loader(name, slot)
            self._loads.release()
            if loaded and name not in self._slot_of:
                self._slot_of[name] = slot
                self._refs[name] = 0
                fetched += 1
        return fetched

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Optional[AdapterRef]]:
        ref = await self.acquire(name)  # clean: released in finally
        try:
            yield ref
        finally:
            if ref is not None:
                self.release(ref)


class LoraRequest:
    def __init__(self, rid: str, adapter: Optional[str], tokens: List[int]) -> None:
        self.rid = rid
        self.adapter = adapter
        self.tokens = tokens
        self.ref: Optional[AdapterRef] = None
        self.tried = 0


class LoraRouter:
    def __init__(self, slots: AdapterSlots, max_batch_adapters: int) -> None:
        self.slots = slots
        self.max_batch_adapters = max_batch_adapters
        self.ready: List[LoraRequest] = []
        self.tasks: Set[asyncio.Task] = set()
        self.canary: Dict[str, AdapterRef] = {}

    async def enqueue(self, req: LoraRequest) -> bool:
        if req.adapter is not None and req.ref is None:
            req.ref = await self.slots.acquire(req.adapter)  # clean: kept in the request, finish() releases
            if req.ref is None:
                return False
        self.ready.append(req)
        return True

    def finish(self, req: LoraRequest) -> None:
        if req.ref is not None:
            self.slots.release(req.ref)
            req.ref = None

    async def enqueue_retrying(self, req: LoraRequest, tries: int) -> bool:
        """Waits for a slot in the low half, which the fused kernel wants."""
        assert req.adapter is not None
        while req.tried < tries:
            req.tried += 1
            ref = await self.slots.acquire(req.adapter)  # leak: a ref with a high slot is overwritten
            if ref is not None and ref.slot < self.max_batch_adapters:
                req.ref = ref
                self.ready.append(req)
                return True
            await asyncio.sleep(0.01 * req.tried)
        return False

    async def generate(self, req: LoraRequest, run: Run) -> List[int]:
        if req.adapter is None:
            return await run(-1, req.tokens)
        async with self.slots.using(req.adapter) as ref:  # clean: the context manager releases
            if ref is None:
                return []
            return await run(ref.slot, req.tokens)

    async def spawn(self, req: LoraRequest, run: Run) -> bool:
        assert req.adapter is not None
        ref = await self.slots.acquire(req.adapter)  # clean: near miss, the done callback releases
        if ref is None:
            return False
        task = asyncio.ensure_future(run(ref.slot, req.tokens))
        self.tasks.add(task)

        def _done(t: asyncio.Task) -> None:
            self.tasks.discard(t)
            self.slots.release(ref)

        task.add_done_callback(_done)
        return True

    async def spawn_untracked(self, req: LoraRequest, run: Run) -> bool:
        assert req.adapter is not None
        ref = await self.slots.acquire(req.adapter)  # leak: the done callback only forgets the task
        if ref is None:
            return False
        task = asyncio.ensure_future(run(ref.slot, req.tokens))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def pin_canary(self, tenant: str, name: str) -> bool:
        if tenant in self.canary:
            return True
        ref = await self.slots.acquire(name)  # clean: kept per tenant, close() releases all
        if ref is None:
            return False
        self.canary[tenant] = ref
        return True

    def close(self) -> None:
        for ref in self.canary.values():
            self.slots.release(ref)
        self.canary.clear()
        for req in self.ready:
            self.finish(req)
        self.ready.clear()
