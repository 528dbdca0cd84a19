"""Tokenised data shards: memory mapped, pinned in an LRU while in use, guarded by per-shard locks."""
from __future__ import annotations

import mmap
import os
import random
import threading
from collections import OrderedDict


class ShardEntry:
    def __init__(self, path: str):
        self.path = path
        self.file = open(path, "rb")  # clean: near miss, the cache calls unmap on eviction
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        self.pins = 0
        self.lock = threading.Lock()

    def unmap(self) -> None:
        self.map.close()
        self.file.close()


class ShardCache:
    """pin(path) maps the shard and keeps it from eviction until unpin(entry)."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._lru: OrderedDict[str, ShardEntry] = OrderedDict()
        self._guard = threading.RLock()

    def pin(self, path: str) -> ShardEntry:
        with self._guard:
            ent = self._lru.get(path)
            if ent is None:
                self._evict()
                ent = self._lru[path] = ShardEntry(path)  # clean: near miss, kept in the LRU, _evict unmaps it
            self._lru.move_to_end(path)
            ent.pins += 1
            return ent

    def try_pin(self, path: str) -> ShardEntry | None:
        """Pins only what is already mapped."""
        with self._guard:
            ent = self._lru.get(path)
            if ent is None:
                return None
            ent.pins += 1
            return ent

    def unpin(self, ent: ShardEntry) -> None:
        with self._guard:
            ent.pins -= 1

    def _evict(self) -> None:
        for path, ent in list(self._lru.items()):
            if len(self._lru) < self.capacity:
                return
            if ent.pins == 0:
                del self._lru[path]
                ent.unmap()

    def pin_any(self, paths: list[str]) -> ShardEntry:
        for p in paths:
            ent = self.try_pin(p)  # clean: handed to the caller
            if ent is not None:
                return ent
        return self.pin(paths[0])  # clean: handed to the caller

    def is_hot(self, path: str) -> bool:
        return self.try_pin(path) is not None  # leak: the pin is only tested

    def mapped_bytes(self, path: str) -> int:
        ent = self.try_pin(path)  # clean: unpinned after the length was read
        if ent is None:
            return 0
        n = len(ent.map)
        self.unpin(ent)
        return n


class Cursor:
    """Reading position in one shard; close() or leaving the with-block unpins it."""

    def __init__(self, cache: ShardCache, path: str):
        self.cache = cache
        self.ent = cache.pin(path)  # clean: near miss, close unpins it
        self.pos = 0

    def read(self, n: int) -> bytes:
        out = self.ent.map[self.pos : self.pos + n]
        self.pos += len(out)
        return out

    def close(self) -> None:
        if self.ent is not None:
            self.cache.unpin(self.ent)
            self.ent = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class JumpingCursor(Cursor):
    """Moves from shard to shard."""

    def jump(self, path: str, least: int) -> bool:
        nxt = self.cache.pin(path)  # leak: a shard that is too short is refused and stays pinned
        if len(nxt.map) < least:
            return False
        self.close()
        self.ent, self.pos = nxt, 0
        return True

    def jump_to(self, path: str) -> None:
        nxt = self.cache.pin(path)  # clean: near miss, the old pin is given up first and close ends this one
        self.close()
        self.ent, self.pos = nxt, 0


class Mixture:
    def __init__(self, cache: ShardCache, sources: dict[str, list[str]], seed: int):
        self.cache = cache
        self.sources = sources
        self.rng = random.Random(seed)
        self.cursors: dict[str, Cursor] = {}
        self.retired: list[Cursor] = []

    def draw(self, name: str, n: int) -> bytes:
        if name not in self.cursors:
            self.cursors[name] = Cursor(self.cache, self.rng.choice(self.sources[name]))  # clean: stop closes them
        cur = self.cursors[name]
        data = cur.read(n)
        if len(data) < n:
            del self.cursors[name]
            cur.close()
        return data

    def peek(self, name: str, n: int) -> bytes:
        cur = Cursor(self.cache, self.sources[name][0])  # leak: returned from without close
        return cur.read(n)

    def sample_header(self, name: str) -> bytes:
        with Cursor(self.cache, self.sources[name][0]) as cur:  # clean: __exit__ closes it
            return cur.read(64)

    def replace(self, name: str, path: str) -> None:
        old = self.cursors.pop(name, None)
        if old is not None:
            self.retired.append(old)
        self.cursors[name] = Cursor(self.cache, path)  # clean: near miss, retired or current, stop closes both

    def stop(self) -> None:
        for cur in self.retired:
            cur.close()
        self.retired.clear()
        for cur in self.cursors.values():
            cur.close()
        self.cursors.clear()


def copy_rows(ent: ShardEntry, offsets: list[int], n: int) -> list[bytes]:
    rows = []
    ent.lock.acquire()  # leak: a row past the end returns with the lock held
    for off in offsets:
        if off + n > len(ent.map):
            return rows
        rows.append(ent.map[off : off + n])
    ent.lock.release()
    return rows


def try_copy_row(ent: ShardEntry, off: int, n: int) -> bytes | None:
    if not ent.lock.acquire(blocking=False):  # clean: released in the finally when it was taken
        return None
    try:
        if off + n > len(ent.map):
            return None
        return ent.map[off : off + n]
    finally:
        ent.lock.release()


def verify(cache: ShardCache, paths: list[str], sums: dict[str, int]) -> list[str]:
    bad = []
    for p in paths:
        ent = cache.pin(p)  # leak: shards without a known sum continue while pinned
        want = sums.get(p)
        if want is None:
            continue
        if sum(ent.map[: 1 << 16]) != want:
            bad.append(p)
        cache.unpin(ent)
    return bad


def concat(cache: ShardCache, paths: list[str], out: str) -> int:
    total = 0
    dst = open(out, "wb")  # clean: closed after the loop
    for p in paths:
        ent = cache.pin_any([p])  # clean: unpinned in both branches
        if len(ent.map) == 0:
            cache.unpin(ent)
            continue
        total += dst.write(ent.map)
        cache.unpin(ent)
    dst.close()
    return total


def scan(cache: ShardCache, paths: list[str], needle: bytes) -> tuple[str, int] | None:
    ents = [cache.pin(p) for p in paths]  # clean: near miss, the finally unpins all of them on each return
    try:
        for ent in ents:
            at = ent.map.find(needle)
            if at >= 0:
                return ent.path, at
        return None
    finally:
        for ent in ents:
            cache.unpin(ent)


def write_offsets(path: str, rows: list[int]) -> bool:
    if os.path.exists(path):
        return False
    fh = open(path, "w")  # leak: an empty list returns without close
    if not rows:
        return True
    fh.writelines(f"{r}\n" for r in rows)
    fh.close()
    return True
