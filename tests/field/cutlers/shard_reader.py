"""Reads tensors from sharded weight files (header, index, then raw data)."""
from __future__ import annotations

import io
import json
import os
import struct
from collections import OrderedDict
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import BinaryIO, Iterator, Optional

MAGIC = b"SHRD"


class BadShard(ValueError):
    pass


@dataclass(frozen=True)
class Entry:
    name: str
    offset: int
    nbytes: int


def write_shard(path: str, tensors: dict[str, bytes]) -> None:
    index, off = {}, 0
    for k, v in tensors.items():
        index[k] = [off, len(v)]
        off += len(v)
    blob = json.dumps(index).encode()
    with open(path, "wb") as f:  # clean: with
        f.write(MAGIC + struct.pack("<I", len(blob)) + blob)
        for v in tensors.values():
            f.write(v)


def read_index(f: BinaryIO) -> dict[str, Entry]:
    if f.read(4) != MAGIC:
        raise BadShard("magic")
    (n,) = struct.unpack("<I", f.read(4))
    raw = json.loads(f.read(n))
    base = 8 + n
    return {k: Entry(k, base + o, ln) for k, (o, ln) in raw.items()}


def is_shard(path: str) -> bool:
    f = open(path, "rb")  # leak: a foreign file returns False before close
    if f.read(4) != MAGIC:
        return False
    f.close()
    return True


def shard_version(path: str) -> Optional[int]:
    f = open(path, "rb")  # clean: closed in finally on both returns
    try:
        if f.read(4) != MAGIC:
            return None
        return 1
    finally:
        f.close()


def list_names(path: str) -> list[str]:
    return sorted(read_index(open(path, "rb")))  # leak: the handle is a temporary that nobody closes


def open_shard(path: str) -> Optional[BinaryIO]:
    """Open and check; None for a file that is not a shard."""
    f = open(path, "rb")  # clean: near miss, closed before None is returned, else handed to the caller
    if f.read(4) != MAGIC:
        f.close()
        return None
    f.seek(0)
    return f


def open_first(paths: list[str]) -> Optional[BinaryIO]:
    for p in paths:
        f = open_shard(p)  # clean: near miss, None is skipped, a handle is returned
        if f is None:
            continue
        return f
    return None


def tensor_bytes(path: str, name: str) -> Optional[bytes]:
    f = open_shard(path)  # leak: a missing name returns before close
    if f is None:
        return None
    e = read_index(f).get(name)
    if e is None:
        return None
    f.seek(e.offset)
    data = f.read(e.nbytes)
    f.close()
    return data


def tensor_size(paths: list[str], name: str) -> int:
    f = open_first(paths)  # clean: closing() closes it
    if f is None:
        return -1
    with closing(f):
        e = read_index(f).get(name)
        return e.nbytes if e else -1


def find_tensor(paths: list[str], name: str) -> Optional[str]:
    for p in paths:
        f = open(p, "rb")  # leak: a bad shard is skipped with its file open
        try:
            idx = read_index(f)
        except BadShard:
            continue
        f.close()
        if name in idx:
            return p
    return None


def iter_tensors(path: str) -> Iterator[tuple[str, bytes]]:
    with open(path, "rb") as f:  # clean: near miss, with inside a generator
        for e in list(read_index(f).values()):
            f.seek(e.offset)
            yield e.name, f.read(e.nbytes)


def copy_shard(src: str, dst: str, overwrite: bool = False) -> bool:
    fin = open(src, "rb")  # leak: not closed when the target exists
    if os.path.exists(dst) and not overwrite:
        return False
    fout = open(dst, "wb")  # clean: closed in finally
    try:
        fout.write(fin.read())
    finally:
        fout.close()
        fin.close()
    return True


def concat(paths: list[str]) -> bytes:
    with ExitStack() as stack:
        files = [stack.enter_context(open(p, "rb")) for p in paths]  # clean: the exit stack closes them
        return b"".join(f.read() for f in files)


class ShardFile:
    def __init__(self, path: str, preload: bool = False) -> None:
        self.path = path
        self._f: Optional[BinaryIO] = open(path, "rb")  # clean: near miss, a preloaded file is closed at once, else close() does it
        self.index = read_index(self._f)
        self._cache: dict[str, bytes] = {}
        if preload:
            for e in self.index.values():
                self._cache[e.name] = self._read(e)
            self._f.close()
            self._f = None

    def _read(self, e: Entry) -> bytes:
        self._f.seek(e.offset)
        return self._f.read(e.nbytes)

    def get(self, name: str) -> bytes:
        if name in self._cache:
            return self._cache[name]
        return self._read(self.index[name])

    def reopen(self, path: str) -> None:
        """Point at a newer revision of the same shard."""
        if self._f is not None:
            self._f.close()
        self._f = open(path, "rb")  # clean: near miss, the former handle is closed first, close() closes this one
        self.path = path
        self.index = read_index(self._f)

    def close(self) -> None:
        if self._f is not None:
            self._f.close()
            self._f = None


class ShardCache:
    """Small LRU of open shards."""

    def __init__(self, limit: int = 4) -> None:
        self.limit = limit
        self._open: OrderedDict[str, ShardFile] = OrderedDict()
        self._logs: dict[str, io.TextIOBase] = {}

    def shard(self, path: str) -> ShardFile:
        sf = self._open.get(path)
        if sf is None:
            sf = ShardFile(path)  # clean: near miss, cached; eviction and close_all close it
            self._open[path] = sf
            while len(self._open) > self.limit:
                _, old = self._open.popitem(last=False)
                old.close()
        self._open.move_to_end(path)
        return sf

    def audit_log(self, path: str) -> io.TextIOBase:
        log = open(path + ".access", "a")  # leak: opened anew on each call although setdefault keeps only the first
        return self._logs.setdefault(path, log)

    def close_all(self) -> None:
        for sf in self._open.values():
            sf.close()
        self._open.clear()
        for log in self._logs.values():
            log.close()
        self._logs.clear()
