"""Page-locked host memory, handed out in whole pages."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional

PAGE = 4096


class PinnedBuffer:
    __slots__ = ("mem", "size", "used")

    def __init__(self, size: int):
        self.mem = bytearray(size)
        self.size = size
        self.used = 0

    def write(self, payload: bytes) -> None:
        self.mem[: len(payload)] = payload
        self.used = len(payload)

    def read(self) -> bytes:
        return bytes(self.mem[: self.used])


class PinnedPool:
    def __init__(self, limit: int = 1 << 24):
        self.limit = limit
        self.in_use = 0
        self._lock = threading.Lock()
        self._free: Dict[int, List[PinnedBuffer]] = {}

    @staticmethod
    def _round(n: int) -> int:
        return max(PAGE, (n + PAGE - 1) // PAGE * PAGE)

    def pin(self, nbytes: int) -> Optional[PinnedBuffer]:
        """None when the host budget is spent."""
        size = self._round(nbytes)
        with self._lock:
            if self.in_use + size > self.limit:
                return None
            self.in_use += size
            free = self._free.setdefault(size, [])
            return free.pop() if free else PinnedBuffer(size)

    def unpin(self, buf: PinnedBuffer) -> None:
        with self._lock:
            self.in_use -= buf.size
            buf.used = 0
            self._free.setdefault(buf.size, []).append(buf)

    def pin_many(self, sizes: List[int]) -> Optional[List[PinnedBuffer]]:
        got: List[PinnedBuffer] = []
        for n in sizes:
            buf = self.pin(n)  # leak: those taken before are dropped when one is None
            if buf is None:
                return None
            got.append(buf)
        return got

    def pin_all_or_none(self, sizes: List[int]) -> Optional[List[PinnedBuffer]]:
        got: List[PinnedBuffer] = []
        for n in sizes:
            buf = self.pin(n)  # clean: near miss, rolled back when one is None
            if buf is None:
                for b in got:
                    self.unpin(b)
                return None
            got.append(buf)
        return got
