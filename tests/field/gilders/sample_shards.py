"""Indexed sample shards on disk: writer with rotation, reader with a handle cache, verification."""
from __future__ import annotations

import gzip
import io
import json
import os
import struct
from collections import OrderedDict
from typing import BinaryIO, Dict, Iterable, Iterator, List, Optional, Tuple

LEN = struct.Struct("<I")


class ShardWriter:
    def __init__(self, folder: str, max_bytes: int = 1 << 20):
        self.folder = folder
        self.max_bytes = max_bytes
        self._data: Optional[BinaryIO] = None
        self._index: Optional[io.TextIOBase] = None
        self._number = 0
        self._offset = 0

    def _name(self, kind: str) -> str:
        return os.path.join(self.folder, f"shard{self._number:05d}.{kind}")

    def _rotate(self) -> None:
        if self._data is not None:
            self._data.close()
            self._number += 1
        self._data = open(self._name("bin"), "wb")  # clean: near miss, the older one was closed, close does the last
        self._index = open(self._name("idx"), "w")  # leak: rotation closes only the data file, the older index handle is overwritten
        self._offset = 0

    def add(self, key: str, sample: bytes) -> None:
        if self._data is None or self._offset >= self.max_bytes:
            self._rotate()
        self._index.write(f"{key} {self._offset} {len(sample)}\n")
        self._data.write(sample)
        self._offset += len(sample)

    def close(self) -> None:
        if self._data is None:
            return
        self._data.close()
        self._index.close()
        self._data = self._index = None


class HandleCache:
    """Keeps the most recently used shard files open."""

    def __init__(self, capacity: int = 2):
        self.capacity = capacity
        self._open: "OrderedDict[str, BinaryIO]" = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, path: str) -> BinaryIO:
        fh = self._open.pop(path, None)
        if fh is None:
            fh = open(path, "rb")  # clean: near miss, popped or opened, it goes back into the cache; eviction and clear close it
        self._open[path] = fh
        while len(self._open) > self.capacity:
            _, old = self._open.popitem(last=False)
            old.close()
        return fh

    def clear(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def open_maybe_gz(path: str, mode: str = "rt"):
    if path.endswith(".gz"):
        return gzip.open(path, mode)  # clean: handed to the caller
    return open(path, mode)  # clean: handed to the caller


def read_index(path: str) -> Dict[str, Tuple[int, int]]:
    fh = open_maybe_gz(path)  # clean: near miss, the finally closes it on the early return too
    entries: Dict[str, Tuple[int, int]] = {}
    try:
        for line in fh:
            parts = line.split()
            if len(parts) != 3:
                return entries
            entries[parts[0]] = (int(parts[1]), int(parts[2]))
    finally:
        fh.close()
    return entries


class ShardReader:
    def __init__(self, folder: str, cache: Optional[HandleCache] = None):
        self.folder = folder
        self._own_cache = cache is None
        self.cache = cache if cache is not None else HandleCache()
        self.index: Dict[str, Tuple[str, int, int]] = {}
        for name in sorted(os.listdir(folder)):
            if name.endswith(".idx"):
                for key, (off, n) in read_index(os.path.join(folder, name)).items():
                    self.index[key] = (os.path.join(folder, name[:-4] + ".bin"), off, n)

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        if self._own_cache:
            self.cache.clear()

    def read(self, key: str) -> bytes:
        path, off, n = self.index[key]
        fh = self.cache.get(path)  # clean: near miss, the cache owns the handle
        fh.seek(off)
        return fh.read(n)

    def scan(self, keys: Iterable[str]) -> Iterator[bytes]:
        """Sequential read that bypasses the cache."""
        current, fh = None, None
        for key in keys:
            path, off, n = self.index[key]
            if path != current:
                fh = open(path, "rb")  # leak: moving on to the next shard rebinds it without a close
                current = path
            fh.seek(off)
            yield fh.read(n)
        if fh is not None:
            fh.close()

    def scan_grouped(self, keys: Iterable[str]) -> Iterator[bytes]:
        groups: Dict[str, List[Tuple[int, int]]] = {}
        for key in keys:
            path, off, n = self.index[key]
            groups.setdefault(path, []).append((off, n))
        for path, spans in groups.items():
            fh = open(path, "rb")  # clean: near miss, closed per shard by the finally, also when the consumer stops
            try:
                for off, n in spans:
                    fh.seek(off)
                    yield fh.read(n)
            finally:
                fh.close()


def copy_samples(reader: ShardReader, keys: List[str], dst: str, strict: bool = False) -> int:
    out = open(dst, "wb")  # leak: a missing key in strict mode returns with it open
    n = 0
    for key in keys:
        if key not in reader.index:
            if strict:
                return -1
            continue
        data = reader.read(key)
        out.write(LEN.pack(len(data)) + data)
        n += 1
    out.close()
    return n


def merge_shards(sources: List[str], dst: str) -> bool:
    handles: List[BinaryIO] = []
    for path in sources:
        try:
            handles.append(open(path, "rb"))  # leak: a missing later source returns with the earlier ones open
        except FileNotFoundError:
            return False
    out = open(dst, "wb")  # clean: closed after the loop
    for fh in handles:
        out.write(fh.read())
        fh.close()
    out.close()
    return True


class RunLog:
    """JSON lines; `path` may also be an already open stream."""

    def __init__(self, path, append: bool = True):
        if hasattr(path, "write"):
            self._fh, self._owned = path, False
        else:
            self._fh = open(path, "a" if append else "w")  # clean: near miss, owned under the flag, close honours it
            self._owned = True

    def emit(self, **fields) -> None:
        self._fh.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        if self._owned:
            self._fh.close()

    def reopen(self, path: str) -> None:
        self.close()
        self._fh = open(path, "a")  # leak: _owned stays False after a borrowed stream, so close skips it


def summarize(folder: str, log_path: str) -> int:
    log = RunLog(log_path)  # clean: closed in the finally
    try:
        with ShardReader(folder) as reader:  # clean: with statement, __exit__ clears the reader's own cache
            total = sum(len(reader.read(k)) for k in reader.index)
        log.emit(folder=folder, total=total)
        return total
    finally:
        log.close()


if __name__ == "__main__":
    import tempfile
    d = tempfile.mkdtemp()
    w = ShardWriter(d, 8)
    for i in range(5):
        w.add(f"k{i}", bytes([65 + i]) * 4)
    w.close()
    r = ShardReader(d)  # clean: closed on the next line
    print(r.read("k3"), list(r.scan_grouped(r.index)), copy_samples(r, ["k1", "k2"], d + "/c"), r.close())
    print(summarize(d, d + "/log"), merge_shards([d + "/c", d + "/c"], d + "/m"), len(r.cache))
