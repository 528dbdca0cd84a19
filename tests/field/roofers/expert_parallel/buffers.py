"""Symmetric-memory buffers for all-to-all dispatch and combine."""
from __future__ import annotations

from typing import Optional


class ExchangeBuffer:
    def __init__(self, rows: int, hidden: int) -> None:
        self.rows = rows
        self.hidden = hidden
        self.data: list[list[float]] = []


class DispatchBuffers:
    def __init__(self, hidden: int, count: int, rows: int) -> None:
        self.hidden = hidden
        self._idle = [ExchangeBuffer(rows, hidden) for _ in range(count)]

    def get(self, rows: int) -> Optional[ExchangeBuffer]:
        for i, b in enumerate(self._idle):
            if b.rows >= rows:
                return self._idle.pop(i)
        return None

    def put(self, buf: ExchangeBuffer) -> None:
        buf.data = []
        self._idle.append(buf)

    def get_pair(self, rows: int) -> tuple[Optional[ExchangeBuffer], Optional[ExchangeBuffer]]:
        """Both buffers or neither."""
        a = self.get(rows)  # clean: returned, or put back when there is no second
        b = self.get(rows)  # clean: near miss, a second without a first is put back too
        if a is not None and b is not None:
            return a, b
        if a is not None:
            self.put(a)
        if b is not None:
            self.put(b)
        return None, None

    def idle(self) -> int:
        return len(self._idle)
