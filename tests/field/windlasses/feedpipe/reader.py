from __future__ import annotations

import logging
import zlib
from typing import BinaryIO, Callable, Iterator

from .chunks import Chunk, ChunkPool

log = logging.getLogger(__name__)


class ShardReader:
    def __init__(self, pool: ChunkPool, opener: Callable[[str], BinaryIO]) -> None:
        self.pool = pool
        self.opener = opener
        self.bad = 0

    def read_one(self, fh: BinaryIO, shard: str) -> Chunk | None:
        """Next chunk of the shard; the caller unrefs it. None at the end."""
        chunk = self.pool.obtain(shard)  # clean: unreffed at end of file, else returned
        if chunk is None:
            return None
        n = fh.readinto(chunk.mem)
        if not n:
            chunk.unref()
            return None
        chunk.length = n
        return chunk

    def read_verified(self, fh: BinaryIO, shard: str, crc: int) -> Chunk | None:
        chunk = self.read_one(fh, shard)  # leak: a crc mismatch returns None without unref
        if chunk is None:
            return None
        if zlib.crc32(chunk.payload()) != crc:
            self.bad += 1
            log.warning("crc mismatch in %s", shard)
            return None
        return chunk

    def iter_shard(self, shard: str) -> Iterator[Chunk]:
        with self.opener(shard) as fh:  # clean: with
            while True:
                chunk = self.read_one(fh, shard)  # clean: each chunk is yielded to its new owner
                if chunk is None:
                    return
                yield chunk
