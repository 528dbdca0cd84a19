"""Loading of sharded weights: files, shared memory regions and reader permits."""
from __future__ import annotations

import json
import logging
import os
import struct
import threading
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass
class Region:
    name: str
    size: int
    buf: bytearray


class RegionRegistry:
    """Regions shared by the workers of a node, counted by name."""

    def __init__(self):
        self._regions: dict[str, Region] = {}
        self._count: dict[str, int] = {}
        self._lock = threading.Lock()

    def attach(self, name: str, size: int) -> Region:
        with self._lock:
            region = self._regions.get(name)
            if region is None:
                region = self._regions[name] = Region(name, size, bytearray(size))
            self._count[name] = self._count.get(name, 0) + 1
            return region

    def detach(self, region: Region) -> None:
        with self._lock:
            self._count[region.name] -= 1
            if self._count[region.name] == 0:
                del self._regions[region.name], self._count[region.name]


class ReadPermits:
    """Limits how many shards are read at the same time from the network disk."""

    def __init__(self, n: int):
        self._sem = threading.BoundedSemaphore(n)

    def obtain(self, wait: bool = True) -> bool:
        return self._sem.acquire(blocking=wait)  # clean: handed to the caller of obtain

    def surrender(self) -> None:
        self._sem.release()


REGISTRY = RegionRegistry()
PERMITS = ReadPermits(4)


def read_header(path: str) -> dict:
    f = open(path, "rb")  # leak: an empty header returns before close
    (length,) = struct.unpack("<Q", f.read(8))
    if length == 0:
        return {}
    header = json.loads(f.read(length))
    f.close()
    return header


def open_shard(path: str):
    """Open file positioned at the data; None when the magic does not fit."""
    f = open(path, "rb")  # clean: closed on a bad header, otherwise returned
    head = f.read(8)
    if len(head) < 8:
        f.close()
        return None
    (length,) = struct.unpack("<Q", head)
    f.seek(8 + length)
    return f


def shard_bytes(path: str) -> int:
    shard = open_shard(path)  # leak: the open file is asked for its position and then dropped
    if shard is None:
        return 0
    return os.path.getsize(path) - shard.tell()


class ShardLoader:
    def __init__(self, paths: list[str]):
        self.paths = paths
        self.regions: dict[str, Region] = {}
        self.prev: Region | None = None

    def load(self, path: str) -> Region | None:
        PERMITS.obtain()  # clean: surrendered in the finally
        try:
            size = os.path.getsize(path)
            region = REGISTRY.attach(path, size)  # clean: near miss, detached for a short file, else in regions
            with open(path, "rb") as f:  # clean: closed by with
                got = f.readinto(region.buf)
            if got < size:
                REGISTRY.detach(region)
                return None
            old = self.regions.get(path)
            self.regions[path] = region
            if old is not None:
                REGISTRY.detach(old)
            return region
        finally:
            PERMITS.surrender()

    def unload(self, path: str) -> None:
        region = self.regions.pop(path, None)
        if region is not None:
            REGISTRY.detach(region)

    def close(self) -> None:
        for path in list(self.regions):
            self.unload(path)

    def try_load(self, path: str) -> bool:
        if not PERMITS.obtain(wait=False):  # leak: a missing file returns with the permit held
            return False
        if not os.path.exists(path):
            log.warning("%s is missing", path)
            return False
        with open(path, "rb") as f:  # clean: closed by with
            data = f.read()
        PERMITS.surrender()
        log.info("%s: %d bytes", path, len(data))
        return True

    def load_group(self, paths: list[str]) -> list[Region]:
        """All or nothing."""
        got: list[Region] = []
        for path in paths:
            if not os.path.exists(path):
                while got:
                    REGISTRY.detach(got.pop())
                return got
            region = REGISTRY.attach(path, os.path.getsize(path))  # clean: near miss, rolled back or returned
            got.append(region)
        return got

    def digest_group(self, paths: list[str]) -> int:
        regions = self.load_group(paths)  # leak: the regions are summed up and never detached
        return sum(sum(r.buf[:64]) for r in regions)

    def sizes(self, paths: list[str]) -> list[int]:
        regions = self.load_group(paths)  # clean: each is detached in the loop
        out = []
        for region in regions:
            out.append(region.size)
            REGISTRY.detach(region)
        return out

    def stream(self, chunk: int):
        for path in self.paths:
            f = open(path, "rb")  # clean: closed in the finally also when the generator is closed
            try:
                while data := f.read(chunk):
                    yield path, data
            finally:
                f.close()

    def advance(self, path: str) -> Region:
        """Double buffering: the region before this one is let go."""
        region = REGISTRY.attach(path, os.path.getsize(path))  # clean: near miss, next advance or stop detaches it
        prev, self.prev = self.prev, region
        if prev is not None:
            REGISTRY.detach(prev)
        return region

    def stop(self) -> None:
        if self.prev is not None:
            REGISTRY.detach(self.prev)
            self.prev = None


class MappedView:
    """with MappedView(path) as view"""

    def __init__(self, path: str, size: int):
        self.path = path
        self.size = size
        self.region: Region | None = None
        self.dirty = False

    def __enter__(self) -> "MappedView":
        self.region = REGISTRY.attach(self.path, self.size)  # leak: __exit__ returns early when nothing was written
        return self

    def write(self, at: int, data: bytes) -> None:
        self.region.buf[at: at + len(data)] = data
        self.dirty = True

    def __exit__(self, exc_type, exc, tb) -> None:
        if not self.dirty:
            return
        log.debug("%s written", self.path)
        REGISTRY.detach(self.region)
        self.region = None


def patch(path: str, size: int, at: int, data: bytes) -> None:
    with MappedView(path, size) as view:  # clean: write() sets dirty, so __exit__ detaches
        view.write(at, data)


def peek(path: str, size: int, at: int, n: int) -> bytes:
    with MappedView(path, size) as view:  # leak: nothing is written, so __exit__ returns before detach
        return bytes(view.region.buf[at: at + n])
