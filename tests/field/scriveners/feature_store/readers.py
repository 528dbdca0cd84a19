"""Readers that keep a connection for longer than one call."""
from __future__ import annotations

from typing import Iterator, Optional

from .conns import ShardConn, ShardConnPool

PAGE = 256


class TableReader:
    """Reads one table of one shard; close() ends it."""

    def __init__(self, pool: ShardConnPool, table: str, shard: int) -> None:
        self._pool = pool
        self._conn: Optional[ShardConn] = pool.borrow(shard)  # clean: given back by close()
        self.table = table
        self.rows = 0

    def fetch(self, keys: list[str]) -> dict[str, list[float]]:
        assert self._conn is not None
        found = self._conn.query(self.table, keys)
        self.rows += len(found)
        return found

    def close(self) -> None:
        if self._conn is None:
            return
        conn, self._conn = self._conn, None
        self._pool.give_back(conn)


class MirrorReader:
    """Reads a shard and its replica and keeps the answers that agree."""

    def __init__(self, pool: ShardConnPool, shard: int, replica: int) -> None:
        self._pool = pool
        self._main = pool.borrow(shard)  # clean: given back by stop()
        self._replica = pool.borrow(replica)  # leak: stop() drops it and gives back the main one only
        self.mismatches = 0

    def fetch(self, table: str, keys: list[str]) -> dict[str, list[float]]:
        left = self._main.query(table, keys)
        right = self._replica.query(table, keys)
        agreed = {key: row for key, row in left.items() if right.get(key) == row}
        self.mismatches += len(left) - len(agreed)
        return agreed

    def stop(self) -> None:
        self._pool.give_back(self._main)
        self._main = None
        self._replica = None


def open_reader(pool: ShardConnPool, table: str, key: str) -> TableReader:
    """The reader of the shard that owns a key; the caller closes it."""
    reader = TableReader(pool, table, pool.shard_of(key))  # clean: handed to the caller
    reader.rows = 0
    return reader


def scan(pool: ShardConnPool, table: str, shard: int, keys: list[str]) -> Iterator[tuple[str, list[float]]]:
    conn = pool.borrow(shard)  # clean: near miss, the finally runs when the consumer stops early as well
    try:
        for start in range(0, len(keys), PAGE):
            page = conn.query(table, keys[start:start + PAGE])
            if not page:
                return
            yield from page.items()
    finally:
        pool.give_back(conn)


def scan_sorted(pool: ShardConnPool, table: str, shard: int, keys: list[str]) -> Iterator[list[float]]:
    conn = pool.borrow(shard)  # leak: an empty page ends the generator before the connection is given back
    for start in range(0, len(keys), PAGE):
        page = conn.query(table, sorted(keys[start:start + PAGE]))
        if not page:
            return
        for key in sorted(page):
            yield page[key]
    pool.give_back(conn)
