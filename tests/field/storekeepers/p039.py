class AdapterSlot:
    def __init__(self, index):
        self.index = index
        self.weights = None


class SlotPool:
    def __init__(self, n):
        self.unused = [AdapterSlot(i) for i in range(n)]

    def lend(self):
        return self.unused.pop() if self.unused else None

    def reclaim(self, slot):
        slot.weights = None
        self.unused.append(slot)


class AdapterCache:
    """LoRA weights: name -> slot, with a use stamp per name and a pinned set."""

    def __init__(self, pool, read):
        self.pool = pool
        self.read = read
        self.loaded = {}
        self.stamps = {}
        self.pinned = {}
        self.clock = 0

    def load(self, name):
        self.clock += 1
        self.stamps[name] = self.clock
        if name in self.loaded:
            return self.loaded[name].index
        slot = self.pool.lend()  # leak: refresh clears the cache and reclaims only stale adapters
        if slot is None:
            self._evict()
            slot = self.pool.lend()  # leak: refresh clears the cache and reclaims only stale adapters
            if slot is None:
                return None
        slot.weights = self.read(name)
        self.loaded[name] = slot
        return slot.index

    def _evict(self):
        if not self.loaded:
            return
        oldest = min(self.loaded, key=self.stamps.get)
        self.pool.reclaim(self.loaded.pop(oldest))
        del self.stamps[oldest]

    def pin(self, name):
        if name in self.pinned:
            return True
        slot = self.pool.lend()  # clean: unpin reclaims it
        if slot is None:
            return False
        slot.weights = self.read(name)
        self.pinned[name] = slot
        return True

    def unpin(self, name):
        slot = self.pinned.pop(name, None)
        if slot is not None:
            self.pool.reclaim(slot)

    def refresh(self, before):
        for name, slot in self.loaded.items():
            if self.stamps[name] < before:
                self.pool.reclaim(slot)
        self.loaded = {}
        self.stamps = {}

    def measure(self, name):
        slot = self.pool.lend()  # clean: reclaimed below
        if slot is None:
            return 0
        slot.weights = self.read(name)
        size = len(slot.weights)
        self.pool.reclaim(slot)
        return size

    def close(self):
        for name in list(self.pinned):
            self.unpin(name)
        while self.loaded:
            self._evict()
