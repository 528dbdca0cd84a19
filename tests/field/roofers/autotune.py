"""Kernel autotuning with an on-disk cache shared between workers."""
from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Any, Callable, Optional

log = logging.getLogger(__name__)

Config = dict[str, int]


class TuneCache:
    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._best: dict[str, Config] = {}
        self._audit = open(path + ".audit", "a")  # clean: open for the life of the cache, closed by close

    def lookup(self, key: str) -> Optional[Config]:
        self._lock.acquire()  # leak: a hit returns with the lock held
        cfg = self._best.get(key)
        if cfg is not None:
            return dict(cfg)
        self._lock.release()
        return None

    def store(self, key: str, cfg: Config) -> None:
        self._lock.acquire()  # clean: finally
        try:
            self._best[key] = dict(cfg)
            self._audit.write(key + "\n")
        finally:
            self._lock.release()

    def try_store(self, key: str, cfg: Config) -> bool:
        if not self._lock.acquire(blocking=False):  # clean: near miss, not held on the early return
            return False
        self._best.setdefault(key, dict(cfg))
        self._lock.release()
        return True

    def flush(self, timeout: float = 1.0) -> bool:
        got = self._lock.acquire(timeout=timeout)  # clean: near miss, released when it was got
        snapshot = dict(self._best)
        if got:
            self._lock.release()
        tmp = self.path + ".tmp"
        with open(tmp, "w") as f:  # clean: with
            json.dump(snapshot, f)
        os.replace(tmp, self.path)
        return got

    def reload(self, timeout: float = 1.0) -> int:
        if not self._lock.acquire(timeout=timeout):  # leak: a missing file is caught and returns with the lock held
            return 0
        try:
            with open(self.path) as f:  # clean: with
                self._best.update(json.load(f))
        except FileNotFoundError:
            return 0
        self._lock.release()
        return len(self._best)

    def close(self) -> None:
        self._audit.close()


class CompileGate:
    """At most n compilations at a time."""

    def __init__(self, n: int) -> None:
        self._sem = threading.BoundedSemaphore(n)
        self.running = 0

    def enter(self, timeout: Optional[float] = None) -> bool:
        if not self._sem.acquire(timeout=timeout):  # clean: handed to the caller, leave releases
            return False
        self.running += 1
        return True

    def leave(self) -> None:
        self.running -= 1
        self._sem.release()


class FileLock:
    """Lock file with O_EXCL; works on shared file systems."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: Optional[int] = None

    def lock(self, tries: int = 50) -> bool:
        for _ in range(tries):
            try:
                self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR)  # clean: kept in the object, unlock closes
                return True
            except FileExistsError:
                time.sleep(0.01)
        return False

    def unlock(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            os.unlink(self.path)


class Autotuner:
    def __init__(self, cache: TuneCache, gate: CompileGate, compile_fn: Callable[[Config], Any], bench: Callable[[Any], float]) -> None:
        self.cache = cache
        self.gate = gate
        self.compile_fn = compile_fn
        self.bench = bench

    def tune(self, key: str, space: list[Config]) -> Optional[Config]:
        best, best_ms = None, float("inf")
        for cfg in space:
            self.gate.enter()  # leak: a configuration that does not compile goes on without leave
            try:
                fn = self.compile_fn(cfg)
            except ValueError as e:
                log.debug("%s: %s", cfg, e)
                continue
            self.gate.leave()
            ms = self.bench(fn)
            if ms < best_ms:
                best, best_ms = cfg, ms
        if best is not None:
            self.cache.store(key, best)
        return best

    def compile_one(self, cfg: Config, timeout: float) -> Optional[Any]:
        if not self.gate.enter(timeout):  # clean: near miss, nothing held on the early return, finally otherwise
            return None
        try:
            return self.compile_fn(cfg)
        except ValueError:
            return None
        finally:
            self.gate.leave()

    def compile_async(self, cfg: Config, done: Callable[[Any], None]) -> threading.Thread:
        self.gate.enter()  # clean: near miss, the worker thread leaves

        def work() -> None:
            try:
                done(self.compile_fn(cfg))
            finally:
                self.gate.leave()

        t = threading.Thread(target=work, daemon=True)
        t.start()
        return t

    def tune_shared(self, key: str, space: list[Config]) -> Optional[Config]:
        """One worker of the node tunes, the others read its result."""
        lk = FileLock(self.cache.path + ".lock")
        if not lk.lock():  # leak: a result found under the lock is returned without unlock
            return None
        self.cache.reload()
        hit = self.cache._best.get(key)
        if hit is not None:
            return hit
        best = self.tune(key, space)
        self.cache.flush()
        lk.unlock()
        return best
