import asyncio


class GpuSlotPool:
    def __init__(self, n):
        self.slots = list(range(n))

    def acquire_slot(self):
        return self.slots.pop() if self.slots else None

    def release_slot(self, slot):
        self.slots.append(slot)


class Batcher:
    """Futures carry the slot to the caller, who returns it when the output is read."""

    def __init__(self, pool):
        self.pool = pool
        self.waiters = {}
        self.prefetched = {}

    def request(self, rid):
        loop = asyncio.get_running_loop()
        fut = loop.create_future()
        self.waiters[rid] = fut
        return fut

    def dispatch(self):
        for rid in list(self.waiters):
            slot = self.pool.acquire_slot()  # leak: a cancelled waiter is skipped and the slot dropped
            if slot is None:
                break
            fut = self.waiters.pop(rid)
            if fut.cancelled():
                continue
            fut.set_result((rid, slot))

    async def generate(self, rid, model):
        _, slot = await self.request(rid)
        try:
            return await model(rid, slot)
        finally:
            self.pool.release_slot(slot)

    def prefetch(self, rid):
        if rid in self.prefetched:
            return
        slot = self.pool.acquire_slot()  # clean: consume and forget release it
        if slot is not None:
            self.prefetched[rid] = slot

    async def consume(self, rid, model):
        slot = self.prefetched.pop(rid, None)
        if slot is None:
            return await self.generate(rid, model)
        result = await model(rid, slot)
        self.pool.release_slot(slot)
        return result

    def forget(self, rid):
        if rid in self.prefetched:
            self.pool.release_slot(self.prefetched.pop(rid))

    def reserve_pair(self):
        first = self.pool.acquire_slot()  # clean: released below when incomplete, else handed on
        if first is None:
            return None
        second = self.pool.acquire_slot()  # clean: handed on to the caller
        if second is None:
            self.pool.release_slot(first)
            return None
        return first, second

    async def beam(self, rid, model):
        pair = self.reserve_pair()  # leak: only the first of the two is released
        if pair is None:
            return None
        scores = [await model(rid, slot) for slot in pair]
        self.pool.release_slot(pair[0])
        return max(scores)
