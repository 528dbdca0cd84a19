"""Offload tiers of the Cellar team: pinned host memory, mapped files, spool files, DMA lanes."""
from __future__ import annotations

import bisect
import mmap
import os
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None


class Slab:
    __slots__ = ("arena", "klass", "storage", "_returned")

    def __init__(self, arena: "PinnedArena", klass: int, storage) -> None:
        self.arena = arena
        self.klass = klass
        self.storage = storage
        self._returned = False

    def hand_back(self) -> None:
        if self._returned:
            raise RuntimeError("slab handed back twice")
        self._returned = True
        self.arena._shelve(self)


class PinnedArena:
    """Page-locked host memory in power of two classes; slabs know their way home."""

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._held = 0
        self._shelves: Dict[int, list] = defaultdict(list)
        self._mu = threading.Lock()
        self.carved = 0

    @staticmethod
    def _klass(nbytes: int) -> int:
        return max(4096, 1 << (nbytes - 1).bit_length())

    def carve(self, nbytes: int) -> Slab:
        klass = self._klass(nbytes)
        with self._mu:
            if self._shelves[klass]:
                storage = self._shelves[klass].pop()
            elif self._held + klass > self._ceiling:
                raise MemoryError(f"{klass} bytes are over the ceiling")
            else:
                self._held += klass
                if torch is not None and torch.cuda.is_available():
                    storage = torch.empty(klass, dtype=torch.uint8, pin_memory=True)
                else:
                    storage = bytearray(klass)
            self.carved += 1
        return Slab(self, klass, storage)

    def _shelve(self, slab: Slab) -> None:
        with self._mu:
            self.carved -= 1
            self._shelves[slab.klass].append(slab.storage)


def spill(arena: PinnedArena, block, writer) -> bool:
    slab = arena.carve(block.nbytes)  # leak: the disk-full way is caught and returns False with the slab out
    try:
        block.copy_into(slab.storage)
        writer.write(slab.storage)
    except OSError:
        return False
    slab.hand_back()
    return True


def verify(arena: PinnedArena, block, crc: int) -> bool:
    slab = arena.carve(block.nbytes)  # clean: handed back before either return
    block.copy_into(slab.storage)
    same = block.crc(slab.storage) == crc
    slab.hand_back()
    if not same:
        return False
    return True


class Staging:
    """Layers on the way down; each waits in its slab for the copy to end."""

    def __init__(self, arena: PinnedArena) -> None:
        self.arena = arena
        self.pending: List[Tuple[object, Slab]] = []

    def push(self, layer) -> None:
        slab = self.arena.carve(layer.nbytes)  # clean: near miss, queued in pending and handed back by drain
        self.pending.append((layer.copy_async(slab.storage), slab))

    def drain(self) -> None:
        while self.pending:
            event, slab = self.pending.pop()
            event.wait()
            slab.hand_back()


class Extent(NamedTuple):
    offset: int
    length: int


