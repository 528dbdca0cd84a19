"""Storage of single KV pages in host memory and on disk."""
from __future__ import annotations

import os
from typing import BinaryIO, Optional


class HostTier:
    """Page frames in host memory. `obtain` a frame, `relinquish` it."""

    def __init__(self, frames: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._frames = [bytearray(page_bytes) for _ in range(frames)]
        self._avail = list(range(frames))

    def obtain(self) -> Optional[int]:
        return self._avail.pop() if self._avail else None

    def relinquish(self, frame: int) -> None:
        self._avail.append(frame)

    def data(self, frame: int) -> bytearray:
        return self._frames[frame]

    def wipe_idle(self, limit: int) -> int:
        """Zero at most `limit` idle frames."""
        idle: list[int] = []
        while (frame := self.obtain()) is not None:  # leak: idle frames beyond the limit are not relinquished
            idle.append(frame)
        wiped = idle[:limit]
        for frame in wiped:
            self._frames[frame] = bytearray(self.page_bytes)
            self.relinquish(frame)
        return len(wiped)


class DiskTier:
    """One file per page; a bounded number of them open at a time."""

    def __init__(self, root: str, limit: int) -> None:
        self.root = root
        self.limit = limit
        self.handles: dict[str, BinaryIO] = {}

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key[:2], key)

    def handle(self, key: str) -> BinaryIO:
        """Cached read handle, owned by this tier."""
        fh = self.handles.get(key)
        if fh is None:
            if len(self.handles) >= self.limit:
                _, oldest = self.handles.popitem()
                oldest.close()
            fh = open(self._path(key), "rb")  # clean: near miss, in handles, closed by popitem or close()
            self.handles[key] = fh
        return fh

    def read_into(self, key: str, out: bytearray) -> int:
        fh = self.handle(key)
        fh.seek(0)
        return fh.readinto(out)

    def write(self, key: str, data: bytes) -> None:
        os.makedirs(os.path.dirname(self._path(key)), exist_ok=True)
        with open(self._path(key), "wb") as fh:  # clean: closed by with
            fh.write(data)

    def append_index(self, keys: list[str]) -> int:
        index = open(os.path.join(self.root, "index"), "a")  # leak: nothing to write returns before close
        if not keys:
            return 0
        index.writelines(k + "\n" for k in keys)
        index.close()
        return len(keys)

    def exists(self, key: str) -> bool:
        return os.path.exists(self._path(key))

    def close(self) -> None:
        while self.handles:
            _, fh = self.handles.popitem()
            fh.close()
