"""Host staging buffers between device tensors and the checkpoint files."""
import threading
from contextlib import contextmanager
from typing import Iterator, List, Optional


class Staging:
    def __init__(self, arena: "StagingArena", nbytes: int) -> None:
        self.arena = arena
        self.raw = bytearray(nbytes)
        self.length = 0

    def fill(self, data: bytes) -> None:
        if len(data) > len(self.raw):
            raise ValueError(f"{len(data)} bytes do not fit the staging buffer")
        self.raw[: len(data)] = data
        self.length = len(data)

    def payload(self) -> memoryview:
        return memoryview(self.raw)[: self.length]


class StagingArena:
    def __init__(self, buffers: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._permits = threading.BoundedSemaphore(buffers)
        self._idle: List[Staging] = []
        self._lock = threading.Lock()
        self._frozen = False

    def reserve(self) -> Staging:
        self._permits.acquire()  # clean: the permit travels with the buffer, unreserve releases it
        with self._lock:
            return self._idle.pop() if self._idle else Staging(self, self.nbytes)

    def reserve_nowait(self) -> Optional[Staging]:
        if not self._permits.acquire(blocking=False):  # leak: a frozen arena returns None and keeps the permit
            return None
        with self._lock:
            if self._frozen:
                return None
            return self._idle.pop() if self._idle else Staging(self, self.nbytes)

    def reserve_within(self, seconds: float) -> Optional[Staging]:
        if not self._permits.acquire(timeout=seconds):  # clean: near miss, the frozen branch releases the permit
            return None
        with self._lock:
            if not self._frozen:
                return self._idle.pop() if self._idle else Staging(self, self.nbytes)
        self._permits.release()
        return None

    def unreserve(self, staging: Staging) -> None:
        staging.length = 0
        with self._lock:
            self._idle.append(staging)
        self._permits.release()

    def freeze(self) -> None:
        with self._lock:
            self._frozen = True

    @contextmanager
    def staged(self, data: bytes) -> Iterator[memoryview]:
        staging = self.reserve()  # clean: finally
        try:
            staging.fill(data)
            yield staging.payload()
        finally:
            self.unreserve(staging)
