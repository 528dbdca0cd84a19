# take: P.popleft_n(n)
# give: P.append_n(X)
# gets: value
# type: FreeKVQueue
class _Blk:
    __slots__ = ("bid", "prev", "nxt")

    def __init__(self, bid):
        self.bid = bid
        self.prev = self.nxt = None


class FreeKVQueue:
    """Doubly linked free list with one sentinel; blocks come back at the tail (LRU)."""

    def __init__(self, n):
        self._s = _Blk(None)
        self._s.prev = self._s.nxt = self._s
        self.num_free = 0
        self.append_n([_Blk(i) for i in range(n)])

    def _unlink(self, b):
        b.prev.nxt, b.nxt.prev = b.nxt, b.prev
        b.prev = b.nxt = None

    def popleft_n(self, n):
        if n > self.num_free:
            raise ValueError(f"cannot pop {n}, only {self.num_free} free blocks")
        out = []
        for _ in range(n):
            b = self._s.nxt
            self._unlink(b)
            out.append(b)
        self.num_free -= n
        return out

    def append_n(self, blocks):
        for b in blocks:
            if b.nxt is not None:
                raise ValueError(f"block {b.bid} is already in the free queue")
            last = self._s.prev
            last.nxt = self._s.prev = b
            b.prev, b.nxt = last, self._s
            self.num_free += 1
