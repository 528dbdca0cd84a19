import threading
from multiprocessing import shared_memory
from typing import Dict, List, Optional

import numpy as np


class Chunk:
    __slots__ = ("seg", "index", "nbytes", "readers")

    def __init__(self, seg, index, nbytes):
        self.seg, self.index, self.nbytes = seg, index, nbytes
        self.readers = 0

    def array(self) -> np.ndarray:
        off = self.index * self.seg.chunk
        return np.frombuffer(self.seg.shm.buf, np.uint8, self.nbytes, off)


class Segment:
    """Buddy-less: all chunks have one size. reserve() / surrender()."""

    def __init__(self, name: str, chunk: int, n: int):
        self.chunk, self.n = chunk, n
        self.shm = shared_memory.SharedMemory(name=name, create=True, size=chunk * n)  # clean: closed and unlinked by destroy()
        self._avail: List[int] = list(range(n))
        self._cond = threading.Condition()

    def reserve(self, nbytes: int, timeout: Optional[float] = None) -> Optional[Chunk]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._avail), timeout):
                return None
            i = self._avail.pop()  # leak: a request above the chunk size returns None after the pop
            if nbytes > self.chunk:
                return None
            return Chunk(self, i, nbytes)

    def surrender(self, c: Chunk) -> None:
        with self._cond:
            self._avail.append(c.index)
            self._cond.notify()

    def destroy(self) -> None:
        self.shm.close()
        self.shm.unlink()


def segment_size(name: str) -> int:
    shm = shared_memory.SharedMemory(name=name)  # clean: closed in finally
    try:
        return shm.size
    finally:
        shm.close()


class ScopedChunk:
    """with-block over one chunk; keep() hands it on."""

    def __init__(self, seg: Segment, nbytes: int):
        self.seg, self.nbytes = seg, nbytes
        self.c: Optional[Chunk] = None

    def __enter__(self) -> "ScopedChunk":
        self.c = self.seg.reserve(self.nbytes)  # clean: near miss, surrendered by __exit__ unless keep() gave it away
        return self

    def keep(self) -> Optional[Chunk]:
        c, self.c = self.c, None
        return c

    def __exit__(self, *exc) -> None:
        if self.c is not None:
            self.seg.surrender(self.c)
            self.c = None
