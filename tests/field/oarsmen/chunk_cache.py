"""SSD cache in front of an object store, for dataset shards.

A pinned entry is never evicted. Space is taken from a ledger before a download and stays taken while the entry exists.
"""
from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Callable, Dict, Iterator, List, Optional

log = logging.getLogger("chunkcache")


class CacheFull(OSError): ...
class Corrupt(ValueError): ...


class Ledger:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._lock = threading.Lock()

    def take(self, n: int) -> bool:
        with self._lock:
            fits = self.used + n <= self.capacity
            self.used += n if fits else 0
            return fits

    def give(self, n: int) -> None:
        with self._lock:
            self.used -= n


@dataclass(eq=False)
class Entry:
    key: str
    path: Path
    size: int
    digest: str
    pins: int = 0
    touched: float = field(default_factory=time.monotonic)
    doomed: bool = False


class ChunkCache:
    def __init__(self, root: Path, capacity: int, fetch: Callable[[str, BinaryIO], str], workers: int = 4) -> None:
        self.root = root
        self.ledger = Ledger(capacity)
        self.fetch = fetch
        self._entries: Dict[str, Entry] = {}
        self._lock = threading.RLock()
        self._exec = ThreadPoolExecutor(workers, thread_name_prefix="chunk")

    def _path(self, key: str) -> Path:
        return self.root / hashlib.sha1(key.encode()).hexdigest()

    def pin(self, key: str) -> Optional[Entry]:
        """The entry with one more pin, or None if it is not here."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not entry.doomed:
                entry.pins += 1
                entry.touched = time.monotonic()
                return entry
        return None

    def unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.pins -= 1
            if entry.doomed and entry.pins == 0:
                self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        with contextlib.suppress(FileNotFoundError):
            entry.path.unlink()
        self.ledger.give(entry.size)

    def invalidate(self, key: str) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.doomed = True
                if entry.pins == 0:
                    self._remove(entry)

    def _make_room(self, n: int) -> bool:
        with self._lock:
            for entry in sorted(self._entries.values(), key=lambda e: e.touched):
                if self.ledger.take(n):  # clean: near miss, the answer is passed on, the caller has the bytes
                    return True
                if entry.pins == 0:
                    self._remove(entry)
            return self.ledger.take(n)  # clean: passed on to the caller

    def _download(self, key: str, size: int, digest: str) -> Entry:
        if not self._make_room(size):  # leak: for a chunk with a wrong digest the file is removed, the bytes stay booked in the ledger
            raise CacheFull(f"{key}: {size} bytes do not fit")
        path = self._path(key)
        part = path.with_suffix(".part")
        with open(part, "wb") as out:  # clean: with
            got = self.fetch(key, out)
        if got != digest:
            part.unlink()
            raise Corrupt(f"{key}: expected {digest}, got {got}")
        part.rename(path)
        with self._lock:
            if key in self._entries:
                self.ledger.give(size)
            else:
                self._entries[key] = Entry(key, path, size, digest)
            return self._entries[key]

    def request(self, key: str, size: int, digest: str) -> Future:
        return self._exec.submit(self._download, key, size, digest)

    def adopt(self, key: str, blob: bytes) -> bool:
        """Insert something that was produced here, e.g. a tokenised shard."""
        if not self.ledger.take(len(blob)):  # clean: near miss, given back in the handler, otherwise by _remove() of the entry
            return False
        path = self._path(key)
        try:
            with self._lock:
                if key in self._entries:
                    raise FileExistsError(key)
                path.write_bytes(blob)
                self._entries[key] = Entry(key, path, len(blob), hashlib.md5(blob).hexdigest())
        except OSError as exc:
            log.info("not adopted: %s", exc)
            self.ledger.give(len(blob))
            return False
        return True

    def open(self, key: str) -> Optional["ChunkReader"]:
        entry = self.pin(key)  # leak: when the file has vanished the handler returns None and forgets the pin
        if entry is None:
            return None
        try:
            raw = open(entry.path, "rb", buffering=0)  # clean: belongs to the reader, closed by its close()
        except FileNotFoundError:
            log.error("%s: the file of the entry is gone", key)
            return None
        return ChunkReader(self, entry, raw)

    @contextlib.contextmanager
    def mapped(self, key: str) -> Iterator[Optional[mmap.mmap]]:
        entry = self.pin(key)  # clean: near miss, a miss has no pin, everything else goes through the finally
        if entry is None:
            yield None
            return
        fd = None
        try:
            fd = os.open(entry.path, os.O_RDONLY)  # clean: closed in the finally
            with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mm:  # clean: with
                yield mm
        finally:
            if fd is not None:
                os.close(fd)
            self.unpin(entry)

    def verify(self, keys: List[str]) -> List[str]:
        bad = []
        for key in keys:
            entry = self.pin(key)  # leak: a mismatch is noted and the loop continues before the unpin
            if entry is None:
                continue
            with open(entry.path, "rb") as fh:  # clean: with
                digest = hashlib.file_digest(fh, "md5").hexdigest()
            if digest != entry.digest:
                bad.append(key)
                self.invalidate(key)
                continue
            self.unpin(entry)
        return bad

    def close(self) -> None:
        self._exec.shutdown(wait=True)


class ChunkReader:
    """Reads a pinned entry."""

    def __init__(self, cache: ChunkCache, entry: Entry, raw: BinaryIO) -> None:
        self.cache, self.entry, self.raw = cache, entry, raw
        self.read = raw.read

    def close(self) -> None:
        if not self.raw.closed:
            self.raw.close()
            self.cache.unpin(self.entry)

    def __enter__(self) -> "ChunkReader":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class Readahead:
    """Keeps the next few shards of an epoch open."""

    def __init__(self, cache: ChunkCache, order: List[str], depth: int = 3) -> None:
        self.cache, self.order, self.depth, self.at = cache, order, depth, 0
        self._open: Dict[str, ChunkReader] = {}

    def _fill(self) -> None:
        for key in self.order[self.at:self.at + self.depth]:
            if key in self._open:
                continue
            reader = self.cache.open(key)  # leak: a seek() throws away the table with readers that are still open
            if reader is not None:
                self._open[key] = reader

    def seek(self, at: int) -> None:
        """Resume from a checkpoint in the middle of the epoch."""
        self.at = at
        self._open = {}
        self._fill()

    def __iter__(self) -> Iterator[bytes]:
        while self.at < len(self.order):
            self._fill()
            reader = self._open.pop(self.order[self.at], None)
            self.at += 1
            if reader is not None:
                with reader:
                    yield reader.read()

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()
        self._open.clear()


def head(cache: ChunkCache, key: str, n: int = 512) -> bytes:
    reader = cache.open(key)  # leak: an entry shorter than asked for raises Corrupt with the reader open
    if reader is None:
        raise KeyError(key)
    data = reader.read(n)
    if len(data) < n:
        raise Corrupt(f"{key}: only {len(data)} bytes")
    reader.close()
    return data


def copy_out(cache: ChunkCache, key: str, target: Path) -> int:
    reader = cache.open(key)  # clean: None or closed by the with
    if reader is None:
        return 0
    with reader, open(target, "wb") as out:  # clean: with
        return out.write(reader.read())
