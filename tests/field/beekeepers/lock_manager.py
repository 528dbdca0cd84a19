"""Row locks and latches of a small transactional store."""
from __future__ import annotations

import enum
import logging
import threading
from collections import defaultdict
from typing import Callable, Iterable, Optional

log = logging.getLogger("txn")


class Mode(enum.Enum):
    SHARED = 1
    EXCLUSIVE = 2


class LockEntry:
    def __init__(self, key: str) -> None:
        self.key = key
        self.sharers = 0
        self.owner: Optional[int] = None


class LockManager:
    """try_lock() answers True when the row is locked now; unlock() undoes one lock."""

    def __init__(self) -> None:
        self._table: dict[str, LockEntry] = {}
        self._mutex = threading.Lock()

    def try_lock(self, key: str, txn: int, mode: Mode) -> bool:
        with self._mutex:
            entry = self._table.setdefault(key, LockEntry(key))
            if entry.owner is not None:
                return False
            if mode is Mode.SHARED:
                entry.sharers += 1
                return True
            if entry.sharers:
                return False
            entry.owner = txn
            return True

    def unlock(self, key: str, txn: int, mode: Mode) -> None:
        with self._mutex:
            entry = self._table[key]
            if mode is Mode.SHARED:
                entry.sharers -= 1
            elif entry.owner == txn:
                entry.owner = None
            if entry.owner is None and entry.sharers == 0:
                del self._table[key]


