# take: P.claim()
# give: P.vacate(X)
# gets: optional
from collections import deque


class Pool:
    def __init__(self, count):
        self.ready = deque(range(count))

    def claim(self):
        return self.ready.popleft() if self.ready else None

    def vacate(self, index):
        self.ready.append(index)
