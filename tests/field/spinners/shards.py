"""Readers and writers of token shards on disk."""
from __future__ import annotations

import gzip
import os
import struct
from typing import BinaryIO, Callable, Dict, Iterator, List, Optional

HEADER = struct.Struct("<II")
MAGIC = 0x54534831


class ShardReader:
    """Random access to one shard; close() when done."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fh: Optional[BinaryIO] = None
        self.count = 0

    def open(self) -> bool:
        if self._fh is not None:
            return True
        fh = open(self.path, "rb")  # leak: a shard with another magic gives False and its file is not closed
        magic, count = HEADER.unpack(fh.read(HEADER.size))
        if magic != MAGIC:
            return False
        self._fh = fh
        self.count = count
        return True

    def token(self, i: int) -> int:
        assert self._fh is not None
        self._fh.seek(HEADER.size + 2 * i)
        return int.from_bytes(self._fh.read(2), "little")

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None


class ShardWriter:
    def __init__(self, directory: str, tokens_per_shard: int) -> None:
        self.directory = directory
        self.limit = tokens_per_shard
        self.index = 0
        self._out: Optional[BinaryIO] = None
        self._written = 0

    def _roll(self) -> None:
        if self._out is not None:
            self._out.close()
        self.index += 1
        path = os.path.join(self.directory, f"{self.index:05d}.bin")
        self._out = open(path, "wb")  # clean: near miss, the file before is closed, close() ends the last
        self._written = 0

    def write(self, tokens: List[int]) -> None:
        for t in tokens:
            if self._out is None or self._written == self.limit:
                self._roll()
            assert self._out is not None
            self._out.write(t.to_bytes(2, "little"))
            self._written += 1

    def close(self) -> None:
        if self._out is not None:
            self._out.close()
            self._out = None


def open_any(path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # clean: returned to the caller
    return open(path, "rb")  # clean: returned to the caller


def first_line(path: str) -> bytes:
    return open_any(path).readline()  # leak: the file is used for one line and dropped


def documents(paths: List[str], skip_empty: bool = True) -> Iterator[bytes]:
    for path in paths:
        fh = open_any(path)  # leak: an empty file is skipped with continue
        first = fh.readline()
        if skip_empty and not first:
            continue
        yield first
        yield from fh
        fh.close()


def interleave(paths: List[str]) -> Iterator[bytes]:
    """Round robin over the files until the shortest ends."""
    files = [open_any(p) for p in paths]  # clean: near miss, all are closed in the finally, however it ends
    try:
        while files:
            for fh in files:
                line = fh.readline()
                if not line:
                    return
                yield line
    finally:
        for fh in files:
            fh.close()


class ShardCache:
    """Keeps the files of recently used shards open."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: Dict[str, BinaryIO] = {}

    def file(self, path: str) -> BinaryIO:
        fh = self._open.get(path)
        if fh is None:
            if len(self._open) >= self.limit:
                oldest = next(iter(self._open))
                del self._open[oldest]
            fh = self._open[path] = open(path, "rb")  # leak: the oldest entry is deleted without being closed
        return fh

    def close(self) -> None:
        for fh in self._open.values():
            fh.close()
        self._open.clear()


class IndexScope:
    """``with IndexScope(path) as offsets``; the index is rewritten when it changed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.offsets: List[int] = []
        self._before: List[int] = []

    def __enter__(self) -> List[int]:
        self._fh = open(self.path, "r+b")  # leak: __exit__ returns before close when nothing changed
        data = self._fh.read()
        self.offsets = list(struct.unpack(f"<{len(data) // 4}I", data))
        self._before = list(self.offsets)
        return self.offsets

    def __exit__(self, *exc: object) -> None:
        if self.offsets == self._before:
            return
        self._fh.seek(0)
        self._fh.truncate()
        self._fh.write(struct.pack(f"<{len(self.offsets)}I", *self.offsets))
        self._fh.close()


def append_offset(path: str, offset: int) -> None:
    with IndexScope(path) as offsets:
        if offset not in offsets:
            offsets.append(offset)


def tee(src: str, dst: str, keep: Callable[[bytes], bool]) -> int:
    kept = 0
    with open(dst, "wb") as out:  # clean: with statement
        for line in documents([src]):
            if not keep(line):
                continue
            out.write(line)
            kept += 1
    return kept
