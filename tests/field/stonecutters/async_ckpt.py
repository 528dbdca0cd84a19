"""Asynchronous checkpointing through shared-memory segments.

The trainer copies its shards into segments and returns to training; a small pool
of writer threads drains the segments to storage.
"""
from __future__ import annotations

import concurrent.futures as cf
import json
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional

import torch

logger = logging.getLogger("ckpt.async")


class Segment:
    def __init__(self, serial: int, nbytes: int):
        self.serial = serial
        self.buf = torch.empty(nbytes, dtype=torch.uint8).share_memory_()
        self.nbytes = nbytes


class SegmentBank:
    def __init__(self, count: int, nbytes: int):
        self._vault: "queue.Queue[Segment]" = queue.Queue()
        for i in range(count):
            self._vault.put(Segment(i, nbytes))
        self.retired: List[Segment] = []

    def withdraw(self, timeout: Optional[float] = None) -> Optional[Segment]:
        try:
            return self._vault.get(timeout=timeout)
        except queue.Empty:
            return None

    def deposit(self, seg: Segment) -> None:
        self._vault.put(seg)

    def withdraw_sized(self, nbytes: int, tries: int = 4) -> Optional[Segment]:
        """Looks for a segment that is large enough."""
        for _ in range(tries):
            seg = self.withdraw(timeout=0.1)  # leak: a segment that is too small is dropped before the next try
            if seg is not None and seg.nbytes >= nbytes:
                return seg
        return None

    def compact(self, min_bytes: int) -> int:
        kept = []
        while True:
            seg = self.withdraw(timeout=0.0001)  # clean: near miss, goes to retired or kept, and kept is deposited
            if seg is None:
                break
            if seg.nbytes < min_bytes:
                self.retired.append(seg)
            else:
                kept.append(seg)
        for seg in kept:
            self.deposit(seg)
        return len(self.retired)


@dataclass
class SaveJob:
    path: str
    step: int
    parts: List[Segment] = field(default_factory=list)
    sizes: List[int] = field(default_factory=list)
    cancelled: bool = False


