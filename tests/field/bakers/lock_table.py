"""Named locks and reader/writer guards for shared trainer state."""
from __future__ import annotations

import logging
import threading
import time
from typing import Any, Callable, Dict, Optional

log = logging.getLogger("locks")


class ShardLocks:
    """One lock per parameter shard; names map to stripes."""

    def __init__(self, stripes: int = 16) -> None:
        self._stripes = [threading.Lock() for _ in range(stripes)]

    def _of(self, name: str) -> threading.Lock:
        return self._stripes[sum(name.encode()) % len(self._stripes)]

    def lock(self, name: str, timeout: float = -1) -> bool:
        return self._of(name).acquire(timeout=timeout)  # clean: held for the caller, unlock releases

    def unlock(self, name: str) -> None:
        self._of(name).release()


class RWGate:
    """Many readers or one writer."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writing = False

    def enter_read(self) -> None:
        with self._cond:
            while self._writing:
                self._cond.wait()
            self._readers += 1

    def leave_read(self) -> None:
        with self._cond:
            self._readers -= 1
            self._cond.notify_all()

    def try_enter_read(self) -> bool:
        self._cond.acquire()  # clean: near miss, both returns lie inside try/finally
        try:
            if self._writing:
                return False
            self._readers += 1
            return True
        finally:
            self._cond.release()

    def enter_write(self, deadline: float) -> bool:
        self._cond.acquire()  # leak: the timed-out return keeps the condition locked
        while self._writing or self._readers:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._cond.wait(left)
        self._writing = True
        self._cond.release()
        return True

    def leave_write(self) -> None:
        with self._cond:
            self._writing = False
            self._cond.notify_all()


class SharedParams:
    def __init__(self, locks: ShardLocks, gate: RWGate) -> None:
        self.locks = locks
        self.gate = gate
        self.values: Dict[str, float] = {}
        self.version = 0
        self._save_lock = threading.Lock()
        self._saving = False

    def read(self, name: str, default: Optional[float] = None) -> Optional[float]:
        self.gate.enter_read()  # leak: a missing name returns the default while still a reader
        if name not in self.values:
            return default
        value = self.values[name]
        self.gate.leave_read()
        return value

    def peek(self, name: str) -> Optional[float]:
        if not self.gate.try_enter_read():  # clean: near miss, a refused entry holds nothing
            return None
        try:
            return self.values.get(name)
        finally:
            self.gate.leave_read()

    def update(self, name: str, fn: Callable[[float], float]) -> bool:
        self.locks.lock(name)  # leak: the handler reports and returns without unlocking
        try:
            self.values[name] = fn(self.values.get(name, 0.0))
        except ArithmeticError as exc:
            log.warning("update of %s: %s", name, exc)
            return False
        self.locks.unlock(name)
        return True

    def update_many(self, deltas: Dict[str, float]) -> int:
        applied = 0
        for name, delta in deltas.items():
            if not self.locks.lock(name, timeout=0.01):  # clean: near miss, continue is for a lock not got
                continue
            self.values[name] = self.values.get(name, 0.0) + delta
            self.locks.unlock(name)
            applied += 1
        return applied

    def swap(self, a: str, b: str) -> bool:
        first, second = sorted((a, b))
        self.locks.lock(first)  # leak: not unlocked when the second lock times out
        if not self.locks.lock(second, timeout=0.05):  # clean: refused holds nothing, else unlocked below
            return False
        self.values[a], self.values[b] = self.values[b], self.values[a]
        self.locks.unlock(second)
        self.locks.unlock(first)
        return True

    def swap_patient(self, a: str, b: str, tries: int = 5) -> bool:
        first, second = sorted((a, b))
        for _ in range(tries):
            self.locks.lock(first)  # clean: near miss, unlocked before every retry and after the swap
            if not self.locks.lock(second, timeout=0.01):  # clean: refused holds nothing, else unlocked below
                self.locks.unlock(first)
                time.sleep(0)
                continue
            self.values[a], self.values[b] = self.values[b], self.values[a]
            self.locks.unlock(second)
            self.locks.unlock(first)
            return True
        return False

    def publish(self, values: Dict[str, float], patience: float) -> bool:
        if not self.gate.enter_write(time.monotonic() + patience):  # clean: refused holds nothing, else left in finally
            return False
        try:
            self.values.update(values)
            self.version += 1
        finally:
            self.gate.leave_write()
        return True

    def begin_save(self) -> bool:
        if not self._save_lock.acquire(blocking=False):  # clean: near miss, end_save releases under the flag set here
            return False
        self._saving = True
        return True

    def end_save(self) -> None:
        if self._saving:
            self._saving = False
            self._save_lock.release()

    def save(self, sink: Callable[[Dict[str, float]], Any]) -> bool:
        if not self.begin_save():  # clean: refused holds nothing, else ended in finally
            return False
        try:
            sink(dict(self.values))
            return True
        finally:
            self.end_save()

    def save_changed(self, sink: Callable[[Dict[str, float]], Any], since: int) -> bool:
        if not self.begin_save():  # leak: an unchanged version returns while the save lock is held
            return False
        if self.version == since:
            return False
        sink(dict(self.values))
        self.end_save()
        return True
