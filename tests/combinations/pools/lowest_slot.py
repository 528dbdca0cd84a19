# take: P.claim()
# give: P.yield_slot(X)
# gets: value
# type: DenseBatchSlots
import heapq


class DenseBatchSlots:
    """Smallest index first, so the live part of the persistent batch stays dense."""

    def __init__(self, max_batch):
        self.max_batch = max_batch
        self._heap = []
        self._frontier = 0  # indices >= frontier were never used

    def claim(self):
        if self._heap:
            return heapq.heappop(self._heap)
        if self._frontier == self.max_batch:
            raise IndexError("persistent batch is full")
        i = self._frontier
        self._frontier += 1
        return i

    def yield_slot(self, i):
        if i in self._heap or not 0 <= i < self._frontier:
            raise ValueError(f"slot {i} is not claimed")
        heapq.heappush(self._heap, i)

    @property
    def padded_batch(self):
        return self._frontier
