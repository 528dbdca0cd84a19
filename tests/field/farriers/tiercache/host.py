from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Optional

import numpy as np


@dataclass(eq=False)
class HostPages:
    idx: np.ndarray

    @property
    def n(self) -> int:
        return int(self.idx.size)


class HostArena:
    """Pinned page arena; page ids are kept as one int64 stack."""

    def __init__(self, npages: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.mem = np.zeros((npages, page_bytes), dtype=np.uint8)
        self._stack = np.arange(npages, dtype=np.int64)
        self._top = npages
        self._mu = threading.Lock()

    def alloc(self, n: int) -> Optional[HostPages]:
        with self._mu:
            if n > self._top:
                return None
            self._top -= n
            return HostPages(self._stack[self._top : self._top + n].copy())

    def free(self, pages: HostPages) -> None:
        with self._mu:
            self._stack[self._top : self._top + pages.n] = pages.idx
            self._top += pages.n


class DiskTier:
    """One fixed-size file of extents, an extent per cached prefix."""

    def __init__(self, path: str, extents: int, extent_bytes: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.extent_bytes = extent_bytes
        self._free = set(range(extents))

    def take_extent(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def return_extent(self, e: int) -> None:
        self._free.add(e)

    def store(self, blob: bytes) -> Optional[int]:
        e = self.take_extent()  # leak: a blob longer than an extent gives None with the extent taken
        if e is None:
            return None
        if len(blob) > self.extent_bytes:
            return None
        os.pwrite(self.fd, blob, e * self.extent_bytes)
        return e

    def store_padded(self, blob: bytes) -> Optional[int]:
        if len(blob) > self.extent_bytes:
            return None
        e = self.take_extent()  # clean: near miss, returned when the disk is full, otherwise the caller's
        if e is None:
            return None
        try:
            os.pwrite(self.fd, blob.ljust(self.extent_bytes, b"\0"), e * self.extent_bytes)
        except OSError:
            self.return_extent(e)
            return None
        return e

    def load(self, e: int) -> bytes:
        return os.pread(self.fd, self.extent_bytes, e * self.extent_bytes)

    def close(self) -> None:
        os.close(self.fd)
