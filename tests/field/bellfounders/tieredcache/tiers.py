"""The lower tier: extents of one big file, and the upper tier's table."""
from __future__ import annotations

import bisect
import mmap
from collections import OrderedDict

from .frames import Frame, FramePool


class ExtentFile:
    """First-fit extents of a memory-mapped file; free extents are sorted by offset."""

    def __init__(self, path: str, size: int):
        with open(path, "w+b") as fh:  # clean: closed by with
            fh.truncate(size)
            self._map = mmap.mmap(fh.fileno(), size)  # clean: kept in self._map, closed by close
        self._free: list[tuple[int, int]] = [(0, size)]

    def cut(self, n: int) -> tuple[int, int] | None:
        for i, (off, length) in enumerate(self._free):
            if length < n:
                continue
            if length == n:
                del self._free[i]
            else:
                self._free[i] = (off + n, length - n)
            return off, n
        return None

    def join(self, ext: tuple[int, int]) -> None:
        bisect.insort(self._free, ext)

    def store(self, ext: tuple[int, int], raw: bytes) -> None:
        self._map[ext[0]:ext[0] + len(raw)] = raw

    def load(self, ext: tuple[int, int]) -> bytes:
        return self._map[ext[0]:ext[0] + ext[1]]

    def close(self) -> None:
        self._map.close()


class Tier:
    """Keys to frames, least recently used first. The tier holds one count per frame."""

    def __init__(self, pool: FramePool):
        self.pool = pool
        self.table: OrderedDict[str, Frame] = OrderedDict()

    def lookup(self, key: str) -> Frame | None:
        frame = self.table.get(key)
        if frame is None:
            return None
        self.table.move_to_end(key)
        return frame.retain()  # clean: handed to the caller, on top of the tier's own count

    def admit(self, key: str, frame: Frame) -> None:
        """Takes over the caller's count."""
        old = self.table.pop(key, None)
        if old is not None:
            old.forget()
        self.table[key] = frame

    def coldest(self) -> tuple[str, Frame] | None:
        """Takes the coldest frame out of the table; its count goes to the caller."""
        for key, frame in self.table.items():
            if frame.count == 1:
                del self.table[key]
                return key, frame
        return None

    def clear(self) -> None:
        while self.table:
            _, frame = self.table.popitem()
            frame.forget()
