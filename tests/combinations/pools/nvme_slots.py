# take: P.assign()
# give: P.discard(X)
# gets: value
# type: NvmeSlotFile
import heapq
import threading


class TierFull(OSError):
    pass


class NvmeSlotFile:
    """Disk-tier slots in one preallocated file. Lowest offsets first keeps it compact."""

    def __init__(self, path, slot_bytes, max_slots):
        self.path = path
        self.slot_bytes = slot_bytes
        self.max_slots = max_slots
        self._holes = []
        self._end = 0
        self._guard = threading.Lock()
        self.peak = 0

    def offset_of(self, slot):
        return slot * self.slot_bytes

    def assign(self):
        with self._guard:
            if self._holes:
                slot = heapq.heappop(self._holes)
            elif self._end < self.max_slots:
                slot = self._end
                self._end += 1
            else:
                raise TierFull(f"{self.path}: all {self.max_slots} slots in use")
            self.peak = max(self.peak, self._end - len(self._holes))
            return slot

    def discard(self, slot):
        with self._guard:
            if slot >= self._end or slot in self._holes:
                raise ValueError(f"slot {slot} is not assigned")
            heapq.heappush(self._holes, slot)
