import logging
import os
import threading
from typing import Dict, List, NamedTuple, Optional

import numpy as np

logger = logging.getLogger(__name__)

class TierFull(Exception):
    pass

class CorruptSlab(Exception):
    pass

class HostChunk(NamedTuple):
    index: int
    view: np.ndarray

class HostTier:
    """One big array, cut into chunks of equal size."""

    def __init__(self, chunks: int, chunk_bytes: int):
        self._mem = np.empty((chunks, chunk_bytes), dtype=np.uint8)
        self._free: List[int] = list(range(chunks))
        self._lock = threading.Lock()

    def alloc(self) -> HostChunk:
        with self._lock:
            if not self._free:
                raise TierFull("host")
            i = self._free.pop()  # clean: handed out as a HostChunk
        return HostChunk(i, self._mem[i])

    def alloc_some(self, n: int) -> List[HostChunk]:
        out: List[HostChunk] = []
        try:
            while len(out) < n:
                out.append(self.alloc())  # clean: a shorter list is what the caller asked for
        except TierFull:
            logger.debug("%d of %d host chunks", len(out), n)
        return out

    def free(self, chunk: HostChunk) -> None:
        with self._lock:
            self._free.append(chunk.index)

class DiskTier:
    """Slabs in one preallocated file; a slab is found by its number."""

    def __init__(self, path: str, slabs: int, slab_bytes: int):
        self.slab_bytes = slab_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # clean: kept by the tier and closed in close()
        self._free = set(range(slabs))
        self._sums: Dict[int, int] = {}
        self._bad: List[int] = []

    def new_slab(self) -> Optional[int]:
        while self._free:
            slab = self._free.pop()  # clean: near miss, bad slabs are put aside into self._bad for repair()
            if slab in self._sums and self._sums[slab] < 0:
                self._bad.append(slab)
                continue
            return slab
        return None

    def drop_slab(self, slab: int) -> None:
        self._sums.pop(slab, None)
        self._free.add(slab)

    def repair(self) -> int:
        n = len(self._bad)
        while self._bad:
            self.drop_slab(self._bad.pop())
        return n

    def write(self, slab: int, data: np.ndarray) -> None:
        n = os.pwrite(self._fd, data.tobytes(), slab * self.slab_bytes)
        if n != data.nbytes:
            self._sums[slab] = -1
            raise CorruptSlab(f"slab {slab}: {n} bytes written")
        self._sums[slab] = int(data.sum())

    def read(self, slab: int, into: np.ndarray) -> None:
        raw = os.pread(self._fd, into.nbytes, slab * self.slab_bytes)
        into[: len(raw)] = np.frombuffer(raw, np.uint8)
        if int(into.sum()) != self._sums.get(slab):
            raise CorruptSlab(f"slab {slab} reads differently")

    def close(self) -> None:
        os.close(self._fd)
