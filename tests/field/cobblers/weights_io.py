"""Checkpoint shards: readers over file handles, a bounded handle cache, staging buffers for the copy to the device."""
from __future__ import annotations

import json
import logging
import mmap
import os
import struct
from collections import OrderedDict
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Tuple

logger = logging.getLogger(__name__)

LEN = struct.Struct("<Q")


def write_shard(path: str, tensors: Dict[str, bytes]) -> None:
    meta: Dict[str, Tuple[int, int]] = {}
    off = 0
    for name, data in tensors.items():
        meta[name] = (off, len(data))
        off += len(data)
    head = json.dumps(meta).encode()
    with open(path, "wb") as f:  # clean: with
        f.write(LEN.pack(len(head)) + head)
        for data in tensors.values():
            f.write(data)


def shard_header(path: str) -> Dict[str, Any]:
    f = open(path, "rb")  # leak: an empty header returns without close
    (n,) = LEN.unpack(f.read(LEN.size))
    if n <= 2:
        return {}
    meta = json.loads(f.read(n))
    f.close()
    return meta


def first_readable(paths: List[str]) -> Optional[BinaryIO]:
    """Replicas of one shard on several mounts; the caller closes."""
    for p in paths:
        try:
            f = open(p, "rb")  # leak: a truncated replica is passed over while open
        except OSError:
            continue
        if len(f.read(LEN.size)) == LEN.size:
            f.seek(0)
            return f
    return None


def tensor_names(paths: List[str]) -> List[str]:
    f = first_readable(paths)  # clean: near miss, closed by with on the branch that has a file
    if f is None:
        return []
    with f:
        (n,) = LEN.unpack(f.read(LEN.size))
        return list(json.loads(f.read(n)))


class StagingBuffers:
    """Equal buffers for reads with O_DIRECT; `lend` and `reclaim`."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._bufs = [bytearray(nbytes) for _ in range(count)]
        self.nbytes = nbytes

    def lend(self) -> bytearray:
        if not self._bufs:
            raise BufferError("all staging buffers lent")
        return self._bufs.pop()

    def reclaim(self, buf: bytearray) -> None:
        self._bufs.append(buf)


class HandleCache:
    """LRU over open shards. Closing happens on eviction and in close()."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: "OrderedDict[str, BinaryIO]" = OrderedDict()

    def handle(self, path: str) -> BinaryIO:
        f = self._open.pop(path, None)
        if f is None:
            f = open(path, "rb")  # clean: kept in the cache, closed on eviction or close()
        self._open[path] = f
        while len(self._open) > self.limit:
            self._open.popitem(last=False)[1].close()
        return f

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


class ShardReader:
    def __init__(self, path: str, staging: StagingBuffers, use_mmap: bool = False) -> None:
        self.path = path
        self.staging = staging
        self.use_mmap = use_mmap
        self._f = open(path, "rb")  # clean: close() closes it
        self._map = mmap.mmap(self._f.fileno(), 0, access=mmap.ACCESS_READ) if use_mmap else None  # clean: near miss, close() under the same flag
        (n,) = LEN.unpack(self._f.read(LEN.size))
        self.meta = json.loads(self._f.read(n))
        self._base = LEN.size + n

    def read(self, name: str) -> Optional[bytes]:
        buf = self.staging.lend()  # leak: an unknown name returns None with the buffer lent
        entry = self.meta.get(name)
        if entry is None:
            return None
        off, n = entry
        self._f.seek(self._base + off)
        self._f.readinto(memoryview(buf)[:n])
        data = bytes(buf[:n])
        self.staging.reclaim(buf)
        return data

    def iter_tensors(self) -> Iterator[Tuple[str, bytes]]:
        buf = self.staging.lend()  # clean: near miss, finally of the generator, one buffer for all tensors
        try:
            for name, (off, n) in self.meta.items():
                self._f.seek(self._base + off)
                self._f.readinto(memoryview(buf)[:n])
                yield name, bytes(buf[:n])
        finally:
            self.staging.reclaim(buf)

    def close(self) -> None:
        if self.use_mmap:
            self._map.close()
        self._f.close()


def load_all(paths: List[str], staging: StagingBuffers, wanted: Optional[set] = None) -> Dict[str, bytes]:
    out: Dict[str, bytes] = {}
    for path in paths:
        reader = ShardReader(path, staging)  # leak: shards without a wanted tensor take the continue past close
        if wanted is not None and not wanted & set(reader.meta):
            logger.debug("%s: nothing wanted", path)
            continue
        out.update(reader.iter_tensors())
        reader.close()
    return out


def total_bytes(paths: List[str], staging: StagingBuffers) -> int:
    readers = {p: ShardReader(p, staging, use_mmap=True) for p in paths}  # clean: near miss, popitem takes each out and closes it
    total = 0
    while readers:
        _, reader = readers.popitem()
        total += sum(n for _, n in reader.meta.values())
        reader.close()
    return total
