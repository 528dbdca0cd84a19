"""Host blocks in which checkpoint shards are laid out before they are written."""
from __future__ import annotations

import threading
from typing import List, Optional


class StagingBlock:
    __slots__ = ("index", "mem", "used")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.mem = bytearray(size)
        self.used = 0

    def put(self, data: bytes) -> None:
        if len(data) > len(self.mem):
            raise BufferError(f"{len(data)} bytes into a block of {len(self.mem)}")
        self.mem[:len(data)] = data
        self.used = len(data)

    def payload(self) -> bytes:
        return bytes(self.mem[:self.used])


class StagingArea:
    """A bounded number of blocks; `rent` waits, `rent_now` does not."""

    def __init__(self, blocks: int, size: int) -> None:
        self._slots = threading.Semaphore(blocks)
        self._lock = threading.Lock()
        self._blocks: List[StagingBlock] = [StagingBlock(i, size) for i in range(blocks)]
        self._closed = False

    def rent(self) -> StagingBlock:
        self._slots.acquire()  # clean: released by hand_in with the block
        with self._lock:
            return self._blocks.pop()

    def rent_now(self) -> Optional[StagingBlock]:
        if not self._slots.acquire(blocking=False):  # leak: a closed area returns None with the slot counted
            return None
        with self._lock:
            if self._closed:
                return None
            return self._blocks.pop()

    def hand_in(self, block: StagingBlock) -> None:
        block.used = 0
        with self._lock:
            self._blocks.append(block)
        self._slots.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def spare(self) -> int:
        return len(self._blocks)
