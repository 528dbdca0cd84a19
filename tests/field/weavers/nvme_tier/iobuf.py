"""Aligned I/O buffers. Everything that touches O_DIRECT goes through these."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator, Optional


class AlignedBuf:
    __slots__ = ("slot", "view", "length")

    def __init__(self, slot: int, view: memoryview) -> None:
        self.slot = slot
        self.view = view
        self.length = 0


class AlignedPool:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._arena = memoryview(bytearray(count * size))
        self._idle = list(range(count))
        self._mu = threading.Lock()

    def lease(self) -> Optional[AlignedBuf]:
        """None when every buffer is out."""
        with self._mu:
            if not self._idle:
                return None
            slot = self._idle.pop()
        lo = slot * self.size
        return AlignedBuf(slot, self._arena[lo:lo + self.size])

    def surrender(self, buf: AlignedBuf) -> None:
        with self._mu:
            self._idle.append(buf.slot)

    def try_surrender(self, buf: Optional[AlignedBuf]) -> None:
        if buf is not None:
            self.surrender(buf)

    @contextmanager
    def leased(self) -> Iterator[Optional[AlignedBuf]]:
        buf = self.lease()  # clean: given back in the finally
        try:
            yield buf
        finally:
            self.try_surrender(buf)
