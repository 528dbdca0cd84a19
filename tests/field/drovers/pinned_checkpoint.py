"""Checkpoint writer that stages shards in page-locked memory and flushes them from a thread."""
from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional

log = logging.getLogger("ckpt")


@dataclass
class Region:
    offset: int
    size: int


class PinnedArena:
    """First-fit arena over one page-locked allocation."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.mem = bytearray(capacity)
        self._live: List[Region] = []
        self._lock = threading.Lock()

    def reserve(self, size: int) -> Optional[Region]:
        with self._lock:
            cursor = 0
            for r in sorted(self._live, key=lambda r: r.offset):
                if r.offset - cursor >= size:
                    break
                cursor = r.offset + r.size
            if cursor + size > self.capacity:
                return None
            region = Region(cursor, size)
            self._live.append(region)
            return region

    def unreserve(self, region: Region) -> None:
        with self._lock:
            self._live.remove(region)

    def fill(self, region: Region, payload: bytes) -> None:
        self.mem[region.offset:region.offset + len(payload)] = payload

    def view(self, region: Region) -> memoryview:
        return memoryview(self.mem)[region.offset:region.offset + region.size]

    def live(self) -> int:
        return len(self._live)


@dataclass
class FlushJob:
    path: str
    region: Region


class FlushThread:
    def __init__(self, arena: PinnedArena):
        self.arena = arena
        self.jobs: "queue.Queue[Optional[FlushJob]]" = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            try:
                with open(job.path, "wb") as fh:  # clean: with statement
                    fh.write(self.arena.view(job.region))
            except OSError:
                log.exception("could not flush %s", job.path)
            finally:
                self.arena.unreserve(job.region)

    def submit(self, path: str, payload: bytes) -> bool:
        region = self.arena.reserve(len(payload))  # clean: near miss, moves into the job and the thread gives it back in finally
        if region is None:
            return False
        self.arena.fill(region, payload)
        self.jobs.put(FlushJob(path, region))
        return True

    def close(self) -> None:
        self.jobs.put(None)
        self._thread.join()


class BatchFlusher:
    """Collects jobs during the step and writes them between steps on the caller's thread."""

    def __init__(self, arena: PinnedArena):
        self.arena = arena
        self._todo: List[FlushJob] = []
        self.failed = 0

    def stage(self, path: str, payload: bytes) -> None:
        region = self.arena.reserve(len(payload))  # leak: flush drops the job of a file that could not be written
        if region is None:
            raise MemoryError(f"arena cannot hold {len(payload)} bytes")
        self.arena.fill(region, payload)
        self._todo.append(FlushJob(path, region))

    def flush(self) -> int:
        written = 0
        while self._todo:
            job = self._todo.pop()
            try:
                with open(job.path, "wb") as fh:  # clean: with statement
                    fh.write(self.arena.view(job.region))
            except OSError as err:
                log.warning("skipping %s: %s", job.path, err)
                self.failed += 1
                continue
            self.arena.unreserve(job.region)
            written += 1
        return written


def stage_group(arena: PinnedArena, shards: Dict[str, bytes]) -> Optional[Dict[str, Region]]:
    """All or nothing."""
    staged: Dict[str, Region] = {}
    for name, payload in shards.items():
        region = arena.reserve(len(payload))  # clean: near miss, the table is rolled back or returned
        if region is None:
            for held in staged.values():
                arena.unreserve(held)
            return None
        arena.fill(region, payload)
        staged[name] = region
    return staged


def unstage(arena: PinnedArena, staged: Dict[str, Region]) -> None:
    while staged:
        _, region = staged.popitem()
        arena.unreserve(region)


def stage_by_dtype(arena: PinnedArena, shards: List[tuple]) -> Dict[str, Region]:
    staged: Dict[str, Region] = {}
    for dtype, payload in shards:
        region = arena.reserve(len(payload))  # leak: a second shard of the same dtype overwrites the entry
        if region is None:
            break
        arena.fill(region, payload)
        staged[dtype] = region
    return staged


def write_group(arena: PinnedArena, directory: str, shards: Dict[str, bytes]) -> int:
    staged = stage_group(arena, shards)  # clean: unstage in finally
    if staged is None:
        return 0
    try:
        for name, region in staged.items():
            fh = open(os.path.join(directory, name + ".bin"), "wb")  # clean: closed in finally
            try:
                fh.write(arena.view(region))
            finally:
                fh.close()
        return len(staged)
    finally:
        unstage(arena, staged)


def write_optimizer_pair(arena: PinnedArena, path: str, exp_avg: bytes, exp_avg_sq: bytes) -> bool:
    first = arena.reserve(len(exp_avg))  # leak: not rolled back when the second moment does not fit
    second = arena.reserve(len(exp_avg_sq))  # leak: not given back when the first did not fit and this one did
    if first is None or second is None:
        return False
    arena.fill(first, exp_avg)
    arena.fill(second, exp_avg_sq)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(path, "wb"))  # clean: near miss, the exit stack closes it
        out.write(arena.view(first))
        out.write(arena.view(second))
    arena.unreserve(first)
    arena.unreserve(second)
    return True


def read_manifest(directory: str) -> dict:
    path = os.path.join(directory, "manifest.json")
    if not os.path.exists(path):
        return {}
    return json.load(open(path))  # leak: nobody closes it
