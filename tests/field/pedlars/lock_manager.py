"""Row lock manager of a transactional store: lock table, transactions with savepoints, range guards."""
from __future__ import annotations

import threading
from collections import defaultdict
from typing import Callable, Dict, List, Optional, Set, Tuple

Key = Tuple[str, int]


class LockTable:
    """Exclusive locks by key. A lock is owned by whoever got True from acquire()."""

    def __init__(self) -> None:
        self._held: Set[Key] = set()
        self._cv = threading.Condition()

    def acquire(self, key: Key, timeout: float = 0.0) -> bool:
        with self._cv:
            if not self._cv.wait_for(lambda: key not in self._held, timeout):
                return False
            self._held.add(key)
            return True

    def release(self, key: Key) -> None:
        with self._cv:
            self._held.discard(key)
            self._cv.notify_all()


class Latches:
    """Striped latches; the stripe is chosen by the key."""

    def __init__(self, stripes: int) -> None:
        self._locks = [threading.Lock() for _ in range(stripes)]

    def latch(self, key: Key) -> threading.Lock:
        lock = self._locks[hash(key) % len(self._locks)]
        lock.acquire()  # clean: handed on locked, the caller unlocks it
        return lock


class Transaction:
    def __init__(self, table: LockTable, txid: int) -> None:
        self.table = table
        self.txid = txid
        self.keys: List[Key] = []
        self.marks: Dict[str, int] = {}
        self.writes: Dict[Key, bytes] = {}

    def lock(self, key: Key) -> bool:
        if key in self.keys:
            return True
        if not self.table.acquire(key, 0.5):  # clean: near miss, in keys until the end of the transaction
            return False
        self.keys.append(key)
        return True

    def write(self, key: Key, value: bytes) -> bool:
        if not self.lock(key):
            return False
        self.writes[key] = value
        return True

    def savepoint(self, name: str) -> None:
        self.marks[name] = len(self.keys)

    def rollback_to(self, name: str) -> int:
        at = self.marks.pop(name)
        undone = self.keys[at:]
        del self.keys[at:]
        for key in undone:
            self.writes.pop(key, None)
            self.table.release(key)
        return len(undone)

    def commit(self, apply: Callable[[Key, bytes], None]) -> int:
        for key, value in self.writes.items():
            apply(key, value)
        self._end()
        return len(self.writes)

    def abort(self) -> None:
        self.writes.clear()
        self._end()

    def _end(self) -> None:
        while self.keys:
            self.table.release(self.keys.pop())


class ReadOnly(Transaction):
    """Locks rows for reading; the end has nothing to apply."""

    def __init__(self, table: LockTable, txid: int) -> None:
        super().__init__(table, txid)
        self.schema_key: Key = ("schema", 0)
        self.pinned = table.acquire(self.schema_key)  # leak: _end() of this class frees the rows only

    def commit(self, apply: Callable[[Key, bytes], None]) -> int:
        self._end()
        return 0

    def _end(self) -> None:
        if self.writes:
            self.writes.clear()
        super()._end()


class Store:
    def __init__(self) -> None:
        self.rows: Dict[Key, bytes] = {}
        self.table = LockTable()
        self.latches = Latches(64)
        self.conflicts: Dict[Key, int] = defaultdict(int)

    def get(self, key: Key) -> Optional[bytes]:
        lock = self.latches.latch(key)  # clean: unlocked after the read
        value = self.rows.get(key)
        lock.release()
        return value

    def put_if_absent(self, key: Key, value: bytes) -> bool:
        lock = self.latches.latch(key)  # leak: a present key returns with the stripe locked
        if key in self.rows:
            self.conflicts[key] += 1
            return False
        self.rows[key] = value
        lock.release()
        return True

    def increment(self, key: Key) -> int:
        lock = self.latches.latch(key)  # clean: finally
        try:
            n = int(self.rows.get(key, b"0")) + 1
            self.rows[key] = b"%d" % n
            return n
        finally:
            lock.release()

    def move(self, src: Key, dst: Key) -> bool:
        lo, hi = sorted((src, dst))
        if not self.table.acquire(lo, 0.2):  # leak: kept when the second lock is not to be had
            return False
        if not self.table.acquire(hi, 0.2):  # clean: released at the end
            self.conflicts[hi] += 1
            return False
        self.rows[dst] = self.rows.pop(src, b"")
        self.table.release(hi)
        self.table.release(lo)
        return True

    def update_all(self, keys: List[Key], fn: Callable[[bytes], bytes]) -> int:
        changed = 0
        for key in sorted(keys):
            if not self.table.acquire(key, 0.1):  # clean: near miss, both branches come to the release
                self.conflicts[key] += 1
                continue
            if key in self.rows:
                self.rows[key] = fn(self.rows[key])
                changed += 1
            self.table.release(key)
        return changed

    def lock_all(self, keys: List[Key]) -> bool:
        """All keys or none; unlock_all() ends it."""
        got: List[Key] = []
        for key in sorted(keys):
            if not self.table.acquire(key, 0.1):  # clean: near miss, rolled back or kept for unlock_all()
                self.unlock_all(got)
                return False
            got.append(key)
        return True

    def unlock_all(self, keys: List[Key]) -> None:
        for key in keys:
            self.table.release(key)

    def delete_range(self, name: str, first: int, last: int) -> int:
        keys = [k for k in self.rows if k[0] == name and first <= k[1] < last]
        if not self.lock_all(keys):  # clean: near miss, unlocked from the same list
            return -1
        for k in keys:
            del self.rows[k]
        self.unlock_all(keys)
        return len(keys)

    def copy_range(self, name: str, first: int, last: int, to: str) -> int:
        keys = [k for k in self.rows if k[0] == name and first <= k[1] < last]
        if not self.lock_all(keys):  # leak: rows that exist already are taken off the list to unlock
            return -1
        keys = [k for k in keys if (to, k[1]) not in self.rows]
        for k in keys:
            self.rows[(to, k[1])] = self.rows[k]
        self.unlock_all(keys)
        return len(keys)
