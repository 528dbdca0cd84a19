"""Throttling of checkpoint and dataset I/O: permits, byte budgets and path locks."""
from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass


class ByteBudget:
    """A counter of bytes that may be in flight. charge() is a non-blocking reservation."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()

    def charge(self, n: int) -> bool:
        with self._lock:
            if self.used + n > self.limit:
                return False
            self.used += n
            return True

    def refund(self, n: int) -> None:
        with self._lock:
            self.used -= n


class PathLocks:
    """One lock for each path; lock() gives the path's lock already held, or None."""

    def __init__(self):
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def lock(self, path: str, timeout: float = -1) -> threading.Lock | None:
        lk = self._locks[os.path.abspath(path)]
        if lk.acquire(timeout=timeout):  # clean: handed to the caller while held
            return lk
        return None

    def lock_dir(self, path: str, timeout: float) -> threading.Lock | None:
        lk = self._locks[os.path.abspath(path)]
        if not lk.acquire(timeout=timeout):  # leak: stays held when the path is not a directory
            return None
        if not os.path.isdir(path):
            return None
        return lk


@dataclass
class WriteJob:
    path: str
    payload: bytes
    tries: int = 0
    charged: int = 0


class Throttle:
    def __init__(self, permits: int, budget: ByteBudget):
        self.sem = threading.BoundedSemaphore(permits)
        self.budget = budget
        self.locks = PathLocks()
        self.jobs: list[WriteJob] = []
        self.stats: dict[str, float] = {}
        self.dry = False

    # -- writes -----------------------------------------------------------------

    def write(self, job: WriteJob) -> bool:
        self.sem.acquire()  # leak: the permit is kept when the budget is exhausted
        if not self.budget.charge(len(job.payload)):  # clean: refunded in finally
            return False
        try:
            with open(job.path, "wb") as f:
                f.write(job.payload)
        finally:
            self.budget.refund(len(job.payload))
        self.sem.release()
        return True

    def write_checked(self, job: WriteJob) -> bool:
        self.sem.acquire()  # clean: near miss, the outer finally covers the failing charge
        try:
            n = len(job.payload)
            if not self.budget.charge(n):  # clean: refunded in the inner finally
                return False
            try:
                with open(job.path, "wb") as f:
                    f.write(job.payload)
            finally:
                self.budget.refund(n)
            return True
        finally:
            self.sem.release()

    def write_if_changed(self, job: WriteJob, old: bytes | None) -> bool:
        n = len(job.payload)
        if not self.budget.charge(n):  # leak: not refunded when the payload did not change
            return False
        if old == job.payload:
            return False
        with self.sem:
            with open(job.path, "wb") as f:
                f.write(job.payload)
        self.budget.refund(n)
        return True

    def write_with_retry(self, job: WriteJob, attempts: int) -> bool:
        n = len(job.payload)
        for _ in range(attempts):
            if not self.budget.charge(n):  # leak: after an OSError the next attempt charges once more
                time.sleep(0.1)
                continue
            try:
                with open(job.path, "wb") as f:
                    f.write(job.payload)
            except OSError:
                job.tries += 1
                continue
            self.budget.refund(n)
            return True
        return False

    def write_until(self, job: WriteJob, deadline: float) -> bool:
        n = len(job.payload)
        while time.monotonic() < deadline:
            if not self.budget.charge(n):  # clean: near miss, refunded in finally before every next turn
                time.sleep(0.1)
                continue
            try:
                with open(job.path, "wb") as f:
                    f.write(job.payload)
                return True
            except OSError:
                job.tries += 1
            finally:
                self.budget.refund(n)
        return False

    # -- queued jobs ------------------------------------------------------------

    def enqueue(self, job: WriteJob) -> bool:
        n = len(job.payload)
        if not self.budget.charge(n):  # clean: recorded in job.charged, which flush() and cancel() refund
            return False
        job.charged = n
        self.jobs.append(job)
        return True

    def flush(self) -> int:
        done = 0
        while self.jobs:
            job = self.jobs.pop()
            with self.sem:
                try:
                    with open(job.path, "wb") as f:
                        f.write(job.payload)
                    done += 1
                finally:
                    self.budget.refund(job.charged)
        return done

    def cancel(self) -> None:
        for job in self.jobs:
            self.budget.refund(job.charged)
        self.jobs.clear()

    # -- locks ------------------------------------------------------------------

    def append(self, path: str, data: bytes) -> bool:
        lk = self.locks.lock(path, timeout=2.0)  # clean: released in finally
        if lk is None:
            return False
        try:
            with open(path, "ab") as f:
                f.write(data)
        finally:
            lk.release()
        return True

    def rename(self, src: str, dst: str) -> bool:
        a = self.locks.lock(src, timeout=2.0)  # leak: stays held when the lock of dst times out
        if a is None:
            return False
        b = self.locks.lock(dst, timeout=2.0)  # clean: released in finally
        if b is None:
            return False
        try:
            os.replace(src, dst)
        finally:
            b.release()
            a.release()
        return True

    def list_dir(self, path: str) -> list[str]:
        lk = self.locks.lock_dir(path, timeout=1.0)  # clean: released after listing; None means nothing is held
        if lk is None:
            return []
        try:
            return sorted(os.listdir(path))
        finally:
            lk.release()

    def touch(self, path: str) -> None:
        held = not self.dry and self.sem.acquire(timeout=1.0)  # clean: near miss, held is the result and guards the release
        try:
            if not self.dry:
                os.utime(path)
        finally:
            if held:
                self.sem.release()


class AsyncReader:
    def __init__(self, limit: int):
        self._sem = asyncio.Semaphore(limit)
        self._tasks: set[asyncio.Task] = set()

    async def read(self, path: str) -> bytes:
        async with self._sem:
            return await asyncio.to_thread(_slurp, path)

    async def start(self, path: str) -> asyncio.Task | None:
        await self._sem.acquire()  # leak: not released for a path that does not exist
        if not os.path.exists(path):
            return None
        task = asyncio.create_task(self._read_and_release(path))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def start_known(self, path: str) -> asyncio.Task:
        await self._sem.acquire()  # clean: near miss, the task releases it in finally
        return asyncio.create_task(self._read_and_release(path))

    async def _read_and_release(self, path: str) -> bytes:
        try:
            return await asyncio.to_thread(_slurp, path)
        finally:
            self._sem.release()


def _slurp(path: str) -> bytes:
    with open(path, "rb") as f:
        return f.read()
