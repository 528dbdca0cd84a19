"""Asynchronous sharded checkpoint writer."""
from __future__ import annotations

import json
import os
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Optional

import torch


class StagingArena:
    def __init__(self, buffers: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._q: queue.Queue[torch.Tensor] = queue.Queue()
        for _ in range(buffers):
            self._q.put(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def borrow(self, timeout: Optional[float] = None) -> Optional[torch.Tensor]:
        try:
            return self._q.get(timeout=timeout)
        except queue.Empty:
            return None

    def restore(self, buf: torch.Tensor) -> None:
        self._q.put(buf)


class StepLease:
    """Marks a step directory as in use so that the retention job keeps it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: dict[int, int] = {}
        self._lock = threading.Lock()

    def hold(self, step: int) -> int:
        with self._lock:
            self._held[step] = self._held.get(step, 0) + 1
        return step

    def unhold(self, step: int) -> None:
        with self._lock:
            n = self._held[step] - 1
            if n:
                self._held[step] = n
            else:
                del self._held[step]

    def is_held(self, step: int) -> bool:
        with self._lock:
            return step in self._held


@dataclass
class WriteJob:
    step: int
    name: str
    buf: torch.Tensor
    length: int
    meta: dict = field(default_factory=dict)


class AsyncCheckpointWriter:
    def __init__(self, root: Path, arena: StagingArena, lease: StepLease) -> None:
        self.root = root
        self.arena = arena
        self.lease = lease
        self._pool = ThreadPoolExecutor(max_workers=2)
        self._futures: list[Future] = []
        self._manifest: Optional[BinaryIO] = None

    def step_dir(self, step: int) -> Path:
        return self.root / f"step_{step:08d}"

    def _write(self, job: WriteJob) -> int:
        path = self.step_dir(job.step) / f"{job.name}.bin"
        try:
            with open(path, "wb") as f:  # clean: closed by with
                f.write(memoryview(job.buf[: job.length].numpy()))
            return job.length
        finally:
            self.arena.restore(job.buf)
            self.lease.unhold(job.step)

    def save_tensor(self, step: int, name: str, t: torch.Tensor) -> bool:
        raw = t.detach().contiguous().view(-1).view(torch.uint8)
        if raw.numel() > self.arena.nbytes:
            return self._save_large(step, name, raw)
        buf = self.arena.borrow(timeout=30.0)  # clean: near miss, the write job restores it in its finally clause
        if buf is None:
            return False
        self.lease.hold(step)  # clean: near miss, unhold happens in the worker together with the buffer
        buf[: raw.numel()].copy_(raw)
        job = WriteJob(step, name, buf, raw.numel(), {"dtype": str(t.dtype)})
        self._futures.append(self._pool.submit(self._write, job))
        return True

    def _save_large(self, step: int, name: str, raw: torch.Tensor) -> bool:
        self.lease.hold(step)  # leak: when no staging buffer can be had the step stays held
        buf = self.arena.borrow(timeout=5.0)  # clean: restored after the loop
        if buf is None:
            return False
        with open(self.step_dir(step) / f"{name}.bin", "wb") as f:  # clean: closed by with
            for lo in range(0, raw.numel(), self.arena.nbytes):
                part = raw[lo : lo + self.arena.nbytes]
                buf[: part.numel()].copy_(part)
                f.write(memoryview(buf[: part.numel()].numpy()))
        self.arena.restore(buf)
        self.lease.unhold(step)
        return True

    def save_sharded(self, step: int, shards: dict[str, torch.Tensor]) -> int:
        saved = 0
        for name, shard in shards.items():
            buf = self.arena.borrow(timeout=1.0)  # leak: a shard that exists on disk already is skipped with its buffer in hand
            if buf is None:
                break
            if (self.step_dir(step) / f"{name}.bin").exists():
                continue
            raw = shard.detach().view(-1).view(torch.uint8)
            buf[: raw.numel()].copy_(raw)
            self.lease.hold(step)  # clean: _write unholds once per job
            self._futures.append(self._pool.submit(self._write, WriteJob(step, name, buf, raw.numel())))
            saved += 1
        return saved

    def open_manifest(self, step: int) -> None:
        path = self.step_dir(step) / "manifest.jsonl"
        self._manifest = open(path, "ab")  # leak: opening the manifest of the next step overwrites the open one

    def append_manifest(self, entry: dict) -> None:
        if self._manifest is not None:
            self._manifest.write(json.dumps(entry).encode() + b"\n")
            self._manifest.flush()

    def drain(self) -> int:
        total = 0
        for fut in self._futures:
            try:
                total += fut.result()
            except OSError:
                continue
        self._futures.clear()
        return total

    def close(self) -> None:
        self.drain()
        self._pool.shutdown()
        if self._manifest is not None:
            self._manifest.close()
            self._manifest = None


class CheckpointReader:
    def __init__(self, root: Path, lease: StepLease) -> None:
        self.root = root
        self.lease = lease
        self._step: Optional[int] = None
        self._files: dict[str, BinaryIO] = {}

    def bind(self, step: int) -> bool:
        if self._step is not None:
            self.lease.unhold(self._step)
        self._step = self.lease.hold(step)  # clean: near miss, the earlier step was let go just above and close lets the last go
        return (self.root / f"step_{step:08d}").is_dir()

    def read(self, name: str, offset: int, length: int) -> bytes:
        f = self._files.get(name)
        if f is None:
            f = open(self.root / f"step_{self._step:08d}" / f"{name}.bin", "rb")  # clean: near miss, kept in _files which close walks
            self._files[name] = f
        f.seek(offset)
        return f.read(length)

    def header(self, name: str) -> Optional[dict]:
        path = self.root / f"step_{self._step:08d}" / f"{name}.hdr"
        f = open(path, "rb")  # leak: a header with a foreign magic returns before the close
        magic = f.read(4)
        if magic != b"PTSH":
            return None
        out = json.loads(f.read())
        f.close()
        return out

    def close(self) -> None:
        for f in self._files.values():
            f.close()
        self._files.clear()
        if self._step is not None:
            self.lease.unhold(self._step)
            self._step = None


def prune(root: Path, lease: StepLease, keep: int) -> list[int]:
    steps = sorted(int(p.name[5:]) for p in root.glob("step_*"))
    removed = []
    for step in steps[:-keep]:
        if lease.is_held(step):
            continue
        for p in (root / f"step_{step:08d}").iterdir():
            os.unlink(p)
        removed.append(step)
    return removed


def newest_complete(root: Path, lease: StepLease) -> Optional[int]:
    for path in sorted(root.glob("step_*"), reverse=True):
        step = lease.hold(int(path.name[5:]))  # leak: steps without a commit marker are passed over but stay held
        if (path / ".complete").exists():
            return step
    return None


def load_newest(root: Path, lease: StepLease) -> Optional[dict]:
    step = newest_complete(root, lease)  # clean: unheld in finally
    if step is None:
        return None
    try:
        return torch.load(root / f"step_{step:08d}" / "extra.pt")
    finally:
        lease.unhold(step)
