"""Dataset shards for the training loader: descriptors, mappings, sample cursors.

Shards are mapped on first use and reference counted.  Descriptors are rationed
because the loader runs with dozens of processes on one host.
"""
from __future__ import annotations

import logging
import mmap
import os
import random
import struct
import threading
from typing import Dict, Iterator, List, Optional, Tuple

log = logging.getLogger("data.shards")

MAGIC = b"SHRD"


class FdRation:
    def __init__(self, limit: int):
        self._left = limit
        self._cv = threading.Condition()

    def open(self, path: str) -> int:
        with self._cv:
            while self._left == 0:
                self._cv.wait()
            self._left -= 1
        try:
            return os.open(path, os.O_RDONLY)  # clean: handed to the caller
        except OSError:
            self._regain()
            raise

    def close(self, fd: int) -> None:
        os.close(fd)
        self._regain()

    def _regain(self) -> None:
        with self._cv:
            self._left += 1
            self._cv.notify()


class BadShard(ValueError):
    pass


class Mapped:
    def __init__(self, path: str, mm: mmap.mmap, fd: int, offsets: List[int]):
        self.path = path
        self.mm = mm
        self.fd = fd
        self.offsets = offsets
        self.uses = 0

    def record(self, i: int) -> bytes:
        return self.mm[self.offsets[i] : self.offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1


class ShardTable:
    def __init__(self, root: str, ration: FdRation):
        self.root = root
        self.ration = ration
        self._open: Dict[str, Mapped] = {}
        self._mu = threading.RLock()

    def pin(self, name: str) -> Mapped:
        with self._mu:
            shard = self._open.get(name)
            if shard is None:
                shard = self._map(os.path.join(self.root, name))  # clean: kept in the table until the last unpin
                self._open[name] = shard
            shard.uses += 1
            return shard

    def unpin(self, name: str) -> None:
        with self._mu:
            shard = self._open[name]
            shard.uses -= 1
            if shard.uses > 0:
                return
            del self._open[name]
        shard.mm.close()
        self.ration.close(shard.fd)

    def _map(self, path: str) -> Mapped:
        fd = self.ration.open(path)  # leak: a wrong magic raises BadShard with the descriptor open
        head = os.pread(fd, 8, 0)
        if head[:4] != MAGIC:
            raise BadShard(path)
        (count,) = struct.unpack("<I", head[4:])
        mm = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)  # clean: handed to the caller in Mapped
        offsets = list(struct.unpack_from(f"<{count + 1}Q", mm, 8))
        return Mapped(path, mm, fd, offsets)

    def size_of(self, name: str) -> int:
        fd = self.ration.open(os.path.join(self.root, name))  # clean: near miss, closed before the magic is looked at
        head = os.pread(fd, 8, 0)
        self.ration.close(fd)
        if head[:4] != MAGIC:
            raise BadShard(name)
        return struct.unpack("<I", head[4:])[0]

    def sample(self, name: str, i: int) -> Optional[bytes]:
        shard = self.pin(name)  # leak: an index past the end returns without the unpin
        if i >= len(shard):
            return None
        data = bytes(shard.record(i))
        self.unpin(name)
        return data

    def sample_checked(self, name: str, i: int) -> Optional[bytes]:
        try:
            shard = self.pin(name)  # clean: unpinned in the inner finally
        except BadShard:
            return None
        try:
            if i >= len(shard):
                return None
            return bytes(shard.record(i))
        finally:
            self.unpin(name)


class Cursor:
    """Walks one shard; advance() moves on to the next and drops the pin."""

    def __init__(self, table: ShardTable, names: List[str]):
        self.table = table
        self.names = names
        self.at = 0
        self.pos = 0
        self.shard: Optional[Mapped] = None

    def _load(self) -> bool:
        if self.at >= len(self.names):
            return False
        if self.shard is None:
            self.shard = self.table.pin(self.names[self.at])  # clean: near miss, only when shard is None, unpinned by advance() or close()
            self.pos = 0
        return True

    def advance(self) -> None:
        if self.shard is not None:
            self.table.unpin(self.names[self.at])
            self.shard = None
        self.at += 1

    def __iter__(self) -> Iterator[bytes]:
        while self._load():
            if self.pos >= len(self.shard):
                self.advance()
                continue
            rec = self.shard.record(self.pos)
            self.pos += 1
            yield bytes(rec)

    def close(self) -> None:
        if self.shard is not None:
            self.table.unpin(self.names[self.at])
            self.shard = None


class ShuffleWindow:
    """Keeps a few shards pinned and draws from them at random."""

    def __init__(self, table: ShardTable, width: int, seed: int):
        self.table = table
        self.width = width
        self.rng = random.Random(seed)
        self.window: List[Tuple[str, Mapped]] = []
        self.skipped = 0

    def refill(self, names: List[str]) -> None:
        while names and len(self.window) < self.width:
            name = names.pop()
            shard = self.table.pin(name)  # leak: an empty shard is skipped with its pin
            if len(shard) == 0:
                self.skipped += 1
                continue
            self.window.append((name, shard))

    def rotate(self, name: str) -> None:
        """Swaps the oldest shard for a new one."""
        fresh = self.table.pin(name)  # clean: near miss, appended to the window after the oldest is unpinned
        if self.window:
            old_name, _ = self.window.pop(0)
            self.table.unpin(old_name)
        self.window.append((name, fresh))

    def draw(self) -> Optional[bytes]:
        if not self.window:
            return None
        _, shard = self.rng.choice(self.window)
        return bytes(shard.record(self.rng.randrange(len(shard))))

    def clear(self) -> None:
        for name, _ in self.window:
            self.table.unpin(name)
        self.window.clear()


def read_slice(table: ShardTable, name: str, start: int, stop: int) -> Iterator[bytes]:
    shard = table.pin(name)  # clean: unpinned in finally, also when the generator is closed
    try:
        for i in range(start, min(stop, len(shard))):
            yield bytes(shard.record(i))
    finally:
        table.unpin(name)


def read_until(table: ShardTable, name: str, sentinel: bytes) -> Iterator[bytes]:
    shard = table.pin(name)  # leak: the sentinel's return comes before the unpin
    for i in range(len(shard)):
        rec = bytes(shard.record(i))
        if rec.startswith(sentinel):
            return
        yield rec
    table.unpin(name)


def merge_headers(table: ShardTable, names: List[str]) -> List[int]:
    """Record counts of all shards, or an empty list if one cannot be read."""
    pinned: List[str] = []
    counts: List[int] = []
    try:
        for name in names:
            counts.append(len(table.pin(name)))  # clean: near miss, all names in pinned are unpinned in finally
            pinned.append(name)
    except BadShard as exc:
        log.error("cannot read %s", exc)
        counts = []
    finally:
        for name in pinned:
            table.unpin(name)
    return counts


def copy_tail(ration: FdRation, src: str, dst: str, nbytes: int) -> int:
    fd = ration.open(src)  # leak: rebinding fd to the destination loses the source descriptor
    size = os.fstat(fd).st_size
    data = os.pread(fd, nbytes, max(0, size - nbytes))
    fd = os.open(dst, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)  # clean: closed in finally
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)
