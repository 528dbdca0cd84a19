"""Locks for concurrent updates of embedding rows: striped row locks, a table-wide reader-writer lock."""
from __future__ import annotations

import logging
import threading
import time
from typing import Callable, Iterable

log = logging.getLogger("emb.locks")


class RowLocks:
    def __init__(self, stripes: int = 64) -> None:
        self._stripes = [threading.Lock() for _ in range(stripes)]

    def _of(self, row: int) -> threading.Lock:
        return self._stripes[hash(row) % len(self._stripes)]

    def same_stripe(self, a: int, b: int) -> bool:
        return self._of(a) is self._of(b)

    def hold(self, row: int) -> None:
        self._of(row).acquire()  # clean: handed to the caller, drop releases it

    def try_hold(self, row: int, timeout: float = 0.0) -> bool:
        return self._of(row).acquire(timeout=timeout)  # clean: handed to the caller when True

    def drop(self, row: int) -> None:
        self._of(row).release()


class TableLock:
    """Many readers or one writer."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writer = False

    def lock_read(self) -> None:
        with self._cond:
            self._cond.wait_for(lambda: not self._writer)
            self._readers += 1

    def unlock_read(self) -> None:
        with self._cond:
            self._readers -= 1
            self._cond.notify_all()

    def lock_write(self) -> None:
        with self._cond:
            self._cond.wait_for(lambda: not self._writer and self._readers == 0)
            self._writer = True

    def unlock_write(self) -> None:
        with self._cond:
            self._writer = False
            self._cond.notify_all()


class Update:
    """One optimizer step: reads share the table, structural changes take it alone."""

    def __init__(self, table: TableLock, structural: bool) -> None:
        self.table = table
        self.structural = structural

    def begin(self) -> None:
        if self.structural:
            self.table.lock_write()  # clean: near miss, end looks at the same flag
        else:
            self.table.lock_read()  # clean: near miss, end looks at the same flag

    def end(self) -> None:
        if self.structural:
            self.table.unlock_write()
        else:
            self.table.unlock_read()


class LazyUpdate:
    """Takes the read side first and the write side once a row has to be inserted."""

    def __init__(self, table: TableLock, rows: dict[int, list[float]]) -> None:
        self.table = table
        self.rows = rows
        self.writing = False

    def begin(self) -> None:
        self.table.lock_read()  # clean: near miss, unlocked by need_write or by end
        self.writing = False

    def need_write(self) -> None:
        if not self.writing:
            self.table.unlock_read()
            self.table.lock_write()  # leak: end never unlocks the write side, it only unlocks a read
            self.writing = True

    def end(self) -> int:
        if not self.writing:
            self.table.unlock_read()
        self.writing = False
        return len(self.rows)


def swap_rows(locks: RowLocks, data: dict[int, list[float]], a: int, b: int) -> bool:
    first, second = sorted((a, b))
    locks.hold(first)  # leak: two rows of one stripe return with the stripe locked
    if locks.same_stripe(first, second):
        log.debug("rows %d and %d share a stripe, left to the slow path", a, b)
        return False
    locks.hold(second)  # clean: dropped with the first
    data[a], data[b] = data[b], data[a]
    locks.drop(second)
    locks.drop(first)
    return True


def swap_rows_slow(locks: RowLocks, data: dict[int, list[float]], a: int, b: int) -> None:
    first, second = sorted((a, b))
    shared = locks.same_stripe(first, second)
    locks.hold(first)  # clean: dropped at the end
    if not shared:
        locks.hold(second)  # clean: near miss, dropped under the same guard
    data[a], data[b] = data[b], data[a]
    if not shared:
        locks.drop(second)
    locks.drop(first)


def add_grad(locks: RowLocks, data: dict[int, list[float]], row: int, grad: list[float]) -> bool:
    deadline = time.monotonic() + 0.5
    while not locks.try_hold(row, 0.01):  # clean: near miss, held once the loop ends, dropped in finally
        if time.monotonic() > deadline:
            return False
    try:
        old = data.get(row)
        if old is None:
            return False
        data[row] = [x - g for x, g in zip(old, grad)]
        return True
    finally:
        locks.drop(row)


def decay_rows(locks: RowLocks, data: dict[int, list[float]], rows: Iterable[int], f: float) -> int:
    n = 0
    for row in rows:
        if not locks.try_hold(row):  # leak: rows that are absent continue with their lock
            continue
        vec = data.get(row)
        if vec is None:
            continue
        data[row] = [x * f for x in vec]
        locks.drop(row)
        n += 1
    return n


def export_rows(table: TableLock, data: dict[int, list[float]], sink: Callable[[int, list], bool]) -> int:
    table.lock_read()  # leak: a full sink breaks out past the else that unlocks
    n = 0
    for row, vec in data.items():
        if not sink(row, vec):
            break
        n += 1
    else:
        table.unlock_read()
    return n
