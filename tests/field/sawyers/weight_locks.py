"""Live weight reload: versioned weights, a reader-writer gate, and per-shard locks."""
from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional

logger = logging.getLogger(__name__)


class WeightVersion:
    def __init__(self, number: int, tensors: dict[str, Any]) -> None:
        self.number = number
        self.tensors = tensors
        self.readers = 0


class RWGate:
    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writer = False

    def enter_read(self) -> None:
        with self._cond:
            while self._writer:
                self._cond.wait()
            self._readers += 1

    def leave_read(self) -> None:
        with self._cond:
            self._readers -= 1
            if self._readers == 0:
                self._cond.notify_all()

    def enter_write(self, timeout: float) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: not self._writer and self._readers == 0, timeout):
                return False
            self._writer = True
            return True

    def leave_write(self) -> None:
        with self._cond:
            self._writer = False
            self._cond.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        self.enter_read()  # clean: the finally leaves
        try:
            yield
        finally:
            self.leave_read()


class WeightStore:
    def __init__(self, tensors: dict[str, Any], shards: int) -> None:
        self.current = WeightVersion(0, tensors)
        self.gate = RWGate()
        self.locks = [threading.Lock() for _ in range(shards)]
        self._reload = threading.Lock()
        self.retired: list[WeightVersion] = []

    def attach(self) -> WeightVersion:
        version = self.current
        version.readers += 1
        return version

    def detach(self, version: WeightVersion) -> None:
        version.readers -= 1
        if version.readers == 0 and version in self.retired:
            self.retired.remove(version)

    def reload(self, load: Callable[[], Optional[dict[str, Any]]]) -> bool:
        if not self._reload.acquire(blocking=False):  # clean: near miss, the refused way holds nothing, the rest is in try
            return False
        try:
            tensors = load()
            if tensors is None:
                return False
            self.retired.append(self.current)
            self.current = WeightVersion(self.current.number + 1, tensors)
            return True
        finally:
            self._reload.release()

    def reload_quiesced(self, load: Callable[[], Optional[dict[str, Any]]], timeout: float) -> bool:
        if not self.gate.enter_write(timeout):  # leak: nothing to load returns with the writer inside
            return False
        tensors = load()
        if not tensors:
            logger.info("nothing to load")
            return False
        self.current = WeightVersion(self.current.number + 1, tensors)
        self.gate.leave_write()
        return True

    def patch(self, name: str, value: Any, shard: int) -> bool:
        lock = self.locks[shard]
        lock.acquire()  # leak: an unknown name returns with the lock held
        if name not in self.current.tensors:
            return False
        self.current.tensors[name] = value
        lock.release()
        return True

    def patch_all(self, updates: dict[str, Any]) -> int:
        for lock in self.locks:
            lock.acquire()  # clean: all released in the finally
        try:
            self.current.tensors.update(updates)
            return len(updates)
        finally:
            for lock in reversed(self.locks):
                lock.release()

    def try_patch_all(self, updates: dict[str, Any]) -> bool:
        held: list[threading.Lock] = []
        for lock in self.locks:
            if not lock.acquire(timeout=0.05):  # leak: locks in held stay locked when a later one times out
                return False
            held.append(lock)
        self.current.tensors.update(updates)
        for lock in held:
            lock.release()
        return True

    def lookup(self, name: str) -> Any:
        with self.gate.reading():  # clean: with statement
            return self.current.tensors.get(name)

    def checksum(self, fn: Callable[[Any], int]) -> int:
        self.gate.enter_read()  # leak: a tensor that fn refuses breaks off past leave_read
        total = 0
        for name, tensor in self.current.tensors.items():
            try:
                total += fn(tensor)
            except TypeError:
                logger.warning("cannot sum %s", name)
                return -1
        self.gate.leave_read()
        return total


class Runner:
    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.version: Optional[WeightVersion] = None

    def refresh(self) -> None:
        if self.version is not None and self.version is self.store.current:
            return
        if self.version is not None:
            self.store.detach(self.version)
        self.version = self.store.attach()  # clean: near miss, the older version is detached first, stop() does the last

    def stop(self) -> None:
        if self.version is not None:
            self.store.detach(self.version)
            self.version = None


class Evaluator:
    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.baseline: Optional[WeightVersion] = None

    def rebase(self) -> None:
        self.baseline = self.store.attach()  # leak: the baseline before is overwritten while counted

    def close(self) -> None:
        if self.baseline is not None:
            self.store.detach(self.baseline)
            self.baseline = None

    def diff(self, name: str) -> bool:
        version = self.store.attach()  # clean: detached before both returns
        if self.baseline is None:
            self.store.detach(version)
            return False
        same = version.tensors.get(name) == self.baseline.tensors.get(name)
        self.store.detach(version)
        return not same
