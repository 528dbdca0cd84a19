"""Asynchronous checkpoint writer with staging slabs, shard locks and a manifest."""
from __future__ import annotations

import json
import os
import queue
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Optional

import torch


class SlabPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: queue.Queue[torch.Tensor] = queue.Queue()
        for _ in range(count):
            self._free.put(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def rent(self, timeout: Optional[float] = None) -> Optional[torch.Tensor]:
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            return None

    def give(self, slab: torch.Tensor) -> None:
        self._free.put(slab)


class ShardLocks:
    """Lock files, so that two ranks never write one shard."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def grab(self, shard: str) -> Optional[Path]:
        path = self.root / f"{shard}.lock"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))  # clean: near miss, the descriptor is closed at once, the file itself is the lock
        except FileExistsError:
            return None
        return path

    def drop(self, path: Path) -> None:
        path.unlink(missing_ok=True)


@dataclass
class WriteJob:
    shard: str
    slab: torch.Tensor
    nbytes: int
    lock: Path


class CheckpointWriter:
    def __init__(self, root: Path, slabs: SlabPool, locks: ShardLocks, rank: int) -> None:
        self.root = root
        self.slabs = slabs
        self.locks = locks
        self.rank = rank
        self._jobs: queue.Queue[Optional[WriteJob]] = queue.Queue()
        self._log: IO[str] = (root / f"rank{rank}.log").open("a")  # clean: near miss, open for the writer's life and closed by close()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def save(self, shard: str, tensor: torch.Tensor) -> bool:
        lock = self.locks.grab(shard)  # leak: a busy slab pool returns False with the lock file left behind
        if lock is None:
            return False
        slab = self.slabs.rent(timeout=5.0)  # clean: moved into the job, and _run gives it back
        if slab is None:
            return False
        flat = tensor.detach().contiguous().view(torch.uint8).flatten()
        slab[: flat.numel()].copy_(flat, non_blocking=True)
        self._jobs.put(WriteJob(shard, slab, flat.numel(), lock))
        return True

    def save_blocking(self, shard: str, tensor: torch.Tensor) -> bool:
        slab = self.slabs.rent()  # clean: given back on both returns below
        if slab is None:
            return False
        lock = self.locks.grab(shard)  # clean: dropped in finally
        if lock is None:
            self.slabs.give(slab)
            return False
        try:
            flat = tensor.detach().contiguous().view(torch.uint8).flatten()
            slab[: flat.numel()].copy_(flat)
            self._write(shard, slab, flat.numel())
            return True
        finally:
            self.locks.drop(lock)
            self.slabs.give(slab)

    def save_split(self, shard: str, tensor: torch.Tensor) -> int:
        flat = tensor.detach().contiguous().view(torch.uint8).flatten()
        parts = 0
        for start in range(0, flat.numel(), self.slabs.nbytes):
            piece = flat[start: start + self.slabs.nbytes]
            slab = self.slabs.rent()  # leak: break for a locked part comes before the slab is queued or given back
            if slab is None:
                break
            lock = self.locks.grab(f"{shard}.{parts}")  # clean: near miss, None breaks and a lock is moved into the job
            if lock is None:
                break
            slab[: piece.numel()].copy_(piece)
            self._jobs.put(WriteJob(f"{shard}.{parts}", slab, piece.numel(), lock))
            parts += 1
        return parts

    def _write(self, shard: str, slab: torch.Tensor, nbytes: int) -> None:
        tmp = self.root / f"{shard}.tmp"
        with tmp.open("wb") as fh:  # clean: closed by with
            fh.write(memoryview(slab.numpy())[:nbytes])
        tmp.rename(self.root / f"{shard}.bin")

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                self._write(job.shard, job.slab, job.nbytes)
            except OSError as exc:
                self._log.write(f"{job.shard}: {exc}\n")
            finally:
                self.locks.drop(job.lock)
                self.slabs.give(job.slab)

    def write_manifest(self, meta: dict[str, object]) -> bool:
        lock = self.locks.grab("manifest")  # leak: an OSError is handled by return False and the lock stays
        if lock is None:
            return False
        try:
            (self.root / "manifest.json").write_text(json.dumps(meta))
        except OSError:
            return False
        self.locks.drop(lock)
        return True

    def write_latest(self, tag: str) -> bool:
        lock = self.locks.grab("latest")  # clean: near miss, dropped in both branches
        if lock is None:
            return False
        try:
            (self.root / "latest").write_text(tag)
        except OSError:
            self.locks.drop(lock)
            return False
        self.locks.drop(lock)
        return True

    def prune(self, keep: list[str]) -> int:
        removed = 0
        for path in sorted(self.root.glob("step*")):
            lock = self.locks.grab(path.name)  # clean: near miss, dropped in finally even by continue
            if lock is None:
                continue
            try:
                if path.name in keep:
                    continue
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
            finally:
                self.locks.drop(lock)
        return removed

    def verify(self, shard: str, expected: int) -> bool:
        slab = self.slabs.rent()  # leak: a shard of the wrong length returns before the slab is given back
        if slab is None:
            return False
        with (self.root / f"{shard}.bin").open("rb") as fh:  # clean: closed by with, the early return included
            got = fh.readinto(memoryview(slab.numpy()))
            if got != expected:
                return False
        nonzero = bool(slab[:got].any())
        self.slabs.give(slab)
        return nonzero

    def rotate_log(self, step: int) -> None:
        old = self._log
        self._log = (self.root / f"rank{self.rank}.{step}.log").open("a")  # clean: near miss, the old file is closed right after the exchange
        old.close()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._log.close()
