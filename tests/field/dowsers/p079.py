"""Warm blocks first: a heap ordered by last use, with stale entries skipped."""
import heapq


class WarmBlocks:
    def __init__(self, n):
        self._clock = 0
        self._stamp = [0] * n
        self._idle = [True] * n
        self._heap = [(0, i) for i in range(n)]

    def warmest(self):
        while self._heap:
            neg, i = heapq.heappop(self._heap)
            if self._idle[i] and -neg == self._stamp[i]:
                self._idle[i] = False
                return i
        return None

    def cool(self, i):
        self._clock += 1
        self._stamp[i] = self._clock
        self._idle[i] = True
        heapq.heappush(self._heap, (-self._clock, i))


class KvCompactor:
    def __init__(self, blocks: WarmBlocks, kernel):
        self.blocks = blocks
        self.kernel = kernel

    def rotate(self, chain):
        tmp = self.blocks.warmest()  # clean: takes the place of the old head, which is cooled
        if tmp is None:
            return
        self.kernel.copy(chain[0], tmp)
        old, chain[0] = chain[0], tmp
        self.blocks.cool(old)

    def dedupe(self, a, b):
        tmp = self.blocks.warmest()  # leak: different blocks return with tmp
        if tmp is None:
            return False
        self.kernel.xor(a, b, tmp)
        if not self.kernel.is_zero(tmp):
            return False
        self.blocks.cool(tmp)
        return True

    def grow(self, chain, n):
        for _ in range(n):
            block = self.blocks.warmest()  # clean: in the chain, shrink() cools it
            if block is None:
                break
            chain.append(block)

    def shrink(self, chain, n):
        for _ in range(n):
            self.blocks.cool(chain.pop())

    def zero(self, n):
        block = None
        for _ in range(n):
            block = self.blocks.warmest()  # leak: overwritten in each turn, only the last is cooled
            if block is None:
                return
            self.kernel.memset(block)
        if block is not None:
            self.blocks.cool(block)
