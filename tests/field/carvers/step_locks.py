"""Locks around shared training state: per-parameter locks, a reader/writer gate, counted snapshots."""
from __future__ import annotations

import logging
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

log = logging.getLogger(__name__)


class RWGate:
    """Many readers (evaluation, checkpoint) or one writer (optimizer step)."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writing = False

    def acquire_read(self) -> None:
        with self._cond:
            while self._writing:
                self._cond.wait()
            self._readers += 1

    def release_read(self) -> None:
        with self._cond:
            self._readers -= 1
            self._cond.notify_all()

    def acquire_write(self, timeout: float = 5.0) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: not self._writing and self._readers == 0, timeout):
                return False
            self._writing = True
            return True

    def release_write(self) -> None:
        with self._cond:
            self._writing = False
            self._cond.notify_all()


class Snapshot:
    def __init__(self, step: int, state: Dict[str, float]) -> None:
        self.step = step
        self.state = state
        self.refs = 0


class SnapshotStore:
    """Counted snapshots; one is dropped when its count falls to zero."""

    def __init__(self) -> None:
        self._by_step: Dict[int, Snapshot] = {}
        self._mu = threading.Lock()

    def publish(self, step: int, state: Dict[str, float]) -> None:
        self._by_step[step] = Snapshot(step, dict(state))

    def incref(self, step: int) -> Optional[Snapshot]:
        with self._mu:
            snap = self._by_step.get(step)
            if snap is not None:
                snap.refs += 1
            return snap

    def decref(self, snap: Snapshot) -> None:
        with self._mu:
            snap.refs -= 1
            if snap.refs == 0:
                self._by_step.pop(snap.step, None)


class ParamServer:
    def __init__(self, names: Sequence[str]) -> None:
        self.values: Dict[str, float] = {n: 0.0 for n in names}
        self.locks: Dict[str, threading.Lock] = {n: threading.Lock() for n in names}
        self.gate = RWGate()
        self.table_lock = threading.Lock()
        self.snapshots = SnapshotStore()
        self.step = 0

    def add(self, name: str, delta: float) -> float:
        lock = self.locks[name]
        lock.acquire()  # clean: released in finally
        try:
            self.values[name] += delta
            return self.values[name]
        finally:
            lock.release()

    def add_if_finite(self, name: str, delta: float) -> bool:
        lock = self.locks[name]
        lock.acquire()  # leak: a NaN delta returns with the lock held
        if delta != delta:
            log.warning("nan for %s", name)
            return False
        self.values[name] += delta
        lock.release()
        return True

    def try_add(self, name: str, delta: float) -> bool:
        if not self.locks[name].acquire(blocking=False):  # clean: near miss, False means not held, else released
            return False
        self.values[name] += delta
        self.locks[name].release()
        return True

    def scale_all(self, factor: float, skip: Sequence[str] = ()) -> int:
        touched = 0
        for name, lock in self.locks.items():
            lock.acquire()  # leak: a skipped name continues with its lock held
            if name in skip:
                continue
            self.values[name] *= factor
            touched += 1
            lock.release()
        return touched

    def swap(self, a: str, b: str) -> bool:
        first, second = sorted((a, b))
        self.locks[first].acquire()  # leak: kept when the second lock times out
        if not self.locks[second].acquire(timeout=0.5):  # clean: released below
            return False
        self.values[a], self.values[b] = self.values[b], self.values[a]
        self.locks[second].release()
        self.locks[first].release()
        return True

    def move(self, src: str, dst: str) -> bool:
        first, second = sorted((src, dst))
        self.locks[first].acquire()  # clean: near miss, released when the second is not had
        if not self.locks[second].acquire(timeout=0.5):  # clean: released below
            self.locks[first].release()
            return False
        self.values[dst] += self.values[src]
        self.values[src] = 0.0
        self.locks[second].release()
        self.locks[first].release()
        return True

    def optimizer_step(self, fn: Callable[[Dict[str, float]], None]) -> bool:
        if not self.gate.acquire_write():  # leak: a failed step is caught and the writer stays in
            log.error("optimizer step timed out on the gate")
            return False
        try:
            fn(self.values)
        except FloatingPointError as exc:
            log.warning("step skipped: %s", exc)
            return False
        self.step += 1
        self.gate.release_write()
        return True

    def load(self, values: Dict[str, float]) -> bool:
        if not self.gate.acquire_write(timeout=1.0):  # clean: near miss, False means not held
            return False
        try:
            self.values.update(values)
        finally:
            self.gate.release_write()
        return True

    def evaluate(self, fn: Callable[[Dict[str, float]], float], warm: bool) -> float:
        if warm:
            self.gate.acquire_read()  # clean: near miss, released under the same flag
        score = fn(dict(self.values))
        if warm:
            self.gate.release_read()
        return score

    def pause_writers(self) -> None:
        self.gate.acquire_read()  # clean: near miss, resume_writers is the other half

    def resume_writers(self) -> None:
        self.gate.release_read()

    def checkpoint(self, sink: List[Dict[str, float]]) -> int:
        self.pause_writers()  # clean: released below
        sink.append(dict(self.values))
        self.resume_writers()
        return self.step

    def checkpoint_if_newer(self, last: int, sink: List[Dict[str, float]]) -> int:
        self.pause_writers()  # leak: nothing new returns without resume
        if self.step <= last:
            return last
        sink.append(dict(self.values))
        self.resume_writers()
        return self.step


class SnapshotReader:
    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self.current: Optional[Snapshot] = None

    def follow(self, step: int) -> bool:
        snap = self.store.incref(step)  # clean: near miss, becomes current after the former is let go
        if snap is None:
            return False
        if self.current is not None:
            self.store.decref(self.current)
        self.current = snap
        return True

    def stop(self) -> None:
        if self.current is not None:
            self.store.decref(self.current)
            self.current = None

    def latest_of(self, steps: Sequence[int]) -> Optional[int]:
        best: Optional[Snapshot] = None
        for step in steps:
            snap = self.store.incref(step)  # leak: an older best is replaced without decref
            if snap is None:
                continue
            if best is None or snap.step > best.step:
                best = snap
            else:
                self.store.decref(snap)
        if best is None:
            return None
        found = best.step
        self.store.decref(best)
        return found

    def wait_for(self, step: int, deadline: float) -> Optional[Dict[str, float]]:
        while time.monotonic() < deadline:
            snap = self.store.incref(step)  # clean: near miss, None sleeps, else decref after the copy
            if snap is None:
                time.sleep(0.005)
                continue
            state = dict(snap.state)
            self.store.decref(snap)
            return state
        return None
