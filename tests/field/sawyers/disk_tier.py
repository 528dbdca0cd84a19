"""Disk tier of the KV cache: segment files, an extent bitmap, and an open-file cache."""
from __future__ import annotations

import os
import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import BinaryIO, Optional

HEADER = struct.Struct("<4sII")
MAGIC = b"KVS1"


@dataclass(frozen=True)
class Extent:
    start: int
    length: int


class ExtentMap:
    """First-fit over a bitmap of fixed-size cells."""

    def __init__(self, cells: int) -> None:
        self._bits = bytearray(cells)

    def reserve(self, n: int) -> Optional[Extent]:
        run = 0
        for i, bit in enumerate(self._bits):
            run = 0 if bit else run + 1
            if run == n:
                start = i - n + 1
                self._bits[start: start + n] = b"\1" * n
                return Extent(start, n)
        return None

    def unreserve(self, ext: Extent) -> None:
        self._bits[ext.start: ext.start + ext.length] = bytes(ext.length)

    def reserve_mirrored(self, other: "ExtentMap", n: int) -> Optional[tuple[Extent, Extent]]:
        mine = self.reserve(n)  # leak: held when the mirror has no room
        if mine is None:
            return None
        theirs = other.reserve(n)  # clean: returned with its partner
        if theirs is None:
            return None
        return mine, theirs


class SegmentStore:
    def __init__(self, path: str, cells: int, cell_bytes: int) -> None:
        self.cell_bytes = cell_bytes
        self.extents = ExtentMap(cells)
        self.index: dict[str, Extent] = {}
        if not os.path.exists(path):
            open(path, "wb").close()  # clean: closed in the same expression
        self._file: BinaryIO = open(path, "r+b")  # clean: closed by close()

    def close(self) -> None:
        self._file.close()

    def _cells(self, nbytes: int) -> int:
        return (nbytes + self.cell_bytes - 1) // self.cell_bytes

    def put(self, key: str, payload: bytes) -> bool:
        self.drop(key)
        ext = self.extents.reserve(self._cells(len(payload)))  # clean: near miss, an older extent is dropped first
        if ext is None:
            return False
        self._file.seek(ext.start * self.cell_bytes)
        self._file.write(payload)
        self.index[key] = ext
        return True

    def put_if_small(self, key: str, payload: bytes, limit: int) -> bool:
        if key in self.index:
            return True
        ext = self.extents.reserve(self._cells(len(payload)))  # leak: the size test returns after the reservation
        if ext is None or len(payload) > limit:
            return False
        self._file.seek(ext.start * self.cell_bytes)
        self._file.write(payload)
        self.index[key] = ext
        return True

    def rewrite(self, key: str, payload: bytes) -> bool:
        old = self.index.get(key)
        ext = self.extents.reserve(self._cells(len(payload)))  # clean: given back after a failed write, else indexed
        if ext is None:
            return False
        try:
            self._file.seek(ext.start * self.cell_bytes)
            self._file.write(payload)
        except OSError:
            self.extents.unreserve(ext)
            return False
        self.index[key] = ext
        if old is not None:
            self.extents.unreserve(old)
        return True

    def append_scratch(self, payload: bytes) -> Optional[int]:
        ext = self.extents.reserve(self._cells(len(payload)))  # leak: a failed write is survived with the cells set
        if ext is None:
            return None
        try:
            self._file.seek(ext.start * self.cell_bytes)
            self._file.write(payload)
        except OSError:
            return None
        self.index[f"scratch-{ext.start}"] = ext
        return ext.start

    def drop(self, key: str) -> None:
        ext = self.index.pop(key, None)
        if ext is not None:
            self.extents.unreserve(ext)


class HandleCache:
    """Keeps the most recently used segment files open."""

    def __init__(self, root: str, capacity: int) -> None:
        self.root = root
        self.capacity = capacity
        self._open: OrderedDict[str, BinaryIO] = OrderedDict()

    def get(self, name: str) -> BinaryIO:
        handle = self._open.get(name)
        if handle is not None:
            self._open.move_to_end(name)
            return handle
        while len(self._open) >= self.capacity:
            _, old = self._open.popitem(last=False)
            old.close()
        handle = open(os.path.join(self.root, name), "rb")  # clean: kept in the cache, closed on eviction
        self._open[name] = handle
        return handle

    def reopen(self, name: str) -> BinaryIO:
        handle = self._open.pop(name, None)
        if handle is not None:
            handle.close()
        self._open[name] = open(os.path.join(self.root, name), "rb")  # clean: near miss, the old handle was closed
        return self._open[name]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


class ColdIndex:
    def __init__(self, root: str) -> None:
        self.root = root
        self.files: dict[int, BinaryIO] = {}

    def attach(self, shard: int) -> bool:
        fh = open(os.path.join(self.root, f"{shard:05d}.idx"), "rb")  # leak: the bad-magic return leaves it open
        magic, version, _ = HEADER.unpack(fh.read(HEADER.size))
        if magic != MAGIC or version != 1:
            return False
        previous = self.files.get(shard)
        if previous is not None:
            previous.close()
        self.files[shard] = fh
        return True

    def count(self, shard: int) -> int:
        fh = open(os.path.join(self.root, f"{shard:05d}.idx"), "rb")  # clean: closed in the finally on each return
        try:
            magic, _, entries = HEADER.unpack(fh.read(HEADER.size))
            if magic != MAGIC:
                return 0
            return entries
        finally:
            fh.close()

    def rotate(self, shard: int) -> None:
        fh = open(os.path.join(self.root, f"{shard:05d}.idx.new"), "wb")  # clean: closed before the rename
        fh.write(HEADER.pack(MAGIC, 1, 0))
        fh.close()
        os.replace(fh.name, os.path.join(self.root, f"{shard:05d}.idx"))

    def first_valid(self, shards: list[int]) -> Optional[int]:
        for shard in shards:
            fh = open(os.path.join(self.root, f"{shard:05d}.idx"), "rb")  # leak: the matching shard returns before close
            if fh.read(4) == MAGIC:
                return shard
            fh.close()
        return None

    def detach_all(self) -> None:
        for fh in self.files.values():
            fh.close()
        self.files = {}
