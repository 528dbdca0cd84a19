"""Gradient buckets and asynchronous checkpoints of a fine-tuning job."""
from __future__ import annotations

import os
import threading
from typing import Callable, Dict, List, Optional, TextIO


class Bucket:
    def __init__(self, idx: int, capacity: int) -> None:
        self.idx = idx
        self.capacity = capacity
        self.grads: List[float] = []

    @property
    def full(self) -> bool:
        return len(self.grads) >= self.capacity


class BucketAllocator:
    def __init__(self, count: int, capacity: int) -> None:
        self._free: List[Bucket] = [Bucket(i, capacity) for i in range(count)]
        self._inflight = threading.BoundedSemaphore(count)

    def acquire_bucket(self) -> Optional[Bucket]:
        if not self._inflight.acquire(blocking=False):  # clean: near miss, handed on with the bucket, release_bucket gives it back
            return None
        return self._free.pop()

    def release_bucket(self, bucket: Bucket) -> None:
        bucket.grads.clear()
        self._free.append(bucket)
        self._inflight.release()


class Reducer:
    """Fills buckets in backward order and all-reduces the full ones."""

    def __init__(self, alloc: BucketAllocator, reduce: Callable[[List[float]], bool]) -> None:
        self.alloc = alloc
        self.reduce = reduce
        self.current: Optional[Bucket] = None
        self.pending: List[Bucket] = []
        self.no_sync = False

    def add(self, grad: float) -> None:
        if self.current is None or self.current.full:
            if self.current is not None:
                self.pending.append(self.current)
            self.current = self.alloc.acquire_bucket()  # clean: near miss, the full one moved to pending, finalize releases both
            if self.current is None:
                self.finalize()
                self.current = self.alloc.acquire_bucket()  # clean: near miss, finalize freed all, and finalizes this one too
        self.current.grads.append(grad)

    def finalize(self) -> int:
        if self.current is not None:
            self.pending.append(self.current)
            self.current = None
        n = 0
        while self.pending:
            bucket = self.pending.pop()
            if not self.no_sync:
                self.reduce(bucket.grads)
            self.alloc.release_bucket(bucket)
            n += 1
        return n

    def reduce_now(self, grads: List[float]) -> bool:
        bucket = self.alloc.acquire_bucket()  # leak: gradients with a NaN return before the release
        if bucket is None:
            return self.reduce(grads)
        bucket.grads.extend(grads)
        if any(g != g for g in bucket.grads):
            return False
        ok = self.reduce(bucket.grads)
        self.alloc.release_bucket(bucket)
        return ok

    def rebuild(self, order: List[int]) -> None:
        """Buckets are made anew after the first step has shown the order."""
        fresh: Dict[int, Bucket] = {}
        for idx in order:
            bucket = self.alloc.acquire_bucket()  # leak: a repeated index overwrites its entry
            if bucket is None:
                break
            fresh[idx] = bucket
        for bucket in fresh.values():
            self.pending.append(bucket)
        self.finalize()


class CheckpointSlot:
    """Permit to have a snapshot in memory; at most two exist."""

    _permits = threading.Semaphore(2)

    def __init__(self, step: int) -> None:
        self.step = step
        self.held = False

    def __enter__(self) -> "CheckpointSlot":
        self._permits.acquire()  # leak: __exit__ returns early for step zero
        self.held = True
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.step:
            return
        self.held = False
        self._permits.release()


class AsyncCheckpointer:
    def __init__(self, folder: str, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._io = threading.Lock()
        self._log: Optional[TextIO] = None
        self._metrics: Optional[TextIO] = None

    def save(self, step: int, blob: bytes) -> str:
        path = os.path.join(self.folder, f"step{step}.pt")
        with CheckpointSlot(step):  # clean: with, the fault is in the slot's own exit
            with open(path, "wb") as f:  # clean: with
                f.write(blob)
        return path

    def save_background(self, step: int, blob: bytes) -> Optional[threading.Thread]:
        if not self._io.acquire(blocking=False):  # clean: near miss, the writer thread releases
            return None
        thread = threading.Thread(target=self._write, args=(step, blob))
        thread.start()
        return thread

    def _write(self, step: int, blob: bytes) -> None:
        try:
            self.save(step, blob)
        finally:
            self._io.release()

    def log(self, line: str) -> None:
        if self._log is None:
            self._log = open(os.path.join(self.folder, "ckpt.log"), "a")  # clean: opened once, close closes it
        self._log.write(line + "\n")

    def start_metrics(self, run: str) -> None:
        self._metrics = open(os.path.join(self.folder, f"{run}.metrics"), "a")  # leak: starting another run overwrites the handle
        self._metrics.write("step,loss\n")

    def latest(self) -> Optional[bytes]:
        found = sorted(n for n in os.listdir(self.folder) if n.endswith(".pt"))
        for name in reversed(found):
            try:
                f = open(os.path.join(self.folder, name), "rb")  # leak: an empty file is skipped by continue, unclosed
            except OSError:
                continue
            blob = f.read()
            if not blob:
                continue
            f.close()
            return blob
        return None

    def prune(self) -> int:
        self._io.acquire()  # leak: few files return with the lock held
        found = sorted(os.listdir(self.folder))
        if len(found) <= self.keep:
            return 0
        for name in found[: -self.keep]:
            os.remove(os.path.join(self.folder, name))
        self._io.release()
        return len(found) - self.keep

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
