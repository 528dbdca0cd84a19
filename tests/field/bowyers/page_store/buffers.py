"""Buffer pool: frames are pinned while somebody reads or writes the page they hold."""
from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Optional

PAGE_SIZE = 8192


class Frame:
    __slots__ = ("page_no", "data", "pins", "dirty", "lsn")

    def __init__(self, page_no: int) -> None:
        self.page_no = page_no
        self.data = bytearray(PAGE_SIZE)
        self.pins = 0
        self.dirty = False
        self.lsn = 0


class BufferPool:
    def __init__(self, path: str, capacity: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)  # clean: near miss, closed by close()
        self._capacity = capacity
        self._frames: OrderedDict[int, Frame] = OrderedDict()
        self._mu = threading.RLock()
        self._end = os.fstat(self._fd).st_size // PAGE_SIZE

    def pin(self, page_no: int) -> Frame:
        """Return the frame of a page with one more pin on it."""
        with self._mu:
            frame = self._frames.get(page_no)
            if frame is None:
                self._make_room()
                frame = Frame(page_no)
                frame.data[:] = os.pread(self._fd, PAGE_SIZE, page_no * PAGE_SIZE).ljust(PAGE_SIZE, b"\0")
                self._frames[page_no] = frame
            frame.pins += 1
            self._frames.move_to_end(page_no)
            return frame

    def pin_if_cached(self, page_no: int) -> Optional[Frame]:
        with self._mu:
            if page_no not in self._frames:
                return None
            return self.pin(page_no)  # clean: handed to the caller

    def append_page(self) -> Frame:
        with self._mu:
            page_no = self._end
            self._end += 1
            frame = self.pin(page_no)  # clean: handed to the caller
            frame.dirty = True
            return frame

    def unpin(self, frame: Frame, dirty: bool = False) -> None:
        with self._mu:
            frame.dirty = frame.dirty or dirty
            frame.pins -= 1

    def _make_room(self) -> None:
        if len(self._frames) < self._capacity:
            return
        for page_no, frame in self._frames.items():
            if frame.pins == 0:
                self._write_out(frame)
                del self._frames[page_no]
                return
        raise MemoryError("all frames are pinned")

    def _write_out(self, frame: Frame) -> None:
        if frame.dirty:
            os.pwrite(self._fd, frame.data, frame.page_no * PAGE_SIZE)
            frame.dirty = False

    def flush_all(self) -> int:
        written = 0
        with self._mu:
            for frame in self._frames.values():
                written += frame.dirty
                self._write_out(frame)
        return written

    def close(self) -> None:
        self.flush_all()
        os.close(self._fd)


class PinnedPage:
    """Scoped pin."""

    def __init__(self, pool: BufferPool, page_no: int, write: bool = False) -> None:
        self._pool = pool
        self._page_no = page_no
        self._write = write
        self._frame: Optional[Frame] = None

    def __enter__(self) -> Frame:
        self._frame = self._pool.pin(self._page_no)  # clean: __exit__ unpins on every way
        return self._frame

    def __exit__(self, exc_type, exc, tb) -> None:
        self._pool.unpin(self._frame, dirty=self._write and exc_type is None)
        self._frame = None
