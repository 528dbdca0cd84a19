"""Compaction side of the LSM store that backs the training event log."""
from __future__ import annotations

import heapq
import logging
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import BinaryIO, Iterator, Optional

log = logging.getLogger(__name__)


@dataclass
class TableHandle:
    path: str
    fh: BinaryIO
    users: int = 0
    evicted: bool = False

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        self.fh.seek(0)
        for line in self.fh:
            key, _, value = line.rstrip(b"\n").partition(b"\t")
            yield key, value


class TableCache:
    """Open table files.  lookup() counts a user; done() uncounts; the idle ones are evicted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._handles: OrderedDict[str, TableHandle] = OrderedDict()
        self._mu = threading.Lock()

    def lookup(self, path: str) -> TableHandle:
        with self._mu:
            handle = self._handles.get(path)
            if handle is None:
                handle = TableHandle(path, open(path, "rb"))  # clean: near miss, eviction or close() ends it
                self._handles[path] = handle
            handle.users += 1
            self._handles.move_to_end(path)
            self._evict()
            return handle

    def done(self, handle: TableHandle) -> None:
        with self._mu:
            handle.users -= 1
            if handle.evicted and handle.users == 0:
                handle.fh.close()

    def _evict(self) -> None:
        idle = [p for p, h in self._handles.items() if h.users == 0]
        while len(self._handles) > self._capacity and idle:
            self._handles.pop(idle.pop(0)).fh.close()

    def forget(self, path: str) -> None:
        with self._mu:
            handle = self._handles.pop(path, None)
            if handle is None:
                return
            handle.evicted = True
            if handle.users == 0:
                handle.fh.close()

    def close(self) -> None:
        with self._mu:
            for handle in self._handles.values():
                handle.fh.close()
            self._handles.clear()


@dataclass
class Version:
    number: int
    levels: list[list[str]]
    refs: int = 0


class VersionSet:
    """Chain of versions; obsolete files can go when no version that lists them is referenced."""

    def __init__(self, tables: TableCache) -> None:
        self._tables = tables
        self._versions: list[Version] = [Version(0, [[] for _ in range(7)])]
        self._mu = threading.Lock()

    def current(self) -> Version:
        with self._mu:
            v = self._versions[-1]
            v.refs += 1
            return v

    def unref(self, v: Version) -> None:
        with self._mu:
            v.refs -= 1
            self._collect()

    def install(self, levels: list[list[str]]) -> None:
        with self._mu:
            self._versions.append(Version(self._versions[-1].number + 1, levels))
            self._collect()

    def _collect(self) -> None:
        live = [v for v in self._versions[:-1] if v.refs > 0] + self._versions[-1:]
        keep = {p for v in live for level in v.levels for p in level}
        for v in self._versions:
            for path in (p for level in v.levels for p in level if p not in keep):
                self._tables.forget(path)
        self._versions = live


class CompactionSlots:
    """How many compactions may run on the node; big ones take two."""

    def __init__(self, total: int) -> None:
        self._sem = threading.Semaphore(total)

    def begin(self, big: bool) -> bool:
        if not self._sem.acquire(blocking=False):  # clean: near miss, end() gives it back
            return False
        if big and not self._sem.acquire(blocking=False):  # clean: near miss, end() gives the second one back
            self._sem.release()
            return False
        return True

    def end(self, big: bool) -> None:
        self._sem.release()
        if big:
            self._sem.release()


@dataclass
class Stats:
    read: int = 0
    written: int = 0
    dropped: int = 0
    errors: list[str] = field(default_factory=list)


class Compactor:
    def __init__(self, root: str, tables: TableCache, versions: VersionSet, slots: CompactionSlots) -> None:
        self.root = root
        self.tables = tables
        self.versions = versions
        self.slots = slots
        self.stats = Stats()

    def get(self, key: bytes) -> Optional[bytes]:
        version = self.versions.current()  # clean: unreferenced in the finally
        try:
            for level in version.levels:
                for path in level:
                    handle = self.tables.lookup(path)  # leak: the table with the key stays in use
                    for k, value in handle.records():
                        if k == key:
                            return value
                    self.tables.done(handle)
            return None
        finally:
            self.versions.unref(version)

    def has_level(self, n: int) -> bool:
        return bool(self.versions.current().levels[n])  # leak: the reference to the version is dropped

    def compact(self, level: int) -> bool:
        version = self.versions.current()  # leak: the return for a level that is small enough skips unref
        inputs = list(version.levels[level])
        if len(inputs) < 4:
            return False
        big = len(inputs) > 16
        if not self.slots.begin(big):  # clean: near miss, given back with the same unchanged flag
            self.versions.unref(version)
            return False
        handles = [self.tables.lookup(p) for p in inputs]  # clean: all done below
        target = os.path.join(self.root, f"{version.number:08d}-{level + 1}.tbl")
        with open(target, "wb") as out:  # clean: closed by the with
            last = None
            for key, value in heapq.merge(*(h.records() for h in handles)):
                self.stats.read += 1
                if key == last or not value:
                    self.stats.dropped += 1
                    continue
                out.write(key + b"\t" + value + b"\n")
                last = key
                self.stats.written += 1
        levels = [list(lv) for lv in version.levels]
        levels[level] = []
        levels[level + 1].append(target)
        for handle in handles:
            self.tables.done(handle)
        self.versions.install(levels)
        self.versions.unref(version)
        self.slots.end(big)
        return True

    def compact_if_calm(self, level: int, load: float) -> bool:
        if not self.slots.begin(False):  # leak: under high load it returns with the slot held
            return False
        if load > 0.8:
            log.info("load is %.2f, level %d waits", load, level)
            return False
        self.slots.end(False)
        return self.compact(level)

    def verify(self, paths: list[str]) -> bool:
        handles: list[TableHandle] = []
        ok = True
        for path in paths:
            handle = self.tables.lookup(path)  # clean: near miss, collected in the list, done after the loop
            handles.append(handle)
            keys = [k for k, _ in handle.records()]
            if keys != sorted(keys):
                self.stats.errors.append(path)
                ok = False
                break
        for handle in handles:
            self.tables.done(handle)
        return ok

    def overlap(self, a: str, b: str) -> int:
        left = self.tables.lookup(a)  # clean: done before both returns
        right = self.tables.lookup(b)  # leak: not done when the left table is empty
        keys = {k for k, _ in left.records()}
        if not keys:
            self.tables.done(left)
            return 0
        n = sum(1 for k, _ in right.records() if k in keys)
        self.tables.done(right)
        self.tables.done(left)
        return n


class MergeIterator:
    """Iterator over a frozen version; close() ends it."""

    def __init__(self, versions: VersionSet, tables: TableCache) -> None:
        self._versions = versions
        self._tables = tables
        self._version = versions.current()  # clean: near miss, unreferenced in close()
        self._handles = [
            tables.lookup(p)  # leak: close() drops the list of handles without done()
            for level in self._version.levels
            for p in level
        ]

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return heapq.merge(*(h.records() for h in self._handles))

    def close(self) -> None:
        self._handles.clear()
        self._versions.unref(self._version)


def dump(versions: VersionSet, tables: TableCache, path: str) -> int:
    it = MergeIterator(versions, tables)  # clean: closed at the end
    n = 0
    out = open(path, "wb")  # clean: closed after the loop
    for key, value in it:
        out.write(key + b"=" + value + b"\n")
        n += 1
    out.close()
    it.close()
    return n


def dump_prefix(versions: VersionSet, tables: TableCache, path: str, prefix: bytes) -> int:
    it = MergeIterator(versions, tables)  # leak: return at the first later key skips close()
    n = 0
    with open(path, "wb") as out:  # clean: closed by the with
        for key, value in it:
            if key < prefix:
                continue
            if not key.startswith(prefix):
                return n
            out.write(key + b"=" + value + b"\n")
            n += 1
    it.close()
    return n
