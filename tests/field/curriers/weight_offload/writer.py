"""Spills pinned chunks to disk."""
from __future__ import annotations

import os
from typing import BinaryIO, Dict, List, Optional

from .pinned import PinnedChunk, PinnedPool


class SpillWriter:
    def __init__(self, root: str, pool: PinnedPool) -> None:
        self.root = root
        self.pool = pool
        self.out: Optional[BinaryIO] = None
        self.partial: Dict[str, PinnedChunk] = {}

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name + ".spill")

    def roll(self, name: str) -> None:
        if self.out is not None:
            self.out.close()
        self.out = open(self._path(name), "wb")  # clean: near miss, the one before was closed; finish closes the last

    def finish(self) -> None:
        if self.out is not None:
            self.out.close()
            self.out = None
        for name in list(self.partial):
            self.pool.put(self.partial.pop(name))

    def stage(self, name: str) -> Optional[PinnedChunk]:
        chunk = self.partial.get(name)
        if chunk is None:
            chunk = self.pool.get()  # leak: discard removes the entry without putting the chunk back
            if chunk is not None:
                self.partial[name] = chunk
        return chunk

    def discard(self, name: str) -> None:
        self.partial.pop(name, None)

    def spill(self, name: str, chunks: List[PinnedChunk]) -> int:
        f = open(self._path(name), "wb")  # leak: an OSError of a full disk is survived without close
        n = 0
        try:
            for c in chunks:
                n += f.write(c.data)
        except OSError:
            return -1
        f.close()
        return n

    def restore(self, name: str) -> Optional[List[PinnedChunk]]:
        path = self._path(name)
        if not os.path.exists(path):
            return None
        n = -(-os.path.getsize(path) // self.pool.chunk_bytes)
        chunks = self.pool.get_many(n)  # clean: returned to the caller
        if chunks is None:
            return None
        with open(path, "rb") as f:  # clean: with
            for c in chunks:
                f.readinto(c.data)
        return chunks

    def peek(self, name: str) -> bytes:
        chunks = self.restore(name)  # leak: the head is copied and the chunks are dropped
        if not chunks:
            return b""
        return bytes(chunks[0].data[:16])
