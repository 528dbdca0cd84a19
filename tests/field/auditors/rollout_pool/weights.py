from __future__ import annotations

from typing import Optional


class SyncBuffers:
    def __init__(self, count: int, size: int) -> None:
        self._free = [bytearray(size) for _ in range(count)]

    def obtain(self) -> Optional[bytearray]:
        return self._free.pop() if self._free else None

    def restore(self, buf: bytearray) -> None:
        self._free.append(buf)


class VersionPins:
    def __init__(self) -> None:
        self.pins: dict[int, int] = {}

    def pin(self, version: int) -> int:
        self.pins[version] = self.pins.get(version, 0) + 1
        return version

    def unpin(self, version: int) -> None:
        self.pins[version] -= 1
        if self.pins[version] == 0:
            del self.pins[version]


class WeightSync:
    def __init__(self, buffers: SyncBuffers, pins: VersionPins) -> None:
        self.buffers = buffers
        self.pins = pins
        self.published: Optional[int] = None
        self.front: Optional[bytearray] = None
        self.back: Optional[bytearray] = None

    def publish(self, version: int) -> None:
        previous = self.published
        self.published = self.pins.pin(version)  # clean: near miss, the version before is unpinned on the next line, close() unpins the last
        if previous is not None:
            self.pins.unpin(previous)

    def open_double(self) -> bool:
        self.close_double()
        self.front = self.buffers.obtain()  # clean: near miss, without a back buffer close_double restores it at once
        self.back = self.buffers.obtain()  # clean: in a field that close_double restores
        if self.front is None or self.back is None:
            self.close_double()
            return False
        return True

    def close_double(self) -> None:
        for buf in (self.front, self.back):
            if buf is not None:
                self.buffers.restore(buf)
        self.front = self.back = None

    def push_shard(self, shard: bytes) -> bool:
        buf = self.buffers.obtain()  # leak: a shard larger than the buffer returns False past the restore
        if buf is None:
            return False
        if len(shard) > len(buf):
            return False
        buf[: len(shard)] = shard
        self.buffers.restore(buf)
        return True

    def close(self) -> None:
        self.close_double()
        if self.published is not None:
            self.pins.unpin(self.published)
            self.published = None
