from __future__ import annotations

import threading
from typing import Any, Dict, List, Optional


class DeviceArena:
    """Fixed size page frames in device memory."""

    def __init__(self, frames: List[Any]) -> None:
        self._frames = list(frames)
        self._lock = threading.Lock()

    def alloc(self) -> Optional[Any]:
        with self._lock:
            return self._frames.pop() if self._frames else None

    def free(self, frame: Any) -> None:
        with self._lock:
            self._frames.append(frame)

    def available(self) -> int:
        return len(self._frames)


class PinnedPool:
    """Page-locked host buffers. ``take`` returns None when exhausted."""

    def __init__(self, buffers: List[Any]) -> None:
        self._idle = list(buffers)
        self._lock = threading.Lock()

    def take(self) -> Optional[Any]:
        with self._lock:
            if not self._idle:
                return None
            return self._idle.pop()

    def put_back(self, buf: Any) -> None:
        with self._lock:
            self._idle.append(buf)


class DiskSlab:
    """A preallocated file cut in page sized extents."""

    def __init__(self, path: str, page_bytes: int, extents: int) -> None:
        self.page_bytes = page_bytes
        self._free = list(range(extents))
        self._fh = open(path, "w+b")  # clean: the slab's own file, closed in close()
        self._sums: Dict[int, int] = {}

    def reserve(self) -> int:
        if not self._free:
            raise MemoryError("slab full")
        return self._free.pop()

    def unreserve(self, extent: int) -> None:
        self._sums.pop(extent, None)
        self._free.append(extent)

    def write(self, extent: int, data: bytes) -> None:
        self._fh.seek(extent * self.page_bytes)
        self._fh.write(data[: self.page_bytes])
        self._sums[extent] = sum(data) & 0xFFFF

    def read(self, extent: int) -> bytes:
        self._fh.seek(extent * self.page_bytes)
        return self._fh.read(self.page_bytes)

    def checksum(self, extent: int) -> int:
        return self._sums.get(extent, 0)

    def close(self) -> None:
        self._fh.close()
