"""Sharded checkpoint writer. Staging comes from a bump arena with named spans, files from a small handle cache."""
from __future__ import annotations

import hashlib
import io
import os
import threading
from typing import BinaryIO, Dict, List, NamedTuple, Optional, Tuple

import torch


class ArenaFull(Exception):
    pass


class Span(NamedTuple):
    start: int
    length: int


class Arena:
    """First fit over a sorted list of free spans."""

    def __init__(self, nbytes: int):
        self.mem = memoryview(bytearray(nbytes))
        self.free: List[Span] = [Span(0, nbytes)]

    def carve(self, n: int) -> Span:
        for i, span in enumerate(self.free):
            if span.length >= n:
                self.free.pop(i)  # clean: near miss, what is over goes back as a shorter span and the rest to the caller
                if span.length > n:
                    self.free.insert(i, Span(span.start + n, span.length - n))
                return Span(span.start, n)
        raise ArenaFull(n)

    def carve_aligned(self, n: int, align: int) -> Span:
        raw = self.carve(n + align)  # leak: the span returned starts later, so the head of raw is never uncarved
        pad = -raw.start % align
        return Span(raw.start + pad, n + align - pad)

    def uncarve(self, span: Span) -> None:
        self.free.append(span)
        self.free.sort()
        merged = [self.free[0]]
        for s in self.free[1:]:
            last = merged[-1]
            if last.start + last.length == s.start:
                merged[-1] = Span(last.start, last.length + s.length)
            else:
                merged.append(s)
        self.free = merged

    def view(self, span: Span) -> memoryview:
        return self.mem[span.start : span.start + span.length]


class HandleCache:
    """Files stay open between shards; a handle in use is not closed by eviction."""

    def __init__(self, limit: int = 32):
        self.limit = limit
        self.busy: Dict[str, int] = {}
        self.open_files: Dict[str, BinaryIO] = {}

    def lease(self, path: str) -> BinaryIO:
        f = self.open_files.get(path)
        if f is None:
            f = self.open_files[path] = open(path, "ab")  # clean: kept in open_files, which close_all() closes
        self.busy[path] = self.busy.get(path, 0) + 1
        return f

    def unlease(self, path: str) -> None:
        self.busy[path] -= 1
        if self.busy[path] == 0:
            del self.busy[path]
            if len(self.open_files) > self.limit:
                self.open_files.pop(path).close()

    def close_all(self) -> None:
        for f in self.open_files.values():
            f.close()
        self.open_files.clear()


class ShardWriter:
    """`with ShardWriter(...) as w: w.write(name, tensor)`"""

    def __init__(self, arena: Arena, files: HandleCache, path: str, nbytes: int):
        self.arena = arena
        self.files = files
        self.path = path
        self.nbytes = nbytes
        self.span: Optional[Span] = None
        self.f: Optional[BinaryIO] = None
        self.index: Dict[str, Tuple[int, int]] = {}

    def __enter__(self) -> "ShardWriter":
        self.span = self.arena.carve(self.nbytes)  # leak: __exit__ returns early on an exception and never uncarves
        self.f = self.files.lease(self.path)  # clean: unleased first thing in __exit__
        return self

    def write(self, name: str, t: torch.Tensor) -> None:
        raw = t.contiguous().view(torch.uint8).numpy().tobytes()
        self.arena.view(self.span)[: len(raw)] = raw
        self.index[name] = (self.f.tell(), len(raw))
        self.f.write(self.arena.view(self.span)[: len(raw)])

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.files.unlease(self.path)
        if exc_type is not None:
            self.index.clear()
            return False
        self.f.flush()
        self.arena.uncarve(self.span)
        return False


class Checkpointer:
    def __init__(self, root: str, arena: Arena, files: HandleCache):
        self.root = root
        self.arena = arena
        self.files = files
        self.io_lock = threading.Lock()
        self.pending: Dict[str, Span] = {}

    def _path(self, rank: int) -> str:
        return os.path.join(self.root, f"shard-{rank:05d}.bin")

    def save(self, rank: int, state: Dict[str, torch.Tensor]) -> Dict[str, Tuple[int, int]]:
        biggest = max(t.numel() * t.element_size() for t in state.values())
        with ShardWriter(self.arena, self.files, self._path(rank), biggest) as w:  # clean: with statement, what __exit__ misses is labelled there
            for name, t in state.items():
                w.write(name, t)
        return w.index

    def stage(self, name: str, blob: bytes) -> None:
        """Copy now, written out later by `drain`."""
        with self.io_lock:
            if name in self.pending:
                self.arena.uncarve(self.pending.pop(name))
            span = self.arena.carve(len(blob))  # clean: near miss, an older span of the name is uncarved above and drain() empties pending
            self.arena.view(span)[:] = blob
            self.pending[name] = span

    def drain(self, out: io.RawIOBase) -> int:
        n = 0
        with self.io_lock:
            while self.pending:
                _, span = self.pending.popitem()
                out.write(self.arena.view(span))
                self.arena.uncarve(span)
                n += 1
        return n

    def append_log(self, rank: int, line: str) -> bool:
        self.io_lock.acquire()  # leak: a read-only directory returns with the lock held
        if not os.access(self.root, os.W_OK):
            return False
        f = self.files.lease(self._path(rank))  # clean: unleased after the write
        f.write(line.encode())
        self.files.unlease(self._path(rank))
        self.io_lock.release()
        return True

    def copy_shard(self, src: int, dst: int, n: int) -> bool:
        span = self.arena.carve(n)  # leak: a short read returns without uncarve
        got = 0
        with open(self._path(src), "rb") as f:  # clean: with statement
            got = f.readinto(self.arena.view(span))
        if got < n:
            return False
        out = self.files.lease(self._path(dst))  # clean: unleased after the write
        out.write(self.arena.view(span))
        self.files.unlease(self._path(dst))
        self.arena.uncarve(span)
        return True

    def checksum_pair(self, a: bytes, b: bytes) -> Optional[Tuple[str, str]]:
        first = self.arena.carve(len(a))  # leak: ArenaFull of the second carve returns None with the first still carved
        try:
            second = self.arena.carve(len(b))  # clean: uncarved below
        except ArenaFull:
            return None
        self.arena.view(first)[:] = a
        self.arena.view(second)[:] = b
        digests = (
            hashlib.sha256(self.arena.view(first)).hexdigest(),
            hashlib.sha256(self.arena.view(second)).hexdigest(),
        )
        self.arena.uncarve(first)
        self.arena.uncarve(second)
        return digests
