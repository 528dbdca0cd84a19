from __future__ import annotations

import logging
from typing import List, Optional

from .buffers import TransferBuffer, TransferBufferPool

logger = logging.getLogger(__name__)


class BufferGuard:
    """Gives the buffer up on exit unless `detach` was called."""

    def __init__(self, pool: TransferBufferPool) -> None:
        self.pool = pool
        self.buf: Optional[TransferBuffer] = None

    def __enter__(self) -> "BufferGuard":
        self.buf = self.pool.lease()  # clean: near miss, __exit__ returns early only when nothing is held
        return self

    def detach(self) -> Optional[TransferBuffer]:
        buf, self.buf = self.buf, None
        return buf

    def __exit__(self, exc_type, exc, tb) -> None:
        if self.buf is None:
            return
        self.pool.give_up(self.buf)
        self.buf = None


class MultiGuard:
    """Leases `count` buffers; falls back to fewer when the pool is short."""

    def __init__(self, pool: TransferBufferPool, count: int, minimum: int = 1) -> None:
        self.pool = pool
        self.count = count
        self.minimum = minimum
        self.bufs: List[TransferBuffer] = []

    def __enter__(self) -> List[TransferBuffer]:
        for _ in range(self.count):
            buf = self.pool.lease()  # leak: __exit__ returns early when fewer than minimum are held
            if buf is None:
                break
            self.bufs.append(buf)
        return self.bufs

    def __exit__(self, exc_type, exc, tb) -> None:
        if len(self.bufs) < self.minimum:
            logger.warning("transfer went ahead with %d buffers", len(self.bufs))
            return
        while self.bufs:
            self.pool.give_up(self.bufs.pop())
