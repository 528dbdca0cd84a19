# TAKE: X = self._free.pop()
# PUT: self._free.append(X)
# EMPTY: not self._free
# COUNT: len(self._free)
# BAD: torch.isnan(self.memory[X]).any()
import torch


class Pages:
    def __init__(self, count):
        self._free = list(range(count))
        self.memory = torch.zeros(count, 16, 64)

    def acquire(self):
        if not self._free:
            return None
        return self._free.pop()

    def release(self, page):
        self._free.append(page)
