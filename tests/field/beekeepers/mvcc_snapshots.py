"""Versioned key-value store: readers hold epochs, tables are reference counted, compaction waits."""
from __future__ import annotations

import bisect
import heapq
import logging
import threading
from dataclasses import dataclass, field
from typing import Iterator, Optional

log = logging.getLogger("mvcc")


@dataclass(eq=False)
class Table:
    number: int
    rows: list[tuple[str, bytes]]
    level: int = 0
    count: int = 1
    dead: bool = False

    def get(self, key: str) -> Optional[bytes]:
        at = bisect.bisect_left(self.rows, (key, b""))
        if at < len(self.rows) and self.rows[at][0] == key:
            return self.rows[at][1]
        return None


@dataclass(eq=False)
class Version:
    number: int
    tables: list[Table] = field(default_factory=list)
    readers: int = 0


class VersionSet:
    """current() hands out a referenced version; unref() may let old tables go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._head = Version(0)
        self._live: dict[int, Version] = {0: self._head}
        self.reclaimed: list[int] = []

    def current(self) -> Version:
        with self._lock:
            self._head.readers += 1
            return self._head

    def at_least(self, number: int) -> Optional[Version]:
        with self._lock:
            if self._head.number < number:
                return None
            self._head.readers += 1
            return self._head

    def unref(self, version: Version) -> None:
        with self._lock:
            version.readers -= 1
            if version.readers == 0 and version is not self._head:
                del self._live[version.number]
                self._reclaim(version)

    def install(self, tables: list[Table]) -> None:
        with self._lock:
            old, self._head = self._head, Version(self._head.number + 1, tables)
            self._live[self._head.number] = self._head
            if old.readers == 0:
                del self._live[old.number]
                self._reclaim(old)

    def _reclaim(self, version: Version) -> None:
        alive = {t.number for v in self._live.values() for t in v.tables}
        for table in version.tables:
            if table.number not in alive:
                table.dead = True
                self.reclaimed.append(table.number)


class Snapshot:
    """Handle on a version for the API. end() is idempotent."""

    def __init__(self, versions: VersionSet) -> None:
        self._versions = versions
        self._version: Optional[Version] = versions.current()  # clean: end() unrefs

    def get(self, key: str) -> Optional[bytes]:
        for table in self._version.tables:
            value = table.get(key)
            if value is not None:
                return value
        return None

    def end(self) -> None:
        version, self._version = self._version, None
        if version is not None:
            self._versions.unref(version)

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, *exc) -> None:
        self.end()


class Cursor:
    """Server-side cursor; the client pages through it and closes it."""

    def __init__(self, ident: int, snapshot: Snapshot, keys: list[str]) -> None:
        self.ident = ident
        self.snapshot = snapshot
        self.keys = keys
        self.at = 0


class CursorTable:
    def __init__(self, versions: VersionSet) -> None:
        self.versions = versions
        self.cursors: dict[int, Cursor] = {}
        self._next = 0

    def open(self, keys: list[str]) -> int:
        self._next += 1
        snapshot = Snapshot(self.versions)  # clean: near miss, lives in the cursor, close() and page() end it
        self.cursors[self._next] = Cursor(self._next, snapshot, keys)
        return self._next

    def page(self, ident: int, size: int) -> list[Optional[bytes]]:
        cursor = self.cursors[ident]
        keys = cursor.keys[cursor.at : cursor.at + size]
        cursor.at += len(keys)
        values = [cursor.snapshot.get(k) for k in keys]
        if cursor.at >= len(cursor.keys):
            self.close(ident)
        return values

    def close(self, ident: int) -> None:
        cursor = self.cursors.pop(ident, None)
        if cursor is not None:
            cursor.snapshot.end()


class FollowerTable:
    """Replicas read from a version of their own until they move on."""

    def __init__(self, versions: VersionSet) -> None:
        self.versions = versions
        self._by_replica: dict[str, Version] = {}

    def advance(self, replica: str, number: int) -> bool:
        version = self.versions.at_least(number)  # leak: the version the replica had before is overwritten
        if version is None:
            return False
        self._by_replica[replica] = version
        return True

    def gone(self, replica: str) -> None:
        version = self._by_replica.pop(replica, None)
        if version is not None:
            self.versions.unref(version)


class Store:
    def __init__(self, versions: VersionSet) -> None:
        self.versions = versions
        self.numbers = 0
        self.cache: dict[str, tuple[int, Optional[bytes]]] = {}

    def get(self, key: str) -> Optional[bytes]:
        version = self.versions.current()  # leak: a hit in a table returns from inside the loop
        for table in version.tables:
            value = table.get(key)
            if value is not None:
                return value
        self.versions.unref(version)
        return None

    def exists(self, key: str) -> bool:
        version = self.versions.current()  # clean: break leaves the loop for the unref
        found = False
        for table in version.tables:
            if table.get(key) is not None:
                found = True
                break
        self.versions.unref(version)
        return found

    def multi_get(self, keys: list[str]) -> list[Optional[bytes]]:
        with Snapshot(self.versions) as snapshot:  # clean: context manager
            return [snapshot.get(key) for key in keys]

    def scan(self, low: str, high: str) -> Iterator[tuple[str, bytes]]:
        version = self.versions.current()  # clean: near miss, the finally covers an abandoned generator
        try:
            for key, value in heapq.merge(*(t.rows for t in version.tables)):
                if key >= high:
                    return
                if key >= low:
                    yield key, value
        finally:
            self.versions.unref(version)

    def cached(self, key: str) -> Optional[bytes]:
        snapshot = Snapshot(self.versions)  # clean: ended on both ways
        number = snapshot._version.number
        if key in self.cache and self.cache[key][0] == number:
            snapshot.end()
            return self.cache[key][1]
        value = snapshot.get(key)
        self.cache[key] = (number, value)
        snapshot.end()
        return value

    def flush(self, rows: dict[str, bytes]) -> None:
        base = self.versions.current()  # clean: unreffed after the install
        self.numbers += 1
        table = Table(self.numbers, sorted(rows.items()))
        self.versions.install([table] + base.tables)
        self.versions.unref(base)

    def compact(self, level: int) -> int:
        base = self.versions.current()  # leak: with too few tables it returns zero with the version held
        picked = [t for t in base.tables if t.level == level]
        if len(picked) < 4:
            return 0
        merged: dict[str, bytes] = {}
        for table in reversed(picked):
            merged.update(table.rows)
        self.numbers += 1
        joined = Table(self.numbers, sorted(merged.items()), level + 1)
        self.versions.install([t for t in base.tables if t not in picked] + [joined])
        self.versions.unref(base)
        return len(picked)

    def wait_until(self, number: int, attempts: int, pause: threading.Event) -> Optional[Version]:
        for _ in range(attempts):
            version = self.versions.at_least(number)  # clean: returned when there is one
            if version is not None:
                return version
            pause.wait(0.01)
        return None

    def read_after(self, number: int, key: str, pause: threading.Event) -> Optional[bytes]:
        version = self.wait_until(number, 50, pause)  # clean: near miss, None holds nothing
        if version is None:
            return None
        values = [table.get(key) for table in version.tables]
        self.versions.unref(version)
        return next((v for v in values if v is not None), None)

    def lag(self, number: int, pause: threading.Event) -> int:
        version = self.wait_until(number, 5, pause)  # leak: only the number is read
        return version.number - number if version is not None else -1


def export(versions: VersionSet, keys: list[str], sink) -> int:
    snapshot = Snapshot(versions)  # leak: end() is not called on the way out
    written = 0
    for key in keys:
        value = snapshot.get(key)
        if value is None:
            continue
        sink.write(b"%s=%s\n" % (key.encode(), value))
        written += 1
    return written
