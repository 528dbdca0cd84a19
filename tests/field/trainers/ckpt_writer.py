"""Asynchronous sharded checkpoint writer.

The training loop copies tensors into host staging chunks and returns at once; writer
threads drain the chunks to disk. Chunks circulate through a blocking queue.
"""
from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, IO, List, Optional

import torch

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
MAGIC = b"SHRD0002"


class StagingChunks:
    def __init__(self, n: int, nbytes: int = CHUNK_BYTES):
        self._q: "queue.LifoQueue[torch.Tensor]" = queue.LifoQueue(n)
        for _ in range(n):
            self._q.put(torch.empty(nbytes, dtype=torch.uint8))

    def fetch(self, timeout: Optional[float] = None) -> Optional[torch.Tensor]:
        try:
            return self._q.get(timeout=timeout)  # clean: returned to the caller
        except queue.Empty:
            return None

    def restore(self, chunk: torch.Tensor) -> None:
        self._q.put(chunk)


@dataclass
class WriteJob:
    path: Path
    offset: int
    nbytes: int
    chunk: torch.Tensor
    done: threading.Event = field(default_factory=threading.Event)
    error: Optional[BaseException] = None


class AsyncCheckpointWriter:
    def __init__(self, root: Path, chunks: StagingChunks, workers: int = 2):
        self.root = root
        self.chunks = chunks
        self.jobs: "queue.Queue[Optional[WriteJob]]" = queue.Queue()
        self.failed: List[WriteJob] = []
        self._state_lock = threading.Lock()
        self._files: Dict[Path, IO[bytes]] = {}
        self._threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(workers)]
        for t in self._threads:
            t.start()

    # ---- producer side ----

    def save_tensor(self, name: str, t: torch.Tensor) -> List[WriteJob]:
        flat = t.detach().contiguous().view(torch.uint8).flatten()
        jobs = []
        for off in range(0, flat.numel(), CHUNK_BYTES):
            piece = flat[off : off + CHUNK_BYTES]
            chunk = self.chunks.fetch()  # clean: near miss, travels in the job, the worker restores it
            chunk[: piece.numel()].copy_(piece)
            job = WriteJob(self.root / f"{name}.bin", off, piece.numel(), chunk)
            self.jobs.put(job)
            jobs.append(job)
        return jobs

    def try_save_small(self, name: str, t: torch.Tensor) -> Optional[WriteJob]:
        """Never blocks the step; optimizer scalars are simply saved next time."""
        chunk = self.chunks.fetch(timeout=0.01)  # leak: a tensor that does not fit returns None with the chunk in hand
        if chunk is None:
            return None
        flat = t.detach().contiguous().view(torch.uint8).flatten()
        if flat.numel() > chunk.numel():
            logger.info("%s too large for the small path", name)
            return None
        chunk[: flat.numel()].copy_(flat)
        job = WriteJob(self.root / f"{name}.bin", 0, flat.numel(), chunk)
        self.jobs.put(job)
        return job

    # ---- consumer side ----

    def _file_for(self, path: Path) -> IO[bytes]:
        with self._state_lock:  # clean: with block
            fh = self._files.get(path)
            if fh is None:
                fh = open(path, "wb")  # clean: near miss, cached in _files and closed in close()
                self._files[path] = fh
            return fh

    def _loop(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            try:
                fd = self._file_for(job.path).fileno()  # clean: cached per path, close() closes it
                os.pwrite(fd, memoryview(job.chunk.numpy())[: job.nbytes], job.offset)
            except OSError as e:
                job.error = e
                self.failed.append(job)
            finally:
                self.chunks.restore(job.chunk)
                job.done.set()

    def rotate(self, path: Path) -> None:
        """Start a new generation of a shard file."""
        with self._state_lock:  # clean: with block
            if path in self._files:
                self._files[path].flush()
                os.replace(path, path.with_suffix(".prev"))
            self._files[path] = open(path, "wb")  # leak: replaces the open handle of the old generation without closing it

    def close(self) -> None:
        for _ in self._threads:
            self.jobs.put(None)
        for t in self._threads:
            t.join()
        for fh in self._files.values():
            fh.close()
        self._files.clear()


def read_header(path: Path) -> Optional[dict]:
    fh = open(path, "rb")  # leak: a foreign magic returns without close
    if fh.read(len(MAGIC)) != MAGIC:
        return None
    size = int.from_bytes(fh.read(8), "little")
    header = json.loads(fh.read(size))
    fh.close()
    return header


def open_shard(path: Path) -> Optional[IO[bytes]]:
    """File positioned behind the header, None if the shard is of another version."""
    fh = open(path, "rb")  # clean: near miss, closed on the version mismatch, else returned
    if fh.read(len(MAGIC)) != MAGIC:
        fh.close()
        return None
    size = int.from_bytes(fh.read(8), "little")
    fh.seek(size, os.SEEK_CUR)
    return fh


def verify(path: Path, digest: str) -> bool:
    fh = open_shard(path)  # clean: near miss, the early return is only for None
    if fh is None:
        return False
    with fh:
        return hashlib.sha256(fh.read()).hexdigest() == digest


def total_payload(paths: List[Path]) -> int:
    total = 0
    for path in paths:
        fh = open_shard(path)  # leak: rebound on every shard and never closed
        if fh is None:
            continue
        total += os.fstat(fh.fileno()).st_size - fh.tell()
    return total


def link_latest(root: Path, step: int, lock: threading.Lock) -> bool:
    if not lock.acquire(timeout=5.0):  # clean: released in the finally
        return False
    try:
        tmp = root / ".latest.tmp"
        with open(tmp, "w") as f:  # clean: with block
            f.write(str(step))
        os.replace(tmp, root / "latest")
    finally:
        lock.release()
    return True
