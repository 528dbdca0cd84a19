import heapq
import itertools


class BlockHandle:
    def __init__(self, cache, index):
        self.cache = cache
        self.index = index
        self.live = True

    def close(self):
        if self.live:
            self.live = False
            self.cache.spare.append(self.index)


class BlockCache:
    def __init__(self, n):
        self.spare = list(range(n))

    def open_block(self):
        if not self.spare:
            return None
        return BlockHandle(self, self.spare.pop())


class Sequence:
    def __init__(self, sid, priority):
        self.sid = sid
        self.priority = priority
        self.blocks = []
        self.swapped = None


class PreemptingScheduler:
    def __init__(self, cache, rate):
        self.cache = cache
        self.rate = rate
        self.order = itertools.count()
        self.heap = []
        self.parked = {}

    def add(self, sid, priority, length):
        seq = Sequence(sid, priority)
        while len(seq.blocks) * 16 < length:
            block = self.cache.open_block()  # leak: preempt parks the sequence with an emptied list
            if block is None:
                self._close(seq)
                return False
            seq.blocks.append(block)
        heapq.heappush(self.heap, (priority, next(self.order), seq))
        return True

    def _close(self, seq):
        while seq.blocks:
            seq.blocks.pop().close()
        if seq.swapped is not None:
            seq.swapped.close()
            seq.swapped = None

    def preempt(self):
        if not self.heap:
            return None
        _, _, seq = heapq.heappop(self.heap)
        if seq.swapped is None:
            seq.swapped = self.cache.open_block()  # clean: resume closes it, as does drop
        seq.blocks = []
        self.parked[seq.sid] = seq
        return seq.sid

    def resume(self, sid):
        seq = self.parked.pop(sid, None)
        if seq is None:
            return False
        self._close(seq)
        return self.add(seq.sid, seq.priority, self.rate)

    def drop(self, sid):
        seq = self.parked.pop(sid, None)
        if seq is not None:
            self._close(seq)

    def step(self):
        for _, _, seq in self.heap:
            block = self.cache.open_block()  # leak: only the last of the step is closed
        if self.heap and block is not None:
            block.close()
        return len(self.heap)
