"""Lock table and read/write gate of the offload path."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional


class RowLocks:
    """One lock per row of the block table."""

    def __init__(self, rows: int):
        self._locks = [threading.Lock() for _ in range(rows)]

    def lock(self, row: int) -> None:
        self._locks[row].acquire()  # clean: held for the caller until unlock

    def try_lock(self, row: int) -> bool:
        return self._locks[row].acquire(blocking=False)  # clean: True tells the caller that it holds the lock

    def unlock(self, row: int) -> None:
        self._locks[row].release()

    def lock_range(self, lo: int, hi: int) -> bool:
        """Lock rows lo..hi-1, or none of them."""
        for row in range(lo, hi):
            if not self._locks[row].acquire(blocking=False):  # clean: near miss, a failure releases all rows before it
                for r in range(lo, row):
                    self._locks[r].release()
                return False
        return True

    def lock_pair(self, a: int, b: int) -> bool:
        self._locks[a].acquire()  # leak: if b is busy, False is returned with a still locked
        if not self._locks[b].acquire(blocking=False):  # clean: True hands both to the caller
            return False
        return True


class ReadGate:
    """Counts readers; a writer waits until there are none."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0

    def enter(self) -> None:
        with self._cond:
            self._readers += 1

    def leave(self) -> None:
        with self._cond:
            self._readers -= 1
            self._cond.notify_all()

    def wait_idle(self) -> None:
        with self._cond:
            while self._readers:
                self._cond.wait()


class OffloadTable:
    def __init__(self, rows: int):
        self.locks = RowLocks(rows)
        self.gate = ReadGate()
        self.state: List[str] = ["gpu"] * rows
        self.owner: Dict[int, str] = {}
        self._meta = threading.Lock()

    def mark(self, row: int, state: str) -> bool:
        self.locks.lock(row)  # leak: no unlock when the state does not change
        if self.state[row] == state:
            return False
        self.state[row] = state
        self.locks.unlock(row)
        return True

    def mark_if_free(self, row: int, state: str) -> bool:
        if not self.locks.try_lock(row):  # leak: unlocked only where the state changed
            return False
        changed = self.state[row] != state
        if changed:
            self.state[row] = state
            self.locks.unlock(row)
        return changed

    def sweep(self, state: str) -> int:
        n = 0
        for row in range(len(self.state)):
            if not self.locks.try_lock(row):  # leak: a row already in the state is skipped by continue and stays locked
                continue
            if self.state[row] == state:
                continue
            self.state[row] = state
            n += 1
            self.locks.unlock(row)
        return n

    def set_range(self, lo: int, hi: int, state: str) -> bool:
        if not self.locks.lock_range(lo, hi):  # clean: all rows are unlocked in the loop below
            return False
        for row in range(lo, hi):
            self.state[row] = state
            self.locks.unlock(row)
        return True

    def swap(self, a: int, b: int) -> bool:
        if a == b:
            return False
        if not self.locks.lock_pair(a, b):  # clean: both are unlocked after the exchange
            return False
        self.state[a], self.state[b] = self.state[b], self.state[a]
        self.locks.unlock(b)
        self.locks.unlock(a)
        return True

    def adopt(self, row: int, rid: str, blocking: bool) -> bool:
        """Lock a row for a request until disown()."""
        if blocking:
            self.locks.lock(row)  # clean: near miss, owner notes it and disown unlocks
        elif not self.locks.try_lock(row):  # clean: near miss, falls to the same note in owner
            return False
        self.owner[row] = rid
        return True

    def disown(self, row: int) -> None:
        if self.owner.pop(row, None) is not None:
            self.locks.unlock(row)

    def lookup(self, row: int) -> Optional[str]:
        self.gate.enter()  # leak: an unowned row returns None without leave
        rid = self.owner.get(row)
        if rid is None:
            return None
        self.gate.leave()
        return rid

    def snapshot(self) -> List[str]:
        self.gate.enter()  # clean: leave follows on the only path
        copy = list(self.state)
        self.gate.leave()
        return copy

    def rename(self, old: str, new: str) -> int:
        self._meta.acquire()  # clean: near miss, the early return is inside the try with release in finally
        try:
            if old == new:
                return 0
            rows = [r for r, rid in self.owner.items() if rid == old]
            for r in rows:
                self.owner[r] = new
            return len(rows)
        finally:
            self._meta.release()
