from __future__ import annotations

import os
from typing import IO, Iterator, Optional

from .staging import StagingPool


class ShardSet:
    """Open shard files by index; closed all together."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.files: dict[int, IO[bytes]] = {}

    def file(self, i: int) -> IO[bytes]:
        if i not in self.files:
            self.files[i] = open(self.paths[i], "rb")  # clean: near miss, kept in files until close
        return self.files[i]

    def close(self) -> None:
        for f in self.files.values():
            f.close()
        self.files.clear()

    def lengths(self) -> list[int]:
        out = []
        for p in self.paths:
            f = open(p, "rb")  # leak: only the last file is closed, after the loop
            out.append(f.seek(0, os.SEEK_END))
        if self.paths:
            f.close()
        return out


def read_chunk(pool: StagingPool, ss: ShardSet, i: int, n: int) -> Optional[tuple[bytearray, int]]:
    """(buffer, bytes read); the caller checks the buffer in. None at the end of the shard."""
    b = pool.checkout()  # clean: near miss, checked in at end of shard, else returned
    if b is None:
        return None
    got = ss.file(i).readinto(memoryview(b)[:n])  # type: ignore[attr-defined]
    if not got:
        pool.checkin(b)
        return None
    return b, got


def chunks(pool: StagingPool, ss: ShardSet, i: int, n: int) -> Iterator[bytes]:
    while True:
        r = read_chunk(pool, ss, i, n)  # clean: checked in before the yield
        if r is None:
            return
        b, got = r
        data = bytes(b[:got])
        pool.checkin(b)
        yield data


def count_tokens(pool: StagingPool, ss: ShardSet, i: int, n: int) -> int:
    total = 0
    while (r := read_chunk(pool, ss, i, n)) is not None:  # leak: the count is taken and the buffer dropped
        total += r[1] // 2
    return total
