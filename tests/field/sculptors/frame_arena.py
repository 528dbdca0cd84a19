"""Decoder worker memory: one frame per worker, regions of it lent to the image stages."""
from __future__ import annotations

import bisect
from typing import Iterable, NamedTuple


class Region(NamedTuple):
    start: int
    length: int


class Frame:
    """First fit over a sorted list of holes. A carved region stays taken until it is folded back."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.holes: list[Region] = [Region(0, len(memory))]
        self.taken_bytes = 0

    def carve(self, length: int) -> Region | None:
        length = (length + 63) & ~63
        for i, hole in enumerate(self.holes):
            if hole.length < length:
                continue
            if hole.length == length:
                del self.holes[i]
            else:
                self.holes[i] = Region(hole.start + length, hole.length - length)
            self.taken_bytes += length
            return Region(hole.start, length)
        return None

    def fold(self, region: Region) -> None:
        self.taken_bytes -= region.length
        at = bisect.bisect_left(self.holes, region)
        self.holes.insert(at, region)
        self._merge(at)
        if at:
            self._merge(at - 1)

    def _merge(self, at: int) -> None:
        if at + 1 < len(self.holes):
            a, b = self.holes[at], self.holes[at + 1]
            if a.start + a.length == b.start:
                self.holes[at:at + 2] = [Region(a.start, a.length + b.length)]

    def view(self, region: Region) -> memoryview:
        return memoryview(self.memory)[region.start:region.start + region.length]


class DecodeWorker:
    def __init__(self, size: int, codec) -> None:
        self.frame = Frame(bytearray(size))
        self.codec = codec
        self.strips: list[Region] = []

    def decode(self, blob: bytes) -> bytes | None:
        header = self.codec.header(blob)
        if header is None:
            return None
        out = self.frame.carve(header.nbytes)  # clean: folded after the copy out
        if out is None:
            return None
        with self.frame.view(out) as view:
            self.codec.decode_into(blob, view)
            pixels = bytes(view)
        self.frame.fold(out)
        return pixels

    def decode_resized(self, blob: bytes, width: int, height: int) -> bytes | None:
        header = self.codec.header(blob)
        raw = self.frame.carve(header.nbytes)  # leak: kept when there is no room for the small image
        if raw is None:
            return None
        small = self.frame.carve(width * height * 3)  # clean: folded together with raw at the end
        if small is None:
            return None
        self.codec.decode_into(blob, self.frame.view(raw))
        self.codec.resize(self.frame.view(raw), self.frame.view(small), width, height)
        pixels = bytes(self.frame.view(small))
        self.frame.fold(raw)
        self.frame.fold(small)
        return pixels

    def blend(self, a: bytes, b: bytes, alpha: float) -> bytes | None:
        left = self.frame.carve(len(a))  # clean: near miss, folded when the second carve finds no room
        if left is None:
            return None
        right = self.frame.carve(len(b))  # clean: folded
        if right is None:
            self.frame.fold(left)
            return None
        self.frame.view(left)[:len(a)] = a
        self.frame.view(right)[:len(b)] = b
        mixed = self.codec.blend(self.frame.view(left), self.frame.view(right), alpha)
        self.frame.fold(right)
        self.frame.fold(left)
        return mixed

    def histogram(self, blobs: Iterable[bytes]) -> list[int]:
        counts = [0] * 256
        scratch = None
        for blob in blobs:
            scratch = self.frame.carve(len(blob))  # leak: replaced in each turn, only the last folded
            if scratch is None:
                break
            view = self.frame.view(scratch)
            view[:len(blob)] = blob
            for value in view[:len(blob)]:
                counts[value] += 1
        if scratch is not None:
            self.frame.fold(scratch)
        return counts

    def add_strip(self, rows: bytes) -> bool:
        strip = self.frame.carve(len(rows))  # clean: near miss, kept in strips, folded by flush_strips
        if strip is None:
            return False
        self.frame.view(strip)[:len(rows)] = rows
        self.strips.append(strip)
        return True

    def flush_strips(self, sink) -> int:
        written = 0
        while self.strips:
            strip = self.strips.pop(0)
            written += sink.write(self.frame.view(strip))
            self.frame.fold(strip)
        return written

    def fits(self, nbytes: int) -> bool:
        probe = self.frame.carve(nbytes)  # clean: near miss, folded at once when there was room
        if probe is None:
            return False
        self.frame.fold(probe)
        return True

    def reserve_margin(self, nbytes: int) -> bool:
        return self.frame.carve(nbytes) is not None  # leak: the region is compared with None and dropped
