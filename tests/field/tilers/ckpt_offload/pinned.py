"""Page-locked host buffers for activation offload."""
from __future__ import annotations

import threading
from collections import defaultdict
from typing import DefaultDict, List

try:
    import torch
except ImportError:
    torch = None

PAGE = 4096


def _pinned(nbytes: int):
    if torch is None or not torch.cuda.is_available():
        return bytearray(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


class PinnedBuffer:
    __slots__ = ("storage", "bucket", "used")

    def __init__(self, bucket: int) -> None:
        self.storage = _pinned(bucket)
        self.bucket = bucket
        self.used = 0

    def write(self, data: bytes) -> None:
        self.storage[: len(data)] = data
        self.used = len(data)

    def read(self) -> bytes:
        return bytes(self.storage[: self.used])


class PinnedPool:
    def __init__(self) -> None:
        self._idle: DefaultDict[int, List[PinnedBuffer]] = defaultdict(list)
        self._lock = threading.Lock()
        self.live = 0

    def checkout(self, nbytes: int) -> PinnedBuffer:
        bucket = max(PAGE, 1 << (nbytes - 1).bit_length())
        with self._lock:
            self.live += 1
            idle = self._idle[bucket]
            return idle.pop() if idle else PinnedBuffer(bucket)

    def checkin(self, buf: PinnedBuffer) -> None:
        buf.used = 0
        with self._lock:
            self.live -= 1
            self._idle[buf.bucket].append(buf)
