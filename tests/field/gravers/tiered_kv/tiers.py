"""Frames of the host tier and extents of the disk tier."""
from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import BinaryIO


class Frame:
    __slots__ = ("index", "buf", "length", "dirty")

    def __init__(self, index: int, size: int):
        self.index = index
        self.buf = bytearray(size)
        self.length = 0
        self.dirty = False


class FramePool:
    def __init__(self, count: int, size: int):
        self.size = size
        self._frames = [Frame(i, size) for i in range(count)]
        self._mutex = threading.Lock()
        self.retired: list[Frame] = []

    def alloc(self) -> Frame | None:
        with self._mutex:
            return self._frames.pop() if self._frames else None

    def dealloc(self, frame: Frame) -> None:
        frame.length = 0
        frame.dirty = False
        with self._mutex:
            self._frames.append(frame)

    def alloc_filled(self, payload: bytes) -> Frame | None:
        frame = self.alloc()  # leak: a payload that is too long gives None with the frame taken
        if frame is None:
            return None
        if len(payload) > self.size:
            return None
        frame.buf[: len(payload)] = payload
        frame.length = len(payload)
        return frame

    def shrink(self, count: int) -> int:
        gone = 0
        while gone < count:
            frame = self.alloc()  # clean: near miss, retired frames come back in grow
            if frame is None:
                break
            self.retired.append(frame)
            gone += 1
        return gone

    def grow(self, count: int) -> int:
        back = 0
        while self.retired and back < count:
            self.dealloc(self.retired.pop())
            back += 1
        return back


@dataclass
class Extent:
    path: str
    offset: int
    length: int


class DiskTier:
    """Extents of fixed size in one file; free ones are kept by offset."""

    def __init__(self, root: str, extent_size: int, extents: int):
        self.path = os.path.join(root, "kv.spill")
        self.extent_size = extent_size
        self._holes = [i * extent_size for i in range(extents)]

    def reserve_extent(self, length: int) -> Extent | None:
        if length > self.extent_size or not self._holes:
            return None
        return Extent(self.path, self._holes.pop(), length)

    def free_extent(self, extent: Extent) -> None:
        self._holes.append(extent.offset)

    def open_spill(self, mode: str) -> BinaryIO:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        return open(self.path, mode)  # clean: the caller closes it

    def load_index(self) -> list[int]:
        if not os.path.exists(self.path + ".idx"):
            return []
        fh = open(self.path + ".idx", "rb")  # leak: an index of the wrong version returns with the file open
        header = fh.read(4)
        if header != b"KVI1":
            return []
        rows = [int.from_bytes(fh.read(8), "little") for _ in range(16)]
        fh.close()
        return rows

    def save_index(self, rows: list[int]) -> None:
        with open(self.path + ".idx", "wb") as fh:  # clean: closed by with
            fh.write(b"KVI1")
            for row in rows:
                fh.write(row.to_bytes(8, "little"))