class ExtentFile:
    """One mapped file, best fit over a list of holes kept sorted by offset."""

    def __init__(self, path: str, size: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self._holes: List[Extent] = [Extent(0, size)]

    def allot(self, length: int) -> Optional[Extent]:
        fitting = [h for h in self._holes if h.length >= length]
        if not fitting:
            return None
        hole = min(fitting, key=lambda h: h.length)
        self._holes.remove(hole)
        if hole.length > length:
            bisect.insort(self._holes, Extent(hole.offset + length, hole.length - length))
        return Extent(hole.offset, length)

    def vacate(self, extent: Extent) -> None:
        at = bisect.bisect_left(self._holes, extent)
        self._holes.insert(at, extent)
        if at + 1 < len(self._holes) and extent.offset + extent.length == self._holes[at + 1].offset:
            after = self._holes.pop(at + 1)
            self._holes[at] = Extent(extent.offset, extent.length + after.length)
        if at > 0:
            before = self._holes[at - 1]
            if before.offset + before.length == self._holes[at].offset:
                here = self._holes.pop(at)
                self._holes[at - 1] = Extent(before.offset, before.length + here.length)

    def view(self, extent: Extent) -> memoryview:
        return memoryview(self._map)[extent.offset:extent.offset + extent.length]

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


class ColdTier:
    def __init__(self, extents: ExtentFile) -> None:
        self.extents = extents
        self.index: Dict[str, Extent] = {}

    def write(self, key: str, data: bytes) -> bool:
        extent = self.extents.allot(len(data))  # leak: writing a known key overwrites its extent in the index
        if extent is None:
            return False
        self.extents.view(extent)[:] = data
        self.index[key] = extent
        return True

    def erase(self, key: str) -> None:
        extent = self.index.pop(key, None)
        if extent is not None:
            self.extents.vacate(extent)


def rewrite(extents: ExtentFile, old: Extent, data: bytes) -> Extent:
    new = extents.allot(len(data))  # clean: near miss, None holds nothing and else it is returned
    if new is None:
        return old
    extents.view(new)[:] = data
    extents.vacate(old)
    return new


class SpoolYard:
    """Spill files with a quota on their number. A file is named by its path."""

    def __init__(self, root: str, quota: int) -> None:
        self._root = root
        self._quota = quota
        self._paths: set = set()

    def stake_file(self) -> str:
        if len(self._paths) >= self._quota:
            raise OSError("spool yard is full")
        fd, path = tempfile.mkstemp(dir=self._root, suffix=".kv")
        os.close(fd)
        self._paths.add(path)
        return path

    def raze_file(self, path: str) -> None:
        self._paths.discard(path)
        if os.path.exists(path):
            os.unlink(path)


def spool_and_upload(yard: SpoolYard, chunks, remote) -> Optional[str]:
    path = yard.stake_file()  # leak: no chunks, then the path is dropped with the file in the yard
    written = 0
    with open(path, "wb") as out:
        for chunk in chunks:
            written += out.write(chunk)
    if written == 0:
        return None
    url = remote.upload(path)
    yard.raze_file(path)
    return url


def spool_for_reader(yard: SpoolYard, data: bytes, start_reader: Callable) -> None:
    path = yard.stake_file()  # clean: the callback given to the reader razes it
    with open(path, "wb") as out:
        out.write(data)
    start_reader(path, on_done=lambda: yard.raze_file(path))


class ResidencyMap:
    """Which keys must stay on the fast tier. Holding twice needs unholding twice."""

    def __init__(self) -> None:
        self._holds: Dict[str, int] = {}

    def hold(self, key: str) -> int:
        self._holds[key] = self._holds.get(key, 0) + 1
        return self._holds[key]

    def unhold(self, key: str) -> None:
        left = self._holds[key] - 1
        if left:
            self._holds[key] = left
        else:
            del self._holds[key]

    def evictable(self, keys) -> List[str]:
        return [k for k in keys if k not in self._holds]


def prefetch(residency: ResidencyMap, keys: List[str], load) -> int:
    loaded = 0
    for key in keys:
        residency.hold(key)  # leak: a missing key continues without unhold
        data = load(key)
        if data is None:
            continue
        loaded += len(data)
        residency.unhold(key)
    return loaded


def copy_pair(residency: ResidencyMap, src: str, dst: str, tier) -> None:
    residency.hold(src)  # clean: unheld in the outer finally
    try:
        residency.hold(dst)  # clean: unheld in the inner finally
        try:
            tier.copy(src, dst)
        finally:
            residency.unhold(dst)
    finally:
        residency.unhold(src)


class DmaLanes:
    """Copy engines. Hiring one gives the lane and the call that frees it."""

    def __init__(self, n: int) -> None:
        self._idle = list(range(n))
        self._cv = threading.Condition()
        self.waits = 0

    def hire(self, timeout: float = 1.0) -> Tuple[int, Callable[[], None]]:
        with self._cv:
            while not self._idle:
                self.waits += 1
                if not self._cv.wait(timeout):
                    raise TimeoutError("no lane is idle")
            lane = self._idle.pop()
        spent = False

        def done() -> None:
            nonlocal spent
            if spent:
                return
            spent = True
            with self._cv:
                self._idle.append(lane)
                self._cv.notify()

        return lane, done


def copy_down(lanes: DmaLanes, driver, src, dst) -> bool:
    lane, done = lanes.hire()  # leak: a driver that refuses the copy returns before done is called
    job = driver.submit(lane, src, dst)
    if job < 0:
        return False
    driver.on_complete(job, done)
    return True


def copy_sync(lanes: DmaLanes, driver, src, dst) -> None:
    lane, done = lanes.hire()  # clean: done is called in finally
    try:
        driver.copy(lane, src, dst)
    finally:
        done()


@dataclass
class EvictionPlan:
    keys: List[str]
    nbytes: int


class EvictionPlanner:
    """Builds a plan step by step. Nothing is held while it is built."""

    def __init__(self) -> None:
        self._keys: List[str] = []
        self._bytes = 0

    def reserve(self, key: str, nbytes: int) -> "EvictionPlanner":
        self._keys.append(key)
        self._bytes += nbytes
        return self

    def build(self) -> EvictionPlan:
        return EvictionPlan(list(self._keys), self._bytes)


def plan(entries, goal: int) -> Optional[EvictionPlan]:
    planner = EvictionPlanner()
    for key, nbytes in entries:
        planner.reserve(key, nbytes)  # clean: a builder that only notes down names
    built = planner.build()
    return built if built.nbytes >= goal else None
