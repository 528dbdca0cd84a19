"""Pinned host memory for KV offload: a thread-safe pool and the worker threads that use it."""
from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass

import torch


@dataclass
class PinnedPage:
    index: int
    tensor: "torch.Tensor"
    used: int = 0


class PinnedPool:
    def __init__(self, pages: int, page_numel: int):
        self._lock = threading.Lock()
        self._stack = [
            PinnedPage(i, torch.empty(page_numel, dtype=torch.float16, pin_memory=True)) for i in range(pages)
        ]
        self.low_water = pages

    def get(self) -> PinnedPage | None:
        with self._lock:
            if not self._stack:
                return None
            page = self._stack.pop()
            self.low_water = min(self.low_water, len(self._stack))
            return page

    def put(self, page: PinnedPage) -> None:
        page.used = 0
        with self._lock:
            self._stack.append(page)

    def get_batch(self, n: int) -> list[PinnedPage] | None:
        taken: list[PinnedPage] = []
        for _ in range(n):
            page = self.get()  # clean: all of them are put back when one is missing
            if page is None:
                for p in taken:
                    self.put(p)
                return None
            taken.append(page)
        return taken

    def get_at_most(self, n: int) -> list[PinnedPage]:
        taken: list[PinnedPage] = []
        for _ in range(n):
            page = self.get()  # leak: an odd page is popped off and not put back
            if page is None:
                break
            taken.append(page)
        if len(taken) % 2:
            taken.pop()
        return taken

    def try_lock(self, timeout: float) -> bool:
        return self._lock.acquire(timeout=timeout)  # clean: near miss, the caller unlocks when True

    def unlock(self) -> None:
        self._lock.release()

    def snapshot(self) -> list[int]:
        self._lock.acquire()  # leak: the empty answer returns with the lock held
        if not self._stack:
            return []
        out = [p.index for p in self._stack]
        self._lock.release()
        return out

    def largest(self) -> int:
        self._lock.acquire()  # clean: released in finally
        try:
            if not self._stack:
                return 0
            return max(p.tensor.numel() for p in self._stack)
        finally:
            self._lock.release()


@dataclass
class OffloadTask:
    seq_id: int
    source: "torch.Tensor"
    page: PinnedPage
    done: threading.Event


class Offloader(threading.Thread):
    """Copies device tensors to pinned pages in the background."""

    def __init__(self, pool: PinnedPool):
        super().__init__(daemon=True)
        self.pool = pool
        self.inbox: "queue.Queue[OffloadTask | None]" = queue.Queue()
        self.store: dict[int, list[PinnedPage]] = {}
        self.failures = 0

    def submit(self, seq_id: int, source: "torch.Tensor") -> threading.Event | None:
        page = self.pool.get()  # clean: near miss, moves with the task to the store, forget puts it back
        if page is None:
            return None
        done = threading.Event()
        self.inbox.put(OffloadTask(seq_id, source, page, done))
        return done

    def run(self) -> None:
        while True:
            task = self.inbox.get()
            if task is None:
                return
            task.page.tensor[: task.source.numel()].copy_(task.source.flatten())
            task.page.used = task.source.numel()
            self.store.setdefault(task.seq_id, []).append(task.page)
            task.done.set()

    def forget(self, seq_id: int) -> None:
        for page in self.store.pop(seq_id, []):
            self.pool.put(page)

    def stage_copy(self, source: "torch.Tensor") -> "torch.Tensor | None":
        page = self.pool.get()  # leak: the clone is returned and the page dropped
        if page is None:
            return None
        view = page.tensor[: source.numel()]
        view.copy_(source.flatten(), non_blocking=True)
        return view.clone()

    def stage_copy_sync(self, source: "torch.Tensor") -> "torch.Tensor | None":
        page = self.pool.get()  # clean: put back after the clone
        if page is None:
            return None
        view = page.tensor[: source.numel()]
        view.copy_(source.flatten())
        result = view.clone()
        self.pool.put(page)
        return result

    def measure_bandwidth(self, source: "torch.Tensor", repeat: int) -> float:
        pages = self.pool.get_batch(repeat)  # leak: put back on the slow path only
        if pages is None:
            return 0.0
        begin = time.perf_counter()
        for page in pages:
            page.tensor[: source.numel()].copy_(source.flatten())
        spent = time.perf_counter() - begin
        if spent > 0.5:
            self.failures += 1
            for page in pages:
                self.pool.put(page)
            return 0.0
        return source.numel() * 2 * repeat / max(spent, 1e-9)

    def reserve_for(self, seq_id: int, n: int) -> bool:
        pages = self.pool.get_batch(n)  # clean: near miss, extended into the store, forget puts them back
        if pages is None:
            return False
        self.store.setdefault(seq_id, []).extend(pages)
        return True

    def replace_last(self, seq_id: int, source: "torch.Tensor") -> bool:
        pages = self.store.get(seq_id)
        if not pages:
            return False
        fresh = self.pool.get()  # clean: near miss, takes the place of the page that goes back
        if fresh is None:
            return False
        fresh.tensor[: source.numel()].copy_(source.flatten())
        old, pages[-1] = pages[-1], fresh
        self.pool.put(old)
        return True

    def idle_pages(self) -> int:
        if not self.pool.try_lock(0.01):  # clean: unlocked below when the lock came
            return -1
        n = len(self.pool._stack)
        self.pool.unlock()
        return n

    def pressure(self, limit: int) -> str:
        if not self.pool.try_lock(0.01):  # leak: the "low" answer returns without unlock
            return "unknown"
        n = len(self.pool._stack)
        if n < limit:
            return "low"
        self.pool.unlock()
        return "ok"

    def zero_fill(self, n: int) -> int:
        wiped = 0
        for page in self.pool.get_batch(n) or ():  # clean: each page is put back in the loop
            page.tensor.zero_()
            wiped += 1
            self.pool.put(page)
        return wiped

    def stop(self) -> None:
        self.inbox.put(None)
        self.join()
        for seq_id in list(self.store):
            self.forget(seq_id)
