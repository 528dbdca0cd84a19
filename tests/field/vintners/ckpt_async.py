"""Asynchronous sharded checkpointing: stage to host, write from a background thread."""
from __future__ import annotations

import io
import json
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

log = logging.getLogger("ckpt")


class StagingArea:
    """Host memory budget for checkpoint data that waits to be written; reservations are plain byte counts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = 0
        self._cv = threading.Condition()

    def reserve(self, nbytes: int) -> "Reservation":
        with self._cv:
            while self.reserved + nbytes > self.capacity and self.reserved > 0:
                self._cv.wait()
            self.reserved += nbytes
        return Reservation(self, nbytes)

    def reserve_nowait(self, nbytes: int) -> Optional["Reservation"]:
        with self._cv:
            if self.reserved + nbytes > self.capacity:
                return None
            self.reserved += nbytes
        return Reservation(self, nbytes)

    def _give(self, nbytes: int) -> None:
        with self._cv:
            self.reserved -= nbytes
            self._cv.notify_all()


@dataclass(eq=False)
class Reservation:
    area: StagingArea
    nbytes: int
    open: bool = True

    def cancel(self) -> None:
        if self.open:
            self.open = False
            self.area._give(self.nbytes)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.cancel()


@dataclass
class WriteJob:
    path: Path
    payload: Dict[str, torch.Tensor]
    hold: Reservation
    attempt: int = 0


def _nbytes(state: Dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in state.values())


class AsyncCheckpointer:
    def __init__(self, root: Path, area: StagingArea, max_attempts: int = 3) -> None:
        self.root = root
        self.area = area
        self.max_attempts = max_attempts
        self._jobs: "queue.Queue[Optional[WriteJob]]" = queue.Queue()
        self._deferred: List[WriteJob] = []
        self._thread = threading.Thread(target=self._loop, name="ckpt-writer", daemon=True)
        self._thread.start()

    # ---- producer side --------------------------------------------------------------------

    def save(self, step: int, shard: int, state: Dict[str, torch.Tensor]) -> Path:
        hold = self.area.reserve(_nbytes(state))  # clean: near miss, in the job, the writer cancels it
        payload = {k: v.to("cpu", copy=True) for k, v in state.items()}
        path = self.root / f"step{step:08d}" / f"shard{shard:05d}.pt"
        self._jobs.put(WriteJob(path, payload, hold))
        return path

    def save_if_room(self, step: int, shard: int, state: Dict[str, torch.Tensor]) -> bool:
        hold = self.area.reserve_nowait(_nbytes(state))  # leak: existing shard: no cancel
        if hold is None:
            return False
        path = self.root / f"step{step:08d}" / f"shard{shard:05d}.pt"
        if path.exists():
            log.info("%s is already there", path)
            return True
        payload = {k: v.to("cpu", copy=True) for k, v in state.items()}
        self._jobs.put(WriteJob(path, payload, hold))
        return True

    def defer(self, step: int, state: Dict[str, torch.Tensor]) -> None:
        """Keep for flush_deferred(), e.g. until the evaluation says the step is worth it."""
        hold = self.area.reserve(_nbytes(state))  # clean: near miss, flush_deferred() queues or cancels it
        path = self.root / f"step{step:08d}" / "deferred.pt"
        self._deferred.append(WriteJob(path, dict(state), hold))

    def flush_deferred(self, keep_last: int) -> int:
        jobs, self._deferred = self._deferred, []
        cut = max(len(jobs) - keep_last, 0)
        for job in jobs[:cut]:
            job.hold.cancel()
        for job in jobs[cut:]:
            self._jobs.put(job)
        return cut

    def close(self) -> None:
        self.flush_deferred(0)
        self._jobs.put(None)
        self._thread.join()
        while not self._jobs.empty():
            late = self._jobs.get_nowait()
            if late is not None:
                late.hold.cancel()

    # ---- writer side ----------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            ok = self._write(job)
            if ok or job.attempt + 1 >= self.max_attempts:
                job.hold.cancel()
                continue
            job.attempt += 1
            time.sleep(0.1 * job.attempt)
            self._jobs.put(job)

    def _write(self, job: WriteJob) -> bool:
        job.path.parent.mkdir(parents=True, exist_ok=True)
        tmp = job.path.with_suffix(".tmp")
        buf = io.BytesIO()
        torch.save(job.payload, buf)
        with open(tmp, "wb") as f:  # clean: closed by with
            f.write(buf.getvalue())
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, job.path)
        return True


class InlineCheckpointer:
    """Writes in the calling thread; keeps a list of finished files for the manifest."""

    def __init__(self, root: Path, area: StagingArea) -> None:
        self.root = root
        self.area = area
        self._journal = open(root / "journal.txt", "a")  # clean: close() closes it
        self._trace = open(root / "trace.jsonl", "a")  # leak: close() ends the journal only
        self.done: List[str] = []

    def save(self, name: str, state: Dict[str, torch.Tensor]) -> int:
        size = _nbytes(state)
        with self.area.reserve(size):  # clean: cancelled by with
            torch.save({k: v.cpu() for k, v in state.items()}, self.root / name)
        self._journal.write(f"{name} {size}\n")
        self._trace.write(json.dumps({"t": time.time(), "name": name}) + "\n")
        self.done.append(name)
        return size

    def save_parts(self, name: str, parts: List[Dict[str, torch.Tensor]]) -> int:
        written = 0
        hold = self.area.reserve(max(map(_nbytes, parts), default=0))  # clean: cancelled on both returns
        for i, part in enumerate(parts):
            if not part:
                hold.cancel()
                return written
            torch.save(part, self.root / f"{name}.{i}")
            written += 1
        hold.cancel()
        return written

    def save_streamed(self, name: str, state: Dict[str, torch.Tensor]) -> List[str]:
        files: List[str] = []
        hold: Optional[Reservation] = None
        for key, tensor in state.items():
            size = tensor.numel() * tensor.element_size()
            hold = self.area.reserve(size)  # leak: rebound each turn, only the last one is cancelled
            file = f"{name}.{key}"
            torch.save(tensor.cpu(), self.root / file)
            files.append(file)
        if hold is not None:
            hold.cancel()
        return files

    def close(self) -> None:
        self._journal.close()


def read_manifest(root: Path) -> Dict[str, Any]:
    f = open(root / "manifest.json")  # leak: returned from json without closing
    data = json.load(f)
    if data.get("version", 1) > 2:
        log.warning("manifest is newer than this reader")
    return data


def write_manifest(root: Path, names: List[str]) -> None:
    out = open(root / "manifest.json", "w")  # clean: closed in finally
    try:
        json.dump({"version": 2, "files": sorted(names)}, out)
    finally:
        out.close()


def first_line(paths: List[Path]) -> Optional[str]:
    """The header of the first journal that has one."""
    for p in paths:
        f = open(p)  # leak: an empty journal continues without closing
        line = f.readline()
        if not line:
            continue
        f.close()
        return line.rstrip("\n")
    return None


def last_lines(paths: List[Path], n: int) -> Dict[str, List[str]]:
    tails: Dict[str, List[str]] = {}
    for p in paths:
        f = open(p)  # clean: near miss, closed before the continue
        lines = f.readlines()
        f.close()
        if not lines:
            continue
        tails[p.name] = lines[-n:]
    return tails


class SnapshotWindow:
    """Keeps the last k snapshots in host memory for a quick roll-back."""

    def __init__(self, area: StagingArea, k: int) -> None:
        self.area = area
        self.k = k
        self._snaps: Dict[int, Dict[str, torch.Tensor]] = {}
        self._holds: Dict[int, Reservation] = {}

    def take(self, step: int, state: Dict[str, torch.Tensor]) -> bool:
        hold = self.area.reserve_nowait(_nbytes(state))  # leak: drop() removes the hold without cancelling
        if hold is None:
            return False
        self._snaps[step] = {k: v.to("cpu", copy=True) for k, v in state.items()}
        self._holds[step] = hold
        while len(self._snaps) > self.k:
            self.drop(min(self._snaps))
        return True

    def drop(self, step: int) -> None:
        del self._snaps[step]
        del self._holds[step]

    def restore(self, state: Dict[str, torch.Tensor]) -> int:
        step = max(self._snaps)
        for k, v in self._snaps[step].items():
            state[k].copy_(v)
        return step
