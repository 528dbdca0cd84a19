"""Reads raw shards into slabs."""
from __future__ import annotations

from typing import BinaryIO, Dict, Iterator, List, Optional

from .slabs import Slab, SlabArena, SlabGuard


class ShardReader:
    def __init__(self, arena: SlabArena):
        self.arena = arena
        self.handles: Dict[str, BinaryIO] = {}

    def _handle(self, path: str) -> BinaryIO:
        fh = self.handles.get(path)
        if fh is None:
            fh = open(path, "rb")  # clean: near miss, opened only when absent and closed by close
            self.handles[path] = fh
        return fh

    def rewind(self, path: str) -> None:
        self.handles[path] = open(path, "rb")  # leak: overwrites the handle that is already open for the path

    def close(self) -> None:
        while self.handles:
            _, fh = self.handles.popitem()
            fh.close()

    def chunks(self, path: str) -> Iterator[Slab]:
        """Each slab belongs to the consumer."""
        fh = self._handle(path)
        while True:
            slab = self.arena.lend()  # leak: at end of file the slab of the last round is not given back
            if slab is None:
                return
            slab.used = fh.readinto(slab.buf)
            if not slab.used:
                return
            yield slab

    def slabs(self, path: str) -> Iterator[Slab]:
        """Each slab belongs to the consumer."""
        fh = self._handle(path)
        while True:
            slab = self.arena.lend()  # clean: near miss, at end of file it is given back, else the consumer's
            if slab is None:
                return
            slab.used = fh.readinto(slab.buf)
            if not slab.used:
                self.arena.back(slab)
                return
            yield slab

    def first(self, path: str) -> Optional[Slab]:
        """The caller gives the slab back."""
        with SlabGuard(self.arena) as guard:  # clean: near miss, a filled slab is detached for the caller, else returned on exit
            if guard.slab is None:
                return None
            guard.slab.used = self._handle(path).readinto(guard.slab.buf)
            if guard.slab.used == 0:
                return None
            return guard.detach()
