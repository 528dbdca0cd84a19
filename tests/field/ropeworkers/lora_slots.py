"""LoRA adapter residency: a few device slots, a host cache, and pins for running requests."""
import asyncio
import heapq
import itertools
import logging
import os
from contextlib import asynccontextmanager

log = logging.getLogger("serve.lora")


class AdapterError(Exception):
    pass


class SlotHeap:
    """Device slots; the lowest index is handed out first so that the stacked weights stay dense."""

    def __init__(self, n):
        self._heap = list(range(n))
        heapq.heapify(self._heap)
        self._owner = {}

    def take(self, adapter_id):
        if not self._heap:
            return None
        slot = heapq.heappop(self._heap)
        self._owner[slot] = adapter_id
        return slot

    def take_pair(self, adapter_id):
        """Rank-split adapters need two neighbouring slots."""
        if len(self._heap) < 2:
            return None
        a = heapq.heappop(self._heap)  # leak: not pushed back when the next slot is not its neighbour
        b = heapq.heappop(self._heap)  # clean: pushed back or recorded and returned
        if b != a + 1:
            heapq.heappush(self._heap, b)
            return None
        self._owner[a] = self._owner[b] = adapter_id
        return a, b

    def put(self, slot):
        self._owner.pop(slot, None)
        heapq.heappush(self._heap, slot)


class HostArena:
    """Pinned host memory for adapter weights, in pages, by a plain counter."""

    def __init__(self, pages):
        self.pages = pages
        self.used = 0

    def reserve(self, n):
        if self.used + n > self.pages:
            return 0
        self.used += n
        return n

    def unreserve(self, n):
        self.used -= n


class Adapter:
    def __init__(self, aid, path):
        self.aid = aid
        self.path = path
        self.slot = None
        self.second = None
        self.pages = 0
        self.pins = 0
        self.stamp = 0


class AdapterManager:
    def __init__(self, slots, arena, copier):
        self.slots = slots
        self.arena = arena
        self.copier = copier
        self.known = {}
        self.loading = asyncio.Semaphore(1)  # one copy at a time, the link is narrow
        self._clock = itertools.count()

    # -- pins -------------------------------------------------------------

    def pin(self, aid):
        ad = self.known[aid]
        ad.pins += 1
        ad.stamp = next(self._clock)
        return ad

    def unpin(self, ad):
        ad.pins -= 1

    @asynccontextmanager
    async def active(self, aid):
        ad = self.pin(aid)  # clean: unpinned in finally
        try:
            if ad.slot is None:
                await self.load(ad)
            yield ad
        finally:
            self.unpin(ad)

    def pin_batch(self, aids):
        """Pin every adapter of a batch; None when one of them is not resident."""
        pinned = []
        for aid in aids:
            ad = self.pin(aid)  # clean: near miss, the rollback covers this adapter too because it is appended first
            pinned.append(ad)
            if ad.slot is None:
                for p in pinned:
                    self.unpin(p)
                return None
        return pinned

    def pin_for_merge(self, base_id, delta_id):
        base = self.pin(base_id)  # leak: stays pinned when the delta is not resident
        delta = self.pin(delta_id)  # clean: unpinned on refusal, else returned
        if delta.slot is None:
            self.unpin(delta)
            raise AdapterError(f"{delta_id} is not resident")
        return base, delta

    def ranks(self, aids):
        out = []
        for aid in aids:
            ad = self.pin(aid)  # leak: continue skips the unpin for an adapter without a slot
            if ad.slot is None:
                continue
            out.append((ad.aid, ad.pages))
            self.unpin(ad)
        return out

    # -- loading ----------------------------------------------------------

    async def load(self, ad):
        if ad.slot is not None:
            return True
        await self.loading.acquire()  # clean: released in finally
        try:
            if ad.slot is not None:
                return True
            slot = self.slots.take(ad.aid)  # clean: put back when the copy fails, else owned by the adapter
            if slot is None and self._evict_one():
                slot = self.slots.take(ad.aid)  # clean: near miss, reached only when the first take gave nothing
            if slot is None:
                return False
            ok = await self.copier.to_device(ad.path, slot)
            if not ok:
                self.slots.put(slot)
                return False
            ad.slot = slot
            return True
        finally:
            self.loading.release()

    async def load_split(self, ad):
        await self.loading.acquire()  # leak: not released when there is no pair of slots
        pair = self.slots.take_pair(ad.aid)  # clean: owned by the adapter or put back
        if pair is None:
            return False
        a, b = pair
        try:
            if ad.slot is not None:
                self.slots.put(a)
                self.slots.put(b)
                return True
            if not await self.copier.to_device(ad.path, a, half=0):
                self.slots.put(a)
                self.slots.put(b)
                return False
            ad.slot, ad.second = a, b
            return True
        finally:
            self.loading.release()

    async def load_with_retry(self, ad, tries=3):
        async with self.loading:
            return ad.slot is not None or await self._retrying(ad, tries)

    async def _retrying(self, ad, tries):
        for attempt in range(tries):
            slot = self.slots.take(ad.aid)  # leak: a failed attempt loops round without putting its slot back
            if slot is None:
                await asyncio.sleep(0.05 * (attempt + 1))
                continue
            if await self.copier.to_device(ad.path, slot):
                ad.slot = slot
                return True
            log.warning("copy of %s failed, attempt %d", ad.aid, attempt)
        return False

    # -- host cache -------------------------------------------------------

    def register(self, aid, path):
        if aid in self.known:
            return self.known[aid]
        size = os.path.getsize(path)
        pages = self.arena.reserve(-(-size // 65536))  # leak: not unreserved when the adapter's format is unknown
        if not pages:
            raise AdapterError("host arena is full")
        if not path.endswith((".safetensors", ".bin")):
            raise AdapterError(f"{path}: unknown format")
        ad = Adapter(aid, path)
        ad.pages = pages
        self.known[aid] = ad
        return ad

    def _evict_one(self):
        idle = [a for a in self.known.values() if a.slot is not None and a.pins == 0]
        if not idle:
            return False
        victim = min(idle, key=lambda a: a.stamp)
        self._drop_slots(victim)
        return True

    def _drop_slots(self, ad):
        if ad.slot is not None:
            self.slots.put(ad.slot)
            ad.slot = None
        if ad.second is not None:
            self.slots.put(ad.second)
            ad.second = None

    def unregister(self, aid):
        ad = self.known[aid]
        if ad.pins:
            return False
        del self.known[aid]
        self._drop_slots(ad)
        self.arena.unreserve(ad.pages)
        return True
