"""Spool directory and shared handle cache of the dataset compactor."""
from __future__ import annotations

import json
import os
import struct
import tempfile
import threading
from collections import OrderedDict
from typing import BinaryIO, Iterator

_HDR = struct.Struct("<4sIQ")
MAGIC = b"NDL1"


class CorruptShard(ValueError):
    pass


class _Entry:
    __slots__ = ("fh", "users")

    def __init__(self, fh: BinaryIO):
        self.fh = fh
        self.users = 0


class HandleCache:
    """Opens each shard once; users share the handle by reference count."""

    def __init__(self, keep: int = 128):
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._keep = keep

    def open_shared(self, path: str) -> BinaryIO:
        with self._lock:
            entry = self._entries.get(path)
            if entry is None:
                entry = _Entry(open(path, "rb"))  # clean: near miss, kept in self._entries, closed by _shrink or close_all
                self._entries[path] = entry
            entry.users += 1
            self._entries.move_to_end(path)
            self._shrink()
            return entry.fh

    def done(self, path: str) -> None:
        with self._lock:
            entry = self._entries[path]
            entry.users -= 1
            self._shrink()

    def _shrink(self) -> None:
        extra = len(self._entries) - self._keep
        if extra <= 0:
            return
        for path in [p for p, e in self._entries.items() if e.users == 0][:extra]:
            self._entries.pop(path).fh.close()

    def close_all(self) -> None:
        with self._lock:
            while self._entries:
                _, entry = self._entries.popitem()
                entry.fh.close()


class SpoolDir:
    """Named spool files below a byte quota."""

    def __init__(self, root: str, quota: int):
        self.root = root
        self.quota = quota
        self._charged: dict[str, int] = {}

    def new_file(self, size_hint: int) -> str | None:
        if sum(self._charged.values()) + size_hint > self.quota:
            return None
        fd, path = tempfile.mkstemp(dir=self.root, suffix=".spool")  # clean: descriptor closed at once, the path goes to the caller
        os.close(fd)
        self._charged[path] = size_hint
        return path

    def new_open(self, size_hint: int) -> tuple[int, str] | None:
        fd, path = tempfile.mkstemp(dir=self.root, suffix=".spool")  # leak: descriptor and file stay when the quota refuses
        if sum(self._charged.values()) + size_hint > self.quota:
            return None
        self._charged[path] = size_hint
        return fd, path

    def discard(self, path: str) -> None:
        if self._charged.pop(path, None) is not None:
            os.unlink(path)

    def promote(self, path: str, dest: str) -> None:
        os.replace(path, dest)
        self._charged.pop(path, None)


class ShardReader:
    def __init__(self, cache: HandleCache):
        self.cache = cache

    def header(self, path: str) -> tuple[int, int]:
        fh = self.cache.open_shared(path)  # leak: users count kept when the magic is wrong
        magic, count, length = _HDR.unpack(os.pread(fh.fileno(), _HDR.size, 0))
        if magic != MAGIC:
            raise CorruptShard(path)
        self.cache.done(path)
        return count, length

    def payload(self, path: str) -> bytes:
        fh = self.cache.open_shared(path)  # clean: finally
        try:
            magic, _, length = _HDR.unpack(os.pread(fh.fileno(), _HDR.size, 0))
            if magic != MAGIC:
                raise CorruptShard(path)
            return os.pread(fh.fileno(), length, _HDR.size)
        finally:
            self.cache.done(path)

    def records(self, path: str, limit: int | None = None) -> Iterator[dict]:
        fh = self.cache.open_shared(path)  # leak: the limit returns from the generator before done
        pos = _HDR.size
        n = 0
        while True:
            raw = os.pread(fh.fileno(), 4, pos)
            if len(raw) < 4:
                break
            (size,) = struct.unpack("<I", raw)
            yield json.loads(os.pread(fh.fileno(), size, pos + 4))
            pos += 4 + size
            n += 1
            if limit is not None and n >= limit:
                return
        self.cache.done(path)


class Compactor:
    def __init__(self, reader: ShardReader, spool: SpoolDir):
        self.reader = reader
        self.spool = spool

    def merge(self, inputs: list[str], dest: str) -> bool:
        path = self.spool.new_file(64 << 20)  # clean: promoted, or discarded by the handler
        if path is None:
            return False
        try:
            with open(path, "wb") as out:  # clean: with block
                for p in inputs:
                    out.write(self.reader.payload(p))
        except CorruptShard:
            self.spool.discard(path)
            raise
        self.spool.promote(path, dest)
        return True

    def dedupe(self, src: str, dest: str) -> int:
        path = self.spool.new_file(os.path.getsize(src))  # leak: a source without duplicates returns 0 and keeps the spool file
        if path is None:
            return -1
        seen: set[str] = set()
        dropped = 0
        with open(path, "w") as out:  # clean: with block
            for line in open_lines(src):
                if line in seen:
                    dropped += 1
                    continue
                seen.add(line)
                out.write(line)
        if dropped == 0:
            return 0
        self.spool.promote(path, dest)
        return dropped

    def touch_all(self, dests: list[str]) -> int:
        n = 0
        for d in dests:
            got = self.spool.new_open(0)  # leak: path is promoted but the descriptor is never closed
            if got is None:
                break
            fd, path = got
            os.write(fd, MAGIC)
            self.spool.promote(path, d)
            n += 1
        return n

    def split(self, src: str, left: str, right: str) -> bool:
        data = self.reader.payload(src)
        mid = len(data) // 2
        a = self.spool.new_file(1 << 20)  # clean: near miss, discarded in the rollback, else promoted
        b = self.spool.new_file(1 << 20)  # clean: near miss, discarded in the rollback, else promoted
        if a is None or b is None:
            for p in (a, b):
                if p is not None:
                    self.spool.discard(p)
            return False
        for p, part in ((a, data[:mid]), (b, data[mid:])):
            with open(p, "wb") as fh:  # clean: with block
                fh.write(part)
        self.spool.promote(a, left)
        self.spool.promote(b, right)
        return True


def open_lines(path: str) -> Iterator[str]:
    fh = open(path)  # clean: closed by the generator's finally
    try:
        yield from fh
    finally:
        fh.close()
