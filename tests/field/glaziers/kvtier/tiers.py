from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import IO


class Frame:
    __slots__ = ("tier", "no", "pins", "stale", "payload")

    def __init__(self, tier: str, no: int) -> None:
        self.tier = tier
        self.no = no
        self.pins = 0
        self.stale = False
        self.payload: bytes = b""


class MemoryTier:
    """Fixed frames; a frame in the index may be evicted when nobody pins it."""

    def __init__(self, name: str, frames: int) -> None:
        self.name = name
        self._spare = [Frame(name, i) for i in range(frames)]
        self.index: OrderedDict[str, Frame] = OrderedDict()

    def obtain(self) -> Frame | None:
        if self._spare:
            return self._spare.pop()
        for key, fr in self.index.items():
            if fr.pins == 0:
                del self.index[key]
                return fr
        return None

    def surrender(self, fr: Frame) -> None:
        fr.payload = b""
        self._spare.append(fr)

    def publish(self, key: str, fr: Frame) -> None:
        old = self.index.pop(key, None)
        if old is not None:
            if old.pins:
                old.stale = True
            else:
                self.surrender(old)
        self.index[key] = fr

    def pin(self, key: str) -> Frame | None:
        fr = self.index.get(key)
        if fr is None:
            return None
        fr.pins += 1
        self.index.move_to_end(key)
        return fr

    def unpin(self, fr: Frame) -> None:
        fr.pins -= 1
        if fr.stale and fr.pins == 0:
            fr.stale = False
            self.surrender(fr)


class DiskTier:
    def __init__(self, root: str | None = None) -> None:
        self.root = Path(root or tempfile.mkdtemp())
        self.handles: dict[str, IO[bytes]] = {}

    def open_blob(self, key: str) -> IO[bytes] | None:
        path = self.root / key
        if not path.exists():
            return None
        fh = path.open("rb")  # clean: filed under its key and returned, close_blob closes it
        stale = self.handles.pop(key, None)
        if stale is not None:
            stale.close()
        self.handles[key] = fh
        return fh

    def close_blob(self, key: str) -> None:
        fh = self.handles.pop(key, None)
        if fh is not None:
            fh.close()

    def write_blob(self, key: str, data: bytes) -> None:
        with (self.root / key).open("wb") as fh:  # clean: the with block closes it
            fh.write(data)
