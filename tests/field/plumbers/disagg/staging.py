"""Staging buffers registered for the transfer engine."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional


class StagingBuffer:
    __slots__ = ("index", "payload", "length")

    def __init__(self, index: int) -> None:
        self.index = index
        self.payload = b""
        self.length = 0


class StagingPool:
    def __init__(self, count: int) -> None:
        self._free: List[StagingBuffer] = [StagingBuffer(i) for i in range(count)]
        self._lent: Dict[int, StagingBuffer] = {}

    def reserve(self) -> Optional[StagingBuffer]:
        if not self._free:
            return None
        buf = self._free.pop()
        self._lent[buf.index] = buf
        return buf

    def unreserve(self, buf: StagingBuffer) -> None:
        del self._lent[buf.index]
        buf.payload, buf.length = b"", 0
        self._free.append(buf)

    def reserve_pair(self) -> Optional[List[StagingBuffer]]:
        """One buffer for keys and one for values."""
        k = self.reserve()  # leak: no second buffer, the first is not returned to the pool
        if k is None:
            return None
        v = self.reserve()  # clean: None or handed to the caller
        if v is None:
            return None
        return [k, v]

    @contextmanager
    def scratch(self) -> Iterator[Optional[StagingBuffer]]:
        buf = self.reserve()  # clean: unreserved in finally
        try:
            yield buf
        finally:
            if buf is not None:
                self.unreserve(buf)
