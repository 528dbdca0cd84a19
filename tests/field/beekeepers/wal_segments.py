"""Write-ahead log of a queue service: segment files, a handle cache and retention."""
from __future__ import annotations

import logging
import os
import struct
import threading
from collections import OrderedDict
from typing import BinaryIO, Iterator, Optional

log = logging.getLogger("wal")
HEADER = struct.Struct("<IQ")
MAGIC = b"WAL2"


class CachedFile:
    def __init__(self, path: str, handle: BinaryIO) -> None:
        self.path = path
        self.handle = handle
        self.users = 0


class HandleCache:
    """LRU of open segment files. lease() counts a user in, drop() counts it out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._files: OrderedDict[str, CachedFile] = OrderedDict()
        self._lock = threading.Lock()

    def lease(self, path: str) -> CachedFile:
        with self._lock:
            cached = self._files.get(path)
            if cached is None:
                cached = CachedFile(path, open(path, "rb"))  # clean: near miss, trim() closes it when unused
                self._files[path] = cached
            self._files.move_to_end(path)
            cached.users += 1
            return cached

    def drop(self, cached: CachedFile) -> None:
        with self._lock:
            cached.users -= 1
        self.trim()

    def trim(self) -> None:
        with self._lock:
            for path, cached in list(self._files.items()):
                if len(self._files) <= self.capacity:
                    break
                if cached.users == 0:
                    del self._files[path]
                    cached.handle.close()

    def close(self) -> None:
        with self._lock:
            while self._files:
                _, cached = self._files.popitem()
                cached.handle.close()


class IndexCache:
    """Memory of index files by segment."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._open: OrderedDict[int, BinaryIO] = OrderedDict()

    def index_of(self, directory: str, segment: int) -> BinaryIO:
        handle = self._open.get(segment)
        if handle is None:
            handle = open(os.path.join(directory, "%08d.idx" % segment), "rb")  # leak: evicted unclosed
            self._open[segment] = handle
            if len(self._open) > self.capacity:
                self._open.popitem(last=False)
        return handle

    def close(self) -> None:
        for handle in self._open.values():
            handle.close()
        self._open.clear()


class SegmentWriter:
    def __init__(self, directory: str, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self.number = 0
        self.offset = 0
        self.out: Optional[BinaryIO] = None

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, "%08d.log" % number)

    def open_segment(self, number: int) -> None:
        if self.out is not None:
            self.out.flush()
            self.out.close()
        self.number = number
        self.out = open(self._path(number), "ab")  # clean: near miss, the former is closed, close() ends it
        self.offset = self.out.tell()

    def append(self, payload: bytes) -> tuple[int, int]:
        if self.out is None or self.offset + len(payload) > self.limit:
            self.open_segment(self.number + 1)
        at = self.offset
        self.out.write(HEADER.pack(len(payload), at) + payload)
        self.offset += HEADER.size + len(payload)
        return self.number, at

    def close(self) -> None:
        if self.out is not None:
            self.out.close()
            self.out = None


class CheckpointWriter:
    """Rolls the checkpoint file over whenever it is asked to."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.generation = 0
        self.file: Optional[BinaryIO] = None

    def roll(self) -> None:
        self.generation += 1
        self.file = open(self._path(), "wb")  # leak: roll() replaces the open file of the generation before
        self.file.write(MAGIC)

    def _path(self) -> str:
        return os.path.join(self.directory, "ckpt.%d" % self.generation)

    def write(self, blob: bytes) -> None:
        self.file.write(blob)
        self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def read_magic(path: str) -> bool:
    return open(path, "rb").read(4) == MAGIC  # leak: the handle is never closed


def read_header(path: str) -> Optional[tuple[int, int]]:
    with open(path, "rb") as handle:  # clean: with
        raw = handle.read(HEADER.size)
        if len(raw) < HEADER.size:
            return None
        return HEADER.unpack(raw)


def record_at(cache: HandleCache, path: str, offset: int) -> Optional[bytes]:
    cached = cache.lease(path)  # leak: a record cut short returns None with the user counted in
    cached.handle.seek(offset)
    raw = cached.handle.read(HEADER.size)
    if len(raw) < HEADER.size:
        return None
    size, _ = HEADER.unpack(raw)
    payload = cached.handle.read(size)
    cache.drop(cached)
    return payload


def last_offset(cache: HandleCache, path: str) -> int:
    cached = cache.lease(path)  # clean: dropped after the walk
    position = 0
    while True:
        cached.handle.seek(position)
        raw = cached.handle.read(HEADER.size)
        if len(raw) < HEADER.size:
            break
        position += HEADER.size + HEADER.unpack(raw)[0]
    cache.drop(cached)
    return position


def records(cache: HandleCache, paths: list[str]) -> Iterator[bytes]:
    for path in paths:
        cached = cache.lease(path)  # clean: near miss, the finally also serves a consumer that stops
        try:
            cached.handle.seek(0)
            while raw := cached.handle.read(HEADER.size):
                yield cached.handle.read(HEADER.unpack(raw)[0])
        finally:
            cache.drop(cached)


def open_next(directory: str, number: int) -> Optional[BinaryIO]:
    path = os.path.join(directory, "%08d.log" % number)
    if not os.path.exists(path):
        return None
    return open(path, "rb")  # clean: handed to the caller


def copy_out(directory: str, first: int, target: str) -> int:
    """Concatenate all segments from first on into target."""
    copied = 0
    out = open(target, "wb")  # clean: closed after the loop
    source = open_next(directory, first)  # leak: rebound to the next segment without a close
    number = first
    while source is not None:
        copied += out.write(source.read())
        number += 1
        source = open_next(directory, number)  # leak: rebound to the next segment without a close
    out.close()
    return copied


def verify(directory: str, first: int) -> list[int]:
    broken = []
    number = first
    while (source := open_next(directory, number)) is not None:  # clean: closed at the end of each round
        if source.read(4) != MAGIC:
            broken.append(number)
        number += 1
        source.close()
    return broken


class Tailer:
    """Follows the log across segments, one file at a time."""

    def __init__(self, directory: str, number: int) -> None:
        self.directory = directory
        self.number = number
        self.handle = open_next(directory, number)  # clean: advance() and close() close it

    def advance(self) -> bool:
        following = open_next(self.directory, self.number + 1)  # clean: near miss, swapped in after the close
        if following is None:
            return False
        if self.handle is not None:
            self.handle.close()
        self.handle = following
        self.number += 1
        return True

    def read(self) -> bytes:
        return self.handle.read(65536) if self.handle is not None else b""

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
            self.handle = None


def tail_once(directory: str, number: int, sink) -> int:
    tailer = Tailer(directory, number)  # clean: closed in the finally
    try:
        sink.write(tailer.read())
        while tailer.advance():
            sink.write(tailer.read())
        return tailer.number
    finally:
        tailer.close()
