"""Random and sequential access to sample shards on a parallel file system.

Opening a shard costs a metadata round trip and an index read, so open files are
shared by reference count and stay open for a while after their last reader.
"""
from __future__ import annotations

import contextlib
import heapq
import json
import os
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"SHRD"
FOOTER = struct.Struct("<IQ4s")

Sample = dict[str, Any]


class ShardCorrupt(ValueError):
    """The footer is missing or does not make sense."""


@dataclass(eq=False)
class ShardFile:
    path: Path
    fh: BinaryIO
    offsets: list[tuple[int, int]]
    refs: int = 0

    def read(self, row: int) -> Sample:
        start, size = self.offsets[row]
        return json.loads(os.pread(self.fh.fileno(), size, start))


def _read_index(fh: BinaryIO) -> list[tuple[int, int]]:
    fh.seek(-FOOTER.size, os.SEEK_END)
    count, start, magic = FOOTER.unpack(fh.read(FOOTER.size))
    if magic != MAGIC:
        raise ShardCorrupt(fh.name)
    fh.seek(start)
    return [struct.unpack("<QI", fh.read(12)) for _ in range(count)]


class ShardCache:
    def __init__(self, max_idle: int = 8) -> None:
        self._max_idle = max_idle
        self._open: dict[Path, ShardFile] = {}
        self._idle: OrderedDict[Path, ShardFile] = OrderedDict()
        self._lock = threading.Lock()

    def acquire(self, path: Path) -> ShardFile:
        with self._lock:
            shard = self._open.get(path)
            if shard is None:
                shard = self._idle.pop(path, None)  # clean: returned with a reference, or None
            if shard is None:
                fh = open(path, "rb")  # leak: _read_index() raises ShardCorrupt and the file has no owner yet
                shard = ShardFile(path, fh, _read_index(fh))
            shard.refs += 1
            self._open[path] = shard
            return shard

    def release(self, shard: ShardFile) -> None:
        with self._lock:
            shard.refs -= 1
            if shard.refs:
                return
            del self._open[shard.path]
            self._idle[shard.path] = shard
            while len(self._idle) > self._max_idle:
                _, oldest = self._idle.popitem(last=False)  # clean: closed on the next line
                oldest.fh.close()

    @contextlib.contextmanager
    def using(self, path: Path) -> Iterator[ShardFile]:
        shard = self.acquire(path)  # clean: finally
        try:
            yield shard
        finally:
            self.release(shard)


def iter_shard(cache: ShardCache, path: Path, start: int = 0) -> Iterator[Sample]:
    shard = cache.acquire(path)  # clean: near miss, the finally runs as well when the generator is closed early
    try:
        for row in range(start, len(shard.offsets)):
            yield shard.read(row)
    finally:
        cache.release(shard)


def peek(cache: ShardCache, path: Path) -> Sample | None:
    """The first sample, for schema inference."""
    shard = cache.acquire(path)  # leak: an empty shard returns None before the release
    if not shard.offsets:
        return None
    sample = shard.read(0)
    cache.release(shard)
    return sample


def total_samples(cache: ShardCache, paths: Iterable[Path]) -> tuple[int, list[Path]]:
    total, bad = 0, []
    for path in paths:
        try:
            shard = cache.acquire(path)  # clean: near miss, the handler runs only when nothing was acquired
        except ShardCorrupt:
            bad.append(path)
            continue
        total += len(shard.offsets)
        cache.release(shard)
    return total, bad


@dataclass
class _Cursor:
    shard: ShardFile
    rows: Iterator[int]


