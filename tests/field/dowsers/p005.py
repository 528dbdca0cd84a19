"""Buddy allocator over one device arena; a lease is the offset in bytes."""


class BuddyArena:
    def __init__(self, order_max, min_block=4096):
        self.min_block = min_block
        self.order_max = order_max
        self._lists = [set() for _ in range(order_max + 1)]
        self._lists[order_max].add(0)
        self._order_at = {}

    def _order_for(self, nbytes):
        order = 0
        while self.min_block << order < nbytes:
            order += 1
        return order

    def malloc(self, nbytes):
        want = order = self._order_for(nbytes)
        while order <= self.order_max and not self._lists[order]:
            order += 1
        if order > self.order_max:
            raise MemoryError(nbytes)
        offset = self._lists[order].pop()
        while order > want:
            order -= 1
            self._lists[order].add(offset + (self.min_block << order))
        self._order_at[offset] = want
        return offset

    def mfree(self, offset):
        order = self._order_at.pop(offset)
        while order < self.order_max:
            buddy = offset ^ (self.min_block << order)
            if buddy not in self._lists[order]:
                break
            self._lists[order].remove(buddy)
            offset = min(offset, buddy)
            order += 1
        self._lists[order].add(offset)


class MatmulPlanner:
    def __init__(self, arena: BuddyArena, gpu):
        self.arena = arena
        self.gpu = gpu

    def gemm(self, a, b):
        ws = self.arena.malloc(a.rows * b.cols * 4)  # clean: freed in finally
        try:
            return self.gpu.gemm(a, b, ws)
        finally:
            self.arena.mfree(ws)

    def autotune(self, a, b, algos):
        for algo in algos:
            ws = self.arena.malloc(algo.workspace)  # leak: break on a fast enough algorithm keeps it
            if self.gpu.time(algo, a, b, ws) < algo.target:
                break
            self.arena.mfree(ws)
        return algo

    def split_k(self, a, b, parts):
        left = self.arena.malloc(parts * 1024)  # clean: freed at the end
        right = self.arena.malloc(parts * 1024)  # leak: only left is freed
        out = self.gpu.split_gemm(a, b, left, right)
        self.arena.mfree(left)
        return out
