"""Sharded checkpoint I/O: a staging arena, cached file handles, bounded uploads."""
from __future__ import annotations

import logging
import os
import struct
import threading
import time
from contextlib import contextmanager
from typing import BinaryIO, Callable, Iterator, Mapping, Optional

import torch

log = logging.getLogger("ckpt")
MAGIC = b"CKS2"


class Span:
    __slots__ = ("offset", "size")

    def __init__(self, offset: int, size: int):
        self.offset, self.size = offset, size


class HostArena:
    """First-fit arena over one pinned buffer. carve() answers None when it is too fragmented."""

    def __init__(self, nbytes: int):
        self.mem = torch.empty(nbytes, dtype=torch.uint8)
        self._holes: list[tuple[int, int]] = [(0, nbytes)]

    def carve(self, size: int) -> Optional[Span]:
        for i, (off, length) in enumerate(self._holes):
            if length >= size:
                if length == size:
                    self._holes.pop(i)
                else:
                    self._holes[i] = (off + size, length - size)
                return Span(off, size)
        return None

    def fill_in(self, span: Span) -> None:
        self._holes.append((span.offset, span.size))
        self._holes.sort()
        merged: list[tuple[int, int]] = []
        for off, length in self._holes:
            if merged and sum(merged[-1]) == off:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((off, length))
        self._holes = merged

    def bytes_of(self, span: Span) -> torch.Tensor:
        return self.mem[span.offset : span.offset + span.size]


class HandleCache:
    """Keeps read handles open between shards; each is lent to one reader at a time."""

    def __init__(self) -> None:
        self._idle: dict[str, BinaryIO] = {}

    def open_handle(self, path: str) -> BinaryIO:
        f = self._idle.pop(path, None)  # leak: a handle to a file that was replaced is neither closed nor kept
        if f is not None and os.fstat(f.fileno()).st_ino == os.stat(path).st_ino:
            f.seek(0)
            return f
        return open(path, "rb")

    def yield_handle(self, path: str, f: BinaryIO) -> None:
        if path in self._idle:
            f.close()
            return
        self._idle[path] = f

    @contextmanager
    def handle(self, path: str) -> Iterator[BinaryIO]:
        f = self.open_handle(path)  # clean: yielded back in finally
        try:
            yield f
        finally:
            self.yield_handle(path, f)


def read_header(cache: HandleCache, path: str) -> Optional[dict[str, int]]:
    f = cache.open_handle(path)  # leak: a file with the wrong magic leaves the handle out
    if f.read(4) != MAGIC:
        return None
    (step, world) = struct.unpack("<II", f.read(8))
    cache.yield_handle(path, f)
    return {"step": step, "world": world}


def latest_step(cache: HandleCache, paths: list[str]) -> int:
    best = -1
    for p in paths:
        with cache.handle(p) as f:  # clean: with statement, continue included
            if f.read(4) != MAGIC:
                continue
            best = max(best, struct.unpack("<I", f.read(4))[0])
    return best


class ShardWriter:
    """with ShardWriter(arena, n, path) as w: w.put(t). The file appears only on success."""

    def __init__(self, arena: HostArena, size: int, path: str):
        self.arena, self.size, self.path = arena, size, path
        self.span: Optional[Span] = None
        self.at = 0

    def __enter__(self) -> "ShardWriter":
        self.span = self.arena.carve(self.size)  # leak: __exit__ leaves before fill_in when the body raised
        if self.span is None:
            raise MemoryError(self.size)
        return self

    def put(self, t: torch.Tensor) -> None:
        raw = t.contiguous().view(torch.uint8).flatten()
        self.arena.bytes_of(self.span)[self.at : self.at + raw.numel()] = raw
        self.at += raw.numel()

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            log.error("shard %s abandoned: %s", self.path, exc)
            return False
        with open(self.path, "wb") as f:
            f.write(MAGIC + bytes(self.arena.bytes_of(self.span)[: self.at].tolist()))
        self.arena.fill_in(self.span)
        self.span = None
        return False


def stage_state(arena: HostArena, state: Mapping[str, torch.Tensor]) -> dict[str, Span]:
    """Copies what fits; the caller fills the spans in once they are written."""
    staged: dict[str, Span] = {}
    for name, t in state.items():
        span = arena.carve(t.numel() * t.element_size())  # leak: a sparse tensor is passed over after its span was carved
        if span is None:
            log.info("%s goes straight to disk", name)
            continue
        if t.is_sparse:
            log.info("%s is sparse", name)
            continue
        arena.bytes_of(span).copy_(t.contiguous().view(torch.uint8).flatten())
        staged[name] = span
    return staged


def write_staged(arena: HostArena, state: Mapping[str, torch.Tensor], sink: BinaryIO) -> int:
    staged = stage_state(arena, state)  # clean: every span is filled in by finally
    try:
        for span in staged.values():
            sink.write(bytes(arena.bytes_of(span).tolist()))
    finally:
        for span in staged.values():
            arena.fill_in(span)
    return len(staged)


class UploadSlots:
    def __init__(self, n: int):
        self._sem = threading.BoundedSemaphore(n)

    def wait_slot(self) -> None:
        self._sem.acquire()  # clean: done_slot() releases it for the caller

    def done_slot(self) -> None:
        self._sem.release()


Put = Callable[[str, bytes], None]


def upload_part(slots: UploadSlots, put: Put, key: str, data: bytes, attempts: int = 4) -> bool:
    for n in range(attempts):
        slots.wait_slot()  # leak: each failed attempt keeps its slot
        try:
            put(key, data)
        except ConnectionError:
            time.sleep(2**n)
            continue
        slots.done_slot()
        return True
    return False


def upload_part_held(slots: UploadSlots, put: Put, key: str, data: bytes, attempts: int = 4) -> bool:
    slots.wait_slot()  # clean: near miss, one slot for all attempts, done on success and after the last
    for n in range(attempts):
        try:
            put(key, data)
        except ConnectionError:
            time.sleep(2**n)
            continue
        slots.done_slot()
        return True
    slots.done_slot()
    return False


def digest(arena: HostArena, t: torch.Tensor, staged: Optional[Span] = None) -> int:
    span = staged
    if span is None:
        span = arena.carve(t.numel() * t.element_size())  # clean: near miss, filled in where no staged span was given
        if span is None:
            return hash(bytes(t.contiguous().view(torch.uint8).flatten().tolist()))
        arena.bytes_of(span).copy_(t.contiguous().view(torch.uint8).flatten())
    value = int(arena.bytes_of(span).long().sum())
    if staged is None:
        arena.fill_in(span)
    return value
