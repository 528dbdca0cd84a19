"""Asynchronous sharded checkpoint writer with a staging arena and writer slots."""
from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional


@dataclass
class Region:
    offset: int
    size: int


class StagingArena:
    """First-fit allocator over one host buffer."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        self._holes: List[Region] = [Region(0, size)]

    def lease(self, size: int) -> Optional[Region]:
        for index, hole in enumerate(self._holes):
            if hole.size >= size:
                self._holes.pop(index)  # clean: near miss, the remainder is put back and the rest goes to the caller
                if hole.size > size:
                    self._holes.insert(index, Region(hole.offset + size, hole.size - size))
                return Region(hole.offset, size)
        return None

    def unlease(self, region: Region) -> None:
        self._holes.append(region)
        self._holes.sort(key=lambda r: r.offset)
        merged: List[Region] = []
        for hole in self._holes:
            if merged and merged[-1].offset + merged[-1].size == hole.offset:
                merged[-1] = Region(merged[-1].offset, merged[-1].size + hole.size)
            else:
                merged.append(hole)
        self._holes = merged


class WriterSlots:
    """Limits how many shard files are written at once."""

    def __init__(self, limit: int) -> None:
        self._sem = threading.BoundedSemaphore(limit)

    def enter(self, timeout: float) -> bool:
        return self._sem.acquire(timeout=timeout)  # clean: the outcome is returned to the caller

    def leave(self) -> None:
        self._sem.release()

    @contextmanager
    def slot(self) -> Iterator[None]:
        self._sem.acquire()  # clean: released after the body
        try:
            yield
        finally:
            self._sem.release()


class ShardScope:
    """Stages one shard; the region is held for the length of the with block."""

    def __init__(self, arena: StagingArena, payload: bytes) -> None:
        self.arena = arena
        self.payload = payload
        self.region: Optional[Region] = None
        self.committed = False

    def __enter__(self) -> "ShardScope":
        self.region = self.arena.lease(len(self.payload))  # leak: __exit__ returns early for a shard that was not committed
        if self.region is not None:
            start = self.region.offset
            self.arena.memory[start : start + self.region.size] = self.payload
        return self

    def commit(self, path: Path) -> None:
        if self.region is not None:
            path.write_bytes(self.payload)
            self.committed = True

    def __exit__(self, *exc: object) -> None:
        if not self.committed:
            return
        if self.region is not None:
            self.arena.unlease(self.region)
            self.region = None


class HeaderScope:
    """Stages the index header, if there is room for it."""

    def __init__(self, arena: StagingArena, size: int) -> None:
        self.arena = arena
        self.size = size

    def __enter__(self) -> Optional[Region]:
        self.region = self.arena.lease(self.size)  # clean: near miss, __exit__ returns early only when there is no region
        return self.region

    def __exit__(self, *exc: object) -> None:
        if self.region is None:
            return
        self.arena.unlease(self.region)


class CheckpointWriter:
    def __init__(self, root: Path, arena: StagingArena, slots: WriterSlots) -> None:
        self.root = root
        self.arena = arena
        self.slots = slots
        self.pending: Dict[str, Region] = {}

    def stage(self, name: str, payload: bytes) -> bool:
        if name in self.pending:
            return True
        region = self.arena.lease(len(payload))  # clean: held in pending, flush and abort unlease it
        if region is None:
            return False
        self.arena.memory[region.offset : region.offset + region.size] = payload
        self.pending[name] = region
        return True

    def restage(self, name: str, payload: bytes) -> bool:
        """Stage a newer payload under a name."""
        region = self.arena.lease(len(payload))  # leak: the region of a name that is still pending is overwritten
        if region is None:
            return False
        self.arena.memory[region.offset : region.offset + region.size] = payload
        self.pending[name] = region
        return True

    def flush(self) -> int:
        count = 0
        with self.slots.slot():  # clean: the with block leaves the slot
            while self.pending:
                name, region = self.pending.popitem()
                (self.root / name).write_bytes(self.arena.memory[region.offset : region.offset + region.size])
                self.arena.unlease(region)
                count += 1
        return count

    def abort(self) -> None:
        for region in self.pending.values():
            self.arena.unlease(region)
        self.pending.clear()

    def write_with_retry(self, name: str, payload: bytes, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            if not self.slots.enter(timeout=5.0):  # leak: a failed write retries while the slot is still held
                continue
            try:
                (self.root / name).write_bytes(payload)
            except OSError:
                time.sleep(2**attempt)
                continue
            self.slots.leave()
            return True
        return False

    def write_once(self, name: str, payload: bytes) -> bool:
        target = self.root / name
        entered = self.slots.enter(timeout=0.0)  # leak: an existing target returns with the slot held
        if not entered:
            return False
        if target.exists():
            return False
        target.write_bytes(payload)
        self.slots.leave()
        return True

    def wait_for_region(self, size: int, deadline: float) -> Optional[Region]:
        while time.monotonic() < deadline:
            region = self.arena.lease(size)  # clean: returned to the caller, the loop only goes on without one
            if region is not None:
                return region
            time.sleep(0.01)
        return None

    def write_index(self, lines: List[str]) -> bool:
        text = "\n".join(lines).encode()
        region = self.wait_for_region(len(text), time.monotonic() + 1.0)  # clean: unleased after the write
        if region is None:
            return False
        self.arena.memory[region.offset : region.offset + region.size] = text
        (self.root / "index").write_bytes(text)
        self.arena.unlease(region)
        return True
