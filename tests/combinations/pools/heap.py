# take: P.next_slot()
# give: P.recycle(X)
# gets: optional
import heapq


class Pool:
    def __init__(self, count):
        self._heap = list(range(count))

    def next_slot(self):
        if self._heap:
            return heapq.heappop(self._heap)
        return None

    def recycle(self, slot):
        heapq.heappush(self._heap, slot)
