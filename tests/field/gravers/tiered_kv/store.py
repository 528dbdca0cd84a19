"""Key to location map over the tiers, with demotion and promotion."""
from __future__ import annotations

from collections import OrderedDict
from typing import Iterator

from .tiers import DiskTier, Extent, Frame, FramePool


class TieredStore:
    def __init__(self, frames: FramePool, disk: DiskTier):
        self.frames = frames
        self.disk = disk
        self.hot: OrderedDict[str, Frame] = OrderedDict()
        self.cold: dict[str, Extent] = {}
        self.demotions = 0
        self.reads = 0

    def put(self, key: str, payload: bytes) -> bool:
        if key in self.hot or key in self.cold or len(payload) > self.frames.size:
            return False
        frame = self.frames.alloc()  # clean: near miss, replaced if None, kept in hot until demote or delete
        if frame is None:
            if not self.demote_oldest():
                return False
            frame = self.frames.alloc()  # clean: the second try after a demotion, kept in hot
            if frame is None:
                return False
        frame.buf[: len(payload)] = payload
        frame.length = len(payload)
        frame.dirty = True
        self.hot[key] = frame
        return True

    def overwrite(self, key: str, payload: bytes) -> bool:
        frame = self.frames.alloc_filled(payload)  # clean: near miss, the frame which it displaces goes back
        if frame is None:
            return False
        previous = self.hot.pop(key, None)
        if previous is not None:
            self.frames.dealloc(previous)
        stale = self.cold.pop(key, None)
        if stale is not None:
            self.disk.free_extent(stale)
        self.hot[key] = frame
        return True

    def demote_oldest(self) -> bool:
        if not self.hot:
            return False
        key, frame = next(iter(self.hot.items()))
        extent = self.disk.reserve_extent(frame.length)  # clean: kept in cold, promote or delete frees it
        if extent is None:
            return False
        fh = self.disk.open_spill("r+b")  # clean: closed after the write
        fh.seek(extent.offset)
        fh.write(frame.buf[: frame.length])
        fh.close()
        del self.hot[key]
        self.cold[key] = extent
        self.frames.dealloc(frame)
        self.demotions += 1
        return True

    def promote(self, key: str) -> bool:
        extent = self.cold.get(key)
        if extent is None:
            return False
        frame = self.frames.alloc()  # clean: put in hot, or given back after a short read
        if frame is None:
            return False
        with self.disk.open_spill("rb") as fh:  # clean: with closes the file
            fh.seek(extent.offset)
            data = fh.read(extent.length)
        if len(data) < extent.length:
            self.frames.dealloc(frame)
            return False
        frame.buf[: len(data)] = data
        frame.length = len(data)
        self.disk.free_extent(self.cold.pop(key))
        self.hot[key] = frame
        return True

    def peek(self, key: str) -> bytes | None:
        extent = self.cold.get(key)
        if extent is None:
            return None
        fh = self.disk.open_spill("rb")  # leak: the file is not closed on either return
        fh.seek(extent.offset)
        data = fh.read(extent.length)
        self.reads += 1
        return data if len(data) == extent.length else None

    def checkpoint(self, key: str) -> bool:
        frame = self.hot.get(key)
        if frame is None or not frame.dirty:
            return False
        extent = self.disk.reserve_extent(frame.length)  # leak: written to, but kept nowhere and not freed
        if extent is None:
            return False
        with self.disk.open_spill("r+b") as fh:  # clean: with closes it
            fh.seek(extent.offset)
            written = fh.write(frame.buf[: frame.length])
        frame.dirty = False
        return written == extent.length

    def scan(self) -> Iterator[tuple[str, int]]:
        scratch = self.frames.alloc()  # leak: lost if an extent is too long for the scratch frame
        if scratch is None:
            return
        for key, extent in list(self.cold.items()):
            if extent.length > len(scratch.buf):
                return
            with self.disk.open_spill("rb") as fh:  # clean: with closes it before the yield
                fh.seek(extent.offset)
                scratch.length = fh.readinto(scratch.buf)
            yield key, scratch.length
        self.frames.dealloc(scratch)

    def delete(self, key: str) -> None:
        frame = self.hot.pop(key, None)
        if frame is not None:
            self.frames.dealloc(frame)
        extent = self.cold.pop(key, None)
        if extent is not None:
            self.disk.free_extent(extent)
