"""Locks of the model manager: one per model, one for the table, a file lock per cache dir."""
from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional


class LoadError(RuntimeError):
    pass


class KeyedLocks:
    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: Dict[str, threading.Lock] = {}

    def _get(self, key: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(key, threading.Lock())

    def lock(self, key: str) -> None:
        self._get(key).acquire()  # clean: unlock releases it for the caller

    def try_lock(self, key: str) -> bool:
        return self._get(key).acquire(blocking=False)  # clean: handed to the caller as the result

    def unlock(self, key: str) -> None:
        self._get(key).release()


class ModelManager:
    def __init__(self, load: Callable[[str], object]) -> None:
        self.load = load
        self.locks = KeyedLocks()
        self.table_lock = threading.Lock()
        self.models: Dict[str, object] = {}
        self.budget = threading.Semaphore(2)

    def get(self, name: str) -> Optional[object]:
        self.table_lock.acquire()  # clean: released in the finally
        try:
            return self.models.get(name)
        finally:
            self.table_lock.release()

    def ensure(self, name: str) -> object:
        self.locks.lock(name)  # leak: a model that is there already returns with the key locked
        model = self.get(name)
        if model is not None:
            return model
        try:
            model = self.load(name)
            self.models[name] = model
        finally:
            self.locks.unlock(name)
        return model

    def reload(self, name: str) -> Optional[object]:
        if not self.locks.try_lock(name):  # clean: near miss, the early return is where it was not taken
            return None
        try:
            self.models[name] = self.load(name)
            return self.models[name]
        finally:
            self.locks.unlock(name)

    def refresh_all(self, names: List[str]) -> int:
        n = 0
        for name in names:
            if not self.locks.try_lock(name):  # leak: a failed load continues with the key locked
                continue
            try:
                self.models[name] = self.load(name)
            except LoadError:
                continue
            n += 1
            self.locks.unlock(name)
        return n

    def unload_idle(self, names: List[str], busy: Callable[[str], bool]) -> List[str]:
        gone = []
        for name in names:
            if not self.locks.try_lock(name):  # clean: near miss, continue inside the try runs the finally
                continue
            try:
                if busy(name):
                    continue
                self.models.pop(name, None)
                gone.append(name)
            finally:
                self.locks.unlock(name)
        return gone

    def rename(self, old: str, new: str) -> bool:
        first, second = sorted((old, new))
        self.locks.lock(first)  # leak: stays locked when the second is held elsewhere
        if not self.locks.try_lock(second):  # clean: unlocked at the end
            return False
        self.models[new] = self.models.pop(old, None)
        self.locks.unlock(second)
        self.locks.unlock(first)
        return True

    def swap(self, a: str, b: str) -> bool:
        self.locks.lock(a)  # clean: near miss, unlocked where b is held elsewhere
        if not self.locks.try_lock(b):  # clean: unlocked at the end
            self.locks.unlock(a)
            return False
        self.models[a], self.models[b] = self.models.get(b), self.models.get(a)
        self.locks.unlock(b)
        self.locks.unlock(a)
        return True

    def load_bounded(self, name: str, timeout: float) -> Optional[object]:
        if not self.budget.acquire(timeout=timeout):  # leak: a LoadError is turned into None with the permit out
            return None
        try:
            model = self.load(name)
        except LoadError:
            return None
        self.budget.release()
        return model

    def load_quiet(self, name: str) -> Optional[object]:
        got = self.budget.acquire(blocking=False)  # clean: near miss, the flag guards the release in the finally
        try:
            return self.load(name) if got else None
        except LoadError:
            return None
        finally:
            if got:
                self.budget.release()

    def stats(self, verbose: bool) -> Dict[str, int]:
        self.table_lock.acquire()  # leak: the short form returns holding the table lock
        out = {"models": len(self.models)}
        if not verbose:
            return out
        for name in self.models:
            out[name] = 1
        self.table_lock.release()
        return out

    def names(self, prefix: str) -> List[str]:
        self.table_lock.acquire()  # clean: both branches release
        if not prefix:
            out = list(self.models)
            self.table_lock.release()
            return out
        out = [n for n in self.models if n.startswith(prefix)]
        self.table_lock.release()
        return out


if __name__ == "__main__":
    mm = ModelManager(lambda n: n.upper())
    print(mm.reload("a"), mm.unload_idle(["a"], lambda n: True), mm.swap("a", "b"), mm.names("a"), mm.load_quiet("z"))
