from __future__ import annotations

import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Dict, Iterable, List, Optional

from .pinned import PinnedBuffer, PinnedPool


def spill(pool: PinnedPool, t: bytes) -> PinnedBuffer:
    buf = pool.checkout(len(t))  # clean: returned to the caller
    buf.write(t)
    return buf


class ActivationOffloader:
    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self.table: Dict[int, PinnedBuffer] = {}
        self._kept: List[PinnedBuffer] = []
        self._last: Optional[PinnedBuffer] = None

    def offload(self, layer: int, t: bytes) -> None:
        if layer in self.table:
            self.pool.checkin(self.table.pop(layer))
        self.table[layer] = spill(self.pool, t)  # clean: near miss, in the table, the old entry was checked in

    def restore(self, layer: int) -> bytes:
        buf = self.table.pop(layer)
        data = buf.read()
        self.pool.checkin(buf)
        return data

    def offload_to_disk(self, t: bytes, path: Optional[Path]) -> bool:
        buf = spill(self.pool, t)  # leak: without a path it returns before the checkin
        if path is None:
            return False
        with open(path, "wb") as fh:  # clean: with block
            fh.write(buf.read())
        self.pool.checkin(buf)
        return True

    def checksum(self, t: bytes) -> int:
        return zlib.crc32(spill(self.pool, t).read())  # leak: read once and dropped

    def checksum_all(self, tensors: Iterable[bytes]) -> List[int]:
        sums: List[int] = []
        with ExitStack() as stack:
            for t in tensors:
                buf = spill(self.pool, t)  # clean: near miss, the exit stack checks it in
                stack.callback(self.pool.checkin, buf)
                sums.append(zlib.crc32(buf.read()))
        return sums

    def step(self, t: bytes, keep: bool) -> int:
        buf = spill(self.pool, t)  # clean: near miss, either kept for end_step() or checked in
        n = buf.used
        if keep:
            self._kept.append(buf)
        else:
            self.pool.checkin(buf)
        return n

    def remember(self, t: bytes, keep: bool) -> None:
        buf = spill(self.pool, t)  # leak: the previously remembered buffer is overwritten
        if keep:
            self._last = buf
        else:
            self.pool.checkin(buf)

    def end_step(self) -> None:
        for buf in self._kept:
            self.pool.checkin(buf)
        self._kept.clear()
        if self._last is not None:
            self.pool.checkin(self._last)
            self._last = None
