"""Asynchronous checkpointing: staging regions, flush tickets and writer files."""
from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Callable, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Region:
    start: int
    size: int


class StagingArena:
    """First-fit arena in one pinned tensor."""

    def __init__(self, nbytes: int) -> None:
        self.storage = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._holes: list[Region] = [Region(0, nbytes)]
        self._lock = threading.Lock()

    def carve(self, size: int) -> Optional[Region]:
        with self._lock:
            for i, hole in enumerate(self._holes):
                if hole.size < size:
                    continue
                self._holes[i : i + 1] = [Region(hole.start + size, hole.size - size)] if hole.size > size else []
                return Region(hole.start, size)
        return None

    def fill(self, region: Region) -> None:
        with self._lock:
            self._holes.append(region)
            self._holes.sort(key=lambda r: r.start)
            merged: list[Region] = []
            for r in self._holes:
                if merged and merged[-1].start + merged[-1].size == r.start:
                    merged[-1] = Region(merged[-1].start, merged[-1].size + r.size)
                else:
                    merged.append(r)
            self._holes = merged

    def view(self, region: Region) -> torch.Tensor:
        return self.storage[region.start : region.start + region.size]


class FlushTickets:
    def __init__(self, limit: int) -> None:
        self._sem = threading.Semaphore(limit)

    def try_draw(self) -> bool:
        return self._sem.acquire(blocking=False)

    def stamp(self) -> None:
        self._sem.release()


class WriterFiles:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.live: dict[str, BinaryIO] = {}

    def begin(self, name: str) -> BinaryIO:
        fp = open(self.root / (name + ".tmp"), "wb")
        self.live[name] = fp
        return fp

    def commit(self, name: str) -> None:
        self.live.pop(name).close()
        (self.root / (name + ".tmp")).rename(self.root / name)

    def rollback(self, name: str) -> None:
        self.live.pop(name).close()
        (self.root / (name + ".tmp")).unlink()


@dataclass
class Job:
    name: str
    regions: list[Region] = field(default_factory=list)
    on_done: Optional[Callable[[bool], None]] = None


class CheckpointStager:
    def __init__(self, arena: StagingArena, tickets: FlushTickets, files: WriterFiles) -> None:
        self.arena = arena
        self.tickets = tickets
        self.files = files
        self._jobs: queue.Queue[Optional[Job]] = queue.Queue()
        self._meta: Optional[Region] = None

    def reserve_meta(self, size: int) -> bool:
        if self._meta is None:
            self._meta = self.arena.carve(size)  # clean: near miss, one for the life of the stager, filled by close
        return self._meta is not None

    def close(self) -> None:
        self._jobs.put(None)
        if self._meta is not None:
            self.arena.fill(self._meta)
            self._meta = None

    def stage(self, name: str, tensors: list[torch.Tensor]) -> bool:
        if not self.tickets.try_draw():  # clean: near miss, stamped on failure, else by the flusher
            return False
        job = Job(name)
        for t in tensors:
            region = self.arena.carve(t.nbytes)  # leak: regions carved before the one that fails are not filled
            if region is None:
                logger.warning("arena full while staging %s", name)
                self.tickets.stamp()
                return False
            self.arena.view(region).copy_(t.view(torch.uint8).flatten(), non_blocking=True)
            job.regions.append(region)
        self._jobs.put(job)
        return True

    def stage_or_rollback(self, name: str, tensors: list[torch.Tensor]) -> bool:
        if not self.tickets.try_draw():  # clean: near miss, stamped by _undo or by the flusher
            return False
        job = Job(name)
        for t in tensors:
            region = self.arena.carve(t.nbytes)  # clean: near miss, _undo fills what was carved before
            if region is None:
                self._undo(job)
                return False
            job.regions.append(region)
            self.arena.view(region).copy_(t.view(torch.uint8).flatten())
        self._jobs.put(job)
        return True

    def _undo(self, job: Job) -> None:
        for region in job.regions:
            self.arena.fill(region)
        self.tickets.stamp()

    def flush_loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            ok = self._flush(job)
            if job.on_done is not None:
                job.on_done(ok)

    def _flush(self, job: Job) -> bool:
        fp = self.files.begin(job.name)  # clean: near miss, committed or rolled back
        try:
            for region in job.regions:
                fp.write(self.arena.view(region).numpy().tobytes())
        except OSError:
            logger.exception("flush of %s failed", job.name)
            self.files.rollback(job.name)
            self._undo(job)
            return False
        self.files.commit(job.name)
        self._undo(job)
        return True

    def write_inline(self, name: str, tensor: torch.Tensor) -> bool:
        region = self.arena.carve(tensor.nbytes)  # clean: near miss, filled in the else and in the handler
        if region is None:
            return False
        fp = self.files.begin(name)  # leak: a failed write fills the region but leaves the file open
        try:
            self.arena.view(region).copy_(tensor.view(torch.uint8).flatten())
            fp.write(self.arena.view(region).numpy().tobytes())
        except OSError:
            self.arena.fill(region)
            return False
        else:
            self.arena.fill(region)
        self.files.commit(name)
        return True

    def write_index(self, name: str, index: dict[str, int]) -> bool:
        fp = self.files.begin(name)  # leak: an empty index returns with the file live
        if not index:
            return False
        for key, offset in sorted(index.items()):
            fp.write(f"{key}\t{offset}\n".encode())
        self.files.commit(name)
        return True

    def digest(self, tensor: torch.Tensor) -> Optional[int]:
        if not self.tickets.try_draw():  # clean: near miss, stamped on each way
            return None
        region = self.arena.carve(tensor.nbytes)  # clean: filled below
        if region is None:
            self.tickets.stamp()
            return None
        self.arena.view(region).copy_(tensor.view(torch.uint8).flatten())
        value = int(self.arena.view(region).sum())
        self.arena.fill(region)
        self.tickets.stamp()
        return value

    def snapshot_rng(self, state: torch.Tensor) -> Optional[bytes]:
        region = self.arena.carve(state.nbytes)  # leak: only the bytes are handed out
        if region is None:
            return None
        self.arena.view(region).copy_(state.view(torch.uint8).flatten())
        return self.arena.view(region).numpy().tobytes()

    def drain(self) -> int:
        dropped = 0
        if not self.tickets.try_draw():  # leak: the way out over an empty queue keeps the ticket
            return 0
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return dropped
            if job is None:
                break
            self._undo(job)
            dropped += 1
        self.tickets.stamp()
        return dropped
