"""Asynchronous checkpoint writer: device -> staging chunk -> file, on worker threads."""
from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import threading
from dataclasses import dataclass

import torch

logger = logging.getLogger("ckpt")


class StagingQueue:
    """Fixed set of equal pinned chunks circulating through a queue.Queue."""

    def __init__(self, count: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._q: queue.Queue[torch.Tensor] = queue.Queue()
        for _ in range(count):
            self._q.put(torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True))

    def obtain(self, timeout: float | None = None) -> torch.Tensor | None:
        try:
            return self._q.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            return None

    def obtain_aligned(self, timeout: float, align: int) -> torch.Tensor | None:
        chunk = self.obtain(timeout)  # leak: a chunk with the wrong alignment is not put back
        if chunk is None:
            return None
        if chunk.data_ptr() % align:
            logger.warning("chunk at %x is not aligned to %d", chunk.data_ptr(), align)
            return None
        return chunk

    def restore(self, chunk: torch.Tensor) -> None:
        self._q.put(chunk)


class FileTable:
    """Open files shared by shards of the same target; counted per path."""

    def __init__(self) -> None:
        self._files: dict[str, list] = {}
        self._mu = threading.Lock()

    def open_for(self, path: str):
        with self._mu:
            entry = self._files.get(path)
            if entry is None:
                entry = self._files[path] = [open(path, "r+b" if os.path.exists(path) else "w+b"), 0]  # clean: kept in the table, closed by done_with
            entry[1] += 1
            return entry[0]

    def done_with(self, path: str) -> None:
        with self._mu:
            entry = self._files[path]
            entry[1] -= 1
            if entry[1] == 0:
                entry[0].close()
                del self._files[path]


@dataclass
class WriteJob:
    path: str
    offset: int
    length: int
    chunk: torch.Tensor
    last: bool = False


class _Stop:
    pass


class AsyncWriter:
    def __init__(self, staging: StagingQueue, files: FileTable, workers: int = 2) -> None:
        self.staging = staging
        self.files = files
        self.jobs: queue.Queue = queue.Queue(maxsize=64)
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(workers)]
        for t in self._threads:
            t.start()

    def _loop(self) -> None:
        while True:
            job = self.jobs.get()
            if isinstance(job, _Stop):
                return
            try:
                self._write(job)
            except OSError as e:
                self.errors.append(f"{job.path}: {e}")
            finally:
                self.staging.restore(job.chunk)

    def _write(self, job: WriteJob) -> None:
        f = self.files.open_for(job.path)  # clean: done_with in finally
        try:
            os.pwrite(f.fileno(), job.chunk.numpy()[: job.length], job.offset)
            if job.last:
                os.fsync(f.fileno())
        finally:
            self.files.done_with(job.path)

    def save_tensor(self, t: torch.Tensor, path: str, base: int) -> int:
        raw = t.detach().contiguous().view(torch.uint8).flatten()
        off = 0
        while off < raw.numel():
            n = min(self.staging.chunk_bytes, raw.numel() - off)
            chunk = self.staging.obtain()  # clean: moved into a job, the worker restores it
            chunk[:n].copy_(raw[off:off + n])
            self.jobs.put(WriteJob(path, base + off, n, chunk, off + n == raw.numel()))
            off += n
        return off

    def save_small(self, blob: bytes, path: str, base: int) -> bool:
        chunk = self.staging.obtain(timeout=5.0)  # leak: dropped when the job queue is full
        if chunk is None:
            return False
        chunk[: len(blob)].copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        try:
            self.jobs.put_nowait(WriteJob(path, base, len(blob), chunk, True))
        except queue.Full:
            logger.warning("writer backlog, %s postponed", path)
            return False
        return True

    def save_header(self, blob: bytes, path: str) -> bool:
        chunk = self.staging.obtain(timeout=5.0)  # clean: near miss, restored by hand when the job queue is full
        if chunk is None:
            return False
        chunk[: len(blob)].copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        job = WriteJob(path, 0, len(blob), chunk, True)
        try:
            self.jobs.put_nowait(job)
        except queue.Full:
            self.staging.restore(job.chunk)
            return False
        return True

    def save_with_retry(self, raw: torch.Tensor, path: str, attempts: int = 3) -> bool:
        for i in range(attempts):
            chunk = self.staging.obtain(timeout=2.0)  # leak: a failed write goes round again without restore
            if chunk is None:
                continue
            chunk[: raw.numel()].copy_(raw)
            try:
                self._write(WriteJob(path, 0, raw.numel(), chunk, True))
            except OSError as e:
                logger.info("attempt %d on %s: %s", i, path, e)
                continue
            self.staging.restore(chunk)
            return True
        return False

    def save_with_backoff(self, raw: torch.Tensor, path: str, attempts: int = 3) -> bool:
        chunk = None
        for i in range(attempts):
            if chunk is None:
                chunk = self.staging.obtain(timeout=2.0 * (i + 1))  # clean: near miss, reused across attempts and restored after the loop
            if chunk is None:
                continue
            chunk[: raw.numel()].copy_(raw)
            try:
                self._write(WriteJob(path, 0, raw.numel(), chunk, True))
                break
            except OSError as e:
                logger.info("attempt %d on %s: %s", i, path, e)
        else:
            self.errors.append(path)
        if chunk is not None:
            self.staging.restore(chunk)
        return path not in self.errors

    def close(self) -> None:
        for _ in self._threads:
            self.jobs.put(_Stop())
        for t in self._threads:
            t.join()


class Verifier:
    """Reads back what was written, comparing digests."""

    def __init__(self, staging: StagingQueue, files: FileTable) -> None:
        self.staging = staging
        self.files = files

    def digest(self, path: str, length: int) -> str | None:
        f = self.files.open_for(path)  # leak: no done_with when there is no chunk to read into
        chunk = self.staging.obtain(timeout=1.0)  # clean: restored after the loop
        if chunk is None:
            return None
        h = hashlib.sha256()
        left = length
        while left > 0:
            n = min(left, chunk.numel())
            got = f.readinto(memoryview(chunk.numpy())[:n])
            if not got:
                break
            h.update(chunk.numpy()[:got])
            left -= got
        self.staging.restore(chunk)
        self.files.done_with(path)
        return h.hexdigest()

    def head(self, path: str, n: int) -> bytes:
        with contextlib.ExitStack() as stack:
            f = self.files.open_for(path)  # clean: done_with is on the exit stack
            stack.callback(self.files.done_with, path)
            chunk = self.staging.obtain()  # clean: restore is on the exit stack
            stack.callback(self.staging.restore, chunk)
            f.seek(0)
            got = f.readinto(memoryview(chunk.numpy())[:n])
            return bytes(chunk.numpy()[:got])

    def same_head(self, a: str, b: str, n: int) -> bool:
        fa = self.files.open_for(a)  # clean: done_with in finally
        try:
            if a == b:
                return True
            fb = self.files.open_for(b)  # leak: no done_with when the first file is empty
            head = fa.read(n)
            if not head:
                return False
            same = fb.read(n) == head
            self.files.done_with(b)
            return same
        finally:
            self.files.done_with(a)
