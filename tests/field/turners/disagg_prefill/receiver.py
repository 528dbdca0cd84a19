"""Decode side: preallocates landing buffers and polls for arrivals."""
from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .pool import MetadataSlots, TransferBuffer, TransferPool


class Poll(enum.Enum):
    WAITING = 0
    SUCCESS = 1
    FAILED = 2


@dataclass
class DecodeRequest:
    room: int
    prompt_len: int
    buf: Optional[TransferBuffer] = None
    row: int = -1
    deadline: float = field(default_factory=lambda: time.monotonic() + 30.0)
    status: Poll = Poll.WAITING


class PreallocQueue:
    def __init__(self, pool: TransferPool, rows: MetadataSlots) -> None:
        self.pool = pool
        self.rows = rows
        self.pending: List[DecodeRequest] = []

    def add(self, req: DecodeRequest) -> bool:
        req.buf = self.pool.checkout()  # clean: near miss, rolled back without a row, else pop_ready or abort returns it
        if req.buf is None:
            return False
        req.row = self.rows.alloc_row(req.room)  # clean: kept in the request, freed with the buffer
        if req.row < 0:
            self.pool.checkin(req.buf)
            req.buf = None
            return False
        self.pending.append(req)
        return True

    def pop_ready(self) -> List[DecodeRequest]:
        ready, waiting = [], []
        for req in self.pending:
            if req.status is Poll.WAITING:
                waiting.append(req)
                continue
            self._give_up(req)
            if req.status is Poll.SUCCESS:
                ready.append(req)
        self.pending = waiting
        return ready

    def abort(self, room: int) -> None:
        for req in [r for r in self.pending if r.room == room]:
            self.pending.remove(req)
            self._give_up(req)

    def _give_up(self, req: DecodeRequest) -> None:
        self.pool.checkin(req.buf)
        self.rows.free_row(req.room, req.row)
        req.buf, req.row = None, -1


class LandingTable:
    """Buffers by room, for transfers the peer starts on its own."""

    def __init__(self, pool: TransferPool, ttl: float = 30.0) -> None:
        self.pool = pool
        self.ttl = ttl
        self._landing: Dict[int, TransferBuffer] = {}
        self._since: Dict[int, float] = {}

    def open(self, room: int) -> bool:
        if room in self._landing:
            return True
        buf = self.pool.checkout()  # leak: sweep deletes expired entries without checking the buffers in
        if buf is None:
            return False
        self._landing[room] = buf
        self._since[room] = time.monotonic()
        return True

    def close(self, room: int) -> None:
        buf = self._landing.pop(room, None)
        self._since.pop(room, None)
        if buf is not None:
            self.pool.checkin(buf)

    def sweep(self, now: float) -> int:
        expired = [room for room, t in self._since.items() if now - t > self.ttl]
        for room in expired:
            del self._landing[room]
            del self._since[room]
        return len(expired)
