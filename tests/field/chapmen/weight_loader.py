"""Loads sharded checkpoints: index files, shard readers and host chunks."""
from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple

logger = logging.getLogger(__name__)

MAGIC = b"SHRD"


class ChunkPool:
    """Host chunks for read-ahead; get() blocks until one is idle."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._idle: List[bytearray] = [bytearray(size) for _ in range(count)]
        self._cv = threading.Condition()

    def get(self) -> bytearray:
        with self._cv:
            while not self._idle:
                self._cv.wait()
            return self._idle.pop()

    def get_nowait(self) -> Optional[bytearray]:
        with self._cv:
            return self._idle.pop() if self._idle else None

    def recycle(self, chunk: bytearray) -> None:
        with self._cv:
            self._idle.append(chunk)
            self._cv.notify()


@dataclass
class TensorMeta:
    name: str
    offset: int
    nbytes: int


class ShardReader:
    """An open shard; close() ends the file and its mapping."""

    def __init__(self, path: str, mapped: bool = False) -> None:
        self.path = path
        self.file = open(path, "rb")  # clean: the reader's own, closed in close()
        self.map: Optional[mmap.mmap] = None
        if mapped:
            self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)  # clean: closed in close()

    def read(self, meta: TensorMeta) -> bytes:
        if self.map is not None:
            return self.map[meta.offset:meta.offset + meta.nbytes]
        self.file.seek(meta.offset)
        return self.file.read(meta.nbytes)

    def read_into(self, meta: TensorMeta, chunk: bytearray) -> int:
        data = self.read(meta)[:len(chunk)]
        chunk[:len(data)] = data
        return len(data)

    def close(self) -> None:
        if self.map is not None:
            self.map.close()
        self.file.close()


def read_index(path: str) -> Dict[str, str]:
    with open(path, encoding="utf-8") as handle:  # clean: closed by with
        return json.load(handle)["weight_map"]


def shard_version(path: str) -> int:
    handle = open(path, "rb")  # leak: files without the magic return -1 and stay open
    head = handle.read(8)
    if len(head) < 8 or head[:4] != MAGIC:
        return -1
    (version,) = struct.unpack("<I", head[4:])
    handle.close()
    return version


def total_lines(paths: List[str]) -> int:
    count = 0
    for path in paths:
        manifest = open(path)  # leak: rebound for each path, only the last file is closed
        count += sum(1 for _ in manifest)
    if paths:
        manifest.close()
    return count


def open_shard(path: str) -> Optional[BinaryIO]:
    if not os.path.exists(path):
        return None
    handle = open(path, "rb")  # clean: handed on when the header is right, else closed
    if handle.read(4) != MAGIC:
        handle.close()
        return None
    return handle


def tensor_names(path: str) -> List[str]:
    handle = open_shard(path)  # leak: the parsed names are returned, the file is never closed
    if handle is None:
        return []
    (size,) = struct.unpack("<Q", handle.read(8))
    header = json.loads(handle.read(size))
    return sorted(k for k in header if k != "__metadata__")


def iter_tensors(path: str) -> Iterator[Tuple[str, int]]:
    handle = open_shard(path)  # leak: the close after the loop is not reached by a consumer which stops early
    if handle is None:
        return
    (size,) = struct.unpack("<Q", handle.read(8))
    for name, spec in json.loads(handle.read(size)).items():
        yield name, int(spec["nbytes"])
    handle.close()


def first_large(path: str, limit: int) -> Optional[str]:
    for name, nbytes in iter_tensors(path):
        if nbytes > limit:
            return name
    return None


class Loader:
    def __init__(self, root: str, chunks: ChunkPool, threads: int = 4) -> None:
        self.root = root
        self.chunks = chunks
        self.exec = ThreadPoolExecutor(threads)
        self.readers: Dict[str, ShardReader] = {}
        self.loaded: Dict[str, int] = {}
        self._mu = threading.Lock()

    def reader(self, shard: str) -> ShardReader:
        with self._mu:
            reader = self.readers.get(shard)
            if reader is None:
                reader = ShardReader(os.path.join(self.root, shard))  # clean: cached, close() closes all
                self.readers[shard] = reader
            return reader

    def read_all(self, shard: str, metas: List[TensorMeta]) -> int:
        """Copies tensors through one chunk, skipping what is there."""
        source = self.reader(shard)  # clean: owned by the readers table
        chunk = self.chunks.get()  # clean: near miss, the continue does not pass the recycle after the loop
        total = 0
        for meta in metas:
            if meta.name in self.loaded:
                continue
            got = source.read_into(meta, chunk)
            self.loaded[meta.name] = got
            total += got
        self.chunks.recycle(chunk)
        return total

    def read_missing(self, shard: str, metas: List[TensorMeta]) -> int:
        source = self.reader(shard)  # clean: owned by the readers table
        total = 0
        for meta in metas:
            chunk = self.chunks.get()  # leak: continue for a tensor which is too large keeps the chunk
            if meta.nbytes > self.chunks.size:
                logger.warning("%s does not fit a chunk", meta.name)
                continue
            got = source.read_into(meta, chunk)
            self.loaded[meta.name] = got
            total += got
            self.chunks.recycle(chunk)
        return total

    def _fill(self, shard: str, meta: TensorMeta) -> Tuple[bytearray, int]:
        source = self.reader(shard)  # clean: owned by the readers table
        chunk = self.chunks.get()  # clean: handed on in the tuple
        return chunk, source.read_into(meta, chunk)

    def checksum(self, shard: str, meta: TensorMeta) -> int:
        chunk, size = self._fill(shard, meta)  # clean: recycled after summing
        value = sum(chunk[:size]) & 0xFFFFFFFF
        self.chunks.recycle(chunk)
        return value

    def is_zero(self, shard: str, meta: TensorMeta) -> bool:
        chunk, size = self._fill(shard, meta)  # leak: the any() result is returned and the chunk dropped
        return not any(chunk[:size])

    def read_parallel(self, shard: str, metas: List[TensorMeta]) -> int:
        """Read-ahead on threads; the chunks come back through the futures."""
        futures = [self.exec.submit(self._fill, shard, m) for m in metas]  # leak: lost for known tensors
        total = 0
        for meta, future in zip(metas, futures):
            if meta.name in self.loaded:
                continue
            chunk, size = future.result()
            self.loaded[meta.name] = size
            total += size
            self.chunks.recycle(chunk)
        return total

    def verify(self, shards: List[str]) -> bool:
        with ExitStack() as stack:
            readers = []
            for shard in shards:
                path = os.path.join(self.root, shard)
                reader = ShardReader(path, mapped=True)  # clean: the stack closes it
                readers.append(stack.enter_context(closing(reader)))
            return all(r.map is not None and r.map[:4] == MAGIC for r in readers)

    def close(self) -> None:
        with self._mu:
            for reader in self.readers.values():
                reader.close()
            self.readers.clear()
        self.exec.shutdown()
