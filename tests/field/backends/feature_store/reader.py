"""Point and batch reads of feature rows."""
from __future__ import annotations

import sqlite3
from typing import Iterator

from .pool import TablePool


class Reader:
    def __init__(self, pool: TablePool) -> None:
        self._pool = pool
        self._cache: dict[str, tuple] = {}

    def row(self, entity: str) -> tuple | None:
        conn = self._pool.get()  # leak: a row already cached is returned while the connection is out
        if conn is None:
            return self._cache.get(entity)
        if entity in self._cache:
            return self._cache[entity]
        found = conn.execute("select * from features where entity = ?", (entity,)).fetchone()
        self._pool.put(conn)
        if found is not None:
            self._cache[entity] = found
        return found

    def exists(self, entity: str) -> bool:
        with self._pool.borrowed() as conn:  # clean: with
            if conn is None:
                return False
            return conn.execute("select 1 from features where entity = ?", (entity,)).fetchone() is not None

    def scan(self, prefix: str) -> Iterator[tuple]:
        conn = self._pool.get()  # clean: near miss, the generator's finally puts it back when exhausted or closed
        if conn is None:
            return
        try:
            for found in conn.execute("select * from features where entity like ?", (prefix + "%",)):
                yield found
        finally:
            self._pool.put(conn)

    def count(self, table: str) -> int:
        conn = self._pool.get()  # leak: the handler for a missing table answers 0 with the connection held
        if conn is None:
            return -1
        try:
            total = conn.execute(f"select count(*) from {table}").fetchone()[0]
        except sqlite3.OperationalError:
            return 0
        self._pool.put(conn)
        return total
