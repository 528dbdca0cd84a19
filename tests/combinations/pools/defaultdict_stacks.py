# take: P.lend(16)
# give: P.take_back(X)
# gets: value
import torch
from collections import defaultdict


class Pool:
    def __init__(self):
        self._by_size = defaultdict(list)
        self.in_use = 0

    def lend(self, size):
        self.in_use += 1
        bucket = self._by_size[size]
        return bucket.pop() if bucket else torch.empty(size)

    def take_back(self, t):
        self.in_use -= 1
        self._by_size[t.numel()].append(t)
