"""Step journal and the locks around the engine's shared state."""
from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, IO, Iterator, List, Optional


class StripedLocks:
    """A lock per stripe, chosen by key."""

    def __init__(self, n: int = 16) -> None:
        self._locks = [threading.Lock() for _ in range(n)]

    def hold(self, key: str) -> threading.Lock:
        """Locks the key's stripe and returns the lock, which the caller releases."""
        lock = self._locks[hash(key) % len(self._locks)]
        lock.acquire()  # clean: returned locked to the caller
        return lock

    @contextmanager
    def holding(self, key: str) -> Iterator[None]:
        lock = self.hold(key)  # clean: released in the finally
        try:
            yield
        finally:
            lock.release()


class RequestTable:
    def __init__(self) -> None:
        self._mu = threading.Lock()
        self._stripes = StripedLocks()
        self.state: Dict[str, str] = {}

    def set_state(self, rid: str, state: str) -> bool:
        self._mu.acquire()  # leak: unknown request returns with the mutex held
        if rid not in self.state:
            return False
        self.state[rid] = state
        self._mu.release()
        return True

    def add(self, rid: str) -> bool:
        self._mu.acquire()  # clean: released in the finally on both ways
        try:
            if rid in self.state:
                return False
            self.state[rid] = "new"
            return True
        finally:
            self._mu.release()

    def try_add(self, rid: str) -> bool:
        if not self._mu.acquire(blocking=False):  # clean: near miss, not held on the False way
            return False
        self.state.setdefault(rid, "new")
        self._mu.release()
        return True

    def wait_add(self, rid: str, seconds: float) -> bool:
        got = self._mu.acquire(timeout=seconds)  # clean: near miss, release under the same flag
        if got:
            self.state.setdefault(rid, "new")
        if got:
            self._mu.release()
        return got

    def update(self, rid: str, fn: Callable[[str], str]) -> Optional[str]:
        lock = self._stripes.hold(rid)  # leak: KeyError is caught and None returned, the stripe stays locked
        try:
            new = fn(self.state[rid])
        except KeyError:
            return None
        self.state[rid] = new
        lock.release()
        return new

    def touch(self, rid: str) -> None:
        with self._stripes.holding(rid):  # clean: with
            self.state[rid] = "touched"

    def sweep(self, rids: List[str]) -> int:
        n = 0
        for rid in rids:
            lock = self._stripes.hold(rid)  # clean: near miss, released before the continue and at the end
            if self.state.get(rid) != "done":
                lock.release()
                continue
            del self.state[rid]
            n += 1
            lock.release()
        return n

    def drain(self, rids: List[str]) -> int:
        n = 0
        for rid in rids:
            lock = self._stripes.hold(rid)  # leak: absent request continues with its stripe locked
            if self.state.pop(rid, None) is None:
                continue
            n += 1
            lock.release()
        return n


class Journal:
    def __init__(self, path: str) -> None:
        self.path = path
        self._fh: Optional[IO[str]] = None
        self.rotated = 0

    def _handle(self) -> IO[str]:
        if self._fh is None:
            self._fh = open(self.path, "a")  # clean: kept on the journal, closed in close and rotate
        return self._fh

    def write(self, record: Dict[str, Any]) -> None:
        self._handle().write(json.dumps(record) + "\n")  # clean: near miss, borrowed handle that the journal keeps

    def rotate(self) -> None:
        if self._fh is not None:
            self._fh.close()
        self.rotated += 1
        self._fh = open(f"{self.path}.{self.rotated}", "a")  # clean: near miss, previous handle closed first

    def close(self) -> None:
        fh, self._fh = self._fh, None
        if fh is not None:
            fh.close()

    def last_step(self) -> int:
        step = -1
        fh = open(self.path)  # leak: a torn line returns from the loop before close
        for line in fh:
            try:
                step = json.loads(line)["step"]
            except ValueError:
                return step
        fh.close()
        return step

class JournalReader:
    """Follows a journal across rotations."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fh: Optional[IO[str]] = None

    def __enter__(self) -> "JournalReader":
        self.fh = open(self.path)  # leak: __exit__ returns early when the body raised ValueError
        return self

    def __exit__(self, et: Any, ev: Any, tb: Any) -> bool:
        if et is ValueError:
            return True
        if self.fh is not None:
            self.fh.close()
        return False

    def records(self) -> Iterator[Dict[str, Any]]:
        for line in self.fh:
            yield json.loads(line)

    def follow(self, n: int) -> None:
        self.fh = open(f"{self.path}.{n}")  # leak: the file open before is overwritten without close


class Tailer:
    def __init__(self, sinks: List[Callable[[str], None]]) -> None:
        self.sinks = sinks
        self.opened: List[IO[str]] = []

    def attach(self, path: str) -> Callable[[], str]:
        fh = open(path)  # clean: near miss, listed in opened, stop closes it
        self.opened.append(fh)
        return fh.readline

    def stop(self) -> None:
        for fh in self.opened:
            fh.close()
        self.opened.clear()

    def once(self, path: str) -> int:
        n = 0
        for line in open(path):  # leak: anonymous file object is never closed
            for sink in self.sinks:
                sink(line)
            n += 1
        return n
