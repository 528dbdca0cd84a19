from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator, List, Optional

try:
    import torch
except ImportError:
    torch = None


@dataclass(eq=False)
class PinnedBuffer:
    index: int
    mem: object
    used: int = 0


def _pinned(nbytes: int):
    if torch is not None and torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return bytearray(nbytes)


class PinnedStaging:
    """A fixed number of equally sized pinned buffers. borrow() blocks until one comes back."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._cv = threading.Condition()
        self._idle: List[PinnedBuffer] = [PinnedBuffer(i, _pinned(nbytes)) for i in range(count)]
        self.borrowed = 0

    def borrow(self, timeout: Optional[float] = None) -> PinnedBuffer:
        with self._cv:
            if not self._cv.wait_for(lambda: self._idle, timeout):
                raise TimeoutError("no pinned buffer came back in time")
            self.borrowed += 1
            return self._idle.pop()

    def give_back(self, buf: PinnedBuffer) -> None:
        with self._cv:
            buf.used = 0
            self.borrowed -= 1
            self._idle.append(buf)
            self._cv.notify()

    @contextmanager
    def borrowed_buffer(self) -> Iterator[PinnedBuffer]:
        buf = self.borrow()  # clean: finally
        try:
            yield buf
        finally:
            self.give_back(buf)


class CopyStreams:
    """Side streams for host-to-device copies."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._ready = list(range(count))
        self.busy = 0

    def get_stream(self) -> Optional[int]:
        with self._lock:
            if not self._ready:
                return None
            self.busy += 1
            return self._ready.pop()

    def put_stream(self, stream: int) -> None:
        with self._lock:
            self.busy -= 1
            self._ready.append(stream)
