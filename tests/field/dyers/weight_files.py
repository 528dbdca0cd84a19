"""Reading sharded weights: headers, indexes and tensor slices from plain files."""
from __future__ import annotations

import json
import os
import struct
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Tuple

MAGIC = b"WSHD"


class BadShard(ValueError):
    pass


def read_header(path: str) -> Optional[Dict[str, Any]]:
    f = open(path, "rb")  # leak: wrong magic returns without close
    if f.read(4) != MAGIC:
        return None
    (n,) = struct.unpack("<I", f.read(4))
    header = json.loads(f.read(n))
    f.close()
    return header


def load_index(root: str) -> Dict[str, str]:
    return json.load(open(os.path.join(root, "index.json")))["weight_map"]  # leak: file object never closed


def open_checked(path: str) -> BinaryIO:
    f = open(path, "rb")  # clean: near miss, closed before the raise, else returned
    if f.read(4) != MAGIC:
        f.close()
        raise BadShard(path)
    f.seek(0)
    return f


def shard_sizes(paths: List[str]) -> Dict[str, int]:
    sizes: Dict[str, int] = {}
    for p in paths:
        try:
            f = open_checked(p)  # leak: empty shard hits `continue` before close
        except BadShard:
            continue
        size = f.seek(0, os.SEEK_END)
        if size <= 8:
            continue
        sizes[p] = size
        f.close()
    return sizes


class ShardReader:
    def __init__(self, path: str) -> None:
        self.path = path
        self._f: Optional[BinaryIO] = open_checked(path)  # clean: owned by the reader, closed in close
        self._base = 0

    def header(self) -> Dict[str, Any]:
        self._f.seek(4)
        (n,) = struct.unpack("<I", self._f.read(4))
        self._base = 8 + n
        return json.loads(self._f.read(n))

    def slice(self, start: int, end: int) -> bytes:
        self._f.seek(self._base + start)
        return self._f.read(end - start)

    def reopen(self, path: str) -> None:
        """Continue with another shard."""
        if self._f is not None:
            self._f.close()
        self.path = path
        self._f = open_checked(path)  # clean: near miss, the earlier file is closed first

    def close(self) -> None:
        if self._f is not None:
            self._f.close()
            self._f = None

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class LazyShards:
    """Keeps up to `limit` shard files open."""

    def __init__(self, root: str, index: Dict[str, str], limit: int = 8) -> None:
        self.root = root
        self.index = index
        self.limit = limit
        self._open: Dict[str, BinaryIO] = {}
        self._log: Optional[Any] = None

    def _file(self, name: str) -> BinaryIO:
        shard = self.index[name]
        f = self._open.get(shard)
        if f is None:
            if len(self._open) >= self.limit:
                _, old = self._open.popitem()
                old.close()
            f = open(os.path.join(self.root, shard), "rb")  # clean: cached, evicted with close
            self._open[shard] = f
        return f

    def read(self, name: str, span: Tuple[int, int]) -> bytes:
        f = self._file(name)  # clean: near miss, borrowed from the cache which keeps ownership
        f.seek(span[0])
        return f.read(span[1] - span[0])

    def trace_to(self, path: str) -> None:
        self._log = open(path, "a")  # leak: switching the trace file overwrites the open one

    def drop_shard(self, shard: str) -> None:
        f = self._open.pop(shard, None)
        if f is not None:
            f.close()

    def close(self) -> None:
        for f in self._open.values():
            f.close()
        self._open.clear()
        if self._log is not None:
            self._log.close()
            self._log = None


def merge(a: str, b: str, out: str) -> bool:
    fa = open(a, "rb")  # leak: length mismatch closes only fb
    fb = open(b, "rb")  # clean: closed on both ways
    da, db = fa.read(), fb.read()
    if len(da) != len(db):
        fb.close()
        return False
    with open(out, "wb") as fo:  # clean: with
        fo.write(bytes(x ^ y for x, y in zip(da, db)))
    fa.close()
    fb.close()
    return True


def iter_slices(path: str, spans: List[Tuple[int, int]]) -> Iterator[bytes]:
    with ShardReader(path) as reader:  # clean: with closes the reader, also when the generator is closed
        reader.header()
        for start, end in spans:
            yield reader.slice(start, end)


def tail_of(path: str, n: int) -> bytes:
    f = None
    try:
        f = open(path, "rb")  # clean: near miss, finally closes when it was opened
        f.seek(-n, os.SEEK_END)
        return f.read()
    except OSError:
        return b""
    finally:
        if f:
            f.close()


def copy_range(src: str, dst: str, n: int) -> int:
    fin = open(src, "rb")  # leak: unwritable destination is caught, returns 0 with the source open
    try:
        fout = open(dst, "wb")  # clean: closed after the write
    except PermissionError:
        return 0
    done = fout.write(fin.read(n))
    fout.close()
    fin.close()
    return done
