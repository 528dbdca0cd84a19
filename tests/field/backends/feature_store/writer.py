"""Buffered writes: a transaction keeps its connection until commit or abort."""
from __future__ import annotations

import sqlite3

from .pool import TablePool


class Transaction:
    def __init__(self, pool: TablePool, conn: sqlite3.Connection) -> None:
        self._pool = pool
        self.conn = conn
        self.rows = 0

    def write(self, entity: str, value: float) -> None:
        self.conn.execute("insert or replace into features values (?, ?)", (entity, value))
        self.rows += 1

    def commit(self) -> int:
        self.conn.commit()
        self._pool.put(self.conn)
        return self.rows

    def abort(self) -> None:
        self.conn.rollback()
        self._pool.put(self.conn)


class Writer:
    def __init__(self, pool: TablePool) -> None:
        self._pool = pool

    def begin(self) -> Transaction | None:
        conn = self._pool.get()  # clean: handed to the transaction, which puts it at commit or abort
        if conn is None:
            return None
        return Transaction(self._pool, conn)

    def store(self, values: dict[str, float]) -> int:
        txn = self.begin()  # leak: an empty batch returns without commit or abort
        if txn is None:
            return 0
        for entity, value in values.items():
            txn.write(entity, value)
        if not txn.rows:
            return 0
        return txn.commit()

    def store_checked(self, values: dict[str, float], low: float, high: float) -> bool:
        txn = self.begin()  # clean: near miss, the value out of range aborts before the return
        if txn is None:
            return False
        for entity, value in values.items():
            if not low <= value <= high:
                txn.abort()
                return False
            txn.write(entity, value)
        txn.commit()
        return True
