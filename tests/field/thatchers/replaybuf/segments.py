from __future__ import annotations

import threading
from typing import Any


class Segment:
    def __init__(self, row: int) -> None:
        self.row = row
        self.refs = 0
        self.steps: list[dict[str, Any]] = []
        self.priority = 1.0

    def __len__(self) -> int:
        return len(self.steps)


class SegmentStore:
    """Rows of a preallocated replay table; a row is recycled at refcount zero."""

    def __init__(self, rows: int) -> None:
        self._rows = [Segment(i) for i in range(rows)]
        self._unused = list(range(rows))
        self._lock = threading.RLock()

    def create(self) -> Segment | None:
        with self._lock:
            if not self._unused:
                return None
            seg = self._rows[self._unused.pop()]
            seg.refs = 1
            seg.priority = 1.0
            return seg

    def retain(self, row: int) -> Segment | None:
        with self._lock:
            seg = self._rows[row]
            if seg.refs == 0:
                return None
            seg.refs += 1
            return seg

    def drop(self, seg: Segment) -> None:
        with self._lock:
            seg.refs -= 1
            if seg.refs == 0:
                seg.steps.clear()
                self._unused.append(seg.row)

    def create_many(self, n: int) -> list[Segment]:
        out: list[Segment] = []
        for _ in range(n):
            seg = self.create()  # clean: near miss, a short list is returned on purpose and the caller drops what is in it
            if seg is None:
                break
            out.append(seg)
        return out

    @property
    def available(self) -> int:
        return len(self._unused)
