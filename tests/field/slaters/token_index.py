"""Builds and reads the index of tokenized dataset shards."""
from __future__ import annotations

import logging
import os
import struct
import tempfile
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple

log = logging.getLogger("data.index")

MAGIC = b"TIDX"
HEADER = struct.Struct("<4sI")


def open_shard(path: str, mode: str = "rb") -> BinaryIO:
    return open(path, mode)  # clean: returned to the caller


def read_header(path: str) -> Optional[int]:
    """Number of documents, or None when the file is no shard."""
    f = open_shard(path)  # leak: the magic mismatch returns without close
    magic, count = HEADER.unpack(f.read(HEADER.size))
    if magic != MAGIC:
        return None
    f.close()
    return count


def write_shard(path: str, docs: List[List[int]]) -> int:
    with open_shard(path, "wb") as f:  # clean: with
        f.write(HEADER.pack(MAGIC, len(docs)))
        for d in docs:
            f.write(struct.pack(f"<I{len(d)}I", len(d), *d))
        return f.tell()


class ShardReader:
    def __init__(self, path: str) -> None:
        self.path = path
        self._f: Optional[BinaryIO] = open_shard(path)  # clean: near miss, an empty shard closes at once, else close
        _, self.count = HEADER.unpack(self._f.read(HEADER.size))
        if self.count == 0:
            self.close()

    def __iter__(self) -> Iterator[List[int]]:
        for _ in range(self.count):
            (n,) = struct.unpack("<I", self._f.read(4))
            yield list(struct.unpack(f"<{n}I", self._f.read(4 * n)))

    def close(self) -> None:
        if self._f is not None:
            self._f.close()
            self._f = None

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ShardSet:
    """Readers by path; at most `limit` stay open."""

    def __init__(self, limit: int = 4) -> None:
        self.limit = limit
        self._open: Dict[str, ShardReader] = {}

    def reader(self, path: str) -> ShardReader:
        r = self._open.get(path)
        if r is None:
            if len(self._open) >= self.limit:
                oldest = next(iter(self._open))
                self._open.pop(oldest).close()
            r = ShardReader(path)  # clean: near miss, kept in the table, evicted ones are closed, the rest in close
            self._open[path] = r
        return r

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def count_tokens(paths: List[str], skip_empty: bool = True) -> int:
    total = 0
    for p in paths:
        reader = ShardReader(p)  # clean: near miss, skipped readers of empty shards closed themselves already
        if skip_empty and reader.count == 0:
            continue
        total += sum(len(d) for d in reader)
        reader.close()
    return total


def find_document(paths: List[str], predicate_len: int) -> Optional[Tuple[str, List[int]]]:
    for p in paths:
        reader = ShardReader(p)  # leak: a hit returns from the inner loop without close
        for doc in reader:
            if len(doc) >= predicate_len:
                return p, doc
        reader.close()
    return None


def copy_shard(src: str, dst: str, overwrite: bool) -> bool:
    fin = open_shard(src)  # leak: an existing target returns before it is closed
    if os.path.exists(dst) and not overwrite:
        log.info("%s exists", dst)
        return False
    fout = open_shard(dst, "wb")  # clean: closed after the loop
    while True:
        chunk = fin.read(1 << 16)
        if not chunk:
            break
        fout.write(chunk)
    fout.close()
    fin.close()
    return True


def tail_docs(path: str, n: int) -> List[List[int]]:
    with ShardReader(path) as reader:  # clean: with
        docs = list(reader) if reader.count else []
    return docs[-n:]


def lock_file(path: str) -> Optional[int]:
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # clean: near miss, returned, on FileExistsError nothing was opened
    except FileExistsError:
        return None
    return fd


def build_index(directory: str, names: List[str]) -> Dict[str, int]:
    index: Dict[str, int] = {}
    fd = lock_file(os.path.join(directory, ".lock"))  # clean: closed in finally
    if fd is None:
        return index
    try:
        for n in names:
            count = read_header(os.path.join(directory, n))
            if count is not None:
                index[n] = count
    finally:
        os.close(fd)
        os.unlink(os.path.join(directory, ".lock"))
    return index


def main() -> None:
    with tempfile.TemporaryDirectory() as d:
        paths = [os.path.join(d, f"s{i}.bin") for i in range(3)]
        for i, p in enumerate(paths):
            write_shard(p, [[i] * (i + 1)] * i)
        print(build_index(d, [os.path.basename(p) for p in paths]), count_tokens(paths), find_document(paths, 3))
        print(copy_shard(paths[2], os.path.join(d, "c.bin"), False), tail_docs(paths[2], 1))
        shards = ShardSet(2)
        for p in paths:
            shards.reader(p)  # clean: closed through the set
        shards.close()


if __name__ == "__main__":
    main()
