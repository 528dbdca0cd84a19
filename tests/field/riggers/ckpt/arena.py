"""Host staging memory for checkpoints, and the budget of bytes that may be in flight to storage."""
from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Region:
    start: int
    length: int
    buf: memoryview
    filled: int = 0


class StagingArena:
    """Equal pages of one pinned buffer."""

    def __init__(self, pages: int, page_bytes: int):
        self.page_bytes = page_bytes
        self._mem = torch.empty(pages * page_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
        self._pages = list(range(pages))
        self._cond = threading.Condition()

    def reserve(self, timeout: float | None = None) -> Region | None:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._pages), timeout):
                return None
            page = self._pages.pop()
        start = page * self.page_bytes
        return Region(start, self.page_bytes, self._mem[start : start + self.page_bytes])

    def surrender(self, region: Region) -> None:
        with self._cond:
            self._pages.append(region.start // self.page_bytes)
            self._cond.notify()


class InflightBudget:
    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self._cond = threading.Condition()

    def charge(self, nbytes: int) -> int:
        """Blocks until nbytes fit; the same number must be refunded."""
        nbytes = min(nbytes, self.limit)
        with self._cond:
            while self.used + nbytes > self.limit:
                self._cond.wait()
            self.used += nbytes
        return nbytes

    def refund(self, nbytes: int) -> None:
        with self._cond:
            self.used -= nbytes
            self._cond.notify_all()
