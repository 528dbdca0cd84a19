"""Connections to the shards of the online store."""
from __future__ import annotations

import threading
import zlib
from contextlib import contextmanager
from typing import Iterator, Optional


class ShardConn:
    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.broken = False
        self.queries = 0

    def query(self, table: str, keys: list[str]) -> dict[str, list[float]]:
        self.queries += 1
        return {key: [float(len(table)), float(self.shard)] for key in keys}

    def ping(self) -> bool:
        return not self.broken

    def shut(self) -> None:
        self.broken = True


class ShardConnPool:
    """A bounded stack of connections for every shard."""

    def __init__(self, shards: int, per_shard: int) -> None:
        self.shards = shards
        self._idle: list[list[ShardConn]] = [[ShardConn(s) for _ in range(per_shard)] for s in range(shards)]
        self._cond = threading.Condition()

    def shard_of(self, key: str) -> int:
        return zlib.crc32(key.encode()) % self.shards

    def borrow(self, shard: int) -> ShardConn:
        with self._cond:
            while not self._idle[shard]:
                self._cond.wait()
            return self._idle[shard].pop()

    def borrow_nowait(self, shard: int) -> Optional[ShardConn]:
        with self._cond:
            if not self._idle[shard]:
                return None
            return self._idle[shard].pop()

    def give_back(self, conn: ShardConn) -> None:
        with self._cond:
            if conn.broken:
                conn = ShardConn(conn.shard)
            self._idle[conn.shard].append(conn)
            self._cond.notify()

    def borrow_for(self, key: str) -> ShardConn:
        return self.borrow(self.shard_of(key))  # clean: handed to the caller

    @contextmanager
    def session(self, shard: int) -> Iterator[ShardConn]:
        conn = self.borrow(shard)  # clean: given back when the block ends
        try:
            yield conn
        finally:
            self.give_back(conn)

    def warm(self) -> int:
        """Touches one connection of every shard that has an idle one."""
        alive = 0
        for shard in range(self.shards):
            conn = self.borrow_nowait(shard)  # leak: a connection that does not answer is not given back
            if conn is None:
                continue
            if not conn.ping():
                continue
            alive += 1
            self.give_back(conn)
        return alive
