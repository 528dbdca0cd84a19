"""Reads tensors out of checkpoint shards through a handle cache."""
from __future__ import annotations

import json
import os
import struct
import threading
from typing import BinaryIO, Iterator, Optional


class HandleCache:
    """Open shard files with a use count each; closed at zero."""

    def __init__(self, root: str, limit: int) -> None:
        self.root = root
        self.limit = threading.BoundedSemaphore(limit)
        self._open: dict[str, list] = {}

    def borrow(self, shard: str) -> BinaryIO:
        entry = self._open.get(shard)
        if entry is None:
            self.limit.acquire()  # clean: near miss, released by giveback when the count is zero
            entry = [open(os.path.join(self.root, shard), "rb"), 0]  # clean: kept in _open, giveback closes
            self._open[shard] = entry
        entry[1] += 1
        return entry[0]

    def giveback(self, shard: str) -> None:
        entry = self._open[shard]
        entry[1] -= 1
        if entry[1] == 0:
            del self._open[shard]
            entry[0].close()
            self.limit.release()

    def prefetch(self, shard: str) -> bool:
        """Like borrow, never waits; on True the caller owes a giveback."""
        if not self.limit.acquire(blocking=False):  # leak: a shard already open keeps the extra permit
            return False
        if shard in self._open:
            self._open[shard][1] += 1
            return True
        self._open[shard] = [open(os.path.join(self.root, shard), "rb"), 1]  # clean: near miss, count of one, giveback closes
        return True


def read_header(handle: BinaryIO) -> dict[str, dict]:
    handle.seek(0)
    (size,) = struct.unpack("<Q", handle.read(8))
    return json.loads(handle.read(size))


class ShardReader:
    """Looks tensors up by name."""

    def __init__(self, cache: HandleCache, index: dict[str, str]) -> None:
        self.cache = cache
        self.index = index
        self.held: list[str] = []
        self.log: Optional[BinaryIO] = None

    def tensor_bytes(self, name: str) -> Optional[bytes]:
        shard = self.index[name]
        handle = self.cache.borrow(shard)  # leak: an absent name returns before giveback
        meta = read_header(handle).get(name)
        if meta is None:
            return None
        start, stop = meta["data_offsets"]
        handle.seek(start)
        data = handle.read(stop - start)
        self.cache.giveback(shard)
        return data

    def dtype(self, name: str) -> Optional[str]:
        shard = self.index[name]
        handle = self.cache.borrow(shard)  # clean: near miss, given back before the None test
        meta = read_header(handle).get(name)
        self.cache.giveback(shard)
        if meta is None:
            return None
        return meta["dtype"]

    def names(self, shards: list[str]) -> list[str]:
        found: list[str] = []
        for shard in shards:
            handle = self.cache.borrow(shard)  # leak: a damaged header is handled by continue
            try:
                header = read_header(handle)
            except (json.JSONDecodeError, struct.error):
                continue
            found.extend(header)
            self.cache.giveback(shard)
        return found

    def iterate(self, shard: str) -> Iterator[tuple[str, bytes]]:
        handle = self.cache.borrow(shard)  # clean: finally gives it back
        try:
            for name, meta in read_header(handle).items():
                start, stop = meta["data_offsets"]
                handle.seek(start)
                yield name, handle.read(stop - start)
        finally:
            self.cache.giveback(shard)

    def keep_open(self, shards: list[str]) -> None:
        for shard in shards:
            if shard in self.held:
                continue
            self.cache.borrow(shard)  # clean: near miss, result unused but shard noted, close gives back
            self.held.append(shard)

    def close(self) -> None:
        while self.held:
            self.cache.giveback(self.held.pop())

    def start_log(self, path: str) -> None:
        self.log = open(path, "ab")  # leak: close never touches log, a restart overwrites it

    def note(self, line: bytes) -> None:
        if self.log is not None:
            self.log.write(line)


def shard_size(path: str) -> int:
    handle = open(path, "rb")  # clean: near miss, return value is computed, finally closes
    try:
        return handle.seek(0, os.SEEK_END)
    finally:
        handle.close()


def is_safetensors(path: str) -> bool:
    handle = open(path, "rb")  # leak: a short file returns without close
    prefix = handle.read(8)
    if len(prefix) < 8:
        return False
    (size,) = struct.unpack("<Q", prefix)
    handle.close()
    return 0 < size < 1 << 27


def load_index(path: str) -> dict[str, str]:
    with open(path) as handle:  # clean: with closes
        return json.load(handle)["weight_map"]


def copy_shard(source: str, target: str) -> bool:
    reader = open(source, "rb")  # clean: near miss, the empty file closes it as well
    prefix = reader.read(8)
    if not prefix:
        reader.close()
        return False
    with open(target, "wb") as writer:  # clean: with closes
        writer.write(prefix)
        writer.write(reader.read())
    reader.close()
    return True
