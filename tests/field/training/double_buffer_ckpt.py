"""Asynchronous checkpointing with two snapshot buffers; the training loop never waits for the disk."""
from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional

import torch

logger = logging.getLogger(__name__)
StateDict = Dict[str, torch.Tensor]


@dataclass
class Snapshot:
    index: int
    tensors: StateDict
    step: int = -1


class SnapshotPool:
    def __init__(self, template: StateDict, n: int = 2) -> None:
        self._snaps = [Snapshot(i, {k: torch.empty_like(v) for k, v in template.items()}) for i in range(n)]
        self._sem = threading.BoundedSemaphore(n)
        self._avail: List[Snapshot] = list(self._snaps)

    def reserve_snapshot(self, wait: bool = True) -> Optional[Snapshot]:
        if not self._sem.acquire(blocking=wait):  # clean: release_snapshot gives the permit back
            return None
        return self._avail.pop()

    def release_snapshot(self, snap: Snapshot) -> None:
        snap.step = -1
        self._avail.append(snap)
        self._sem.release()


class AsyncCheckpointer:
    def __init__(self, pool: SnapshotPool, root: Path) -> None:
        self.pool = pool
        self.root = root
        self._exe = ThreadPoolExecutor(1)
        self._last: Optional[Future] = None
        self._best: Optional[Snapshot] = None
        self._io_lock = threading.Lock()

    def _write(self, snap: Snapshot) -> None:
        try:
            torch.save(snap.tensors, self.root / f"step_{snap.step}.pt")
        finally:
            self.pool.release_snapshot(snap)

    def save(self, step: int, state: StateDict) -> bool:
        snap = self.pool.reserve_snapshot(wait=False)  # clean: near miss, the writer job releases it in its finally
        if snap is None:
            logger.info("step %d skipped, both snapshots busy", step)
            return False
        snap.step = step
        for k, v in state.items():
            snap.tensors[k].copy_(v)
        self._last = self._exe.submit(self._write, snap)
        return True

    def save_if_finite(self, step: int, state: StateDict) -> bool:
        snap = self.pool.reserve_snapshot()  # leak: a non-finite tensor returns before the job is submitted
        snap.step = step
        for k, v in state.items():
            if not torch.isfinite(v).all():
                logger.error("%s is not finite at step %d", k, step)
                return False
            snap.tensors[k].copy_(v)
        self._last = self._exe.submit(self._write, snap)
        return True

    def save_if_changed(self, step: int, state: StateDict, ref: StateDict) -> bool:
        snap = self.pool.reserve_snapshot()  # clean: near miss, either released here or by the job
        changed = False
        for k, v in state.items():
            snap.tensors[k].copy_(v)
            changed = changed or not torch.equal(v, ref[k])
        if not changed:
            self.pool.release_snapshot(snap)
            return False
        snap.step = step
        self._last = self._exe.submit(self._write, snap)
        return True

    def keep_best(self, step: int, state: StateDict) -> None:
        snap = self.pool.reserve_snapshot()  # clean: near miss, the former best is released when it is replaced; drop_best ends it
        snap.step = step
        for k, v in state.items():
            snap.tensors[k].copy_(v)
        if self._best is not None:
            self.pool.release_snapshot(self._best)
        self._best = snap

    def drop_best(self) -> None:
        if self._best is None:
            return
        self.pool.release_snapshot(self._best)
        self._best = None

    def save_sync(self, step: int, state: StateDict) -> bool:
        if not self._io_lock.acquire(timeout=10):  # leak: with both snapshots busy it returns with the lock held
            return False
        snap = self.pool.reserve_snapshot(wait=False)  # clean: _write releases it
        if snap is None:
            return False
        snap.step = step
        snap.tensors.update({k: v.clone() for k, v in state.items()})
        self._write(snap)
        self._io_lock.release()
        return True

    def digest(self, state: StateDict) -> Optional[float]:
        with self._io_lock:
            snap = self.pool.reserve_snapshot(wait=False)  # leak: an empty state leaves the with block, which only frees the lock
            if snap is None:
                return None
            if not state:
                return 0.0
            for k, v in state.items():
                snap.tensors[k].copy_(v)
            total = float(sum(t.double().sum() for t in snap.tensors.values()))
            self.pool.release_snapshot(snap)
            return total

    def wait(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None

    def close(self) -> None:
        self.wait()
        self.drop_best()
        self._exe.shutdown()


def export_merged(pool: SnapshotPool, states: List[StateDict]) -> Optional[StateDict]:
    snap = pool.reserve_snapshot()  # leak: the merged mapping is made from clones, the snapshot is not released
    for t in snap.tensors.values():
        t.zero_()
    for s in states:
        for k, v in s.items():
            snap.tensors[k].add_(v, alpha=1.0 / len(states))
    return {k: t.clone() for k, t in snap.tensors.items()}


def merged_norm(pool: SnapshotPool, states: List[StateDict]) -> float:
    snap = pool.reserve_snapshot()  # clean: released before the return
    for k in snap.tensors:
        snap.tensors[k].copy_(sum(s[k] for s in states) / len(states))
    norm = float(sum(t.norm() ** 2 for t in snap.tensors.values()) ** 0.5)
    pool.release_snapshot(snap)
    return norm
