"""Checkpoint staging: shards are copied to host memory and written by background threads."""
from __future__ import annotations

import json
import logging
import os
import queue
import struct
import threading
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Mapping, Optional

import torch

log = logging.getLogger("ckpt")
MAGIC = b"SHRD"


class ByteBudget:
    """How many bytes of host memory staging may hold at once."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._cond = threading.Condition()

    def reserve(self, n: int, timeout: Optional[float] = None) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: self._left >= n, timeout):
                return False
            self._left -= n
            return True

    def refund(self, n: int) -> None:
        with self._cond:
            self._left += n
            self._cond.notify_all()


@dataclass
class StagedChunk:
    name: str
    nbytes: int
    payload: bytearray = field(repr=False)


class StagingArea:
    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.live = 0

    def stage(self, name: str, t: torch.Tensor) -> StagedChunk:
        n = t.numel() * t.element_size()
        self._budget.reserve(n)  # clean: near miss, belongs to the chunk, retire refunds it
        self.live += 1
        return StagedChunk(name, n, bytearray(t.contiguous().cpu().numpy().tobytes()))

    def retire(self, chunk: StagedChunk) -> None:
        chunk.payload = bytearray()
        self.live -= 1
        self._budget.refund(chunk.nbytes)


def open_shard(root: Path, rank: int, mode: str = "rb") -> IO[bytes]:
    path = root / f"rank{rank:05d}.shard"
    return open(path, mode)  # clean: handed on to the caller


def read_header(root: Path, rank: int) -> Optional[int]:
    f = open_shard(root, rank)  # leak: a file of another kind is not closed
    if f.read(4) != MAGIC:
        log.warning("rank %d: not a shard", rank)
        return None
    (first,) = struct.unpack("<Q", f.read(8))
    f.close()
    return first


def save_delta(budget: ByteBudget, out: IO[bytes], old: Mapping[str, int], state: Mapping[str, bytes]) -> int:
    need = sum(len(b) for b in state.values())
    if not budget.reserve(need, timeout=30.0):  # leak: nothing is refunded when no shard has changed
        log.warning("no staging memory for the delta")
        return 0
    changed = {k: b for k, b in state.items() if hash(b) != old.get(k)}
    if not changed:
        return 0
    written = 0
    for name, blob in changed.items():
        out.write(name.encode() + b"\0" + blob)
        written += len(blob)
    budget.refund(need)
    return written


def save_on_executor(pool: Executor, budget: ByteBudget, path: Path, blob: bytes) -> Future:
    n = len(blob)
    budget.reserve(n)  # clean: near miss, the future's callback refunds it
    fut = pool.submit(path.write_bytes, blob)
    fut.add_done_callback(lambda _f: budget.refund(n))
    return fut


@dataclass
class WriteJob:
    step: int
    rank: int
    chunks: list[StagedChunk]


class AsyncSaver:
    """One writer thread; every job is written in the order of its steps."""

    def __init__(self, root: Path, area: StagingArea) -> None:
        self._root, self._area = root, area
        self._jobs: queue.Queue[Optional[WriteJob]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def save(self, step: int, rank: int, state: Mapping[str, torch.Tensor]) -> None:
        chunks = [self._area.stage(k, t) for k, t in state.items()]  # clean: near miss, the writer thread retires them
        self._jobs.put(WriteJob(step, rank, chunks))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with open_shard(self._root, job.rank, "wb") as out:  # clean: closed by with
                    for chunk in job.chunks:
                        out.write(chunk.payload)
            except OSError:
                log.exception("step %d lost", job.step)
            finally:
                for chunk in job.chunks:
                    self._area.retire(chunk)


class LatestSaver:
    """As AsyncSaver, but a job that has been overtaken by a newer step isn't written."""

    def __init__(self, root: Path, area: StagingArea) -> None:
        self._root, self._area = root, area
        self._jobs: queue.Queue[Optional[WriteJob]] = queue.Queue()
        self._newest = -1
        self.overtaken = 0

    def save(self, step: int, rank: int, state: Mapping[str, torch.Tensor]) -> None:
        job = WriteJob(step, rank, [])
        for name, t in state.items():
            job.chunks.append(self._area.stage(name, t))  # leak: an overtaken job goes without retiring its chunks
        self._newest = max(self._newest, step)
        self._jobs.put(job)

    def run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                break
            if job.step < self._newest:
                self.overtaken += 1
                continue
            out = open_shard(self._root, job.rank, "wb")  # clean: closed after the loop over the chunks
            for chunk in job.chunks:
                out.write(chunk.payload)
                self._area.retire(chunk)
            out.close()


class ManifestLog:
    """Append-only list of finished steps; a new file for every thousand."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._file: Optional[IO[str]] = None
        self._part = -1

    def record(self, step: int, **fields) -> None:
        part = step // 1000
        if part != self._part:
            path = self._root / f"manifest.{part}.jsonl"
            self._file = open(path, "a")  # leak: the former part's file is overwritten while open
            self._part = part
        self._file.write(json.dumps({"step": step, **fields}) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def merge_shards(root: Path, ranks: int, into: Path) -> int:
    sources = []
    for rank in range(ranks):
        f = open_shard(root, rank)  # leak: an empty shard is left out of the list and stays open
        if os.fstat(f.fileno()).st_size <= len(MAGIC):
            continue
        sources.append(f)
    copied = 0
    with open(into, "wb") as out:  # clean: closed by with
        for f in sources:
            f.seek(len(MAGIC))
            copied += out.write(f.read())
            f.close()
    return copied
