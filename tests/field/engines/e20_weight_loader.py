"""Streams checkpoint shards through a bounded set of host slabs."""
from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Optional

import torch

logger = logging.getLogger(__name__)


class Slab:
    __slots__ = ("index", "view", "length", "__weakref__")

    def __init__(self, index: int, view: torch.Tensor) -> None:
        self.index = index
        self.view = view
        self.length = 0


class SlabArena:
    """One big allocation cut into slabs, guarded by a condition."""

    def __init__(self, count: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._base = torch.empty(count * slab_bytes, dtype=torch.uint8)
        self._cond = threading.Condition()
        self._free: list[int] = list(range(count))

    def _make(self, index: int) -> Slab:
        lo = index * self.slab_bytes
        return Slab(index, self._base[lo : lo + self.slab_bytes])

    def borrow_slab(self, timeout: Optional[float] = None) -> Optional[Slab]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._free), timeout):
                return None
            index = self._free.pop()  # clean: wrapped as a slab and returned
        return self._make(index)

    def borrow_lowest(self, below: int) -> Optional[Slab]:
        """The free slab with the lowest index, if that is under ``below``."""
        with self._cond:
            if not self._free:
                return None
            self._free.sort(reverse=True)
            index = self._free.pop()  # leak: an index that is not under the bound leaves the free list for good
            if index >= below:
                return None
        return self._make(index)

    def return_slab(self, slab: Slab) -> None:
        self.return_index(slab.index)

    def return_index(self, index: int) -> None:
        with self._cond:
            self._free.append(index)
            self._cond.notify()


@dataclass
class ShardJob:
    path: Path
    name: str
    slab: Optional[Slab] = None
    attempts: int = 0


class ShardReader:
    """Reads shards into slabs and hands them to a consumer."""

    def __init__(self, arena: SlabArena, read_into: Callable[[Path, torch.Tensor], int]) -> None:
        self.arena = arena
        self.read_into = read_into
        self._ready: list[ShardJob] = []

    def read(self, job: ShardJob) -> bool:
        if job.slab is not None:
            return True
        slab = self.arena.borrow_slab(timeout=5.0)  # clean: near miss, the handler returns it before it says False
        if slab is None:
            return False
        try:
            slab.length = self.read_into(job.path, slab.view)
        except OSError:
            self.arena.return_slab(slab)
            return False
        job.slab = slab
        self._ready.append(job)
        return True

    def read_retrying(self, job: ShardJob, tries: int = 3) -> bool:
        if job.slab is not None:
            return True
        slab = self.arena.borrow_slab(timeout=5.0)  # leak: when all tries fail the slab is not returned
        if slab is None:
            return False
        while job.attempts < tries:
            job.attempts += 1
            try:
                slab.length = self.read_into(job.path, slab.view)
            except OSError:
                logger.warning("%s: attempt %d failed", job.path, job.attempts)
                time.sleep(0.05)
                continue
            job.slab = slab
            self._ready.append(job)
            return True
        return False

    def reload(self, job: ShardJob) -> None:
        """Read a shard once more after its file changed."""
        job.slab = self.arena.borrow_slab()  # leak: a job that waits in the ready list still has its earlier slab
        job.slab.length = self.read_into(job.path, job.slab.view)
        if not any(j is job for j in self._ready):
            self._ready.append(job)

    def drain(self, consume: Callable[[str, torch.Tensor], None]) -> int:
        n = 0
        while self._ready:
            job = self._ready.pop()
            slab, job.slab = job.slab, None
            consume(job.name, slab.view[: slab.length])
            self.arena.return_slab(slab)
            n += 1
        return n

    def tensors(self, paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a private copy of each shard."""
        for path in paths:
            slab = self.arena.borrow_slab()  # clean: near miss, returned before the yield, which hands out a clone
            length = self.read_into(path, slab.view)
            data = slab.view[:length].clone()
            self.arena.return_slab(slab)
            yield path.stem, data

    def tracked(self, path: Path) -> Slab:
        """A slab that goes back by itself when the last reference to it dies."""
        slab = self.arena.borrow_slab()  # clean: near miss, the finalizer returns its index
        weakref.finalize(slab, self.arena.return_index, slab.index)
        slab.length = self.read_into(path, slab.view)
        return slab

    def sizes(self, paths: list[Path]) -> dict[str, int]:
        """Bytes of each shard, read through one slab."""
        out: dict[str, int] = {}
        slab: Optional[Slab] = None
        for path in paths:
            if slab is None:
                slab = self.arena.borrow_slab()  # clean: near miss, borrowed once and returned after the loop
            if path.suffix != ".bin":
                continue
            out[path.stem] = self.read_into(path, slab.view)
        if slab is not None:
            self.arena.return_slab(slab)
        return out

    def first_match(self, paths: list[Path], magic: bytes) -> Optional[Path]:
        for path in paths:
            slab = self.arena.borrow_slab()  # leak: the break on a match skips the return of the slab
            n = self.read_into(path, slab.view)
            if bytes(slab.view[: min(n, len(magic))].tolist()) == magic:
                break
            self.arena.return_slab(slab)
        else:
            return None
        return path


async def load_all(reader: ShardReader, jobs: list[ShardJob], consume: Callable[[str, torch.Tensor], None]) -> int:
    """Read on threads, consume on the loop."""
    loaded = 0
    pending = {asyncio.create_task(asyncio.to_thread(reader.read, job)) for job in jobs}
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if any(t.result() for t in done):
            loaded += reader.drain(consume)
    return loaded
