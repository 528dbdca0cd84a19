"""Checkpoint shards: staging buffers, a bounded set of file handles and writer threads."""
from __future__ import annotations

import os
import queue
import threading
from typing import BinaryIO, Optional

import torch


class StagePool:
    """A fixed number of bytearrays in a queue. lease() blocks, poll() does not."""

    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._q: "queue.Queue[bytearray]" = queue.Queue()
        for _ in range(count):
            self._q.put(bytearray(nbytes))

    def lease(self) -> bytearray:
        return self._q.get()

    def poll(self) -> Optional[bytearray]:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def restore(self, buf: bytearray) -> None:
        self._q.put(buf)

    def resize(self, nbytes: int, count: int) -> int:
        """Replace idle buffers with larger ones."""
        self.nbytes = nbytes
        done = 0
        for _ in range(count):
            buf = self.poll()  # clean: near miss, restored if large enough or replaced by a new one
            if buf is None:
                break
            if len(buf) >= nbytes:
                self.restore(buf)
                continue
            self.restore(bytearray(nbytes))
            done += 1
        return done

    def take_large(self, nbytes: int) -> Optional[bytearray]:
        while True:
            buf = self.poll()  # leak: buffers which are too small are not put back in the queue
            if buf is None:
                return None
            if len(buf) >= nbytes:
                return buf


class HandleTable:
    """At most `limit` open shard files; each has a count of users."""

    def __init__(self, root: str, limit: int):
        self.root = root
        self.limit = limit
        self._open: dict[str, tuple[BinaryIO, int]] = {}
        self._lock = threading.Lock()

    def obtain(self, name: str) -> Optional[BinaryIO]:
        with self._lock:
            if name in self._open:
                fh, n = self._open[name]
                self._open[name] = (fh, n + 1)
                return fh
            if len(self._open) >= self.limit:
                return None
            fh = open(os.path.join(self.root, name), "ab")  # clean: kept in _open, which relinquish() closes
            self._open[name] = (fh, 1)
            return fh

    def relinquish(self, name: str) -> None:
        with self._lock:
            fh, n = self._open[name]
            if n > 1:
                self._open[name] = (fh, n - 1)
                return
            del self._open[name]
        fh.close()


class ShardWriter:
    def __init__(self, stage: StagePool, handles: HandleTable, use_stage: bool = True):
        self.stage = stage
        self.handles = handles
        self.use_stage = use_stage
        self.jobs: "queue.Queue[tuple[str, bytearray, int] | None]" = queue.Queue()
        self.manifest: dict[str, int] = {}

    def enqueue(self, name: str, t: torch.Tensor) -> None:
        raw = t.cpu().numpy().tobytes()
        for at in range(0, len(raw), self.stage.nbytes):
            buf = self.stage.lease()  # clean: near miss, goes through jobs to worker(), which restores it
            piece = raw[at:at + self.stage.nbytes]
            buf[: len(piece)] = piece
            self.jobs.put((name, buf, len(piece)))

    def worker(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            name, buf, n = job
            fh = self.handles.obtain(name)  # clean: relinquished in finally
            if fh is None:
                self.jobs.put(job)
                continue
            try:
                fh.write(memoryview(buf)[:n])
            finally:
                self.handles.relinquish(name)
                self.stage.restore(buf)

    def write_now(self, name: str, t: torch.Tensor) -> bool:
        buf = self.stage.poll()  # leak: the refused handle returns with the buffer held
        if buf is None:
            return False
        fh = self.handles.obtain(name)  # clean: relinquished after the write
        if fh is None:
            return False
        raw = t.cpu().numpy().tobytes()
        buf[: len(raw)] = raw
        fh.write(memoryview(buf)[: len(raw)])
        self.handles.relinquish(name)
        self.stage.restore(buf)
        return True

    def write_flagged(self, name: str, raw: bytes) -> int:
        buf = None
        if self.use_stage:
            buf = self.stage.lease()  # clean: near miss, the second test of use_stage restores it
            buf[: len(raw)] = raw
        out = self.manifest.get(name, 0) + len(raw)
        if self.use_stage:
            self.manifest[name] = out
            self.stage.restore(buf)
        return out

    def write_retry(self, name: str, raw: bytes, tries: int = 3) -> bool:
        for _ in range(tries):
            fh = self.handles.obtain(name)  # leak: a short write goes round again without relinquish()
            if fh is None:
                continue
            if fh.write(raw) != len(raw):
                continue
            self.handles.relinquish(name)
            return True
        return False

    def write_retry_safe(self, name: str, raw: bytes, tries: int = 3) -> bool:
        fh = None
        for _ in range(tries):
            fh = self.handles.obtain(name)  # clean: near miss, None while it retries and relinquished after
            if fh is not None:
                break
        if fh is None:
            return False
        try:
            return fh.write(raw) == len(raw)
        finally:
            self.handles.relinquish(name)

    def merge(self, names: list[str], target: str) -> bool:
        taken = []
        for name in names:
            if self.handles.obtain(name) is None:  # clean: near miss, names in taken are relinquished on both ways
                for t in taken:
                    self.handles.relinquish(t)
                return False
            taken.append(name)
        with open(os.path.join(self.handles.root, target), "wb") as out:  # clean: closed by with
            for name in taken:
                with open(os.path.join(self.handles.root, name), "rb") as src:  # clean: closed by with
                    out.write(src.read())
        for t in taken:
            self.handles.relinquish(t)
        return True

    def touch(self, names: list[str]) -> int:
        return sum(1 for n in names if self.handles.obtain(n) is not None)  # leak: counts handles and relinquishes none

    def header(self, name: str) -> bytes:
        f = open(os.path.join(self.handles.root, name), "rb")  # leak: an unknown magic returns before close()
        magic = f.read(4)
        if magic != b"SHRD":
            return b""
        size = int.from_bytes(f.read(8), "little")
        head = f.read(size)
        f.close()
        return head

    def big_copy(self, raw: bytes, sink) -> bool:
        buf = self.stage.take_large(len(raw))  # clean: restored in finally
        if buf is None:
            return False
        try:
            buf[: len(raw)] = raw
            return sink.accept(memoryview(buf)[: len(raw)])
        finally:
            self.stage.restore(buf)
