# TAKE: X = heapq.heappop(self._heap)
# PUT: heapq.heappush(self._heap, X)
# EMPTY: not self._heap
# COUNT: len(self._heap)
# BAD: self.kv[X].isnan().any()
import heapq

import torch


class BlockTable:
    def __init__(self, blocks: int, dim: int):
        self._heap = list(range(blocks))
        heapq.heapify(self._heap)
        self.kv = torch.zeros(blocks, 16, dim)

    def claim(self):
        if not self._heap:
            return None
        return heapq.heappop(self._heap)

    def release(self, bid):
        heapq.heappush(self._heap, bid)