class Latch:
    """Spin latch of one structure."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self.waits = 0

    def latch(self) -> None:
        while not self._lock.acquire(timeout=0.01):  # clean: the caller calls unlatch
            self.waits += 1

    def unlatch(self) -> None:
        self._lock.release()


class LatchScope:
    def __init__(self, *latches: Latch) -> None:
        self.latches = latches

    def __enter__(self) -> "LatchScope":
        for item in self.latches:
            item.latch()  # clean: all unlatched by __exit__
        return self

    def __exit__(self, *exc) -> None:
        for item in reversed(self.latches):
            item.unlatch()


class Catalog:
    def __init__(self) -> None:
        self.latch_ = Latch("catalog")
        self.stats_latch = Latch("stats")
        self.tables: dict[str, dict] = {}
        self.hits: dict[str, int] = defaultdict(int)

    def create(self, name: str, columns: list[str]) -> bool:
        self.latch_.latch()  # leak: the name that exists already returns latched
        if name in self.tables:
            return False
        self.tables[name] = {"columns": columns, "rows": {}}
        self.latch_.unlatch()
        return True

    def drop(self, name: str) -> bool:
        self.latch_.latch()  # clean: unlatched in the finally
        try:
            return self.tables.pop(name, None) is not None
        finally:
            self.latch_.unlatch()

    def describe(self, name: str) -> Optional[list[str]]:
        with LatchScope(self.latch_, self.stats_latch):  # clean: context manager
            self.hits[name] += 1
            table = self.tables.get(name)
            return list(table["columns"]) if table else None

    def rename(self, old: str, new: str) -> None:
        self.latch_.latch()  # clean: unlatched at the end
        self.stats_latch.latch()  # leak: only the catalog latch is undone
        self.tables[new] = self.tables.pop(old)
        self.hits[new] = self.hits.pop(old, 0)
        self.latch_.unlatch()

    def bump(self, name: str, locked: bool = False) -> int:
        if not locked:
            self.stats_latch.latch()  # clean: near miss, the same flag guards the unlatch
        self.hits[name] += 1
        count = self.hits[name]
        if not locked:
            self.stats_latch.unlatch()
        return count


class Transaction:
    def __init__(self, number: int, locks: LockManager) -> None:
        self.number = number
        self.locks = locks
        self.held: list[tuple[str, Mode]] = []
        self.writes: dict[str, object] = {}
        self.state = "active"

    def lock(self, key: str, mode: Mode) -> bool:
        if self.locks.try_lock(key, self.number, mode):  # clean: near miss, held lists it, _unlock_all undoes it
            self.held.append((key, mode))
            return True
        return False

    def read(self, store: dict, key: str) -> object:
        if not self.lock(key, Mode.SHARED):  # clean: filed in held, ended with the transaction
            return None
        return self.writes.get(key, store.get(key))

    def commit(self, store: dict) -> None:
        store.update(self.writes)
        self.state = "committed"
        self._unlock_all()

    def abort(self) -> None:
        self.writes.clear()
        self.state = "aborted"
        self._unlock_all()

    def _unlock_all(self) -> None:
        for key, mode in reversed(self.held):
            self.locks.unlock(key, self.number, mode)
        self.held.clear()


class BatchTransaction:
    """Locks all rows up front; abort() is for batches that were never applied."""

    def __init__(self, number: int, locks: LockManager) -> None:
        self.number = number
        self.locks = locks
        self.keys: list[str] = []
        self.log: list[str] = []

    def prepare(self, keys: Iterable[str]) -> bool:
        for key in sorted(keys):
            if not self.locks.try_lock(key, self.number, Mode.EXCLUSIVE):  # leak: abort() never unlocks
                self.abort()
                return False
            self.keys.append(key)
        return True

    def apply(self, store: dict, change: Callable[[object], object]) -> None:
        for key in self.keys:
            store[key] = change(store.get(key))
            self.locks.unlock(key, self.number, Mode.EXCLUSIVE)
        self.keys.clear()

    def abort(self) -> None:
        self.log.append("abort of %d rows" % len(self.keys))
        self.keys.clear()


def transfer(locks: LockManager, store: dict, txn: int, src: str, dst: str, amount: int) -> bool:
    if not locks.try_lock(src, txn, Mode.EXCLUSIVE):  # leak: stays when dst cannot be locked
        return False
    if not locks.try_lock(dst, txn, Mode.EXCLUSIVE):  # clean: unlocked on both later ways
        log.info("row %s is taken", dst)
        return False
    if store[src] < amount:
        locks.unlock(dst, txn, Mode.EXCLUSIVE)
        locks.unlock(src, txn, Mode.EXCLUSIVE)
        return False
    store[src] -= amount
    store[dst] += amount
    locks.unlock(dst, txn, Mode.EXCLUSIVE)
    locks.unlock(src, txn, Mode.EXCLUSIVE)
    return True


def swap(locks: LockManager, store: dict, txn: int, one: str, two: str) -> bool:
    if not locks.try_lock(one, txn, Mode.EXCLUSIVE):  # clean: unlocked when two is refused and at the end
        return False
    if not locks.try_lock(two, txn, Mode.EXCLUSIVE):  # clean: unlocked at the end
        locks.unlock(one, txn, Mode.EXCLUSIVE)
        return False
    store[one], store[two] = store[two], store[one]
    for key in (one, two):
        locks.unlock(key, txn, Mode.EXCLUSIVE)
    return True


def scan_sum(locks: LockManager, store: dict, txn: int, keys: list[str]) -> int:
    total = 0
    for key in keys:
        if not locks.try_lock(key, txn, Mode.SHARED):  # leak: a deleted row continues with its lock
            continue
        value = store.get(key)
        if value is None:
            continue
        total += value
        locks.unlock(key, txn, Mode.SHARED)
    return total


def move_stock(locks: LockManager, store: dict, number: int, src: str, dst: str) -> bool:
    txn = Transaction(number, locks)
    if txn.lock(src, Mode.EXCLUSIVE) and txn.lock(dst, Mode.EXCLUSIVE):  # clean: near miss, abort undoes
        txn.writes[dst] = store[dst] + store[src]
        txn.writes[src] = 0
        txn.commit(store)
        return True
    txn.abort()
    return False


def read_pair(locks: LockManager, store: dict, number: int, keys: tuple[str, str]) -> Optional[tuple]:
    txn = Transaction(number, locks)
    if not txn.lock(keys[0], Mode.SHARED):  # leak: odd version returns, no abort
        return None
    version = store[keys[0]]
    if version % 2:
        return None
    other = txn.read(store, keys[1])  # clean: ended by the commit
    txn.commit(store)
    return version, other
