# TAKE: X = self._idle.popleft()
# PUT: self._idle.append(X)
# EMPTY: not self._idle
# COUNT: len(self._idle)
# BAD: X.numel() < n
from collections import deque

import torch


class Buffers:
    def __init__(self, count, size):
        self.size = size
        self._idle = deque(torch.empty(size) for _ in range(count))

    def get(self):
        return self._idle.popleft() if self._idle else None

    def put(self, buffer):
        self._idle.append(buffer)
