"""Base class does the accounting, subclasses do the device call."""


class ArenaBase:
    def __init__(self, limit):
        self.limit = limit
        self.sizes = {}

    def obtain(self, nbytes):
        if sum(self.sizes.values()) + nbytes > self.limit:
            raise MemoryError(nbytes)
        ptr = self._device_alloc(nbytes)
        self.sizes[ptr] = nbytes
        return ptr

    def dispose(self, ptr):
        nbytes = self.sizes.pop(ptr)
        self._device_free(ptr, nbytes)

    def _device_alloc(self, nbytes):
        raise NotImplementedError

    def _device_free(self, ptr, nbytes):
        raise NotImplementedError


class VmmArena(ArenaBase):
    def __init__(self, limit, driver):
        super().__init__(limit)
        self.driver = driver

    def _device_alloc(self, nbytes):
        return self.driver.map(self.driver.create(nbytes))

    def _device_free(self, ptr, nbytes):
        self.driver.unmap(ptr, nbytes)


class WeightLoader:
    def __init__(self, arena: VmmArena):
        self.arena = arena
        self.ptrs = []

    def load(self, shard):
        ptr = self.arena.obtain(shard.nbytes)  # clean: kept in ptrs, unload() disposes of it
        self.ptrs.append(ptr)
        shard.upload(ptr)

    def unload(self):
        while self.ptrs:
            self.arena.dispose(self.ptrs.pop())

    def dequantize(self, shard, out):
        ptr = self.arena.obtain(shard.nbytes)  # leak: an fp16 shard returns without dispose
        shard.upload(ptr)
        if shard.dtype == "fp16":
            return out.copy(ptr)
        out.dequant(ptr, shard.scales)
        self.arena.dispose(ptr)

    def checksum(self, shard):
        ptr = self.arena.obtain(shard.nbytes)  # clean: finally
        try:
            shard.upload(ptr)
            return shard.crc(ptr)
        finally:
            self.arena.dispose(ptr)

    def prefault(self, nbytes):
        self.arena.obtain(nbytes)  # leak: the pointer is dropped
