"""Kernel autotuner: device locks, compile slots and a shared result cache."""
from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Callable, Iterable, Optional

import torch


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    stages: int
    warps: int

    def smem(self, head_dim: int) -> int:
        return self.stages * (self.block_m + self.block_n) * head_dim * 2


class DeviceLocks:
    """Exclusive use of a device while timings are taken."""

    def __init__(self, n: int) -> None:
        self._locks = [threading.Lock() for _ in range(n)]

    def seize(self, dev: int) -> None:
        self._locks[dev].acquire()  # clean: near miss, held for the caller until yield_up

    def seize_now(self, dev: int) -> bool:
        return self._locks[dev].acquire(blocking=False)  # clean: near miss, held for the caller if True

    def yield_up(self, dev: int) -> None:
        self._locks[dev].release()


class CompileSlots:
    """Limits concurrent compiler processes."""

    def __init__(self, n: int) -> None:
        self._sem = threading.BoundedSemaphore(n)

    def begin(self, timeout: Optional[float] = None) -> bool:
        return self._sem.acquire(timeout=timeout)  # clean: near miss, the caller ends it with end()

    def end(self) -> None:
        self._sem.release()


class SharedLock:
    """Readers and a writer; no upgrade."""

    def __init__(self) -> None:
        self._cv = threading.Condition()
        self._readers = 0
        self._writing = False

    def acquire_read(self) -> None:
        with self._cv:
            self._cv.wait_for(lambda: not self._writing)
            self._readers += 1

    def release_read(self) -> None:
        with self._cv:
            self._readers -= 1
            self._cv.notify_all()

    def acquire_write(self) -> None:
        with self._cv:
            self._cv.wait_for(lambda: not self._writing and self._readers == 0)
            self._writing = True

    def release_write(self) -> None:
        with self._cv:
            self._writing = False
            self._cv.notify_all()


def measure(locks: DeviceLocks, dev: int, fn: Callable[[], None], reps: int = 20) -> float:
    locks.seize(dev)  # clean: the finally gives the device up
    try:
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        fn()
        start.record()
        for _ in range(reps):
            fn()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / reps
    finally:
        locks.yield_up(dev)


def measure_opportunistic(locks: DeviceLocks, devs: Iterable[int], fn: Callable[[int], float]) -> Optional[float]:
    for dev in devs:
        if not locks.seize_now(dev):  # clean: near miss, False holds nothing, True is given up below
            continue
        ms = fn(dev)
        locks.yield_up(dev)
        return ms
    return None


def measure_p2p(locks: DeviceLocks, a: int, b: int, nbytes: int) -> Optional[float]:
    locks.seize(a)  # leak: a stays seized when b is busy
    if not locks.seize_now(b):  # clean: given up after the copy
        return None
    src = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{a}")
    dst = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{b}")
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    dst.copy_(src)
    stop.record()
    stop.synchronize()
    locks.yield_up(b)
    locks.yield_up(a)
    return start.elapsed_time(stop)


def measure_p2p_ordered(locks: DeviceLocks, a: int, b: int, fn: Callable[[int, int], float]) -> float:
    lo, hi = sorted((a, b))
    locks.seize(lo)  # clean: given up last
    if hi != lo:
        locks.seize(hi)  # clean: near miss, same test guards the give-up
    ms = fn(a, b)
    if hi != lo:
        locks.yield_up(hi)
    locks.yield_up(lo)
    return ms


def compile_all(
    slots: CompileSlots, cfgs: list[Config], build: Callable[[Config], Optional[bytes]]
) -> dict[Config, bytes]:
    built: dict[Config, bytes] = {}
    for cfg in cfgs:
        slots.begin()  # leak: a failed build continues without ending its slot
        binary = build(cfg)
        if binary is None:
            continue
        built[cfg] = binary
        slots.end()
    return built


def compile_parallel(
    slots: CompileSlots, ex: ThreadPoolExecutor, cfgs: list[Config], build
) -> dict[Config, bytes]:
    futures = {}
    for cfg in cfgs:
        if not slots.begin(timeout=30.0):  # clean: near miss, the done callback ends each slot begun
            break
        fut = ex.submit(build, cfg)
        fut.add_done_callback(lambda _f: slots.end())
        futures[cfg] = fut
    return {cfg: f.result() for cfg, f in futures.items() if f.result() is not None}


class TuneCache:
    """Best configuration by problem key, persisted as JSON lines."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._mutex = threading.Lock()
        self._rw = SharedLock()
        self._best: dict[str, Config] = {}
        self._hits: dict[str, int] = {}

    def save(self, keep: Callable[[str], bool]) -> int:
        self._mutex.acquire()  # clean: released on both ways out
        rows = [{"key": k, **asdict(c)} for k, c in self._best.items() if keep(k)]
        if not rows:
            self._mutex.release()
            return 0
        out = open(self._path + ".new", "w")  # leak: written and renamed, never closed
        out.writelines(json.dumps(r) + "\n" for r in rows)
        out.flush()
        os.replace(self._path + ".new", self._path)
        self._mutex.release()
        return len(rows)

    def bump(self, key: str) -> int:
        self._mutex.acquire()  # leak: the first hit of a key returns without release
        if key not in self._hits:
            self._hits[key] = 1
            return 1
        self._hits[key] += 1
        n = self._hits[key]
        self._mutex.release()
        return n

    def lookup_or_tune(self, key: str, tune: Callable[[], Config]) -> Config:
        self._rw.acquire_read()  # clean: released before anything is decided
        found = self._best.get(key)
        self._rw.release_read()
        if found is not None:
            return found
        self._rw.acquire_write()  # leak: another writer's result is returned with the write lock held
        found = self._best.get(key)
        if found is not None:
            return found
        found = self._best[key] = tune()
        self._rw.release_write()
        return found

    def lookup_or_default(self, key: str, default: Config) -> Config:
        self._rw.acquire_read()  # clean: near miss, one release for each branch
        found = self._best.get(key)
        if found is not None:
            self._rw.release_read()
            return found
        self._rw.release_read()
        self._rw.acquire_write()  # clean: released right after the update
        found = self._best.setdefault(key, default)
        self._rw.release_write()
        return found

    def snapshot(self, prefix: str) -> dict[str, Config]:
        self._rw.acquire_read()  # leak: the wrong half is released
        picked = {k: c for k, c in self._best.items() if k.startswith(prefix)}
        self._rw.release_write()
        return picked
