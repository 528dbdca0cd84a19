"""Memory permits for the model workers. Threads only, no event loop."""
from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable


class MemoryBudget:
    """Counts megabytes. reserve() blocks, try_reserve() does not."""

    def __init__(self, total_mb: int) -> None:
        self.total_mb = total_mb
        self._avail = total_mb
        self._cond = threading.Condition()

    def reserve(self, mb: int) -> int:
        with self._cond:  # clean: with block
            while self._avail < mb:
                self._cond.wait()
            self._avail -= mb  # clean: amount handed to the caller
        return mb

    def try_reserve(self, mb: int) -> bool:
        with self._cond:  # clean: with block
            if self._avail < mb:
                return False
            self._avail -= mb  # clean: amount handed to the caller
            return True

    def refund(self, mb: int) -> None:
        with self._cond:  # clean: with block
            self._avail += mb
            self._cond.notify_all()


class ModelRunner:
    def __init__(self, budget: MemoryBudget, max_parallel: int = 4) -> None:
        self.budget = budget
        self.slots = threading.BoundedSemaphore(max_parallel)
        self.pool = ThreadPoolExecutor(max_parallel)
        self.loaded: dict[str, int] = {}

    def load(self, name: str, size_mb: int) -> bool:
        if name in self.loaded:
            return True
        if not self.budget.try_reserve(size_mb):  # clean: entered into loaded, refunded by unload
            return False
        self.loaded[name] = size_mb
        return True

    def unload(self, name: str) -> None:
        size = self.loaded.pop(name, 0)
        if size:
            self.budget.refund(size)

    def submit(self, name: str, fn: Callable[[], object]) -> Future:
        self.slots.acquire()  # clean: near miss, the done callback releases
        fut = self.pool.submit(fn)
        fut.add_done_callback(lambda _f: self.slots.release())
        return fut

    def run_sync(self, name: str, activation_mb: int, fn: Callable[[], object]) -> object:
        if not self.slots.acquire(timeout=5.0):  # leak: not released when the memory reservation fails
            return None
        if not self.budget.try_reserve(activation_mb):  # clean: refunded in finally
            return None
        try:
            return fn()
        finally:
            self.budget.refund(activation_mb)
            self.slots.release()

    def run_batched(self, sizes: list[int], fn: Callable[[int], object]) -> list[object]:
        results = []
        for size in sizes:
            taken = self.budget.reserve(size)  # leak: the break on a None result skips the refund
            out = fn(taken)
            if out is None:
                break
            results.append(out)
            self.budget.refund(taken)
        return results

    def resize(self, name: str, new_mb: int) -> bool:
        old_mb = self.loaded.get(name, 0)
        if new_mb > old_mb:
            if not self.budget.try_reserve(new_mb - old_mb):  # clean: near miss, the difference is part of loaded[name] afterwards
                return False
        else:
            self.budget.refund(old_mb - new_mb)
        self.loaded[name] = new_mb
        return True

    def benchmark(self, mb: int, fn: Callable[[], object], repeats: int = 5) -> float:
        best = float("inf")
        got = self.budget.reserve(mb)  # clean: refunded after the loop
        for _ in range(repeats):
            start = time.perf_counter()
            fn()
            best = min(best, time.perf_counter() - start)
        self.budget.refund(got)
        return best

    def reload(self, name: str, size_mb: int) -> None:
        self.budget.reserve(size_mb)  # leak: overwrites the entry of a loaded model, whose megabytes are never refunded
        self.loaded[name] = size_mb

    def calibrate(self, start_mb: int, works: Callable[[int], bool]) -> int:
        """Grow the reservation until the model fits, return the size that did."""
        mb = start_mb
        while mb <= self.budget.total_mb:
            if not self.budget.try_reserve(mb):  # leak: when works() is true it returns without a refund
                return 0
            if works(mb):
                return mb
            self.budget.refund(mb)
            mb *= 2
        return 0
