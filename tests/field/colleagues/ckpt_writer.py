"""Checkpoint writer: staging slots guarded by a semaphore, flushed by threads."""
from __future__ import annotations

import json
import os
import queue
import threading
from dataclasses import dataclass
from typing import IO, Optional

import torch

class StagingRing:
    """`depth` host slots; indices wander through a queue."""

    def __init__(self, depth: int, nbytes: int) -> None:
        self.bufs = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(depth)]
        self._idle: "queue.Queue[int]" = queue.Queue()
        for i in range(depth):
            self._idle.put(i)

    def check_out(self, timeout: Optional[float] = None) -> int:
        """Slot number, or -1 after the timeout."""
        try:
            return self._idle.get(timeout=timeout)
        except queue.Empty:
            return -1

    def check_in(self, slot: int) -> None:
        self._idle.put(slot)

@dataclass
class WriteJob:
    path: str
    slot: int
    nbytes: int

class ShardWriter:
    def __init__(self, ring: StagingRing, workers: int) -> None:
        self.ring = ring
        self.jobs: "queue.Queue[Optional[WriteJob]]" = queue.Queue()
        self.io_gate = threading.BoundedSemaphore(2)
        self.failed: list[str] = []
        self.threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(workers)]
        for t in self.threads:
            t.start()

    def submit(self, path: str, t: torch.Tensor) -> bool:
        slot = self.ring.check_out(timeout=30.0)  # clean: near miss, job carries it; _loop checks in
        if slot < 0:
            return False
        self.ring.bufs[slot][: t.nbytes].copy_(t.flatten().view(torch.uint8))
        self.jobs.put(WriteJob(path, slot, t.nbytes))
        return True

    def submit_if_changed(self, path: str, t: torch.Tensor, digests: dict[str, int]) -> bool:
        slot = self.ring.check_out(timeout=30.0)  # leak: unchanged shard returns with the slot out
        if slot < 0:
            return False
        self.ring.bufs[slot][: t.nbytes].copy_(t.flatten().view(torch.uint8))
        digest = int(self.ring.bufs[slot][: t.nbytes].sum())
        if digests.get(path) == digest:
            return False
        digests[path] = digest
        self.jobs.put(WriteJob(path, slot, t.nbytes))
        return True

    def _loop(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                self._flush(job)
            except OSError as e:
                self.failed.append(f"{job.path}: {e}")
            finally:
                self.ring.check_in(job.slot)

    def _flush(self, job: WriteJob) -> None:
        self.io_gate.acquire()  # clean: finally releases the gate
        try:
            with open(job.path + ".tmp", "wb") as f:  # clean: with closes it
                f.write(self.ring.bufs[job.slot][: job.nbytes].numpy().tobytes())
            os.replace(job.path + ".tmp", job.path)
        finally:
            self.io_gate.release()

    def verify(self, paths: list[str]) -> list[str]:
        bad = []
        for p in paths:
            self.io_gate.acquire()  # leak: missing file continues without release
            if not os.path.exists(p):
                bad.append(p)
                continue
            if os.path.getsize(p) == 0:
                bad.append(p)
            self.io_gate.release()
        return bad

    def write_meta(self, path: str, meta: dict) -> bool:
        if not self.io_gate.acquire(timeout=5.0):  # clean: near miss, not held on False; otherwise finally
            return False
        try:
            f = open(path, "w")  # leak: never closed, the handle is dropped
            json.dump(meta, f)
        finally:
            self.io_gate.release()
        return True

class ManifestLog:
    """Append-only manifest; one handle at a time."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.fh: Optional[IO[str]] = None
        self.index: Optional[IO[str]] = None

    def rotate(self, step: int) -> None:
        if self.fh is not None:
            self.fh.close()
        self.fh = open(os.path.join(self.root, f"m{step}.log"), "a")  # clean: near miss, old handle closed first; close() ends it
        if self.index is None:
            self.index = open(os.path.join(self.root, "index"), "a")  # leak: close() forgets the index handle

    def note(self, line: str) -> None:
        if self.fh is not None:
            self.fh.write(line + "\n")
    def close(self) -> None:
        if self.fh is not None:
            self.fh.close()
            self.fh = None

def copy_shard(ring: StagingRing, src: str, dst: str) -> int:
    slot = ring.check_out()  # clean: checked in by the outer finally
    try:
        with open(src, "rb") as f:  # clean: with closes it
            n = f.readinto(ring.bufs[slot].numpy())
        with open(dst, "wb") as g:  # clean: with closes it
            g.write(ring.bufs[slot][:n].numpy().tobytes())
        return n
    finally:
        ring.check_in(slot)

def widest(ring: StagingRing, want: int) -> list[int]:
    """Up to `want` slots for a wide shard; the caller checks each in."""
    got: list[int] = []
    while len(got) < want:
        slot = ring.check_out(timeout=0.1)  # clean: near miss, -1 is no slot; list goes to caller
        if slot < 0:
            break
        got.append(slot)
    return got

def write_wide(ring: StagingRing, parts: list[torch.Tensor], sink: IO[bytes]) -> bool:
    slots = widest(ring, len(parts))  # leak: a short grant returns False with slots out
    if len(slots) < len(parts):
        return False
    for slot, part in zip(slots, parts):
        ring.bufs[slot][: part.nbytes].copy_(part.view(torch.uint8))
        sink.write(ring.bufs[slot][: part.nbytes].numpy().tobytes())
        ring.check_in(slot)
    return True
