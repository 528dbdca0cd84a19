"""Shared-memory segments that carry collated batches from workers to the trainer."""
import threading
from dataclasses import dataclass, field
from typing import List, Optional


@dataclass
class Segment:
    index: int
    size: int
    rows: List[list] = field(default_factory=list)
    users: int = 0


class SegmentTable:
    def __init__(self, count: int, size: int):
        self._segments = [Segment(i, size) for i in range(count)]
        self._unused = list(range(count))
        self._lock = threading.Lock()

    def attach(self, size: int) -> Optional[Segment]:
        with self._lock:
            if not self._unused:
                return None
            seg = self._segments[self._unused[-1]]
            if seg.size < size:
                return None
            self._unused.pop()
            seg.users = 1
            return seg

    def detach(self, seg: Segment) -> None:
        with self._lock:
            seg.rows.clear()
            seg.users = 0
            self._unused.append(seg.index)

    def attach_many(self, sizes: List[int]) -> Optional[List[Segment]]:
        got: List[Segment] = []
        for size in sizes:
            seg = self.attach(size)  # leak: the ones had so far are lost when a later one fails
            if seg is None:
                return None
            got.append(seg)
        return got

    @property
    def unused(self) -> int:
        return len(self._unused)
