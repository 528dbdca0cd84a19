"""Registered transfer buffers and metadata slots shared by the prefill and decode sides."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional


class TransferBuffer:
    __slots__ = ("index", "nbytes", "room")

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.nbytes = nbytes
        self.room: Optional[int] = None


class TransferPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._idle: List[TransferBuffer] = [TransferBuffer(i, nbytes) for i in range(count)]
        self._cond = threading.Condition()

    def checkout(self, timeout: float = 0.0) -> Optional[TransferBuffer]:
        with self._cond:
            if not self._idle and timeout:
                self._cond.wait(timeout)
            return self._idle.pop() if self._idle else None

    def checkin(self, buf: TransferBuffer) -> None:
        with self._cond:
            buf.room = None
            self._idle.append(buf)
            self._cond.notify()

    def idle(self) -> int:
        return len(self._idle)


class MetadataSlots:
    """One row of the auxiliary tensor per request in flight (first token, logprobs, ...)."""

    def __init__(self, rows: int) -> None:
        self._rows = list(range(rows))
        self.by_room: Dict[int, int] = {}

    def alloc_row(self, room: int) -> int:
        """Returns -1 when every row is in use."""
        if not self._rows:
            return -1
        row = self._rows.pop()
        self.by_room[room] = row
        return row

    def free_row(self, room: int, row: int) -> None:
        self.by_room.pop(room, None)
        self._rows.append(row)
