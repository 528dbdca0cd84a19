"""NVMe tier below the host cache: extents in one big file, striped locks, counted entries."""
from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@dataclass
class Extent:
    offset: int
    length: int


@dataclass
class Entry:
    key: str
    extent: Extent
    size: int
    refs: int = 0


class ExtentAllocator:
    def __init__(self, capacity: int, extent: int) -> None:
        self.extent = extent
        self._lock = threading.Lock()
        self._open = [Extent(o, extent) for o in range(0, capacity, extent)]

    def obtain(self, timeout: float = 0.0) -> Extent | None:
        deadline = time.monotonic() + timeout
        while True:
            self._lock.acquire()  # clean: near miss, released on the return as well as before the wait
            if self._open:
                extent = self._open.pop()
                self._lock.release()
                return extent
            self._lock.release()
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.001)

    def restore(self, extent: Extent) -> None:
        with self._lock:
            self._open.append(extent)

    def free_bytes(self) -> int:
        with self._lock:
            return sum(e.length for e in self._open)


class DiskTier:
    def __init__(self, path: Path, allocator: ExtentAllocator, stripes: int = 8) -> None:
        self.allocator = allocator
        self.index: dict[str, Entry] = {}
        self.doomed: set[int] = set()
        self._stripes = [threading.Lock() for _ in range(stripes)]
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # clean: lives as long as the tier, close() closes it
        self._stats = threading.Lock()
        self.hits = 0
        self.misses = 0

    def _stripe(self, key: str) -> threading.Lock:
        return self._stripes[hash(key) % len(self._stripes)]

    def ref(self, entry: Entry) -> Entry:
        entry.refs += 1
        return entry

    def unref(self, entry: Entry) -> None:
        entry.refs -= 1
        if entry.refs == 0 and entry.extent.offset in self.doomed:
            self.doomed.remove(entry.extent.offset)
            self.allocator.restore(entry.extent)

    def put(self, key: str, payload: bytes) -> bool:
        lock = self._stripe(key)
        lock.acquire()  # clean: released in the finally
        try:
            if key in self.index:
                return True
            extent = self.allocator.obtain(0.05)  # leak: a payload over the extent length returns False without the restore
            if extent is None:
                return False
            if len(payload) > extent.length:
                logger.warning("%s: %d bytes do not fit", key, len(payload))
                return False
            os.pwrite(self._fd, payload, extent.offset)
            self.index[key] = Entry(key, extent, len(payload))
            return True
        finally:
            lock.release()

    def put_retrying(self, key: str, payload: bytes, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            extent = self.allocator.obtain()  # clean: near miss, restored before every further attempt
            if extent is None:
                continue
            try:
                os.pwrite(self._fd, payload[: extent.length], extent.offset)
            except OSError as exc:
                logger.warning("attempt %d: %s", attempt, exc)
                self.allocator.restore(extent)
                continue
            with self._stripe(key):
                old = self.index.get(key)
                self.index[key] = Entry(key, extent, min(len(payload), extent.length))
            if old is not None:
                self._retire(old)
            return True
        return False

    def lookup(self, key: str) -> Entry | None:
        lock = self._stripe(key)
        lock.acquire()  # leak: a miss returns with the stripe locked
        entry = self.index.get(key)
        if entry is None:
            return None
        self.ref(entry)  # clean: the caller unrefs the entry
        lock.release()
        return entry

    def read(self, key: str) -> bytes | None:
        entry = self.lookup(key)  # clean: near miss, unref in the else and in the except, nothing to do for None
        if entry is None:
            self._count(False)
            return None
        try:
            data = os.pread(self._fd, entry.size, entry.extent.offset)
        except OSError as exc:
            logger.error("%s: %s", key, exc)
            self.unref(entry)
            return None
        else:
            self.unref(entry)
        self._count(True)
        return data

    def read_many(self, keys: list[str]) -> dict[str, bytes]:
        out: dict[str, bytes] = {}
        for key in keys:
            entry = self.lookup(key)  # leak: a read error is logged and continues past the unref
            if entry is None:
                continue
            try:
                out[key] = os.pread(self._fd, entry.size, entry.extent.offset)
            except OSError as exc:
                logger.error("%s: %s", key, exc)
                continue
            self.unref(entry)
        return out

    def size_of(self, key: str) -> int:
        entry = self.lookup(key)  # leak: only the size is used, nobody unrefs
        return entry.size if entry is not None else 0

    def _count(self, hit: bool) -> None:
        if not self._stats.acquire(timeout=0.01):  # clean: near miss, the early return is the one where it was not had
            return
        if hit:
            self.hits += 1
        else:
            self.misses += 1
        self._stats.release()

    def reset_counts(self) -> tuple[int, int] | None:
        if not self._stats.acquire(blocking=False):  # leak: nothing counted returns with the lock held
            return None
        if self.hits + self.misses == 0:
            return None
        counts = self.hits, self.misses
        self.hits = self.misses = 0
        self._stats.release()
        return counts

    def _retire(self, entry: Entry) -> None:
        if entry.refs:
            self.doomed.add(entry.extent.offset)
        else:
            self.allocator.restore(entry.extent)

    def remove(self, key: str) -> bool:
        with self._stripe(key):
            entry = self.index.pop(key, None)
        if entry is None:
            return False
        self._retire(entry)
        return True

    def swap(self, left: str, right: str) -> bool:
        first, second = sorted((self._stripe(left), self._stripe(right)), key=id)
        first.acquire()  # clean: near miss, released last, whichever branch is taken
        same = first is second
        if not same:
            second.acquire()  # clean: near miss, same guards both ends
        ok = left in self.index and right in self.index
        if ok:
            self.index[left], self.index[right] = self.index[right], self.index[left]
        if not same:
            second.release()
        first.release()
        return ok

    def close(self) -> None:
        os.close(self._fd)


class Reader:
    """Holds one entry while its bytes are streamed in pieces."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.entry: Entry | None = None
        self.pos = 0

    def open(self, key: str) -> bool:
        self.close()
        self.entry = self.tier.lookup(key)  # clean: near miss, close() at the top unrefs the entry held before
        self.pos = 0
        return self.entry is not None

    def close(self) -> None:
        if self.entry is not None:
            self.tier.unref(self.entry)
            self.entry = None

    def info(self) -> dict[str, Any]:
        return {"pos": self.pos, "key": self.entry.key if self.entry else None}
