# take: P.carve(4)
# give: P.mend(X)
# gets: optional
from collections import deque


class Pool:
    def __init__(self, count):
        self._blocks = deque(range(count))

    def carve(self, n):
        if n > len(self._blocks):
            return None
        return [self._blocks.popleft() for _ in range(n)]

    def mend(self, blocks):
        for b in blocks:
            self._blocks.append(b)
