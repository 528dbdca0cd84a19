"""Blocks cut from one device allocation, first fit from a sorted list of gaps."""
import bisect
import collections

import torch


class Block:
    def __init__(self, lo, hi, base):
        self.lo = lo
        self.hi = hi
        self.base = base
        self.uses = 0

    def tensor(self, shape):
        n = 1
        for s in shape:
            n *= s
        return self.base[self.lo:self.lo + n].view(shape)


class BufferHeap:
    def __init__(self, size):
        self.base = torch.zeros(size)
        self.gaps = [(0, size)]

    def cut(self, n):
        for i, (lo, hi) in enumerate(self.gaps):
            if hi - lo >= n:
                if hi - lo == n:
                    del self.gaps[i]
                else:
                    self.gaps[i] = (lo + n, hi)
                return Block(lo, lo + n, self.base)
        return None

    def mend(self, block):
        i = bisect.bisect_left(self.gaps, (block.lo, block.hi))
        self.gaps.insert(i, (block.lo, block.hi))
        self._join(max(i - 1, 0))

    def _join(self, i):
        while i + 1 < len(self.gaps):
            (a, b), (c, d) = self.gaps[i], self.gaps[i + 1]
            if b == c:
                self.gaps[i:i + 2] = [(a, d)]
            elif c > b and i + 2 < len(self.gaps):
                i += 1
            else:
                break


class CachingHeap:
    """Keeps mended blocks by size before they go back to the heap below."""

    def __init__(self, heap, keep=4):
        self.heap = heap
        self.keep = keep
        self.cache = collections.defaultdict(list)

    def cut(self, n):
        if self.cache[n]:
            return self.cache[n].pop()
        block = self.heap.cut(n)  # clean: near miss, only a None is rebound
        if block is None:
            self.flush()
            block = self.heap.cut(n)  # clean: returned to the caller
        return block

    def mend(self, block):
        n = block.hi - block.lo
        if len(self.cache[n]) < self.keep:
            self.cache[n].append(block)
        else:
            self.heap.mend(block)

    def flush(self):
        for blocks in self.cache.values():
            while blocks:
                self.heap.mend(blocks.pop())

    def reserve(self, n, count):
        """Fill the cache for n ahead of time."""
        for _ in range(count):
            block = self.heap.cut(n)  # leak: a block over the keep limit goes neither to the cache nor to the heap
            if block is None:
                return False
            if len(self.cache[n]) < self.keep:
                self.cache[n].append(block)
        return True
