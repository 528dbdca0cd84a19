"""Moves layers' weights between device and pinned chunks."""
from __future__ import annotations

import logging
from typing import Callable, Dict, List, Optional

from .pinned import PinnedChunk, PinnedPool

log = logging.getLogger(__name__)


class CopyError(RuntimeError):
    pass


class LayerSwapper:
    def __init__(self, pool: PinnedPool, d2h: Callable[[str, List[PinnedChunk]], None],
                 h2d: Callable[[str, List[PinnedChunk]], None]) -> None:
        self.pool = pool
        self.d2h = d2h
        self.h2d = h2d
        self.host: Dict[str, List[PinnedChunk]] = {}
        self.prefetched: Optional[PinnedChunk] = None

    def _chunks_for(self, nbytes: int) -> Optional[List[PinnedChunk]]:
        n = -(-nbytes // self.pool.chunk_bytes)
        return self.pool.get_many(n)  # clean: handed to the caller

    def swap_out(self, name: str, nbytes: int) -> bool:
        if name in self.host:
            return True
        chunks = self._chunks_for(nbytes)  # clean: put back on CopyError, else owned by the host table
        if chunks is None:
            return False
        try:
            self.d2h(name, chunks)
        except CopyError:
            self.pool.put_many(chunks)
            return False
        self.host[name] = chunks
        return True

    def swap_out_best_effort(self, sizes: Dict[str, int]) -> int:
        done = 0
        for name, nbytes in sizes.items():
            if name in self.host:
                continue
            chunks = self._chunks_for(nbytes)  # leak: a failed copy is logged and the chunks are rebound
            if chunks is None:
                break
            try:
                self.d2h(name, chunks)
            except CopyError:
                log.exception("swap out of %s", name)
            else:
                self.host[name] = chunks
                done += 1
        return done

    def swap_in(self, name: str) -> bool:
        chunks = self.host.pop(name, None)
        if chunks is None:
            return False
        self.h2d(name, chunks)
        self.pool.put_many(chunks)
        return True

    def prefetch(self, name: str) -> bool:
        if self.prefetched is not None:
            self.pool.put(self.prefetched)
        self.prefetched = self.pool.get()  # clean: near miss, the one before was put back first; close puts the last
        if self.prefetched is None:
            return False
        self.h2d(name, [self.prefetched])
        return True

    def close(self) -> None:
        if self.prefetched is not None:
            self.pool.put(self.prefetched)
            self.prefetched = None
        for name in list(self.host):
            self.pool.put_many(self.host.pop(name))

    def round_trip(self, name: str, nbytes: int) -> Optional[bytes]:
        chunks = self._chunks_for(nbytes)  # leak: only the first chunk is put back
        if not chunks:
            return None
        self.d2h(name, chunks)
        out = b"".join(bytes(c.data) for c in chunks)
        self.pool.put(chunks[0])
        return out[:nbytes]

    def checksum(self, name: str, nbytes: int) -> int:
        chunks = self._chunks_for(nbytes)  # clean: put back in the finally
        if chunks is None:
            return -1
        try:
            self.d2h(name, chunks)
            return sum(sum(c.data) for c in chunks)
        finally:
            self.pool.put_many(chunks)

    def is_zero(self, name: str, nbytes: int) -> bool:
        chunks = self._chunks_for(nbytes)  # leak: the first chunk with a set byte returns past the put
        if chunks is None:
            return False
        self.d2h(name, chunks)
        for c in chunks:
            if any(c.data):
                return False
        self.pool.put_many(chunks)
        return True
