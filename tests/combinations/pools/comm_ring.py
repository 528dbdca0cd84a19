# take: P.stage_segment()
# give: P.retire_segment(X)
# gets: optional
# type: SegmentRing
import numpy as np


class SegmentRing:
    """Fixed ring of send segments. Producers stage at head, the tail advances past retired ones."""

    def __init__(self, nseg: int, seg_bytes: int):
        self._mem = np.zeros((nseg, seg_bytes), dtype=np.uint8)
        self._retired = np.ones(nseg, dtype=bool)
        self._nseg = nseg
        self._head = 0  # next to hand out, monotonic
        self._tail = 0  # oldest still in flight, monotonic

    def view(self, seg: int) -> np.ndarray:
        return self._mem[seg]

    def stage_segment(self):
        if self._head - self._tail == self._nseg:
            return None
        seg = self._head % self._nseg
        self._retired[seg] = False
        self._head += 1
        return seg

    def retire_segment(self, seg: int) -> None:
        if self._retired[seg]:
            raise RuntimeError(f"segment {seg} retired twice")
        self._retired[seg] = True
        while self._tail < self._head and self._retired[self._tail % self._nseg]:
            self._tail += 1
