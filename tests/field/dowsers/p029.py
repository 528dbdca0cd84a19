"""Two-level block cache: a magazine for each thread over a shared depot."""
import threading


class MagazineAllocator:
    MAG = 16

    def __init__(self, blocks):
        self._depot = list(blocks)
        self._mu = threading.Lock()
        self._tls = threading.local()

    def _magazine(self):
        return self._tls.__dict__.setdefault("mag", [])

    def fast_alloc(self):
        mag = self._magazine()
        if not mag:
            with self._mu:
                mag.extend(self._depot[-self.MAG:])
                del self._depot[-self.MAG:]
        return mag.pop() if mag else None

    def fast_free(self, block):
        mag = self._magazine()
        mag.append(block)
        if len(mag) > 2 * self.MAG:
            with self._mu:
                self._depot.extend(mag[self.MAG:])
            del mag[self.MAG:]


class DecodeThread:
    def __init__(self, allocator: MagazineAllocator, kv):
        self.allocator = allocator
        self.kv = kv
        self.chain = []

    def extend(self):
        block = self.allocator.fast_alloc()  # clean: in the chain, drop_chain() frees it
        if block is not None:
            self.chain.append(block)

    def drop_chain(self):
        for block in self.chain:
            self.allocator.fast_free(block)
        self.chain = []

    def copy_on_write(self, index):
        fresh = self.allocator.fast_alloc()  # leak: an unshared block returns with the fresh one
        if fresh is None or not self.kv.shared(self.chain[index]):
            return fresh is not None
        self.kv.copy(self.chain[index], fresh)
        self.chain[index] = fresh
        return True

    def compact(self, kernel):
        tmp = self.allocator.fast_alloc()  # clean: freed in finally
        if tmp is None:
            return
        try:
            kernel.compact(self.chain, tmp)
        finally:
            self.allocator.fast_free(tmp)

    def prime(self):
        self.allocator.fast_alloc()  # leak: the block is dropped
        return len(self.chain)