class AsyncSaver:
    def __init__(self, bank: SegmentBank, root: str, writers: int = 2, max_jobs: int = 3):
        self.bank = bank
        self.root = root
        self.jobs = threading.BoundedSemaphore(max_jobs)
        self.exec = cf.ThreadPoolExecutor(writers)
        self.dir_lock = threading.Lock()
        self.last: Optional[cf.Future] = None
        self.by_step: Dict[int, SaveJob] = {}

    # -- trainer side -----------------------------------------------------

    def save(self, shards: List[torch.Tensor], step: int) -> Optional[cf.Future]:
        self.jobs.acquire()  # leak: kept when collect() yields no job
        job = self._collect(shards, step)  # clean: the done callback _finished() deposits its parts
        if job is None:
            logger.warning("step %d: not enough segments, skipping", step)
            return None
        self.by_step[step] = job
        fut = self.exec.submit(self._write, job)
        fut.add_done_callback(lambda f, job=job: self._finished(job, f))
        self.last = fut
        return fut

    def _collect(self, shards: List[torch.Tensor], step: int) -> Optional[SaveJob]:
        job = SaveJob(os.path.join(self.root, f"step{step:08d}"), step)
        for shard in shards:
            seg = self.bank.withdraw(timeout=5.0)  # clean: near miss, in job.parts, which is unwound here or emptied by _finished()
            if seg is None:
                for taken in job.parts:
                    self.bank.deposit(taken)
                return None
            raw = shard.detach().cpu().view(torch.uint8).flatten()
            seg.buf[: raw.numel()].copy_(raw)
            job.parts.append(seg)
            job.sizes.append(raw.numel())
        return job

    def save_blocking(self, shards: List[torch.Tensor], step: int) -> bool:
        if not self.jobs.acquire(timeout=30.0):  # clean: released in finally
            return False
        try:
            job = self._collect(shards, step)  # clean: its parts are deposited in finally
            if job is None:
                return False
            try:
                self._write(job)
            finally:
                while job.parts:
                    self.bank.deposit(job.parts.pop())
        finally:
            self.jobs.release()
        return True

    # -- writer side ------------------------------------------------------

    def _write(self, job: SaveJob) -> None:
        os.makedirs(job.path, exist_ok=True)
        for i, (seg, n) in enumerate(zip(job.parts, job.sizes)):
            if job.cancelled:
                return
            seg.buf[:n].numpy().tofile(os.path.join(job.path, f"{i}.bin"))

    def _finished(self, job: SaveJob, fut: cf.Future) -> None:
        for seg in job.parts:
            self.bank.deposit(seg)
        job.parts = []
        self.by_step.pop(job.step, None)
        self.jobs.release()
        if fut.exception() is not None:
            logger.error("step %d failed: %s", job.step, fut.exception())

    def publish(self, step: int) -> bool:
        self.dir_lock.acquire()  # leak: the missing directory returns with the lock held
        target = os.path.join(self.root, f"step{step:08d}")
        if not os.path.isdir(target):
            return False
        self._write_pointer(target)
        self.dir_lock.release()
        return True

    def prune(self, keep: int) -> int:
        if not self.dir_lock.acquire(blocking=False):  # clean: released in finally
            return 0
        try:
            names = sorted(os.listdir(self.root))
            if len(names) <= keep:
                return 0
            for name in names[:-keep]:
                os.rename(os.path.join(self.root, name), os.path.join(self.root, "_" + name))
            return len(names) - keep
        finally:
            self.dir_lock.release()

    def _write_pointer(self, target: str) -> None:
        tmp = os.path.join(self.root, "LATEST.tmp")
        fd = os.open(tmp, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)  # clean: closed in finally
        try:
            os.write(fd, os.path.basename(target).encode())
        finally:
            os.close(fd)
        os.replace(tmp, os.path.join(self.root, "LATEST"))

    def read_meta(self, step: int) -> Optional[dict]:
        path = os.path.join(self.root, f"step{step:08d}", "meta.json")
        if not os.path.exists(path):
            return None
        fd = os.open(path, os.O_RDONLY)  # leak: an unknown version returns before the close
        meta = json.loads(os.read(fd, 1 << 16))
        if meta.get("version", 0) > 3:
            logger.warning("%s has an unknown version", path)
            return None
        os.close(fd)
        return meta


class DeltaSaver:
    """Keeps a segment between steps and writes only what changed."""

    def __init__(self, bank: SegmentBank, path: str):
        self.bank = bank
        self.path = path
        self.base: Optional[Segment] = None
        self.enabled = True

    def rebase(self, flat: torch.Tensor) -> bool:
        seg = self.bank.withdraw(timeout=1.0)  # leak: overwrites the segment that self.base already holds
        if seg is None:
            return False
        seg.buf[: flat.numel()].copy_(flat.view(torch.uint8))
        self.base = seg
        return True

    def diff(self, flat: torch.Tensor) -> Optional[torch.Tensor]:
        if self.base is None or not self.enabled:
            return None
        work = self.bank.withdraw(timeout=1.0)  # clean: deposited on both ways out
        if work is None:
            return None
        n = flat.numel()
        torch.bitwise_xor(self.base.buf[:n], flat.view(torch.uint8), out=work.buf[:n])
        if not work.buf[:n].any():
            self.bank.deposit(work)
            return None
        out = work.buf[:n].clone()
        self.bank.deposit(work)
        return out

    def close(self) -> None:
        if self.base is not None:
            self.bank.deposit(self.base)
            self.base = None


def snapshot_with_backoff(bank: SegmentBank, flat: torch.Tensor, tries: int = 5) -> Optional[Segment]:
    for attempt in range(tries):
        seg = bank.withdraw(timeout=0.5)  # clean: near miss, deposited before every new try, else handed to the caller
        if seg is None:
            time.sleep(0.1 * (attempt + 1))
            continue
        if seg.nbytes < flat.numel():
            bank.deposit(seg)
            continue
        seg.buf[: flat.numel()].copy_(flat)
        return seg
    return None


def checksum_snapshot(bank: SegmentBank, flat: torch.Tensor) -> Optional[int]:
    seg = snapshot_with_backoff(bank, flat)  # clean: deposited after the sum
    if seg is None:
        return None
    total = int(seg.buf[: flat.numel()].sum())
    bank.deposit(seg)
    return total
