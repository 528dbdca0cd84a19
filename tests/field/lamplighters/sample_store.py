#!/usr/bin/env python3
"""Read-through sample store: sqlite index, blob files, pooled handles.

Used by the data workers and by the ``reindex`` maintenance job.
"""

import argparse
import contextlib
import functools
import logging
import sqlite3
import sys
import threading
import zlib
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple, TypeVar

log = logging.getLogger("sample_store")
T = TypeVar("T")


class NoHandle(Exception):
    """The pool has handed out its last handle."""


class SchemaMismatch(Exception):
    pass


class Handle:
    """An open index plus the blob directory next to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = sqlite3.connect(path, check_same_thread=False)
        self.generation = 0

    def schema(self) -> int:
        return int(self.db.execute("PRAGMA user_version").fetchone()[0])

    def row(self, key: str) -> Optional[Tuple[str, int]]:
        return self.db.execute("SELECT blob, crc FROM samples WHERE key = ?", (key,)).fetchone()

    def blob(self, name: str) -> bytes:
        return (self.path.parent / "blobs" / name).read_bytes()


class HandlePool:
    def __init__(self, path: Path, size: int) -> None:
        self._sem = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._stack: List[Handle] = [Handle(path) for _ in range(size)]

    def fetch(self, block: bool = True) -> Handle:
        if not self._sem.acquire(blocking=block):  # clean: finish_with releases it together with the handle
            raise NoHandle()
        with self._lock:
            return self._stack.pop()  # clean: the semaphore guarantees one, it is returned

    def fetch_generation(self, generation: int) -> Optional[Handle]:
        """A handle of at least ``generation``; stale ones are refreshed later."""
        if not self._sem.acquire(blocking=False):  # leak: the stale case returns None with the permit taken
            return None
        with self._lock:
            handle = self._stack.pop()  # clean: the stale handle is pushed back, the good one returned
            if handle.generation < generation:
                self._stack.insert(0, handle)
                return None
        return handle

    def finish_with(self, handle: Handle) -> None:
        with self._lock:
            self._stack.append(handle)
        self._sem.release()

    @contextlib.contextmanager
    def handle(self) -> Iterator[Handle]:
        h = self.fetch()  # clean: finally
        try:
            yield h
        finally:
            self.finish_with(h)


# -- wrappers ----------------------------------------------------------------
def obtain(pool: HandlePool) -> Handle:
    """Fetch with a log line."""
    h = pool.fetch()  # clean: belongs to the caller
    log.debug("handle %x out", id(h))
    return h


def obtain_checked(pool: HandlePool, version: int) -> Handle:
    h = obtain(pool)  # clean: given back before SchemaMismatch is raised
    if h.schema() != version:
        pool.finish_with(h)
        raise SchemaMismatch(f"want {version}")
    return h


def obtain_for(pool: HandlePool, version: Optional[int]) -> Handle:
    if version is None:
        return obtain(pool)  # clean: passed through
    return obtain_checked(pool, version)  # clean: passed through


def obtain_tuned(pool: HandlePool, version: int, cache_kb: int) -> Handle:
    h = obtain_checked(pool, version)  # leak: a negative size raises ValueError with the handle out
    if cache_kb < 0:
        raise ValueError(f"cache_kb={cache_kb}")
    h.db.execute(f"PRAGMA cache_size = -{cache_kb}")
    return h


def with_handle(fn: Callable[..., T]) -> Callable[..., T]:
    """Decorator for store methods that want a handle as first argument."""

    @functools.wraps(fn)
    def inner(self: "SampleStore", *args, **kwargs):
        h = obtain_for(self.pool, self.version)  # clean: finally
        try:
            return fn(self, h, *args, **kwargs)
        finally:
            self.pool.finish_with(h)

    return inner


def with_cached_handle(fn: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(fn)
    def inner(self: "SampleStore", *args, **kwargs):
        h = obtain_for(self.pool, self.version)  # leak: sqlite errors are turned into None, the handle stays out
        try:
            result = fn(self, h, *args, **kwargs)
        except sqlite3.Error as exc:
            log.warning("%s: %s", fn.__name__, exc)
            return None
        self.pool.finish_with(h)
        return result

    return inner


class SampleStore:
    def __init__(self, path: Path, size: int = 4, version: Optional[int] = None) -> None:
        self.pool = HandlePool(path, size)
        self.version = version
        self._writer: Optional[Handle] = None
        self._cursors: Dict[str, Tuple[Handle, sqlite3.Cursor]] = {}

    @with_handle
    def get(self, h: Handle, key: str) -> Optional[bytes]:
        row = h.row(key)
        if row is None:
            return None
        data = h.blob(row[0])
        if zlib.crc32(data) != row[1]:
            raise SchemaMismatch(f"crc of {key}")
        return data

    @with_cached_handle
    def count(self, h: Handle) -> int:
        return h.db.execute("SELECT COUNT(*) FROM samples").fetchone()[0]

    def get_many(self, keys: Sequence[str]) -> List[bytes]:
        out: List[bytes] = []
        h = obtain_for(self.pool, self.version)  # clean: break and fall-through meet at the give-back
        for key in keys:
            row = h.row(key)
            if row is None:
                break
            out.append(h.blob(row[0]))
        self.pool.finish_with(h)
        return out

    def exists(self, key: str) -> bool:
        h = obtain_for(self.pool, self.version)  # leak: a missing row returns before the give-back
        row = h.row(key)
        if row is None:
            return False
        found = (h.path.parent / "blobs" / row[0]).exists()
        self.pool.finish_with(h)
        return found

    # -- long-lived cursors -------------------------------------------------
    def open_cursor(self, name: str, query: str) -> sqlite3.Cursor:
        if name in self._cursors:
            return self._cursors[name][1]
        h = obtain(self.pool)  # clean: a bad query gives it back, otherwise it is stored with the cursor
        try:
            cur = h.db.execute(query)
        except sqlite3.Error:
            self.pool.finish_with(h)
            raise
        self._cursors[name] = (h, cur)
        return cur

    def close_cursor(self, name: str) -> None:
        h, cur = self._cursors.pop(name)
        cur.close()
        self.pool.finish_with(h)

    def scan(self, query: str, limit: int) -> List[tuple]:
        """Run an ad-hoc query to its end or to ``limit`` rows."""
        cur = obtain(self.pool).db.execute(query)  # leak: only the cursor is kept, the handle has no name
        return cur.fetchmany(limit)

    # -- writer -----------------------------------------------------------------
    def begin(self) -> None:
        if self._writer is not None:
            raise RuntimeError("a write is open")
        self._writer = obtain_for(self.pool, self.version)  # clean: commit and rollback both go through _end
        self._writer.db.execute("BEGIN IMMEDIATE")

    def put(self, key: str, blob: str, crc: int) -> None:
        assert self._writer is not None
        self._writer.db.execute("REPLACE INTO samples VALUES (?, ?, ?)", (key, blob, crc))

    def commit(self) -> None:
        self._end(lambda db: db.commit())

    def rollback(self) -> None:
        self._end(lambda db: db.rollback())

    def _end(self, action: Callable[[sqlite3.Connection], None]) -> None:
        h, self._writer = self._writer, None
        if h is None:
            return
        try:
            action(h.db)
        finally:
            h.generation += 1
            self.pool.finish_with(h)


def copy_sample(src: SampleStore, dst: SampleStore, key: str) -> bool:
    with src.pool.handle() as reader:  # clean: context manager
        row = reader.row(key)
        if row is None:
            return False
        try:
            writer = dst.pool.fetch(block=False)  # leak: the row present already, or a sqlite error, returns past the give-back
            if writer.row(key) is not None:
                return True
            writer.db.execute("INSERT INTO samples VALUES (?, ?, ?)", (key, *row))
            writer.db.commit()
        except (NoHandle, sqlite3.Error) as exc:
            log.error("copy of %s: %s", key, exc)
            return False
        dst.pool.finish_with(writer)
        return True


def reindex(path: Path, version: int) -> int:
    pool = HandlePool(path, 2)
    try:
        h = obtain_tuned(pool, version, 65536)  # clean: given back by the inner finally
    except (SchemaMismatch, ValueError) as exc:
        print(exc, file=sys.stderr)
        return 2
    try:
        h.db.execute("REINDEX samples")
        return 0
    finally:
        pool.finish_with(h)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("path", type=Path)
    ap.add_argument("--version", type=int, default=1)
    args = ap.parse_args()
    return reindex(args.path, args.version)


if __name__ == "__main__":
    sys.exit(main())
