"""LoRA adapter bank: device slots, host staging tensors and load permits."""
import asyncio
import torch


class SlotTable:
    def __init__(self, n):
        self.owner = [None] * n

    def reserve(self, who):
        for i, owner in enumerate(self.owner):
            if owner is None:
                self.owner[i] = who
                return i
        return None

    def free(self, slot):
        self.owner[slot] = None


class StagingPool:
    def __init__(self, n, numel):
        self._bufs = [torch.empty(numel, dtype=torch.float16) for _ in range(n)]

    def lend(self):
        return self._bufs.pop() if self._bufs else None

    def recall(self, buf):
        self._bufs.append(buf)


class LoadPermits:
    def __init__(self, n):
        self._left = n
        self._wake = asyncio.Event()

    async def obtain(self):
        while self._left == 0:
            self._wake.clear()
            await self._wake.wait()
        self._left -= 1

    def put(self):
        self._left += 1
        self._wake.set()


class AdapterBank:
    def __init__(self, slots, staging, permits):
        self.slots = slots
        self.staging = staging
        self.permits = permits
        self.entries = {}       # name -> {"slot": int, "stage": tensor, "version": int, "users": int}
        self.warming = {}       # name -> staging tensor
        self.on_device = {}     # slot -> weights of a promoted adapter

    async def load(self, name, fetch, version):
        await self.permits.obtain()  # clean: near miss, put on both returns
        slot = self.slots.reserve(name)  # clean: near miss, unload frees it and replace() reuses it
        if slot is None:
            self.permits.put()
            return False
        stage = self.staging.lend()  # leak: unload() drops the entry with its staging tensor
        if stage is None:
            self.slots.free(slot)
            self.permits.put()
            return False
        stage.copy_(await fetch(name, version))
        prior = self.entries.pop(name, None)
        if prior is not None:
            self.slots.free(prior["slot"])
            self.staging.recall(prior["stage"])
        self.entries[name] = {"slot": slot, "stage": stage, "version": version, "users": 0}
        self.permits.put()
        return True

    async def replace(self, name, fetch, version):
        entry = self.entries.get(name)
        if entry is None:
            return await self.load(name, fetch, version)
        fresh = self.staging.lend()  # leak: lies in the entry that unload() drops with its tensor
        if fresh is None:
            return False
        fresh.copy_(await fetch(name, version))
        self.staging.recall(entry["stage"])
        entry.update(stage=fresh, version=version)
        return True

    def unload(self, name):
        entry = self.entries.get(name)
        if entry is None or entry["users"]:
            return False
        self.slots.free(entry["slot"])
        del self.entries[name]
        return True

    def warm(self, name, weights):
        buf = self.staging.lend()  # clean: near miss, the former is recalled below, promote and cool recall it
        if buf is None:
            return False
        buf.copy_(weights)
        if (before := self.warming.get(name)) is not None:
            self.staging.recall(before)
        self.warming[name] = buf
        return True

    def promote(self, name):
        buf = self.warming.pop(name)
        slot = self.slots.reserve(("warm", name))  # clean: near miss, demote frees every key of on_device
        if slot is None:
            self.staging.recall(buf)
            return False
        self.on_device[slot] = buf.to("cuda")
        self.staging.recall(buf)
        return True

    def demote(self):
        for slot in list(self.on_device):
            del self.on_device[slot]
            self.slots.free(slot)

    def cool(self):
        while self.warming:
            self.staging.recall(self.warming.popitem()[1])


class MergeQueue:
    """Adapters waiting to be folded into the base weights."""

    def __init__(self, slots: SlotTable):
        self.slots = slots
        self.waiting = []
        self.current = None

    def enqueue(self, name):
        slot = self.slots.reserve(("merge", name))  # leak: discard() drops the tuple with its slot
        if slot is None:
            return False
        self.waiting.append((name, slot))
        return True

    def discard(self, name):
        before = len(self.waiting)
        self.waiting = [item for item in self.waiting if item[0] != name]
        return before - len(self.waiting)

    def run_next(self, fold):
        if not self.waiting:
            return False
        name, slot = self.waiting.pop(0)
        fold(name, slot)
        self.slots.free(slot)
        return True

    def borrow_current(self, name):
        if self.current is not None:
            self.slots.free(self.current)
            self.current = None
        self.current = self.slots.reserve(("current", name))  # clean: near miss, next call or stop frees it
        return self.current is not None

    def stop(self):
        for _, slot in self.waiting:
            self.slots.free(slot)
        self.waiting.clear()
        if self.current is not None:
            self.slots.free(self.current)
            self.current = None
