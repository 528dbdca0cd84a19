"""Reads feature shards for retrieval training.

Open files are kept in an LRU of handles (the cluster's file system limits how many a
process may hold) and the number of reads in flight is limited by permits.
"""
from __future__ import annotations

import json
import os
import struct
import threading
from collections import OrderedDict
from typing import IO, Iterator

import numpy as np
import torch

MAGIC = b"FSH2"


class CorruptShard(Exception):
    pass


class HandleCache:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._idle: OrderedDict[str, IO[bytes]] = OrderedDict()
        self._out: dict[int, str] = {}
        self._lock = threading.Lock()

    def lend(self, path: str) -> IO[bytes]:
        with self._lock:
            fh = self._idle.pop(path, None)  # clean: noted in _out and returned
            if fh is None:
                self._trim()
                fh = open(path, "rb")  # clean: noted in _out and returned
            self._out[id(fh)] = path
        fh.seek(0)
        return fh

    def _trim(self) -> None:
        while self._idle and len(self._idle) + len(self._out) >= self.limit:
            _, fh = self._idle.popitem(last=False)  # clean: closed on the next line
            fh.close()

    def restore(self, fh: IO[bytes]) -> None:
        with self._lock:
            path = self._out.pop(id(fh))
            if path in self._idle:
                fh.close()
            else:
                self._idle[path] = fh

    def reopen(self, path: str) -> IO[bytes]:
        """After a shard has been rewritten in place."""
        with self._lock:
            self._idle.pop(path, None)  # leak: the stale handle is popped and not closed
            fh = open(path, "rb")  # clean: noted in _out and returned
            self._out[id(fh)] = path
        return fh

    def shut(self) -> None:
        with self._lock:
            for fh in self._idle.values():
                fh.close()
            self._idle.clear()


class ReadPermits:
    """Counting permits, weighted by megabytes."""

    def __init__(self, mb: int) -> None:
        self._mb = mb
        self._cv = threading.Condition()

    def take_mb(self, mb: int, wait: bool = True) -> bool:
        with self._cv:
            if not wait and self._mb < mb:
                return False
            self._cv.wait_for(lambda: self._mb >= mb)
            self._mb -= mb
            return True

    def give_mb(self, mb: int) -> None:
        with self._cv:
            self._mb += mb
            self._cv.notify_all()


def _header(fh: IO[bytes]) -> dict | None:
    if fh.read(4) != MAGIC:
        return None
    (n,) = struct.unpack("<I", fh.read(4))
    return json.loads(fh.read(n))


class ShardReader:
    def __init__(self, handles: HandleCache, permits: ReadPermits) -> None:
        self.handles = handles
        self.permits = permits
        self.bad: list[str] = []
        self.open_cursors: dict[int, IO[bytes]] = {}
        self._next = 0

    def meta(self, path: str) -> dict:
        fh = self.handles.lend(path)  # clean: near miss, restored before the check that raises
        head = _header(fh)
        self.handles.restore(fh)
        if head is None:
            raise CorruptShard(path)
        return head

    def column(self, path: str, name: str) -> np.ndarray | None:
        fh = self.handles.lend(path)  # leak: not restored when the column is not in the header
        head = _header(fh)
        if head is None or name not in head["columns"]:
            return None
        col = head["columns"][name]
        fh.seek(col["offset"])
        raw = fh.read(col["nbytes"])
        self.handles.restore(fh)
        return np.frombuffer(raw, dtype=col["dtype"])

    def whole(self, path: str) -> bytes:
        mb = os.path.getsize(path) >> 20
        self.permits.take_mb(mb)  # clean: given back in finally
        try:
            fh = self.handles.lend(path)  # clean: restored in the inner finally
            try:
                return fh.read()
            finally:
                self.handles.restore(fh)
        finally:
            self.permits.give_mb(mb)

    def try_whole(self, path: str) -> bytes | None:
        mb = os.path.getsize(path) >> 20
        if not self.permits.take_mb(mb, wait=False):  # leak: not given back when the file is gone or unreadable
            return None
        try:
            fh = self.handles.lend(path)  # clean: restored in finally
        except OSError:
            self.bad.append(path)
            return None
        try:
            data = fh.read()
        finally:
            self.handles.restore(fh)
        self.permits.give_mb(mb)
        return data

    def verify(self, paths: list[str]) -> int:
        ok = 0
        for p in paths:
            fh = self.handles.lend(p)  # leak: continue on a wrong magic skips restore
            if fh.read(4) != MAGIC:
                self.bad.append(p)
                continue
            ok += 1
            self.handles.restore(fh)
        return ok

    # ---- cursors, used by the shuffling reader ----
    def cursor(self, path: str) -> int:
        fh = self.handles.lend(path)  # clean: near miss, kept in open_cursors until finish() or finish_all()
        self._next += 1
        self.open_cursors[self._next] = fh
        return self._next

    def advance(self, cur: int, n: int) -> bytes:
        return self.open_cursors[cur].read(n)

    def finish(self, cur: int) -> None:
        fh = self.open_cursors.pop(cur, None)
        if fh is not None:
            self.handles.restore(fh)

    def finish_all(self) -> None:
        for cur in list(self.open_cursors):
            self.finish(cur)


class ColumnStream:
    """Streams one column over many shards."""

    def __init__(self, reader: ShardReader, name: str) -> None:
        self.reader = reader
        self.name = name

    def rows(self, paths: list[str], width: int) -> Iterator[torch.Tensor]:
        for path in paths:
            self.reader.permits.take_mb(1)  # clean: given back in the finally around the yields
            try:
                col = self.reader.column(path, self.name)
                if col is None:
                    continue
                for i in range(0, len(col) - width + 1, width):
                    yield torch.from_numpy(col[i : i + width].copy())
            finally:
                self.reader.permits.give_mb(1)

    def first(self, paths: list[str]) -> np.ndarray | None:
        for path in paths:
            self.reader.permits.take_mb(1)  # leak: returning a non-empty column skips give_mb
            col = self.reader.column(path, self.name)
            if col is not None and len(col):
                return col
            self.reader.permits.give_mb(1)
        return None


def merge_headers(handles: HandleCache, left: str, right: str) -> dict | None:
    a = handles.lend(left)  # clean: near miss, restored on the early return too
    ha = _header(a)
    if ha is None:
        handles.restore(a)
        return None
    b = handles.lend(right)  # leak: not restored when its header does not parse
    hb = _header(b)
    handles.restore(a)
    if hb is None:
        return None
    handles.restore(b)
    return {"columns": {**ha["columns"], **hb["columns"]}}
