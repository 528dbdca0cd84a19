"""Trace exporter: SQL handles behind a wrapper of a wrapper."""
from __future__ import annotations

import logging
import queue
import sqlite3
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Optional

log = logging.getLogger("traces")


class HandlePool:
    """LIFO of sqlite handles, so the warm ones stay warm."""

    def __init__(self, path: str, size: int) -> None:
        self._lifo: "queue.LifoQueue[sqlite3.Connection]" = queue.LifoQueue()
        for _ in range(size):
            self._lifo.put(sqlite3.connect(path, check_same_thread=False))  # clean: belongs to the pool, dispose closes it

    def lend(self, timeout: float) -> sqlite3.Connection:
        return self._lifo.get(timeout=timeout)  # clean: lent to the caller

    def accept(self, handle: sqlite3.Connection) -> None:
        handle.rollback()
        self._lifo.put(handle)

    def dispose(self) -> None:
        while not self._lifo.empty():
            self._lifo.get_nowait().close()  # clean: closed in the same expression


@dataclass
class Txn:
    """One lent handle; commit or abandon ends it."""

    pool: HandlePool
    handle: Optional[sqlite3.Connection]

    def execute(self, sql: str, *args: Any) -> list[Any]:
        assert self.handle is not None
        return self.handle.execute(sql, args).fetchall()

    def commit(self) -> None:
        if self.handle is not None:
            self.handle.commit()
            self.abandon()

    def abandon(self) -> None:
        if self.handle is not None:
            self.pool.accept(self.handle)
            self.handle = None


class ScopedTxn:
    def __init__(self, store: "TraceStore", readonly: bool) -> None:
        self.store = store
        self.readonly = readonly
        self.txn: Optional[Txn] = None

    def __enter__(self) -> Txn:
        self.txn = self.store.begin()  # leak: __exit__ returns early for an sqlite error, nothing is abandoned
        return self.txn

    def __exit__(self, et: Optional[type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> bool:
        if et is not None and issubclass(et, sqlite3.Error):
            log.warning("transaction failed: %s", ev)
            return True
        assert self.txn is not None
        if self.readonly or et is not None:
            self.txn.abandon()
        else:
            self.txn.commit()
        return False


class TraceStore:
    def __init__(self, pool: HandlePool) -> None:
        self.pool = pool
        self.batch: Optional[Txn] = None

    def begin(self) -> Txn:
        return Txn(self.pool, self.pool.lend(5.0))  # clean: in the Txn given to the caller

    def begin_or_none(self) -> Optional[Txn]:
        try:
            return self.begin()  # clean: handed through
        except queue.Empty:
            return None

    def insert(self, trace_id: str, body: str) -> bool:
        txn = self.begin()  # leak: an already stored trace returns without ending the transaction
        if txn.execute("select 1 from traces where id = ?", trace_id):
            return False
        txn.execute("insert into traces values (?, ?)", trace_id, body)
        txn.commit()
        return True

    def upsert(self, trace_id: str, body: str) -> bool:
        txn = self.begin()  # clean: near miss, the identical row abandons before the return
        rows = txn.execute("select body from traces where id = ?", trace_id)
        if rows and rows[0][0] == body:
            txn.abandon()
            return False
        txn.execute("replace into traces values (?, ?)", trace_id, body)
        txn.commit()
        return True

    def add_to_batch(self, trace_id: str, body: str) -> None:
        if self.batch is None:
            self.batch = self.begin()  # clean: open until end_batch
        self.batch.execute("insert into traces values (?, ?)", trace_id, body)

    def start_batch(self) -> None:
        self.batch = self.begin()  # leak: a batch already open is overwritten

    def end_batch(self, keep: bool) -> None:
        if self.batch is None:
            return
        if keep:
            self.batch.commit()
        else:
            self.batch.abandon()
        self.batch = None

    def count(self) -> int:
        txn = self.begin()  # clean: abandoned in the finally
        try:
            return int(txn.execute("select count(*) from traces")[0][0])
        finally:
            txn.abandon()


def exists(store: TraceStore, trace_id: str) -> bool:
    return bool(store.begin().execute("select 1 from traces where id = ?", trace_id))  # leak: the Txn is dropped with its handle


def prune(store: TraceStore, ids: list[str]) -> int:
    removed = 0
    for tid in ids:
        txn = store.begin_or_none()  # clean: near miss, only a missing Txn continues
        if txn is None:
            log.info("pool busy, %s later", tid)
            continue
        txn.execute("delete from traces where id = ?", tid)
        txn.commit()
        removed += 1
    return removed


def import_rows(store: TraceStore, rows: list[tuple[str, str]]) -> int:
    txn = store.begin()  # leak: the handler for a duplicate returns without abandon
    done = 0
    try:
        for tid, body in rows:
            txn.execute("insert into traces values (?, ?)", tid, body)
            done += 1
    except sqlite3.IntegrityError:
        log.warning("duplicate after %d rows", done)
        return done
    txn.commit()
    return done
