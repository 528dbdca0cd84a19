"""Aligned host buffers between the device and NVMe files."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, List, Optional, Set


class SwapBuffer:
    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.data = bytearray(size)
        self.used = 0

    def load(self, payload: bytes) -> None:
        self.data[: len(payload)] = payload
        self.used = len(payload)

    def payload(self) -> bytes:
        return bytes(self.data[: self.used])


class SwapBufferManager:
    """Buffers are known by index; a set of free indices."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.all = [SwapBuffer(i, size) for i in range(count)]
        self._free: Set[int] = set(range(count))

    def allocate(self, nbytes: int) -> Optional[SwapBuffer]:
        if nbytes > self.size or not self._free:
            return None
        buf = self.all[self._free.pop()]
        buf.used = 0
        return buf

    def allocate_all(self, sizes: List[int]) -> Optional[List[SwapBuffer]]:
        got: List[SwapBuffer] = []
        for nbytes in sizes:
            buf = self.allocate(nbytes)  # leak: buffers allocated before the one that fails are not freed
            if buf is None:
                return None
            got.append(buf)
        return got

    def deallocate(self, buf: SwapBuffer) -> None:
        if buf.index in self._free:
            raise ValueError("double free of a swap buffer")
        self._free.add(buf.index)

    def free_count(self) -> int:
        return len(self._free)

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[Optional[SwapBuffer]]:
        buf = self.allocate(nbytes)  # clean: near miss, yielded also when None, deallocated under the same test
        try:
            yield buf
        finally:
            if buf is not None:
                self.deallocate(buf)
