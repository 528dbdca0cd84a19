"""Sharded checkpoints: tensors go through pinned host buffers and are written by a small thread pool."""
from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, Optional

import torch

log = logging.getLogger("ckpt")


@dataclass(eq=False)
class HostBuffer:
    data: torch.Tensor
    nbytes: int = 0

    def fill(self, t: torch.Tensor) -> None:
        raw = t.detach().contiguous().view(torch.uint8).reshape(-1)
        self.nbytes = raw.numel()
        self.data[: self.nbytes].copy_(raw, non_blocking=True)

    def view(self) -> memoryview:
        return memoryview(self.data[: self.nbytes].numpy())


class HostBufferPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._cv = threading.Condition()
        blank = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count))
        self._free = deque(HostBuffer(t) for t in blank)
        self.nbytes = nbytes

    def borrow(self) -> HostBuffer:
        with self._cv:
            while not self._free:
                self._cv.wait()
            return self._free.popleft()

    def try_borrow(self) -> Optional[HostBuffer]:
        with self._cv:
            return self._free.popleft() if self._free else None

    def give_back(self, buf: HostBuffer) -> None:
        with self._cv:
            buf.nbytes = 0
            self._free.append(buf)
            self._cv.notify()


@dataclass
class ShardPlan:
    path: Path
    names: list[str]
    replicated: bool = False


@dataclass
class Snapshot:
    step: int
    buffers: dict[str, HostBuffer] = field(default_factory=dict)


class CheckpointWriter:
    def __init__(self, root: Path, pool: HostBufferPool, rank: int, threads: int = 4) -> None:
        self.root = root
        self.pool = pool
        self.rank = rank
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="ckpt")
        self.dir_lock = threading.Lock()
        self.pending: list[Future] = []
        self.journal = None
        self._snapshot: Optional[Snapshot] = None

    # -- staging ---------------------------------------------------------------------------------

    def _stage(self, tensor: torch.Tensor) -> HostBuffer:
        buf = self.pool.borrow()  # clean: handed on, filled
        buf.fill(tensor)
        return buf

    def _stage_if_fits(self, tensor: torch.Tensor) -> Optional[HostBuffer]:
        size = tensor.numel() * tensor.element_size()
        if size > self.pool.nbytes:
            return None
        return self._stage(tensor)  # clean: handed on

    def write_async(self, path: Path, tensor: torch.Tensor) -> Future:
        buf = self._stage(tensor)  # clean: near miss, _flush in the executor gives it back
        fut = self.executor.submit(self._flush, path, buf)
        self.pending.append(fut)
        return fut

    def _flush(self, path: Path, buf: HostBuffer) -> int:
        try:
            with open(path, "wb") as f:  # clean: with
                f.write(buf.view())
                f.flush()
                os.fsync(f.fileno())
            return buf.nbytes
        finally:
            self.pool.give_back(buf)

    def write_pooled(self, path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        offsets: dict[str, int] = {}
        out = open(path, "wb")  # clean: closed at the end, no other way out
        for name, tensor in tensors.items():
            buf = self._stage_if_fits(tensor)  # clean: given back after the write, None takes the slow path
            offsets[name] = out.tell()
            if buf is None:
                out.write(tensor.cpu().numpy().tobytes())
                continue
            out.write(buf.view())
            self.pool.give_back(buf)
        out.close()
        return offsets

    def write_dedup(self, plan: ShardPlan, tensors: dict[str, torch.Tensor]) -> int:
        written = 0
        for name in plan.names:
            buf = self._stage(tensors[name])  # leak: the replica on another rank is skipped with the buffer staged
            if plan.replicated and self.rank != 0:
                log.debug("%s is written by rank 0", name)
                continue
            with open(plan.path / name, "wb") as f:  # clean: with
                written += f.write(buf.view())
            self.pool.give_back(buf)
        return written

    def fingerprint(self, tensor: torch.Tensor) -> int:
        buf = self._stage_if_fits(tensor)  # leak: hashed, and dropped
        if buf is None:
            return hash(tensor.cpu().numpy().tobytes())
        return hash(bytes(buf.view()))

    # -- snapshots -------------------------------------------------------------------------------

    def take_snapshot(self, step: int, state: dict[str, torch.Tensor]) -> bool:
        snap = Snapshot(step)
        for name, tensor in state.items():
            buf = self.pool.try_borrow()  # clean: near miss, dropped snapshots give back, kept ones go to drop_snapshot
            if buf is None:
                self._discard(snap)
                return False
            buf.fill(tensor)
            snap.buffers[name] = buf
        self.drop_snapshot()
        self._snapshot = snap
        return True

    def _discard(self, snap: Snapshot) -> None:
        for buf in snap.buffers.values():
            self.pool.give_back(buf)
        snap.buffers.clear()

    def drop_snapshot(self) -> None:
        if self._snapshot is not None:
            self._discard(self._snapshot)
            self._snapshot = None

    def persist_optimizer(self, step: int, state: dict[str, torch.Tensor]) -> list[str]:
        """Its own snapshot, written at once; large enough tensors only."""
        snap = Snapshot(step)
        for name, tensor in state.items():
            snap.buffers[name] = self._stage(tensor)  # leak: scalars are popped from the snapshot before it is discarded
        done = []
        for name in list(snap.buffers):
            buf = snap.buffers.pop(name)
            if buf.nbytes < 64:
                continue
            (self.root / f"{name}.opt").write_bytes(buf.view())
            self.pool.give_back(buf)
            done.append(name)
        self._discard(snap)
        return done

    # -- directories, metadata -------------------------------------------------------------------

    def claim_directory(self, step: int) -> Optional[Path]:
        self.dir_lock.acquire()  # leak: returns without unlocking when the directory is complete
        target = self.root / f"step_{step:08d}"
        if (target / "COMPLETE").exists():
            return None
        target.mkdir(parents=True, exist_ok=True)
        self.dir_lock.release()
        return target

    def remove_older(self, keep: int) -> int:
        if not self.dir_lock.acquire(blocking=False):  # clean: released in finally when taken
            return 0
        try:
            steps = sorted(self.root.glob("step_*"))
            for old in steps[:-keep]:
                for child in old.iterdir():
                    child.unlink()
                old.rmdir()
            return max(0, len(steps) - keep)
        finally:
            self.dir_lock.release()

    def open_journal(self, name: str) -> None:
        if self.journal is not None:
            self.journal.close()
        self.journal = open(self.root / name, "a", encoding="utf-8")  # clean: closed by the next one or by close

    def read_index(self, step: int) -> dict[str, int]:
        f = open(self.root / f"step_{step:08d}" / "index.json", encoding="utf-8")  # leak: an old version returns unclosed
        head = f.readline()
        if not head.startswith("#v2"):
            return {}
        index = json.load(f)
        f.close()
        return index

    def merge_indexes(self, paths: Iterable[Path]) -> dict[str, int]:
        handles = [open(p, encoding="utf-8") for p in paths]  # clean: near miss, every handle is closed in finally
        merged: dict[str, int] = {}
        try:
            for h in handles:
                merged.update(json.load(h))
        finally:
            for h in handles:
                h.close()
        return merged

    def close(self) -> None:
        for fut in self.pending:
            fut.result()
        self.pending.clear()
        self.drop_snapshot()
        if self.journal is not None:
            self.journal.close()
            self.journal = None
        self.executor.shutdown()
