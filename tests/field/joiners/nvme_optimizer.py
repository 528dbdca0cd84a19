"""Optimizer states on NVMe: swap files, staging buffers, background tasks."""
from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, Dict, List, Optional, Sequence


class StagingPool:
    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._bufs: List[bytearray] = [bytearray(nbytes) for _ in range(count)]

    def obtain(self) -> bytearray:
        if not self._bufs:
            raise RuntimeError("staging buffers exhausted")
        return self._bufs.pop()

    def hand_back(self, buf: bytearray) -> None:
        self._bufs.append(buf)

    @property
    def left(self) -> int:
        return len(self._bufs)


@dataclass
class SwapJob:
    key: str
    buf: bytearray
    length: int
    task: Optional[Future] = None


class SwapDir:
    def __init__(self, root: str):
        self.root = root

    def path(self, key: str) -> str:
        return os.path.join(self.root, key + ".swp")

    def write(self, key: str, data: bytes) -> int:
        f = open(self.path(key), "wb")  # clean: closed in finally
        try:
            return f.write(data)
        finally:
            f.close()

    def read_into(self, key: str, buf: bytearray) -> int:
        f = open(self.path(key), "rb")  # leak: empty file returns without close
        n = os.fstat(f.fileno()).st_size
        if n == 0:
            return 0
        f.readinto(memoryview(buf)[:n])
        f.close()
        return n

    def open_for(self, key: str) -> BinaryIO:
        return open(self.path(key), "rb")  # clean: the caller closes

    def same(self, a: str, b: str) -> bool:
        fa = self.open_for(a)  # leak: not closed when b is missing
        try:
            fb = self.open_for(b)  # clean: near miss, FileNotFoundError means not opened, else closed
        except FileNotFoundError:
            return False
        equal = fa.read() == fb.read()
        fa.close()
        fb.close()
        return equal


class StateSwapper:
    """Swaps optimizer states out in the background; each job owns its staging buffer until reaped."""

    def __init__(self, staging: StagingPool, swap: SwapDir, workers: int = 2):
        self.staging = staging
        self.swap = swap
        self.exec = ThreadPoolExecutor(workers)
        self.jobs: Dict[str, SwapJob] = {}
        self.cached: Dict[str, bytearray] = {}
        self.errors: List[str] = []

    def swap_out(self, key: str, state: bytes) -> None:
        self.wait(key)
        buf = self.staging.obtain()  # clean: owned by the job, wait hands it back
        buf[: len(state)] = state
        job = SwapJob(key, buf, len(state))
        job.task = self.exec.submit(self.swap.write, key, bytes(buf[: len(state)]))
        self.jobs[key] = job

    def wait(self, key: str) -> bool:
        job = self.jobs.pop(key, None)
        if job is None:
            return False
        try:
            job.task.result()
        except OSError as exc:
            self.errors.append(f"{key}: {exc}")
        self.staging.hand_back(job.buf)
        return True

    def swap_out_callback(self, key: str, state: bytes) -> Future:
        buf = self.staging.obtain()  # clean: near miss, done callback hands it back whatever the outcome
        buf[: len(state)] = state
        fut = self.exec.submit(self.swap.write, key, bytes(buf[: len(state)]))
        fut.add_done_callback(lambda _f: self.staging.hand_back(buf))
        return fut

    def swap_out_if_dirty(self, key: str, state: bytes, dirty: bool) -> Optional[Future]:
        buf = self.staging.obtain()  # leak: handed back by the task only, clean states start none
        buf[: len(state)] = state

        def job() -> int:
            try:
                return self.swap.write(key, bytes(buf[: len(state)]))
            finally:
                self.staging.hand_back(buf)

        return self.exec.submit(job) if dirty else None

    def swap_in(self, key: str) -> Optional[bytes]:
        buf = self.staging.obtain()  # leak: OSError is noted and None returned without hand_back
        try:
            n = self.swap.read_into(key, buf)
        except OSError as exc:
            self.errors.append(str(exc))
            return None
        data = bytes(buf[:n])
        self.staging.hand_back(buf)
        return data

    def prefetch(self, keys: Sequence[str]) -> int:
        for key in keys:
            if key in self.cached:
                continue
            if self.staging.left == 0:
                break
            buf = self.staging.obtain()  # clean: near miss, handed back if the read fails, else kept in cached
            try:
                self.swap.read_into(key, buf)
            except OSError:
                self.staging.hand_back(buf)
                continue
            self.cached[key] = buf
        return len(self.cached)

    def consume(self, key: str, n: int) -> bytes:
        buf = self.cached.pop(key, None)
        if buf is None:
            return b""
        data = bytes(buf[:n])
        self.staging.hand_back(buf)
        return data

    def close(self) -> None:
        for key in list(self.jobs):
            self.wait(key)
        for buf in self.cached.values():
            self.staging.hand_back(buf)
        self.cached.clear()
        self.exec.shutdown()
