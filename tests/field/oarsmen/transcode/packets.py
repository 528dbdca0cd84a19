"""Bitstream buffers and the reference-counted packets that are made of them."""
from collections import deque
from typing import Deque, Optional


class Bitstreams:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._free: Deque[bytearray] = deque(bytearray(size) for _ in range(count))
        self.low_water = count

    def get(self) -> Optional[bytearray]:
        if not self._free:
            return None
        buf = self._free.pop()  # clean: returned
        self.low_water = min(self.low_water, len(self._free))
        return buf

    def put(self, buf: bytearray) -> None:
        self._free.append(buf)


class Packet:
    """Starts with one reference, which belongs to whoever made it."""

    def __init__(self, home: Bitstreams, buf: bytearray, size: int, rendition: str, pts: int) -> None:
        self.home = home
        self.buf = buf
        self.size = size
        self.rendition = rendition
        self.pts = pts
        self.refs = 1

    def retain(self) -> "Packet":
        self.refs += 1
        return self

    def release(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.home.put(self.buf)

    def payload(self) -> memoryview:
        return memoryview(self.buf)[:self.size]
