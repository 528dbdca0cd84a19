"""Hot weight updates: readers hold the current version, a writer swaps it in."""
from __future__ import annotations

import threading
import time
from typing import Callable, Optional


class RWGate:
    """enter_read/leave_read and enter_write/leave_write."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writing = False

    def enter_read(self, timeout: Optional[float] = None) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: not self._writing, timeout):
                return False
            self._readers += 1
            return True

    def leave_read(self) -> None:
        with self._cond:
            self._readers -= 1
            self._cond.notify_all()

    def enter_write(self, timeout: Optional[float] = None) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: not self._writing and not self._readers, timeout):
                return False
            self._writing = True
            return True

    def leave_write(self) -> None:
        with self._cond:
            self._writing = False
            self._cond.notify_all()


class ModelVersion:
    def __init__(self, version: int, weights: dict[str, bytes]) -> None:
        self.version = version
        self.weights = weights
        self.users = 0


class WeightStore:
    def __init__(self, weights: dict[str, bytes]) -> None:
        self.gate = RWGate()
        self.lock = threading.Lock()
        self.current = ModelVersion(0, weights)
        self.retired: list[ModelVersion] = []

    def incref(self) -> ModelVersion:
        with self.lock:
            self.current.users += 1
            return self.current

    def decref(self, v: ModelVersion) -> None:
        with self.lock:
            v.users -= 1
            if v.users == 0 and v in self.retired:
                self.retired.remove(v)

    def read(self, name: str, timeout: float) -> Optional[bytes]:
        if not self.gate.enter_read(timeout):  # clean: near miss, False means nothing is held; else finally leaves
            return None
        try:
            return self.current.weights.get(name)
        finally:
            self.gate.leave_read()

    def read_many(self, names: list[str], timeout: float) -> Optional[list[bytes]]:
        if not self.gate.enter_read(timeout):  # leak: an unknown name returns before leave_read
            return None
        out = []
        for n in names:
            w = self.current.weights.get(n)
            if w is None:
                return None
            out.append(w)
        self.gate.leave_read()
        return out

    def swap(self, weights: dict[str, bytes], attempts: int = 3) -> bool:
        for i in range(attempts):
            if self.gate.enter_write(timeout=0.05):  # clean: near miss, left in finally, a timed-out attempt holds nothing
                break
            time.sleep(0.001 * 2 ** i)
        else:
            return False
        try:
            old = self.current
            if old.users:
                self.retired.append(old)
            self.current = ModelVersion(old.version + 1, weights)
            return True
        finally:
            self.gate.leave_write()

    def patch(self, name: str, fn: Callable[[bytes], bytes]) -> bool:
        self.gate.enter_write()  # leak: the KeyError of an unknown name is caught and the gate stays shut
        try:
            new = fn(self.current.weights[name])
            self.current.weights[name] = new
            self.gate.leave_write()
        except KeyError:
            return False
        return True

    def try_retire(self) -> int:
        """Collect retired versions without waiting."""
        if not self.lock.acquire(blocking=False):  # clean: released on both ways
            return 0
        if not self.retired:
            self.lock.release()
            return 0
        n = len(self.retired)
        self.retired = [v for v in self.retired if v.users]
        n -= len(self.retired)
        self.lock.release()
        return n


class Session:
    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.version: Optional[ModelVersion] = None

    def start(self) -> None:
        if self.version is None:
            self.version = self.store.incref()  # clean: near miss, taken only while the field is None; stop gives it back

    def refresh(self) -> bool:
        new = self.store.incref()  # leak: when the version has not changed the extra reference is dropped
        if new is self.version:
            return False
        old, self.version = self.version, new
        if old is not None:
            self.store.decref(old)
        return True

    def stop(self) -> None:
        if self.version is not None:
            self.store.decref(self.version)
            self.version = None