class Interleaver:
    """Round robin over `width` shards, each rank taking every n-th row."""

    def __init__(self, cache: ShardCache, paths: Iterable[Path], width: int, rank: int, world: int) -> None:
        self._cache = cache
        self._todo = deque(paths)
        self._cursors: list[_Cursor | None] = [None] * width
        self._rank, self._world = rank, world
        self._turn = 0

    def _refill(self, i: int) -> _Cursor | None:
        while self._todo:
            shard = self._cache.acquire(self._todo.popleft())  # clean: a shard without rows is released, others live in _cursors
            rows = range(self._rank, len(shard.offsets), self._world)
            if not rows:
                self._cache.release(shard)
                continue
            self._cursors[i] = _Cursor(shard, iter(rows))
            return self._cursors[i]
        return None

    def __iter__(self) -> Iterator[Sample]:
        try:
            starved = 0
            while starved < len(self._cursors):
                i = self._turn = (self._turn + 1) % len(self._cursors)
                cursor = self._cursors[i] or self._refill(i)
                if cursor is None:
                    starved += 1
                    continue
                starved = 0
                row = next(cursor.rows, None)
                if row is None:
                    self._drop(i)
                else:
                    yield cursor.shard.read(row)
        finally:
            for i in range(len(self._cursors)):
                self._drop(i)

    def _drop(self, i: int) -> None:
        cursor, self._cursors[i] = self._cursors[i], None
        if cursor is not None:
            self._cache.release(cursor.shard)


class ResumableReader:
    """Walks through the shards in order and can be checkpointed between rows."""

    def __init__(self, cache: ShardCache, paths: list[Path]) -> None:
        self._cache = cache
        self._paths = paths
        self._file = self._row = 0
        self._shard: ShardFile | None = None

    def state(self) -> dict[str, int]:
        return {"file": self._file, "row": self._row}

    def load_state(self, state: dict[str, int]) -> None:
        self._file, self._row = state["file"], state["row"]
        self._shard = None

    def __next__(self) -> Sample:
        while self._file < len(self._paths):
            if self._shard is None:
                self._shard = self._cache.acquire(self._paths[self._file])  # leak: load_state() drops the open shard unreleased
            if self._row < len(self._shard.offsets):
                self._row += 1
                return self._shard.read(self._row - 1)
            self.close()
            self._file, self._row = self._file + 1, 0
        raise StopIteration

    def close(self) -> None:
        if self._shard is not None:
            self._cache.release(self._shard)
            self._shard = None


class SampleRef:
    def __init__(self, cache: ShardCache, shard: ShardFile, row: int) -> None:
        self._cache, self._shard, self._row = cache, shard, row

    def load(self) -> Sample:
        return self._shard.read(self._row)

    def drop(self) -> None:
        if self._shard is not None:
            self._cache.release(self._shard)
            self._shard = None


def sample_ref(cache: ShardCache, path: Path, row: int) -> SampleRef:
    shard = cache.acquire(path)  # clean: near miss, released before the raise, otherwise owned by the SampleRef
    if row >= len(shard.offsets):
        cache.release(shard)
        raise IndexError(row)
    return SampleRef(cache, shard, row)


class HardExamples:
    """The most recent samples with a large loss."""

    def __init__(self, cache: ShardCache, capacity: int) -> None:
        self._cache = cache
        self._refs: deque[SampleRef] = deque(maxlen=capacity)

    def note(self, path: Path, row: int) -> None:
        self._refs.append(sample_ref(self._cache, path, row))  # leak: a full deque with maxlen throws out the oldest without drop()

    def drain(self) -> Iterator[Sample]:
        while self._refs:
            ref = self._refs.popleft()
            sample = ref.load()
            ref.drop()
            yield sample


def zip_shards(cache: ShardCache, images: Path, captions: Path) -> list[tuple[Sample, Sample]]:
    left = cache.acquire(images)  # leak: acquiring the captions raises ShardCorrupt while this one is held
    right = cache.acquire(captions)  # clean: finally
    try:
        return [(left.read(i), right.read(i)) for i in range(len(left.offsets))]
    finally:
        cache.release(right)
        cache.release(left)


def merge_by_key(cache: ShardCache, paths: Iterable[Path], key: str) -> Iterator[Sample]:
    with contextlib.ExitStack() as stack:
        shards = [stack.enter_context(cache.using(p)) for p in paths]  # clean: the stack releases what was entered so far
        runs = [(s.read(i) for i in range(len(s.offsets))) for s in shards]
        yield from heapq.merge(*runs, key=lambda sample: sample[key])
