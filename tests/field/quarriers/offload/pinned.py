from __future__ import annotations

import threading
from typing import Any, Optional

try:
    import torch
except ImportError:
    torch = None


class PinnedBuffer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = bytearray(nbytes) if torch is None else torch.empty(nbytes, dtype=torch.uint8)


class PinnedArena:
    """Page-locked host buffers of a fixed size."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._bufs = [PinnedBuffer(nbytes) for _ in range(count)]
        self._lock = threading.Lock()

    def pin(self, wait: bool = False) -> Optional[PinnedBuffer]:
        self._lock.acquire()  # leak: the empty way returns with the lock held
        if not self._bufs:
            return None
        buf = self._bufs.pop()
        self._lock.release()
        return buf

    def unpin(self, buf: PinnedBuffer) -> None:
        self._lock.acquire()  # clean: released in finally
        try:
            self._bufs.append(buf)
        finally:
            self._lock.release()

    def try_pin(self) -> Optional[PinnedBuffer]:
        if not self._lock.acquire(blocking=False):  # clean: near miss, not held when it fails
            return None
        try:
            return self._bufs.pop() if self._bufs else None
        finally:
            self._lock.release()


class StreamPool:
    def __init__(self, n: int) -> None:
        self._idle: list[Any] = list(range(n)) if torch is None else [torch.cuda.Stream() for _ in range(n)]

    def get_stream(self) -> Any:
        if not self._idle:
            raise RuntimeError("no idle copy stream")
        return self._idle.pop()

    def put_stream(self, stream: Any) -> None:
        self._idle.append(stream)
