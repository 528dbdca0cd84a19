from __future__ import annotations

from typing import Optional, Tuple

from .arena import Region, Workspace


class TypedScratch:
    """Scratch in elements rather than bytes."""

    def __init__(self, ws: Workspace, itemsize: int = 2):
        self.ws = ws
        self.itemsize = itemsize

    def take(self, *shape: int) -> Region:
        n = self.itemsize
        for d in shape:
            n *= d
        return self.ws.scratch(n)  # clean: handed on

    def drop(self, r: Region) -> None:
        self.ws.done(r)

    def take_filled(self, value: int, *shape: int) -> Region:
        r = self.take(*shape)  # clean: handed on
        r.view[:] = bytes([value]) * r.size
        return r

    def take_qkv(self, heads: int, seq: int) -> Tuple[Region, Region, Region]:
        q = self.take(heads, seq)  # clean: handed on in the tuple
        k = self.take(heads, seq)  # clean: handed on in the tuple
        v = self.take(heads, seq)  # clean: handed on in the tuple
        return q, k, v

    def padded(self, data: bytes, to: int) -> Optional[Region]:
        """None when data is longer than the padded size."""
        r = self.take_filled(0, to)  # leak: data longer than the region returns None with it taken
        if len(data) > r.size:
            return None
        r.view[: len(data)] = data
        return r
