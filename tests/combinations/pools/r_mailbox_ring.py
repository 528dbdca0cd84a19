# take: P.deq()
# give: P.enq(X)
# gets: optional
# type: SegRing
import numpy as np


class SegRing:
    """
    Free segment ids of the all-gather arena in a power of two ring.
    rd and wr only ever grow; the difference is what is free.
    """

    def __init__(self, log2n):
        n = 1 << log2n
        self.m = n - 1
        self.q = np.arange(n, dtype=np.uint32)
        self.rd = 0
        self.wr = n

    def deq(self):
        if self.rd == self.wr:
            return None
        v = self.q[self.rd & self.m]
        self.rd += 1
        return int(v)

    def enq(self, v):
        if self.wr - self.rd > self.m:
            raise OverflowError("ring is full: segment returned twice?")
        self.q[self.wr & self.m] = v
        self.wr += 1
